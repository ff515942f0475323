"""Explains the state of one unit to operators. Pure.

Is it in or out of rotation, since when, on what evidence, what comes next and what can be done (outlook.py).
This module decides nothing: rotation.py has the state of a unit, router/judge.py what follows from evidence.
"""

from __future__ import annotations

from cellgate.proxy.admin.outlook import advice, what_comes
from cellgate.proxy.admin.remarks import remarks
from cellgate.proxy.admin.rotation import Moment, Rotation, rotation_of, silent_s
from cellgate.proxy.ingress.ready import present_reason
from cellgate.router.hold import is_on, spoken
from cellgate.router.nouns import Case, Evidence, Sign, Verdict
from cellgate.router.stall import stall_limit_s
from cellgate.router.unit_state import SLOW_START_LEAST, UnitState

QUIET_S = 0.25
"""A shorter stall is not mentioned."""

_HEADLINES: dict[Rotation, str] = {
    Rotation.DRAINED: "{unit} is out of rotation: an operator drained it. {requests} are still in flight. "
    "Its verdict is {verdict}, for {time}.",
    Rotation.ON_HOLD: "{unit} is out of rotation: {hold}, for {held}. {requests} are still in flight. "
    "Its verdict is {verdict}, for {time}; it is not judged, and not recovered, while its engine says so.",
    Rotation.HELD: "{unit} is kept in rotation, although it has not answered for {mute}: most units "
    "do not answer, so this gate assumes that its own network is cut off.",
    Rotation.RESTART_SUSPECTED: "{unit} gets no requests for now: it closed a connection unexpectedly "
    "{cut} ago, and may have restarted.",
    Rotation.SUSPECT: "{unit} is suspect, for {time}: it gets requests only when no other unit has room.",
    Rotation.FULL: "{unit} is in rotation, but full: {requests} are in flight.",
    Rotation.IN: "{unit} is in rotation, for {time}.",
    Rotation.STARTING: "{unit} is out of rotation, for {time}: its engine has not proven yet that it works.",
    Rotation.DOWN: "{unit} is out of rotation, for {time}: it is down.",
    Rotation.PROBATION: "{unit} is still out of rotation: it was down, and has answered again for {time}.",
}
_SOURCES = {"request": "requests of clients", "progress": "the gate's own view of its progress"}


def explain(state: UnitState, moment: Moment) -> list[str]:
    """The explanation, the most important first; each item is one line."""
    rotation = rotation_of(state, moment)
    return [
        _headline(state, rotation, moment),
        *_because(state, moment),
        *_faults(state),
        *_besides(state, rotation, moment),
        *_heard(state, moment),
        f"Next: {what_comes(state, rotation, moment)}",
        *(f"You can {words}" for words in advice(state, rotation)),
    ]


def _headline(state: UnitState, rotation: Rotation, moment: Moment) -> str:
    return _HEADLINES[rotation].format(
        unit=state.unit.name,
        verdict=state.case.verdict.value,
        time=moment.ago(state.case.since),
        requests=_requests(state),
        hold=spoken(state.hold) if state.hold is not None else "",
        held=moment.ago(state.hold.since) if state.hold is not None else "",
        mute=moment.ago(max(state.heard_at, state.life_at)),
        cut=moment.ago(state.restart_suspected_at),
    )


def _because(state: UnitState, moment: Moment) -> list[str]:
    because = present_reason(state)
    return [f"Because: {_said(because, moment) if because is not None else 'no probe has answered yet.'}"]


def _faults(state: UnitState) -> list[str]:
    """Faults that stand until their source takes them back."""
    lines = []
    for node, source in sorted(state.case.faults):
        last = state.last_evidence.get((node or None, source))
        if last is None or last is not state.case.because:
            said = f": {last.reason}" if last is not None else ""
            lines.append(f"Open fault: {_source(node or None, source)}{said}.")
    return lines


def _besides(state: UnitState, rotation: Rotation, moment: Moment) -> list[str]:
    """Other facts about its present state."""
    lines, rules, now = [], moment.rules, moment.now
    if rotation in (Rotation.IN, Rotation.SUSPECT):
        lines.append(f"{_requests(state)} are in flight.")
    if rotation is Rotation.DRAINED and state.hold is not None:
        lines.append(f"Besides, {spoken(state.hold)}, for {moment.ago(state.hold.since)}.")
    quiet_s = silent_s(state, now)
    if quiet_s is not None and quiet_s >= QUIET_S and not is_on(state.hold):
        limit_s = stall_limit_s(state, rules)
        lines.append(f"Stalled for {quiet_s:.1f} s; with its present work up to {limit_s:.1f} s are normal.")
    if degraded := state.outlier.degraded:
        lines.append(
            f"Slow: a token takes {1.0 / (1.0 - degraded):.1f} times as long as on the other units of cell "
            f"{state.unit.cell}; its share of requests is {degraded:.0%} smaller."
        )
    lines += remarks(state)
    risen_s = now - state.risen_at
    if state.is_usable() and risen_s < rules.slow_start_s:
        share, left_s = max(SLOW_START_LEAST, risen_s / rules.slow_start_s), rules.slow_start_s - risen_s
        lines.append(f"Slow start: it gets {share:.0%} of its share now, all of it in {left_s:.1f} s.")
    if rotation is Rotation.IN and state.cool_until > now:
        left_s = state.cool_until - now
        lines.append(f"It has just answered with an error: other units come first for {left_s:.1f} s more.")
    return lines


def _heard(state: UnitState, moment: Moment) -> list[str]:
    """The last evidence of every source: bad or neutral in full, good in one line."""
    case, news = state.case, sorted(state.last_evidence.values(), key=_at, reverse=True)
    faults = ((node or None, source) for node, source in case.faults)
    told = [case.because, present_reason(state), *map(state.last_evidence.get, faults)]
    lines = [
        f"{'Also bad' if word.sign is Sign.BAD else 'No evidence'}: {_said(word, moment)}"
        for word in news
        if word.sign is not Sign.GOOD and word not in told and not _is_over(word, case)
    ]
    good = [w for w in news if w.sign is Sign.GOOD]
    if good:
        each = (f"{_source(w.node, w.source)} ({moment.ago(w.at)} ago)" for w in good)
        lines.append(f"Last good evidence: {', '.join(each)}.")
    return lines


def _is_over(word: Evidence, case: Case) -> bool:
    """Evidence from before a unit came up is obsolete; that of a node is valid until the next.

    A reading of the epoch alone is neither good nor bad.
    """
    if word.epoch is not None and word.sign is Sign.NEUTRAL:
        return True
    return word.node is None and case.verdict in (Verdict.UP, Verdict.STARTING) and word.at < case.since


def _at(evidence: Evidence) -> float:
    return evidence.at


def _said(evidence: Evidence, moment: Moment) -> str:
    who = _source(evidence.node, evidence.source)
    return f"{evidence.reason} ({who}, {moment.ago(evidence.at)} ago)."


def _source(node: str | None, source: str) -> str:
    return f"{source} of node {node}" if node is not None else _SOURCES.get(source, source)


def _requests(state: UnitState) -> str:
    return f"{state.in_flight} of {state.unit.max_in_flight} requests"
