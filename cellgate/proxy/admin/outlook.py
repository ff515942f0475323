"""What comes next for a unit, and when; and what an operator can do. One line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cellgate.probes.known_answer import RETRY_S
from cellgate.proxy.admin.rotation import Moment, Rotation
from cellgate.router.board import RESTART_SUSPECTED_S
from cellgate.router.known_answers import ANSWER_FAULT
from cellgate.router.nouns import Rules, Strength
from cellgate.router.unit_state import SLOW_START_LEAST, UnitState

_NEXT: dict[Rotation, str] = {
    Rotation.DRAINED: "nothing, until an operator undrains it (cellgate undrain {unit}).",
    Rotation.ON_HOLD: "when its engine goes on, a canary (a request for one token) is sent; when it passes, "
    "the unit gets requests. In {hold_left} at the latest it is judged again, whatever its engine says.",
    Rotation.HELD: "units are judged one by one again when they answer, in {panic_left} at the latest.",
    Rotation.RESTART_SUSPECTED: "{canary}. Any progress of the unit ends the suspicion of a restart, and "
    "so do {suspicion_left} without another cut.",
    Rotation.SUSPECT: "{canary}. If it passes, the unit is up; if it fails, the unit is down.",
    Rotation.FULL: "new requests go there as others end.",
    Rotation.IN: "{canary}, unless the unit shows work before that.",
    Rotation.STARTING: "{canary}. When it passes, {then}",
    Rotation.DOWN: "{canary}. {passes} must pass in a row; {then}",
    Rotation.PROBATION: "{canary}. {passed} of {passes} have passed; {then}",
}
_ANSWERS = "it gets the known prompt every {known_s:g} s; when its answer is right, a canary is sent."
_FAULTS = "it stays out until {faults} reports no fault; then a canary is sent at once."

_ADVICE: dict[Rotation, str] = {
    Rotation.ON_HOLD: "let its engine go on (cellgate resume {unit}, or cellgate wake {unit}); raise "
    "rules.hold_limit_s if it needs longer.",
    Rotation.HELD: "check the network of this gate first: the units may be healthy.",
    Rotation.FULL: "raise its max_in_flight if its engine can take more, or add units.",
    Rotation.SUSPECT: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.IN: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.STARTING: "wait while it loads its model; if it does not load, check its engine's log ({url}).",
    Rotation.DOWN: "check its engine's log ({url}); an engine that hangs must be restarted on all nodes.",
}
_GONE = "make sure that its engine runs and listens at {url}; this gate notices by itself."
_NODES = "check node {nodes} and restart what is missing there; this gate notices by itself."
_WRONG = "compare its weights, engine and GPUs with those of other units, and restart it on all nodes."
_SLOW = "compare clocks, temperatures and links of its nodes with those of the other units."


def what_comes(state: UnitState, rotation: Rotation, moment: Moment) -> str:
    """What happens next, and when, without an operator."""
    rules, faults = moment.rules, sorted(state.case.faults)
    is_held_down = faults and state.hold is None and not state.drained and not state.is_usable()
    panic_s = moment.now - moment.panic_at if moment.panic_at is not None else 0.0
    words = _NEXT[rotation] if not is_held_down else _ANSWERS if faults == [ANSWER_FAULT] else _FAULTS
    return words.format(
        unit=state.unit.name,
        canary=_canary(moment),
        passes=rules.passes,
        passed=state.case.passes,
        then=_then(rules),
        hold_left=f"{_hold_left_s(state, moment):.0f} s",
        faults=" and ".join(f"{source} of node {node}" if node else source for node, source in faults),
        known_s=RETRY_S,
        panic_left=f"{max(0.0, rules.panic_max_s - panic_s):.1f} s",
        suspicion_left=f"{max(0.0, state.restart_suspected_at + RESTART_SUSPECTED_S - moment.now):.1f} s",
    )


def advice(state: UnitState, rotation: Rotation) -> Iterator[str]:
    """What an operator can do; nothing if waiting is all."""
    because, nodes = state.case.because, sorted({node for node, _ in state.case.faults if node})
    words = _ADVICE.get(rotation, "")
    if nodes and not state.is_usable():
        words = _NODES
    elif state.is_out_for_answers() and not state.is_usable():
        words = _WRONG
    elif rotation is Rotation.DOWN and because is not None and because.strength is Strength.FATAL:
        words = _GONE
    elif rotation is Rotation.DRAINED and state.hold is not None:
        words = _ADVICE[Rotation.ON_HOLD]
    if words:
        yield words.format(unit=state.unit.name, url=state.unit.url, nodes=" and ".join(nodes))
    if state.outlier.degraded:
        yield _SLOW


def _canary(moment: Moment) -> str:
    if moment.canary_s is None:
        return "no canary (a request for one token) is planned"
    when = f"within {moment.canary_s:.1f} s" if moment.canary_s else "is in flight"
    return f"a canary (a request for one token) {when}"


def _hold_left_s(state: UnitState, moment: Moment) -> float:
    """How long its engine is believed."""
    since = state.hold.since if state.hold is not None else moment.now
    return max(0.0, since + moment.rules.hold_limit_s - moment.now)


def _then(rules: Rules) -> str:
    if not rules.slow_start_s:
        return "then it gets requests."
    least, after_s = f"{SLOW_START_LEAST:.0%}", rules.slow_start_s
    return f"then it gets requests, {least} of its share at first and all of it after {after_s:g} s."
