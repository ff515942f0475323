"""The whole fleet at a glance, for the status page and `cellgate top`: small rows, made anew each time. Pure.

All there is to know of one unit is in unit_view.py.
"""

from __future__ import annotations

from typing import Any

from cellgate import VERSION
from cellgate.proxy.admin.rotation import Moment, standing
from cellgate.proxy.ingress.ready import why
from cellgate.router.board import Board
from cellgate.router.nouns import Sign
from cellgate.router.unit_state import Desk


def status(board: Board, now: float, *, waiting: int, stopping: bool) -> dict[str, Any]:
    """The gate and all its units, ready for JSON. `waiting` requests have no unit yet."""
    moment = Moment(now, board.rules, board.panic_at)
    return {
        "version": VERSION,
        "ready": not stopping and any(desk.is_usable() for desk in board),
        "stopping": stopping,
        "panic": board.panic_at is not None,
        "waiting": waiting,
        "in_flight": board.in_flight,
        "units": [_row(desk, moment) for desk in board],
    }


def load_s(desk: Desk, now: float) -> float:
    """How long the prompts that wait at the unit will take to compute, as the router reckons."""
    forecast = desk.books.forecast
    tokens = desk.books.work.backlog_tokens(now, forecast.tokens_s) + forecast.foreign_tokens
    return tokens / forecast.tokens_s


def _row(desk: Desk, moment: Moment) -> dict[str, Any]:
    unit, load = desk.unit, desk.load
    return {
        "name": unit.name,
        "cell": unit.cell,
        "verdict": desk.case.verdict.value,
        "standing": standing(desk, moment).value,
        "usable": desk.is_usable(),
        "drained": desk.drained,
        "degraded": round(desk.slowness.degraded, 3),
        "since_s": round(moment.now - desk.case.since, 1),
        "reason": why(desk),
        "in_flight": desk.in_flight,
        "max_in_flight": unit.max_in_flight,
        "load_s": round(load_s(desk, moment.now), 3),
        "kv_use": None if load is None else round(load.kv_use, 3),
        "nodes": _nodes(desk),
    }


def _nodes(desk: Desk) -> list[dict[str, str]]:
    """`state`: bad when anyone says so, unseen when nobody looks at the node itself or learns anything."""
    faulty = {node for node, _ in desk.case.faults}
    good, bad = set(), {}
    for (node, _), word in desk.news.items():
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
        for node in desk.unit.nodes
    ]
