"""What the admin port shows of the fleet and of each unit. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cellgate import VERSION
from cellgate.proxy.ingress.reasons import Rotation, advice, rotation_of, shortcomings, unseen_nodes, why
from cellgate.proxy.observe.text import duration
from cellgate.router.board import Board
from cellgate.router.judge import AnswerRecord
from cellgate.router.nouns import Rules, Sign
from cellgate.router.prefill_decode import TransferLink
from cellgate.router.unit_state import UnitState


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
    unit, load, rotation = state.unit, state.load, rotation_of(state, moment.now, moment.panic_at)
    besides = ", ".join(each.word for each in shortcomings(state))
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
