"""The whole fleet at a glance, for the status page and `cellgate top`: small rows, made anew each time. Pure.

All there is to know of one unit is in unit_view.py.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from proxy.report.ready import why
from proxy.report.standing import Moment, standing
from router.board import Board
from router.cost import Cost
from router.desk import Desk
from router.nouns import Ask, Node, Sign


def status(board: Board, now: float, *, waiting: int, stopping: bool) -> dict[str, Any]:
    """The gate and all its units, ready for JSON. `waiting` requests have no unit yet."""
    moment = Moment(now, board.rules, board.panic_at)
    return {
        "version": version("cellgate"),
        "ready": not stopping and any(desk.is_usable() for desk in board),
        "stopping": stopping,
        "panic": board.panic_at is not None,
        "waiting": waiting,
        "in_flight": board.in_flight,
        "units": [_row(desk, moment) for desk in board],
    }


def load_s(desk: Desk, now: float) -> float:
    """How long the prompts that wait at the unit will take, over its share: what a next one would wait."""
    return Cost(*desk.books.quote(Ask(), now).terms).queue_s


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
        "nodes": [_node(desk, node) for node in unit.nodes],
    }


def _node(desk: Desk, node: Node) -> dict[str, str]:
    """`state`: bad when anyone says so, unseen when nobody looks at the node itself or learns anything."""
    words = [word for (name, _), word in desk.news.items() if name == node.name]
    faults = [source for name, source in desk.case.faults if name == node.name]
    bad = next((word for word in words if word.sign is Sign.BAD), None)
    if faults or bad is not None:
        state = "bad"
    else:
        state = "good" if any(word.sign is Sign.GOOD for word in words) else "unseen"
    return {
        "name": node.name,
        "role": node.role.value,
        "state": state,
        "reason": bad.reason if bad is not None else "",
    }
