"""A summary of the fleet for the status page and `cellgate top`, created for each request. Pure.

unit_view.py has all details of one unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellgate import VERSION
from cellgate.proxy.admin.link_view import avoided
from cellgate.proxy.admin.remarks import remarks
from cellgate.proxy.admin.rotation import Moment, rotation_of
from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.nouns import Sign
from cellgate.router.unit_state import UnitState

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
    unit, load = state.unit, state.load
    return {
        "name": unit.name,
        "cell": unit.cell,
        "role": unit.role,
        "verdict": state.case.verdict.value,
        "standing": rotation_of(state, moment).value,
        "usable": state.is_usable(),
        "drained": state.drained,
        "hold": None if state.hold is None else state.hold.kind.value,
        "degraded": round(state.outlier.degraded, 3),
        "odd_answers": state.has_odd_answers(),
        "remarks": [*remarks(state), *avoided_links],
        "since_s": round(moment.now - state.case.since, 1),
        "reason": why(state),
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
    good, bad = set(), {}
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
            "reason": bad.get(node.name, ""),
        }
        for node in state.unit.nodes
    ]
