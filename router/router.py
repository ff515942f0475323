"""The router: turns an ask into a lease, a place in the queue, or a refusal.

Synchronous and without I/O. Who waits is called back from `serve_waiting`, which the caller invokes when room
may have appeared (a lease closed, a unit came UP, a drain ended), and from `tick`, as time passes. Rules:
1. An ask waits here and not at a unit: which unit is best is decided when there is room (late binding).
2. Nobody who comes overtakes those who wait, but by their turn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import inf
from operator import itemgetter
from typing import cast

from router.board import Board
from router.cost import Cost
from router.lease import Lease
from router.nouns import Ask, Candidate, Policy, Refusal
from router.offers import Bounds, offers
from router.shortlist import Shortlist
from router.waiting import MOVED_S, Kind, Ticket, Waiting

LOOKS = 16
"""So many of those who wait are looked at each time there may be room."""
CURIOUS_S = 2.0
"""A unit that has had nothing for so long gets an ask now and then even if another is better: one that was
slow once would else have nothing by which to tell how fast it is. One that is k times slower is asked every
CURIOUS_S * (k - 1) seconds.
"""
CURIOUS_PERIOD_S = 0.5
LOOK_S = 0.02
"""So often it is looked whether there is such a unit."""
CURIOUS_SHARE = 0.2
"""Not at the price of what is cached: so large a part of an ask at most may be."""

_first = itemgetter(0)

Settle = Callable[[Lease | Refusal], None]


class Router:
    """Picks units for asks by a policy over what the Board believes."""

    def __init__(self, board: Board, policy: Policy, rng: random.Random, waiting: Waiting) -> None:
        self.board = board
        self.policy = policy
        self._by_seconds = policy.by_seconds
        self.waiting = waiting
        self._rng = rng
        self._shortlist = Shortlist(board, rng)
        self._curious_at = 0.0

    def pick(
        self, ask: Ask, now: float, tried: Iterable[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        """The best unit for `ask` that was not tried yet, or why there is none.

        `evicted` asks may go above max_in_flight by `evict_overcommit`; `retry` marks a lease that draws on
        the retry budget. FULL means that the ask may wait.
        """
        overcommit = self.board.rules.evict_overcommit if evicted else 0.0
        best = self._best(ask, now, tried, overcommit=overcommit)
        if isinstance(best, Refusal):
            return best
        is_new = not (tried or evicted or retry)
        if not best.has_room or (is_new and len(self.waiting.fair)):
            return Refusal.FULL
        return self._open(best, ask, now, retry=retry)

    def wait(
        self,
        ask: Ask,
        now: float,
        tried: frozenset[str],
        settle: Settle,
        *,
        size: int = 0,
        moved: bool = False,
    ) -> Ticket | Refusal:
        """Queue an ask with a body of `size` bytes; `settle` is called once, later. Or why it may not wait.

        `moved`: it has lost its unit, and comes before all who have had none.
        """
        if moved:
            ticket = Ticket(ask, tried, now, now + MOVED_S, settle)
            return ticket if self.waiting.add_moved(ticket) else Refusal.FULL
        ticket = Ticket(ask, tried, now, min(now + self.waiting.rules.max_wait_s, ask.deadline_at), settle)
        refusal = self.waiting.add(
            ticket, now, tokens=self._uncached(ask), size=size, tokens_s=self.board.tokens_s()
        )
        return ticket if refusal is None else refusal

    def serve_waiting(self, now: float) -> None:
        """Give room to those who wait, in their order."""
        for ticket in self.waiting.moved():
            if ticket not in self.waiting:
                continue
            answer = self.pick(ticket.ask, now, ticket.tried, evicted=True)
            if isinstance(answer, Lease) or answer is Refusal.UNKNOWN_MODEL or now >= ticket.expires_at:
                self.waiting.remove(ticket)
                ticket.settle(answer)
        if len(self.waiting.fair):
            self._serve_fair(now)

    def tick(self, now: float) -> None:
        """Refuse those who have waited for too long, or for nothing."""
        if len(self.waiting.fair):
            for ticket in list(self.waiting.late(now, self.board.tokens_s())):
                # Whoever was told may have had others leave.
                if ticket in self.waiting:
                    self.waiting.remove(ticket)
                    ticket.settle(Refusal.LATE)
        self.serve_waiting(now)

    def drain_s(self) -> float:
        """How long until all who wait now have been served, as far as can be foreseen; 0 when nobody does."""
        return self.waiting.fair.drain_s(self.board.tokens_s()) if len(self.waiting.fair) else 0.0

    def _best(
        self, ask: Ask, now: float, tried: Iterable[str], *, overcommit: float = 0.0, wait_s: float = 0.0
    ) -> Candidate | Refusal:
        bounds = Bounds(self.waiting.rules.backlog_s, wait_s, overcommit, self._rng.random())
        among = self._shortlist.of(ask, now) if self._by_seconds else None
        rows, refusal = offers(self.board, ask, now, tried, bounds, among)
        if not rows and among is not None:
            rows, refusal = offers(self.board, ask, now, tried, bounds)
        if not rows:
            is_unknown = ask.model is not None and self.board.knows_model(ask.model) is False
            return Refusal.UNKNOWN_MODEL if is_unknown and refusal is Refusal.NO_UNIT else refusal
        if not self._by_seconds or overcommit:
            rows = [row for row in rows if row.has_room] or rows
        best = self.policy.rank(ask, rows, self._rng)[0]
        if self._by_seconds and now >= self._curious_at:
            best = self._curious(rows, best, now)
        return Refusal.LATE if ask.deadline_at < inf and self._is_hopeless(best, ask, now) else best

    def _curious(self, rows: list[Candidate], best: Candidate, now: float) -> Candidate:
        """Instead of `best` a unit that has had nothing for long, if there is one that is nearly as good."""
        if best.blind_s - best.cost_s > CURIOUS_SHARE * best.blind_s:
            return best
        self._curious_at = now + LOOK_S
        idle = [(now - self.board.desks[r.unit].asked_at, r) for r in rows if r.has_room and not r.in_flight]
        idle_s, row = max(idle, key=_first, default=(0.0, best))
        if idle_s > CURIOUS_S and row.blind_s <= best.blind_s * (1.0 + idle_s / CURIOUS_S):
            self._curious_at = now + CURIOUS_PERIOD_S
            return row
        return best

    def _is_hopeless(self, best: Candidate, ask: Ask, now: float) -> bool:
        """Whether even the best unit would answer too late, as far as it has shown how fast it is."""
        books = self.board.desks[best.unit].books
        return books.is_too_slow(ask, Cost(*books.quote(ask, now).terms).ttft_s, now)

    def _open(self, best: Candidate, ask: Ask, now: float, *, retry: bool = False) -> Lease:
        self._shortlist.note(ask, best.unit)
        return self.board.open(best.unit, ask, now, retry=retry)

    def _serve_fair(self, now: float) -> None:
        blocked = _Blocked()
        tokens_s, ahead = self.board.tokens_s(), 0
        for _ in range(LOOKS):
            place = self.waiting.fair.first(blocked)
            if place is None:
                return
            ticket = place.item
            best = self._best(ticket.ask, now, ticket.tried, wait_s=ahead / tokens_s if tokens_s else 0.0)
            if isinstance(best, Refusal) and best is not Refusal.UNSURE:
                self.waiting.remove(ticket)
                ticket.settle(best)
            elif isinstance(best, Candidate) and best.has_room:
                self.waiting.take(ticket)
                ticket.settle(self._open(best, ticket.ask, now))
            else:
                # It waits for a unit that is better than those with room, or there is none.
                ahead += place.tokens
                blocked.tickets.add(ticket)
                if isinstance(best, Refusal) or not self._has_room(ticket, now):
                    blocked.kinds.add(ticket.kind)
                    if blocked.kinds >= self.waiting.kinds.keys():
                        return

    def _has_room(self, ticket: Ticket, now: float) -> bool:
        rows, _ = offers(self.board, ticket.ask, now, ticket.tried, Bounds(self.waiting.rules.backlog_s))
        return any(row.has_room for row in rows)

    def _uncached(self, ask: Ask) -> int:
        """What would have to be computed of it where most of it is cached."""
        desks = [desk for desk in self.board if desk.is_usable() and desk.serves(ask)]
        if not desks:
            return ask.prompt_tokens
        held = max(desk.books.prefixes.match(ask.blocks) for desk in desks) if ask.blocks else 0
        return int(ask.prompt_tokens * (1.0 - held / len(ask.blocks))) if held else ask.prompt_tokens


class _Blocked:
    """Tickets for whom nothing was found; of some kinds, all."""

    __slots__ = ("kinds", "tickets")

    def __init__(self) -> None:
        self.tickets: set[Ticket] = set()
        self.kinds: set[Kind] = set()

    def __contains__(self, ticket: object) -> bool:
        return ticket in self.tickets or (bool(self.kinds) and cast("Ticket", ticket).kind in self.kinds)
