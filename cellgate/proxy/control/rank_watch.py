"""Reports what the ranks of a unit in trouble say: an event and weak evidence, never more than that."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from cellgate.proxy.logs.events import Action, EventLog
from cellgate.router.board import Board
from cellgate.router.nouns import Evidence, Sign, Strength
from cellgate.router.stuck_ranks import conclusions
from cellgate.router.unit_state import UnitState

SOURCE = "ranks"
LOOK_S = 0.5
AGAIN_S = 10.0
"""A unit whose ranks keep saying something else is evidence at most this often: too rarely to be a rate."""


class RankWatch:
    """The look-out of one gate. `observe` takes evidence."""

    def __init__(self, board: Board, events: EventLog, observe: Callable[[Evidence], object]) -> None:
        self._board = board
        self._events = events
        self._observe = observe
        self._look_at = 0.0
        self._told_at: dict[UnitState, float] = {}

    def tick(self, now: float) -> None:
        """Look at the reports of all units, now and then."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for state in list(self._board):
            if state.facts.nodes:
                self._look(state, now)
        self._told_at = {state: at for state, at in self._told_at.items() if not state.retired}

    def _look(self, state: UnitState, now: float) -> None:
        before, state.facts.ranks = state.facts.ranks, conclusions(state.facts, now)
        if state.facts.ranks in ((), before) or now - self._told_at.get(state, -inf) < AGAIN_S:
            return
        self._told_at[state] = now
        name, reason = state.unit.name, "; ".join(state.facts.ranks)
        self._events.add(Action("ranks", "gate", name, reason))
        self._observe(Evidence(name, Sign.BAD, Strength.WEAK, SOURCE, reason, now))
