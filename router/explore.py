"""When a unit gets a request although another would serve it sooner: to learn how fast it is now. Pure.

A unit that was slow once, and is believed to be so, would else never get the request that shows it is not.
What that costs is bounded by a share of what everybody waits: each pick puts so much into a purse, and
trying a unit takes out what it is predicted to cost more. So a unit believed to be ten times slower is
tried as rarely as that deserves. Who has a deadline is never asked to pay.
"""

from __future__ import annotations

from collections.abc import Iterable

from cellgate.router.board import Board
from cellgate.router.nouns import Candidate

SHARE = 0.02
"""Of the predicted seconds of all picks, so much may be spent on trying units."""
PURSE_MAX_S = 60.0
IDLE_S = 2.0
"""A unit that was asked for something since then needs no trial."""
LOOK_S = 0.1
"""So often it is looked whether there is such a unit."""


class Explorer:
    """Spends the purse, from `look_at` on. Whoever picks puts in SHARE of what it predicts."""

    __slots__ = ("_board", "look_at", "purse_s")

    def __init__(self, board: Board) -> None:
        self._board = board
        self.look_at = 0.0
        self.purse_s = 0.0

    def choose(self, rows: Iterable[Candidate], best: Candidate, now: float) -> Candidate:
        """`best`, or instead of it a unit of its cell that had nothing for long and that can be afforded."""
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
        if chosen is best or regret_s > self.purse_s:
            return best
        self.purse_s -= max(regret_s, 0.0)
        return chosen
