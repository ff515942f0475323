"""The router: turns an ask into a lease, a place in the queue, or a refusal.

Synchronous and without I/O. Who waits is called back from `serve_waiting`, which the caller invokes
whenever room may have appeared: a lease closed, a unit came UP, a drain ended, time passed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from router.board import Board
from router.lease import Lease
from router.nouns import Ask, Policy, Refusal
from router.waiting import Ticket, Waiting


class Router:
    """Picks units for asks by a policy over what the Board believes."""

    def __init__(self, board: Board, policy: Policy, rng: random.Random, waiting: Waiting) -> None:
        self.board = board
        self.policy = policy
        self.waiting = waiting
        self._rng = rng

    def pick(
        self, ask: Ask, now: float, tried: Iterable[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        """The best unit for `ask` that was not tried yet, or why there is none.

        `evicted` asks may go above max_in_flight by `evict_overcommit`; `retry` marks a lease that draws on
        the retry budget.
        """
        overcommit = self.board.rules.evict_overcommit if evicted else 0.0
        rows, refusal = self.board.candidates(ask, now, tried, overcommit)
        if rows:
            best = self.policy.rank(ask, rows, self._rng)[0]
            return self.board.open(best.unit, ask, now, retry=retry)
        if refusal is not Refusal.NO_UNIT:
            return refusal
        if ask.model is not None and self.board.knows_model(ask.model) is False:
            return Refusal.UNKNOWN_MODEL
        return Refusal.NO_UNIT

    def wait(
        self, ask: Ask, now: float, tried: frozenset[str], settle: Callable[[Lease | Refusal], None]
    ) -> Ticket | None:
        """Queue an ask that lost its unit; `settle` is called once, later. None when the queue is full."""
        return self.waiting.add(ask, now, tried, settle)

    def serve_waiting(self, now: float) -> None:
        """Give room to those who wait, oldest first, and refuse those who have waited long enough."""
        for ticket in self.waiting.in_order():
            answer = self.pick(ticket.ask, now, ticket.tried, evicted=True)
            if (
                isinstance(answer, Refusal)
                and now < ticket.expires_at
                and answer is not Refusal.UNKNOWN_MODEL
            ):
                continue
            self.waiting.remove(ticket)
            ticket.settle(answer)
