"""Exploration: when a unit gets a request although another would serve it sooner, to measure its speed. Pure.

A unit that was slow once would otherwise never get the request that shows its present speed. The cost is
limited to a share of all waiting time: each pick adds to a budget, and exploring a unit takes out its
predicted additional cost. So a unit that seems ten times slower is explored rarely. Once, a unit is tried
whatever the budget is: when it seems slower because of its weight, and was never tried. Asks with a deadline
never explore.
"""

from __future__ import annotations

from collections.abc import Iterable

from cellgate.router.board import Board
from cellgate.router.nouns import Candidate

SHARE = 0.02
"""The share of the predicted seconds of all picks that may be spent on exploration."""
PURSE_MAX_S = 60.0
IDLE_S = 2.0
"""A unit that got a request this recently needs no exploration."""
LOOK_S = 0.1
"""How often such units are searched."""


class Explorer:
    """The budget of exploration, from `look_at` on. Each pick adds SHARE of its prediction."""

    __slots__ = ("_board", "look_at", "purse_s")

    def __init__(self, board: Board) -> None:
        self._board = board
        self.look_at = 0.0
        self.purse_s = 0.0

    def choose(self, rows: Iterable[Candidate], best: Candidate, now: float) -> Candidate:
        """`best`, or instead of it an idle unit of its cell that the budget can afford."""
        self.purse_s = min(self.purse_s, PURSE_MAX_S)
        self.look_at = now + LOOK_S
        if not best.has_room:
            return best
        states = self._board.units
        cell = states[best.unit].unit.cell
        longest_s, chosen = IDLE_S, best
        for row in rows:
            state = states[row.unit]
            idle_s = now - state.last_lease_at
            if idle_s > longest_s and row.has_room and not row.in_flight and state.unit.cell == cell:
                longest_s, chosen = idle_s, row
        regret_s = chosen.cost_s - best.cost_s
        if chosen is best or (regret_s > self.purse_s and not self._is_guessed(chosen, best)):
            return best
        self.purse_s = max(self.purse_s - max(regret_s, 0.0), 0.0)
        return chosen

    def _is_guessed(self, row: Candidate, best: Candidate) -> bool:
        """Whether a unit is dearer for its weight alone: it has had no request since it came up."""
        state = self._board.units[row.unit]
        return state.last_lease_at <= state.risen_at and state.weight < self._board.units[best.unit].weight
