"""The copy of the Board that each worker has: what the brain tells of its fleet and units, and takes back.

It is good for what needs no decision: answers of the gate's own, which units there are, what they run. Which
unit an ask goes to is never decided by it. A new brain learns from it what the one before believed.
"""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import Any

from cellgate.proxy.handover.view import known_of, take_over
from cellgate.proxy.workers.protocol import Message
from cellgate.router.board import Board
from cellgate.router.nouns import Case, Cell, Fleet, Load, Unit
from cellgate.router.outliers import Slowness
from cellgate.router.unit_state import Desk

Known = dict[str, Any]
"""What is told of one unit."""

_FIELDS = tuple(field.name for field in fields(Unit) if field.name != "nodes")


def fleet_out(fleet: Fleet) -> Message:
    """A fleet as it is sent: without nodes, which only probes look at."""
    cells = [(cell.name, cell.weight, cell.spill_s) for cell in fleet.cells]
    return cells, [tuple(getattr(unit, name) for name in _FIELDS) for unit in fleet.units]


def fleet_in(plain: Message) -> Fleet:
    """A fleet that was sent."""
    cells, units = plain
    found = (Unit(**dict(zip(_FIELDS, unit, strict=True))) for unit in units)
    return Fleet(tuple(Cell(*cell) for cell in cells), tuple(found))


class News:
    """Finds out what has changed of the units of a board since it was told last."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: dict[str, tuple[Desk, Known]] = {}
        self._lives: dict[str, float] = {}

    def units(self, now: float) -> list[Known]:
        """What has changed of units, but for when they last showed life."""
        told, self._told, changed = self._told, {}, []
        for name, desk in self._board.desks.items():
            known = _known(desk, now)
            self._told[name] = desk, known
            if told.get(name) != (desk, known):
                changed.append(known)
        return changed

    def lives(self) -> list[tuple[str, float]]:
        """Which units have shown life, and when."""
        before, self._lives = self._lives, {name: desk.life_at for name, desk in self._board.desks.items()}
        return [(name, at) for name, at in self._lives.items() if before.get(name) != at]

    def all(self, now: float) -> list[Known]:
        """All of all units."""
        return [_known(desk, now) | {"life_at": desk.life_at} for desk in self._board]


def take(board: Board, known: Known) -> Case | None:
    """Take over what was told of a unit; the case before. None: it is not on this board."""
    desk = board.desks.get(known["name"])
    if desk is None:
        return None
    before, life_at = desk.case, desk.life_at
    take_over(desk, {"life_at": life_at, **known})
    desk.life_at = max(life_at, desk.life_at)
    desk.models, desk.engine = frozenset(known["models"]), known["engine"]
    desk.doubted_at = known["doubted_at"]
    desk.slowness = Slowness(known["degraded"])
    # What it has at all workers is the brain's to count: here it has a place or none.
    desk.limit = inf if known["has_place"] else 0.0
    load = known["load"]
    desk.load = None if load is None else Load(desk.unit.name, *load)
    return before


def _known(desk: Desk, now: float) -> Known:
    known, load = known_of(desk), desk.load
    del known["life_at"]
    known["doubted_at"] = desk.doubted_at
    known["degraded"] = desk.slowness.degraded
    known["has_place"] = desk.has_place(now, 0.0)
    known["load"] = None if load is None else (load.at, load.running, load.waiting, load.kv_use)
    return known
