"""Reports nodes of one unit, and units of one cell, that run different software.

Nodes of a unit that differ are weak evidence against it, once for each change: that takes no unit out of
rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from math import inf

from cellgate.proxy.logs.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Sign, Strength
from cellgate.router.stacks import Stacks
from cellgate.router.unit_state import UnitState

SOURCE = "software"
COMPARE_S = 2.0
STEPS_A_TURN = 32
"""So many stacks are read or compared in one turn of the loop: about 5 ms at most with 60 flags each."""
AGAIN_S = 60.0
"""A unit whose reports keep changing is evidence, and an event, at most this often."""
_UNITS_TOLD = 3


class StackWatch:
    """The comparison for one gate. `observe` takes evidence."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._stacks = Stacks()
        self._comparing: Iterator[None] | None = None
        self._compare_at = self._now = 0.0
        self._told_at: dict[UnitState, float] = {}
        self._told_cells: dict[str, tuple[str, float]] = {}
        """What was last reported of each cell, and when."""

    def tick(self, now: float) -> None:
        """Compare the stacks of all units, now and then, some of them in each turn."""
        self._now = now
        if self._comparing is None and now >= self._compare_at:
            self._compare_at = now + COMPARE_S
            self._comparing = self._compare()
        if (
            self._comparing is not None
            and sum(1 for _ in islice(self._comparing, STEPS_A_TURN)) < STEPS_A_TURN
        ):
            self._comparing = None

    def _compare(self) -> Iterator[None]:
        for state in list(self._board):
            yield from self._stacks.read(state)
            self._compare_nodes(state, self._now)
        self._stacks.keep(self._board)
        odd = {}
        for state, words in self._stacks.odd(self._board):
            odd[state] = words
            yield
        for state in self._board:
            state.facts.odd = odd.get(state, "")
        self._report(self._now)

    def _report(self, now: float) -> None:
        self._told_at = {state: at for state, at in self._told_at.items() if not state.retired}
        cells = {cell: list[UnitState]() for cell in self._told_cells}
        for state in self._board:
            if state.facts.odd:
                cells.setdefault(state.unit.cell, []).append(state)
        for cell, states in cells.items():
            self._report_cell(cell, states, now)

    def _compare_nodes(self, state: UnitState, now: float) -> None:
        # A unit that is being restarted differs until all its nodes are new.
        before = state.facts.mixed
        state.facts.mixed = self._stacks.mixed(state) if state.is_usable() else ""
        name = state.unit.name
        if before and not state.facts.mixed:
            said = Evidence(name, Sign.NEUTRAL, Strength.WEAK, SOURCE, "its nodes run the same software", now)
            self._observe(said)
        elif state.facts.mixed != before and now - self._told_at.get(state, -inf) >= AGAIN_S:
            self._told_at[state] = now
            reason = f"its nodes run different software: {state.facts.mixed}"
            self._events.add(Action("stack_drift", "gate", name, reason))
            self._observe(Evidence(name, Sign.BAD, Strength.WEAK, SOURCE, reason, now))

    def _report_cell(self, cell: str, states: list[UnitState], now: float) -> None:
        told = "; ".join(f"{state.unit.name} has {state.facts.odd}" for state in states[:_UNITS_TOLD])
        more = f"; and {len(states) - _UNITS_TOLD} more units" if len(states) > _UNITS_TOLD else ""
        before, at = self._told_cells.get(cell, ("", -inf))
        if told + more == before or (told and now - at < AGAIN_S):
            return
        self._told_cells[cell] = told + more, now
        self._events.add(
            Action("stack_drift" if told else "stack_drift_over", "gate", detail=told + more, cell=cell)
        )
