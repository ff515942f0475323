"""What is true of a unit now, why, and what helps: for the page, commands and load balancers. Pure.

Each fault has its words here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from cellgate.router.departures import is_draining, is_stalled
from cellgate.router.health import spoken
from cellgate.router.judge import CANARY_SOURCE, READINESS_SOURCE
from cellgate.router.kept import kept_words
from cellgate.router.nouns import Evidence, Sign, Strength, Verdict
from cellgate.router.opinions import REFUSING_SOURCE
from cellgate.router.unit_state import UnitState

NOTHING_YET = "no probe has answered yet"


def why(state: UnitState) -> str:
    """The reason behind what is believed of a unit, in one line."""
    if state.drained:
        return "drained by an operator"
    if state.hold is not None:
        return f"{spoken(state.hold)}; it gets requests when it goes on and shows work"
    if state.is_usable() and state.is_restart_suspected():
        return "it closed a connection unexpectedly and may have restarted; a canary is sent"
    said = present_reason(state)
    if said is None:
        return NOTHING_YET
    reason = "; ".join(each.sentence for each in shortcomings(state)) or _sourced(said)
    reason = before_a_token(state, said) + reason + _of_its_requests(state)
    newest = state.last_evidence.get((said.node, said.source), said)
    if not state.is_usable() and said.sign is Sign.BAD and newest.sign is Sign.GOOD:
        reason += f"; since then: {newest.reason}"
    ready = state.last_evidence.get((None, READINESS_SOURCE))
    if state.case.verdict is Verdict.UP and ready is not None and ready.sign is Sign.BAD:
        reason += f"; but its readiness says: {ready.reason}"
    return reason


def before_a_token(state: UnitState, said: Evidence) -> str:
    """What comes before good news of a unit that starts: a web server that answers is no engine that does."""
    return "no token yet; " if state.case.verdict is Verdict.STARTING and said.sign is Sign.GOOD else ""


def _of_its_requests(state: UnitState) -> str:
    """What becomes of the requests of a unit that is out."""
    if state.is_usable() or not state.leases:
        return ""
    if is_draining(state):
        return f"; it takes no new requests, and keeps the {state.in_flight} that it has"
    if is_stalled(state):
        return f"; {state.in_flight} requests stay there until it goes on or another unit can take them"
    return ""


class Rotation(Enum):
    """What decides at the moment whether a unit gets requests."""

    DRAINED = "drained"
    ON_HOLD = "on_hold"
    HELD = "held"
    RESTART_SUSPECTED = "restart_suspected"
    SUSPECT = "suspect"
    FULL = "full"
    IN = "in"
    STARTING = "starting"
    DOWN = "down"
    PROBATION = "probation"
    DRAINING = "draining"


def rotation_of(state: UnitState, now: float, panic_at: float | None) -> Rotation:
    """The one fact that decides; other facts change nothing as long as it is true. `panic_at`: since when the
    gate is in panic (None: it is not).
    """
    if state.drained:
        return Rotation.DRAINED
    if state.hold is not None:
        return Rotation.ON_HOLD
    if not state.is_usable():
        return Rotation.DRAINING if is_draining(state) else Rotation(state.case.verdict.value)
    if panic_at is not None and state.is_unreachable(now):
        return Rotation.HELD
    if state.is_restart_suspected():
        return Rotation.RESTART_SUSPECTED
    if state.case.verdict is Verdict.SUSPECT:
        return Rotation.SUSPECT
    return Rotation.FULL if state.in_flight >= state.unit.max_in_flight else Rotation.IN


def standing_since(state: UnitState) -> float:
    """Since when what is shown of it has been so: that it is drained, on hold or slow, or its verdict."""
    since = state.case.since
    if state.drained:
        return state.drained_at or since
    if state.hold is not None:
        return state.hold.since
    if state.is_usable() and state.is_restart_suspected():
        return state.restart_suspected_at
    return max(since, state.slow_since)


_ADVICE: dict[Rotation, str] = {
    Rotation.ON_HOLD: "let its engine go on (cellgate engine resume {unit}, or cellgate engine wake {unit}); "
    "drain it (cellgate drain {unit}) if it needs longer.",
    Rotation.HELD: "check the network of this gate first: the units may be healthy.",
    Rotation.FULL: "raise its max_in_flight if its engine can take more, or add units.",
    Rotation.SUSPECT: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.IN: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.STARTING: "wait while it loads its model; if it does not load, check its engine's log ({url}).",
    Rotation.DRAINING: "let it finish; if it is not meant to stop, check its engine's log ({url}).",
    Rotation.DOWN: "check its engine's log ({url}); if it hangs, restart it on all its nodes. "
    "cellgate drain {unit} keeps it out meanwhile.",
}
_ADVICE_GONE = "make sure that its engine runs and listens at {url}; this gate notices by itself."
_CERTIFICATE = (
    "renew the certificate that {url} shows, or correct tls.ca of this gate; a restart of the engine "
    "changes nothing."
)
_TLS = "make sure that {url} speaks TLS, or write http:// for it; a restart of the engine changes nothing."
_ADVICE_NAME = "correct the name in {url}, or its record in DNS; the unit itself may be well."
_NODES = (
    "check node {nodes}: let a process that is stopped go on (kill -CONT); if one has ended, restart the "
)
_NODES += "unit on all its nodes. This gate notices by itself."
_UNWATCHED = "start the agent of node {nodes} again (cellgate agent); until then, probes alone watch it."
_WANTS_TOKEN = (
    "give this gate the token that the agent of node {nodes} was started with (CELLGATE_AGENT_TOKEN), "
)
_WANTS_TOKEN += "and start this gate again; until then, probes alone watch it."
_REFUSES = "compare its key, its model's name and its command line with those of another unit: "
_REFUSES += "cellgate units -o wide; docs/4xx.md."
_ITS_KEY = (
    "set `api_key_file:` to a key that its engine accepts, or `models:` and `canary:` to what it serves."
)
_ADVICE_WRONG = "compare its weights, engine and GPUs with those of other units, and restart it on all nodes."
_ADVICE_KEPT = "let it go now (cellgate drain {unit}); it gets nothing more once one of those is up."
KV_FULL = 0.98
_WAITS = "lower its max_in_flight to what its engine runs at once: then they wait here, and go where "
_WAITS += "there is room first; or let it run more (vLLM: --max-num-seqs, SGLang: --max-running-requests)."
_KV = "lower its max_in_flight, so that requests wait here instead (docs/runbooks/kv-cache-full.md)."
_SLOW = "compare clocks, temperatures and links of its nodes with those of the other units."


def advice(state: UnitState, rotation: Rotation) -> Iterator[str]:
    """What an operator can do, what helps most first; nothing if waiting is all."""
    yield from (each.helps for each in shortcomings(state))
    nodes = " and ".join(sorted({node for node, _ in state.case.faults if node}))
    if words := _main_advice(state, rotation, bool(nodes)):
        yield words.format(unit=state.unit.name, url=state.unit.url, nodes=nodes)


def _main_advice(state: UnitState, rotation: Rotation, is_node_at_fault: bool) -> str:
    because, is_out = present_reason(state), not state.is_usable()
    if rotation is Rotation.DRAINED and state.hold is not None:
        return _ADVICE[Rotation.ON_HOLD]
    if because is not None and because.sign is not Sign.GOOD and (words := _of_its_address(because.reason)):
        return words
    if is_out and is_node_at_fault:
        return _NODES
    if is_out and state.is_out_for_answers():
        return _ADVICE_WRONG
    if is_out and rotation is not Rotation.DRAINED and because is not None and _is_refusal(because):
        return _REFUSES
    if rotation is Rotation.DRAINING:
        return _ADVICE[rotation]
    if rotation is Rotation.DOWN and because is not None and because.strength is Strength.FATAL:
        return _ADVICE_GONE
    return _ADVICE.get(rotation, "")


def _of_its_address(reason: str) -> str:
    """What helps where no connection can be made, and no engine is to blame (http/unit.py, http/names.py)."""
    if "DNS " in reason:
        return _ADVICE_NAME
    if "TLS with " not in reason:
        return ""
    return _CERTIFICATE if "certificate" in reason else _TLS


def _is_refusal(word: Evidence) -> bool:
    return word.source == REFUSING_SOURCE or (word.sign is Sign.NEUTRAL and word.source == CANARY_SOURCE)


class Shortcoming(NamedTuple):
    """What is not well with a unit that is UP and keeps its requests: a word, a sentence, what helps."""

    word: str
    sentence: str
    helps: str


def shortcomings(state: UnitState) -> list[Shortcoming]:
    """Those of a unit, the worst first."""
    if state.case.verdict is not Verdict.UP:
        return []
    found = []
    if state.kept is not None:
        sentence = f"it is not configured any more, and kept {kept_words(state.kept)}"
        found.append(Shortcoming("kept", sentence, _ADVICE_KEPT.format(unit=state.unit.name)))
    if degraded := state.outlier.degraded:
        times = f"{1.0 / (1.0 - degraded):.1f} times as long as on other units of its cell"
        found.append(Shortcoming("slow", f"slow: a token takes {times}", _SLOW))
    if unwatched := unseen_nodes(state):
        said, names = "; ".join(map(_sourced, unwatched.values())), " and ".join(sorted(unwatched))
        helps = _WANTS_TOKEN if " token" in said else _UNWATCHED
        found.append(Shortcoming("node not watched", said, helps.format(nodes=names)))
    if state.canary_refused:
        found.append(Shortcoming("its key?", state.canary_refused, _ITS_KEY))
    if state.load is not None and state.load.kv_use >= KV_FULL:
        said = f"its KV cache is full ({state.load.kv_use:.0%}): requests wait inside, or are computed twice"
        found.append(Shortcoming("KV cache full", said, _KV))
    if state.waits_inside:
        found.append(Shortcoming("requests wait inside", state.waits_inside, _WAITS))
    if state.has_odd_answers():
        found.append(Shortcoming("odd answers", "its answers to the known prompt differ", _ADVICE_WRONG))
    return found


def unseen_nodes(state: UnitState) -> dict[str, Evidence]:
    """By node, what is said of those of which no source has anything good to say."""
    words: dict[str, Evidence] = {}
    for (node, _), word in state.last_evidence.items():
        if node is not None and (node not in words or word.sign is Sign.GOOD):
            words[node] = word
    return {node: word for node, word in words.items() if word.sign is not Sign.GOOD}


def present_reason(state: UnitState) -> Evidence | None:
    """What speaks for the verdict, as it was last said; before the first verdict, what the canary found.

    Of a unit that is out, the first open fault of a node decides. What was taken back since (a port that
    refused and answers again) gives way to the newest that speaks against the unit.
    """
    case, last = state.case, state.last_evidence
    because = case.because
    if because is None:
        return last.get((None, CANARY_SOURCE)) or last.get((None, READINESS_SOURCE))
    newest = last.get((because.node, because.source), because)
    if case.verdict not in (Verdict.DOWN, Verdict.STARTING):
        return newest if newest.sign is because.sign else because
    open_faults = [
        word for key in case.faults if key[0] and (word := last.get(key)) and word.sign is Sign.BAD
    ]
    if open_faults:
        return min(open_faults, key=_said_at)
    if newest.sign is Sign.BAD:
        return newest
    later = [word for word in last.values() if _speaks_against(word) and word.at >= because.at]
    return max(later, key=_said_at, default=because)


def _speaks_against(word: Evidence) -> bool:
    """A reading of the epoch alone says nothing; a canary that was refused proves nothing, but says why."""
    return word.sign is Sign.BAD or (word.source == CANARY_SOURCE and word.sign is Sign.NEUTRAL)


def _said_at(word: Evidence) -> float:
    return word.at


def _sourced(word: Evidence) -> str:
    where = f", node {word.node}" if word.node else ""
    return f"{word.reason} (source {word.source}{where})"
