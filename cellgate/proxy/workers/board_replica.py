"""The replica of the Board that each worker has: what is sent of the fleet and its units, and taken over.

It serves what needs no decision: responses of the gate's own, the list of units and their models. It never
decides which unit a request gets. A new control process takes over the state of the previous one from it.
"""

from __future__ import annotations

from dataclasses import fields
from math import inf
from typing import Any

from cellgate.proxy.handover.view import known_of, take_over, view_of
from cellgate.proxy.workers.protocol import Message
from cellgate.router.board import Board
from cellgate.router.nouns import Case, Cell, Fleet, Load, Rules, Unit, Verdict
from cellgate.router.outliers import Outlier
from cellgate.router.unit_state import UnitState

ReplicaUnit = dict[str, Any]
"""The state of one unit, as it is sent."""

_CONTROL = frozenset({"nodes", "kv_events"})
"""What only the control process needs: probes and events are its own."""
_FIELDS = tuple(field.name for field in fields(Unit) if field.name not in _CONTROL)
_FALLEN = (Verdict.DOWN, Verdict.STARTING)


def fleet_out(fleet: Fleet) -> Message:
    """A fleet as it is sent: plain values, without what only the control process needs."""
    cells = [(cell.name, cell.weight, cell.spill_s, cell.transfer) for cell in fleet.cells]
    return cells, [tuple(getattr(unit, name) for name in _FIELDS) for unit in fleet.units]


def fleet_in(plain: Message) -> Fleet:
    """A fleet that was sent."""
    cells, units = plain
    found = (Unit(**dict(zip(_FIELDS, unit, strict=True))) for unit in units)
    return Fleet(tuple(Cell(*cell) for cell in cells), tuple(found))


class BoardUpdates:
    """Finds what has changed of the units of a board since the last message."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: dict[str, tuple[UnitState, ReplicaUnit]] = {}
        self._lives: dict[str, float] = {}

    def units(self, now: float) -> list[ReplicaUnit]:
        """The units that have changed, apart from the time of their last progress."""
        told, self._told, changed = self._told, {}, []
        for name, state in self._board.units.items():
            known = _known(state, now)
            self._told[name] = state, known
            if told.get(name) != (state, known):
                changed.append(known)
        return changed

    def lives(self) -> list[tuple[str, float]]:
        """Which units have made progress, and when."""
        before, self._lives = self._lives, {name: state.life_at for name, state in self._board.units.items()}
        return [(name, at) for name, at in self._lives.items() if before.get(name) != at]

    def all(self, now: float) -> list[ReplicaUnit]:
        """The full state of all units."""
        return [_known(state, now) | {"life_at": state.life_at} for state in self._board]


class BoardReplica:
    """One worker's."""

    def __init__(self, rules: Rules) -> None:
        self.board = Board(rules)
        self.version = 0
        """The version of the fleet, as counted by the control process."""
        self._fleet: Message = ()

    def take_fleet(self, version: int, fleet: Message, now: float) -> list[UnitState]:
        """Apply a fleet; returns the units that were removed."""
        self.version, self._fleet = version, fleet
        old = dict(self.board.units)
        return [old[unit.name] for unit in self.board.configure(fleet_in(fleet), now).removed]

    def take_units(self, units: list[ReplicaUnit]) -> list[UnitState]:
        """Apply changes of units; returns those that went down or restarted."""
        fallen = []
        for known in units:
            state = self.board.units.get(known["name"])
            if state is not None:
                before = state.case
                take(state, known)
                if state.case.verdict in _FALLEN and _is_other(before, state.case):
                    fallen.append(state)
        return fallen

    def take_lives(self, lives: list[tuple[str, float]]) -> None:
        """Units have made progress."""
        for name, at in lives:
            if (state := self.board.units.get(name)) is not None:
                state.life_at = max(state.life_at, at)

    def known(self) -> tuple[Message, dict[str, Any]] | None:
        """Fleet and state for a new control process; None: nothing was received yet."""
        return (self._fleet, view_of(self.board)) if self.version else None


def take(state: UnitState, known: ReplicaUnit) -> None:
    """Apply the received state of a unit."""
    life_at = state.life_at
    take_over(state, {"life_at": life_at, **known})
    state.life_at = max(life_at, state.life_at)
    state.models, state.engine = frozenset(known["models"]), known["engine"]
    state.cards = known.get("cards", {})
    state.restart_suspected_at = known["restart_suspected_at"]
    state.held_until = known["held_until"]
    state.outlier = Outlier(known["degraded"])
    # The load of all workers is not known here, only whether the unit has room.
    state.limit = inf if known["has_place"] else 0.0
    load = known["load"]
    state.load = None if load is None else Load(state.unit.name, *load)


def _is_other(before: Case, after: Case) -> bool:
    return (before.verdict, before.since) != (after.verdict, after.since)


def _known(state: UnitState, now: float) -> ReplicaUnit:
    known, load = known_of(state), state.load
    del known["life_at"]
    known["restart_suspected_at"] = state.restart_suspected_at
    known["held_until"] = state.held_until
    known["degraded"] = state.outlier.degraded
    known["has_place"] = state.has_room(now, 0.0)
    known["load"] = None if load is None else (load.at, load.running, load.waiting, load.kv_use)
    return known
