"""The rotation state of a unit: in one word, what decides whether it gets requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cellgate import VERSION
from cellgate.proxy.ingress.reports import present_reason, shortcomings, unseen_nodes, why
from cellgate.proxy.observe.text import duration
from cellgate.router.board import Board
from cellgate.router.judge import CANARY_SOURCE, AnswerRecord
from cellgate.router.nouns import Rules, Sign, Strength, Verdict
from cellgate.router.opinions import REFUSING_SOURCE
from cellgate.router.prefill_decode import TransferLink
from cellgate.router.unit_state import UnitState


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


@dataclass(frozen=True, slots=True)
class Moment:
    """The time at which a unit is shown, with facts that the Board does not have.

    `canary_s` is within what time its next canary begins (0: it is in flight; None: none is planned),
    `panic_at` since when the gate is in panic (None: it is not).
    """

    now: float
    rules: Rules
    panic_at: float | None = None
    canary_s: float | None = None

    def ago(self, at: float) -> str:
        """How long ago something was, for a person to read."""
        seconds = max(0.0, self.now - at)
        return f"{seconds:.1f} s" if seconds < 60.0 else duration(seconds)


def rotation_of(state: UnitState, moment: Moment) -> Rotation:
    """The one fact that decides; other facts change nothing as long as it is true."""
    if state.drained:
        return Rotation.DRAINED
    if state.hold is not None:
        return Rotation.ON_HOLD
    if not state.is_usable():
        return Rotation(state.case.verdict.value)
    if moment.panic_at is not None and state.is_unreachable(moment.now):
        return Rotation.HELD
    if state.is_restart_suspected():
        return Rotation.RESTART_SUSPECTED
    if state.case.verdict is Verdict.SUSPECT:
        return Rotation.SUSPECT
    return Rotation.FULL if state.in_flight >= state.unit.max_in_flight else Rotation.IN


_ADVICE: dict[Rotation, str] = {
    Rotation.ON_HOLD: "let its engine go on (cellgate engine resume {unit}, or cellgate engine wake {unit}); "
    "drain it (cellgate drain {unit}) if it needs longer.",
    Rotation.HELD: "check the network of this gate first: the units may be healthy.",
    Rotation.FULL: "raise its max_in_flight if its engine can take more, or add units.",
    Rotation.SUSPECT: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.IN: "take it out of rotation (cellgate drain {unit}); requests in flight finish.",
    Rotation.STARTING: "wait while it loads its model; if it does not load, check its engine's log ({url}).",
    Rotation.DOWN: "check its engine's log ({url}); if it hangs, restart it on all its nodes. "
    "cellgate drain {unit} keeps it out meanwhile.",
}
_GONE = "make sure that its engine runs and listens at {url}; this gate notices by itself."
_NODES = (
    "check node {nodes}: let go on what is stopped there (kill -CONT); if a process has ended, restart the "
)
_NODES += "unit on all its nodes. This gate notices by itself."
_UNWATCHED = "start the agent of node {unwatched} again (cellgate agent); until then, probes alone watch it."
_REFUSES = "compare its key, its model's name and its command line with those of another unit: "
_REFUSES += "cellgate units -o wide; docs/4xx.md."
_WRONG = "compare its weights, engine and GPUs with those of other units, and restart it on all nodes."
_SLOW = "compare clocks, temperatures and links of its nodes with those of the other units."


def advice(state: UnitState, rotation: Rotation) -> Iterator[str]:
    """What an operator can do, what helps most first; nothing if waiting is all."""
    nodes, unwatched = sorted({node for node, _ in state.case.faults if node}), sorted(unseen_nodes(state))
    words = [_SLOW] if state.outlier.degraded else []
    if unwatched and state.is_usable():
        words.append(_UNWATCHED)
    words.append(_main_advice(state, rotation, bool(nodes)))
    for each in filter(None, words):
        yield each.format(
            unit=state.unit.name,
            url=state.unit.url,
            nodes=" and ".join(nodes),
            unwatched=" and ".join(unwatched),
        )


def _main_advice(state: UnitState, rotation: Rotation, is_node_at_fault: bool) -> str:
    because = present_reason(state)
    if rotation is Rotation.DRAINED and state.hold is not None:
        return _ADVICE[Rotation.ON_HOLD]
    if not state.is_usable() and is_node_at_fault:
        return _NODES
    if not state.is_usable() and state.is_out_for_answers():
        return _WRONG
    if rotation in (Rotation.DOWN, Rotation.STARTING) and because is not None:
        if because.source == REFUSING_SOURCE or (
            because.sign is Sign.NEUTRAL and because.source == CANARY_SOURCE
        ):
            return _REFUSES
        if rotation is Rotation.DOWN and because.strength is Strength.FATAL:
            return _GONE
    return _ADVICE.get(rotation, "")


def is_held(state: UnitState, board: Board, now: float) -> bool:
    """Whether a unit is in rotation only because of panic."""
    return board.panic_at is not None and state.is_usable() and state.is_unreachable(now)


def silent_s(state: UnitState, now: float) -> float | None:
    """For how long a unit with requests has stalled; None when it has none."""
    return now - state.quiet_since if state.leases else None


# What else an operator should know of a unit, in rotation or not: build, software, answers. Pure.


def remarks(state: UnitState) -> list[str]:
    """One line each; none for an ordinary unit."""
    lines = []
    if state.other_builds:
        others = ", ".join(state.other_builds)
        lines.append(f"Its build, {state.build.key}, is another one than that of {others}.")
    if state.facts.odd:
        lines.append(f"Its software differs from that of its cell: it has {state.facts.odd}.")
    if state.has_odd_answers() and state.answers is not None:
        lines.append(f"Its last {state.answers.differing} answers to the known prompt differ.")
    return lines


def build_view(state: UnitState) -> dict[str, Any]:
    """Its build for JSON; empty where unknown."""
    fingerprint, version, _ = state.build
    return {"fingerprint": fingerprint, "version": version, "other_builds": list(state.other_builds)}


def answer_view(record: AnswerRecord | None, now: float) -> dict[str, Any] | None:
    """Its last answer to the known prompt for JSON; null: none yet."""
    if record is None:
        return None
    return {
        "question": record.question,
        "text": "".join(token.token for token in record.latest),
        "age_s": round(now - record.at, 3),
        "differing": record.differing,
    }


# The links of prefillers and decoders as the admin port shows them. Pure.


def links_of(board: Board, unit: str, now: float) -> list[dict[str, Any]]:
    """The links of one unit, ready for JSON."""
    return [_view(*pair, link, now) for pair, link in sorted(board.pairs.links.items()) if unit in pair]


def avoided(board: Board, unit: str, now: float) -> list[str]:
    """The links of one unit that are avoided because transfers failed, a line each."""
    return [
        f"The link from {pair[0]} to {pair[1]} is avoided: transfers failed."
        for pair, link in sorted(board.pairs.links.items())
        if unit in pair and _is_avoided(link, now)
    ]


def _is_avoided(link: TransferLink, now: float) -> bool:
    """A link that was never used is closed as well while its first transfer is under way."""
    return link.failures > 0 and not link.is_open(now)


def _explained(prefiller: str, decoder: str, link: TransferLink, now: float) -> list[str]:
    """Why requests are, or are not, split between two units; each item is one line."""
    lines = [_headline(prefiller, decoder, link, now)]
    if link.last_failure:
        lines.append(f"Last failure: {link.last_failure} ({now - link.last_failure_at:.0f} s ago).")
    lines.append(f"{link.transferred} transfers arrived, {link.failed} failed.")
    if link.seen:
        lines.append(f"Its speed is {link.tokens_s:.0f} tokens of KV cache a second, as measured.")
    return lines


def _headline(prefiller: str, decoder: str, link: TransferLink, now: float) -> str:
    if link.is_open(now):
        return f"Requests may be split between {prefiller} and {decoder}."
    return (
        f"The pair of {prefiller} and {decoder} is avoided for {link.avoided_until - now:.1f} s more, after "
        f"{link.failures} failures in a row; then one request tries it."
    )


def _view(prefiller: str, decoder: str, link: TransferLink, now: float) -> dict[str, Any]:
    return {
        "prefiller": prefiller,
        "decoder": decoder,
        "open": link.is_open(now),
        "avoided": _is_avoided(link, now),
        "failures": link.failures,
        "last_failure": link.last_failure,
        "transferred": link.transferred,
        "failed": link.failed,
        "tokens_s": round(link.tokens_s) if link.seen else None,
        "why": _explained(prefiller, decoder, link, now),
    }


# A summary of the fleet for the status page and `cellgate top`, created for each request. Pure.
#
# unit_view.py has all details of one unit.


MODELS_SHOWN = 8
"""A unit may list hundreds of adapters; /units/NAME has all."""


def status(
    board: Board, now: float, *, waiting: int, stopping: bool, roll: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The gate and all its units, ready for JSON. `waiting` requests have no unit yet; `roll` is the one
    under way, or the last one.
    """
    moment = Moment(now, board.rules, board.panic_at)
    return {
        "version": VERSION,
        "ready": not stopping and any(state.is_usable() for state in board),
        "stopping": stopping,
        "panic": board.panic_at is not None,
        "waiting": waiting,
        "in_flight": board.in_flight,
        "roll": roll,
        "units": [_row(state, moment, avoided(board, state.unit.name, now)) for state in board],
    }


