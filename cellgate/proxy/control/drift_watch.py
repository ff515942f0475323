"""Reports units of one cell and model that run different builds (engine version or configuration).

Such units may answer differently, so a stream that one of them began is not resumed on another.
"""

from __future__ import annotations

from cellgate.proxy.logs.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.drift import other_builds

COMPARE_S = 1.0


class DriftWatch:
    """The comparison for one gate."""

    def __init__(self, board: Board, events: EventLog) -> None:
        self._board = board
        self._events = events
        self._compare_at = 0.0
        self._told: dict[str, frozenset[str]] = {}
        """The builds of each cell in which they differ, as they were last reported."""

    def tick(self, now: float) -> None:
        """Compare the builds of all units, now and then."""
        if now < self._compare_at:
            return
        self._compare_at = now + COMPARE_S
        differing = other_builds(self._board)
        cells: dict[str, dict[str, str]] = {}
        for state in self._board:
            state.other_builds = differing.get(state.unit.name, ())
            if state.other_builds:
                # One unit stands for all of its build.
                cells.setdefault(state.unit.cell, {}).setdefault(state.build.key, state.unit.name)
        for cell in self._told.keys() - cells.keys():
            self._events.add(Action("drift_over", "gate", cell=cell))
        for cell, units in cells.items():
            if self._told.get(cell) != units.keys():
                self._report(cell, units)
        self._told = {cell: frozenset(units) for cell, units in cells.items()}

    def _report(self, cell: str, units: dict[str, str]) -> None:
        each = ", ".join(f"{unit} runs {key}" for key, unit in list(units.items())[:5])
        detail = f"{each}; they may answer differently, and broken streams are not resumed across them"
        self._events.add(Action("drift", "gate", detail=detail, cell=cell))