def load_s(state: UnitState, now: float) -> float:
    """How long the prompts at the unit will take to compute, as the router estimates."""
    forecast = state.costs.forecast
    tokens = state.costs.backlog.backlog_tokens(now, forecast.tokens_s) + forecast.foreign_tokens
    return tokens / forecast.tokens_s


def _row(state: UnitState, moment: Moment, avoided_links: list[str]) -> dict[str, Any]:
    unit, load, rotation = state.unit, state.load, rotation_of(state, moment)
    besides = ", ".join(shortcomings(state))
    is_well = rotation is Rotation.IN and not besides
    return {
        "name": unit.name,
        "cell": unit.cell,
        "role": unit.role,
        "verdict": state.case.verdict.value,
        "standing": rotation.value,
        "besides": besides,
        "usable": state.is_usable(),
        "drained": state.drained,
        "hold": None if state.hold is None else state.hold.kind.value,
        "degraded": round(state.outlier.degraded, 3),
        "odd_answers": state.has_odd_answers(),
        "remarks": [*remarks(state), *avoided_links],
        "since_s": round(moment.now - state.case.since, 1),
        "reason": why(state),
        "advice": "" if is_well else next(advice(state, rotation), ""),
        "in_flight": state.in_flight,
        "max_in_flight": unit.max_in_flight,
        "load_s": round(load_s(state, moment.now), 3),
        "kv_use": None if load is None else round(load.kv_use, 3),
        "models": sorted(state.models)[:MODELS_SHOWN],
        "nodes": _nodes(state),
    }


def _nodes(state: UnitState) -> list[dict[str, str]]:
    """`state`: bad when any source reports so, unseen when no source has evidence of the node."""
    faulty = {node for node, _ in state.case.faults}
    unseen, good, bad = unseen_nodes(state), set(), {}
    for (node, _), word in state.last_evidence.items():
        if word.sign is Sign.GOOD:
            good.add(node)
        elif word.sign is Sign.BAD:
            bad[node] = word.reason
    return [
        {
            "name": node.name,
            "role": node.role.value,
            "state": "bad"
            if node.name in faulty or node.name in bad
            else "good"
            if node.name in good
            else "unseen",
            "reason": bad.get(node.name) or (unseen[node.name].reason if node.name in unseen else ""),
        }
        for node in state.unit.nodes
    ]
