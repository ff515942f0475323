"""The router: turns an ask into a lease, a place in the queue, or a refusal.

Synchronous and without I/O. Waiting asks are called back from `serve_waiting`, which the caller invokes when
room may have appeared (a lease closed, a unit came UP, a drain ended), and from `tick`. Rules:
1. An ask waits here and not at a unit: which unit is best is decided when there is room (late binding).
2. A new ask never overtakes asks that wait for the same units, except by the fair order.
3. No ask is refused that a unit with room could serve in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import cast

from cellgate.router.board import Board
from cellgate.router.candidates import Bounds, Candidates, find_candidates
from cellgate.router.cost import Cost, Expected
from cellgate.router.explore import SHARE, Explorer
from cellgate.router.nouns import Ask, Candidate, Policy, Refusal
from cellgate.router.queue import MOVED_S, PoolQueue, Queue, Ticket, TicketKind
from cellgate.router.sampling import LOOK_AT_ALL, Sampler
from cellgate.router.shares import Shares, Waiting
from cellgate.router.split_nouns import SplitPlan
from cellgate.router.unit_state import Lease

LOOKS = 16
"""The most waiting asks that are checked each time there may be room."""
_WAITS = (Refusal.UNSURE, Refusal.ON_HOLD, Refusal.FULL)
"""Refusals that may be over soon, without room on another unit."""
OnResult = Callable[[Lease | Refusal], None]


Best = tuple[Candidate, Candidates]
"""The unit that ranks first, and the candidates."""


class Router:
    """Picks units for asks by a policy and the state of the Board."""

    def __init__(self, board: Board, policy: Policy, rng: random.Random, queue: Queue) -> None:
        self.board = board
        self.policy = policy
        self._by_seconds = policy.by_seconds
        self.queue = queue
        self._bounds = Bounds(queue.rules.backlog_s, by_seconds=policy.by_seconds, by_cache=policy.by_cache)
        self._rng = rng
        self._sampler = Sampler(board, rng)
        self._explorer = Explorer(board)
        self._counted: dict[str, Shares] = {}

    def pick(
        self, ask: Ask, now: float, tried: Collection[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        """The best unit for `ask` that was not tried yet, or why there is none.

        `evicted` asks may go above max_in_flight by `evict_overcommit`; `retry` marks a lease that draws on
        the retry budget. FULL means that the ask may wait.
        """
        overcommit = self.board.rules.evict_overcommit if evicted else 0.0
        best = self._best(ask, now, tried, overcommit)
        if not isinstance(best, tuple):
            return best
        has_others = self.queue.size and not (tried or evicted or retry)
        if not best[0].has_room or (has_others and self.comes_after(ask)):
            lent = self._lend(ask, now, tried)
            if lent is None:
                return Refusal.FULL
            best = lent
        return self._open(best, ask, now, retry=retry)

    def wait(
        self,
        ask: Ask,
        now: float,
        tried: frozenset[str],
        on_result: OnResult,
        *,
        size: int = 0,
        moved: bool = False,
        retry: bool = False,
        must_wait: bool = False,
    ) -> Ticket | Lease | Refusal:
        """Queue an ask with a body of `size` bytes; `settle` is called once, later. Or why it may not wait.

        `moved`: it lost its unit, and is served before all others. A lease: it cannot be queued, and a unit
        has room; never with `must_wait`.
        """
        pool = self.board.pools.of(ask.model)
        if moved:
            ticket = Ticket(ask, pool, tried, now, now + MOVED_S, on_result, retry)
            return ticket if self.queue.add_moved(ticket) else Refusal.FULL
        expires_at = min(now + self.queue.rules.max_wait_s, ask.deadline_at)
        ticket = Ticket(ask, pool, tried, now, expires_at, on_result, retry)
        tokens_s = self._sure_tokens_s(pool)
        refusal = self.queue.add(ticket, now, tokens=self._uncached(ask), size=size, tokens_s=tokens_s)
        if refusal is None:
            return ticket
        best = refusal if must_wait else self._best(ask, now, tried)
        if isinstance(best, tuple) and best[0].has_room:
            return self._open(best, ask, now, retry=retry)
        return refusal

    def serve_waiting(self, now: float) -> None:
        """Serve waiting asks, in their order."""
        for ticket in self.queue.moved():
            if ticket not in self.queue:
                # Settling one may take out another.
                continue
            answer = self.pick(ticket.ask, now, ticket.tried, evicted=True, retry=ticket.retry)
            is_final = isinstance(answer, Lease) or answer is Refusal.UNKNOWN_MODEL
            if is_final or self._is_over(ticket, answer, now):
                self.queue.remove(ticket)
                ticket.on_result(answer)
        for pool, queue in self.queue.pools():
            self._serve_pool(pool, queue, now)

    def tick(self, now: float) -> None:
        """Refuse asks that have waited for too long, or that no unit can serve."""
        for pool, queue in self.queue.pools():
            for entry in queue.fair_queue.hopeless(now, self._sure_tokens_s(pool)):
                ticket = entry.item
                if ticket in self.queue:
                    self.queue.remove(ticket)
                    ticket.on_result(Refusal.ON_HOLD if self._is_held_up(ticket, now) else Refusal.LATE)
        self.serve_waiting(now)

    def drain_s(self, model: str | None = None) -> float:
        """The predicted time until all asks that wait for the units of a model are served; 0 when none
        wait.
        """
        pool = self.board.pools.of(model)
        fair = self.queue.pool(pool).fair_queue
        return fair.drain_s(self.board.tokens_s(pool)) if len(fair) else 0.0

    def _sure_tokens_s(self, pool: str) -> float:
        """The prefill rate of a pool for refusals; without measured rates, or usable units, nothing is
        refused.
        """
        return (self.board.tokens_s(pool) or inf) if self.board.is_sure_of(pool) else inf

    def comes_after(self, ask: Ask) -> bool:
        """Whether an ask waits for a unit that could serve `ask` as well."""
        pools = self.queue.pools() if ask.model is None else ()
        kinds = [kind for _, queue in pools for kind in queue.kinds]
        kinds += self.queue.pool(self.board.pools.of(ask.model)).kinds
        return any(self._overlaps(ask, kind) for kind in kinds)

    def _overlaps(self, ask: Ask, kind: TicketKind) -> bool:
        model, unit, tried = kind
        if unit is None and ask.unit is None and not tried and model == ask.model:
            return True
        other = Ask(model, unit=unit)
        return any(
            name not in tried and state.is_usable() and state.serves(ask) and state.serves(other)
            for name, state in self.board.units.items()
        )

    def _best(
        self, ask: Ask, now: float, tried: Collection[str], overcommit: float = 0.0, wait_s: float = 0.0
    ) -> Best | Refusal:
        board, bounds, chance, among = self.board, self._bounds, self._rng.random(), None
        if overcommit or wait_s:
            bounds = bounds._replace(overcommit=overcommit, wait_s=wait_s)
        if len(board.units) > LOOK_AT_ALL and self._by_seconds:
            among = self._sampler.of(ask, now)
        found = find_candidates(board, ask, now, tried, bounds, among, chance)
        best = self._first(ask, now, found, overcommit)
        if among is not None and (best is None or not best.has_room):
            # A sample does not contain all units: an ask must not wait or be refused because of that.
            found = find_candidates(board, ask, now, tried, bounds, None, chance)
            best = self._first(ask, now, found, overcommit)
        if best is not None:
            return best, found
        if found.rows:
            return Refusal.LATE
        is_unknown = ask.model is not None and self.board.knows_model(ask.model) is False
        return Refusal.UNKNOWN_MODEL if is_unknown and found.refusal is Refusal.NO_UNIT else found.refusal

    def _first(self, ask: Ask, now: float, found: Candidates, overcommit: float) -> Candidate | None:
        """The row that ranks first, of those that can be in time."""
        rows = found.rows
        if not rows:
            return None
        if not self._by_seconds or overcommit:
            rows = [row for row in rows if row.has_room] or rows
        elif self.board.has_far:
            rows = self._near(rows, ask, found.expected, now)
        ranked = self.policy.rank(ask, rows, self._rng)
        if ask.deadline_at < inf:
            return next((row for row in ranked if not self._is_late(row, ask, found.expected, now)), None)
        best, explorer = ranked[0], self._explorer
        explorer.purse_s += SHARE * best.cost_s
        return explorer.choose(rows, best, now) if now >= explorer.look_at and self._by_seconds else best

    def _near(self, rows: list[Candidate], ask: Ask, expected: Expected, now: float) -> list[Candidate]:
        """Those at the least distance, and farther ones where it would itself wait less, distance included.

        What others are spared is no reason to send it away.
        """
        states = self.board.units
        least_s = min(states[row.unit].far_s for row in rows)
        own_s = {}
        for row in rows:
            cost = self._cost(row, ask, expected, now)
            own_s[row] = row.cost_s - cost.beside_s - cost.line_s
        near_s = min(own_s[row] for row in rows if states[row.unit].far_s == least_s)
        return [row for row in rows if states[row.unit].far_s == least_s or own_s[row] < near_s]

    def _cost(self, row: Candidate, ask: Ask, expected: Expected, now: float) -> Cost:
        costs = self.board.units[row.unit].costs
        return Cost(*costs.quote(ask, row.held_blocks, expected, now).terms)

    def _is_late(self, row: Candidate, ask: Ask, expected: Expected, now: float) -> bool:
        """Whether a unit would answer too late, by its measured rates."""
        ttft_s = self._cost(row, ask, expected, now).ttft_s
        return self.board.units[row.unit].costs.is_too_slow(ask, ttft_s, now)

    def _open(self, best: Best, ask: Ask, now: float, *, retry: bool = False) -> Lease:
        row, (_, _, expected, shared, splits) = best
        unit, board = row.unit, self.board
        if len(board.units) > LOOK_AT_ALL:
            self._sampler.record(ask, unit)
        if shared is not None:
            shared.count += 1.0
        if splits and (split := splits.get(unit)) is not None:
            return self._open_split(unit, ask, now, split, expected, retry=retry)
        held = row.held_blocks if self._bounds.by_cache else None
        return board.open(unit, ask, now, retry, expected, held)

    def _open_split(
        self, unit: str, ask: Ask, now: float, split: SplitPlan, expected: Expected, *, retry: bool
    ) -> Lease:
        """A lease on a decoder whose prompt another unit is to compute: nothing of it is left to do here, and
        how long its first token takes says nothing about this unit's prefill.
        """
        lease = self.board.open(unit, ask, now, retry=retry, expected=expected, held=len(ask.blocks))
        costs = lease.unit_state.costs
        costs.expect_fetched(lease, now)
        lease.split = split._replace(may_wait=not lease.job.had_seat or costs.backlog.queued > 0)
        # What an engine says of its prefix cache does not count blocks that came from elsewhere.
        ttft_s = split.prefill_s + split.transfer_s
        lease.job = lease.job._replace(held_blocks=0, cached_tokens=0, ttft_s=ttft_s)
        self.board.pairs.link(split.prefiller, unit).use(now)
        return lease

    def _is_over(self, ticket: Ticket, why: Lease | Refusal, now: float) -> bool:
        """Whether one that lost its unit has waited long enough: as long as any other for units on hold."""
        more_s = max(0.0, self.queue.rules.max_wait_s - MOVED_S) if why is Refusal.ON_HOLD else 0.0
        return now >= ticket.expires_at + more_s

    def _is_held_up(self, ticket: Ticket, now: float) -> bool:
        """Whether it still waits only because all its units are on hold."""
        return self._best(ticket.ask, now, ticket.tried) is Refusal.ON_HOLD

    def _serve_pool(self, pool: str, queue: PoolQueue, now: float) -> None:
        blocked = _Blocked()
        if len(queue.payers) > 1:
            shares = self._shares(pool, now)
            blocked.barred, blocked.borrowers = shares.barred(queue.payers), shares.borrowers(queue.payers)
        tokens_s, ahead = self.board.tokens_s(pool), 0
        for _ in range(LOOKS):
            entry = queue.fair_queue.first(blocked)
            if entry is None and blocked.barred:
                # Nobody else finds room.
                blocked.barred = {}
                continue
            if entry is None:
                return
            ticket = entry.item
            best = self._best(ticket.ask, now, ticket.tried, wait_s=ahead / tokens_s if tokens_s else 0.0)
            if not isinstance(best, tuple) and best not in _WAITS:
                self.queue.remove(ticket)
                ticket.on_result(best)
            elif isinstance(best, tuple) and best[0].has_room:
                self.queue.take(ticket)
                ticket.on_result(self._open(best, ticket.ask, now, retry=ticket.retry))
            elif (lent := self._lend(ticket.ask, now, ticket.tried)) is not None:
                self.queue.take(ticket)
                ticket.on_result(self._open(lent, ticket.ask, now, retry=ticket.retry))
            else:
                # It waits for a unit that is better than those with room, or there is none.
                ahead += entry.tokens
                blocked.tickets.add(ticket)
                if not isinstance(best, tuple) or not self._has_room(ticket, now):
                    blocked.kinds.add(ticket.kind)
                    if blocked.kinds >= queue.kinds.keys() and not blocked.borrowers:
                        return

    def _shares(self, pool: str, now: float) -> Shares:
        """Who holds which part of a pool, not long ago."""
        found = self._counted.get(pool)
        if found is None or not found.is_fresh(now):
            states = (state for state in self.board if self.board.pools.of_unit(state.unit.name) == pool)
            found = self._counted[pool] = Shares.count(states, now)
        return found

    def _lend(self, ask: Ask, now: float, tried: Collection[str]) -> Best | None:
        """A place above the limit of a unit, for whoever has less than a share while another one hogs. None:
        there is none, or it was the engine that took no more.
        """
        pool = self.board.pools.of(ask.model)
        waiting = (ask.payer, ask.priority), self.queue.pool(pool).payers
        if not ask.payer or not self._shares(pool, now).may_borrow(*waiting):
            return None
        best = self._best(ask, now, tried, self.board.rules.evict_overcommit)
        if not isinstance(best, tuple) or not best[0].has_room:
            return None
        state = self.board.units[best[0].unit]
        return best if state.limit >= state.unit.max_in_flight else None

    def _has_room(self, ticket: Ticket, now: float) -> bool:
        bounds = Bounds(self.queue.rules.backlog_s)
        return any(
            row.has_room for row in find_candidates(self.board, ticket.ask, now, ticket.tried, bounds).rows
        )

    def _uncached(self, ask: Ask) -> int:
        """What would have to be computed of it where most of it is cached."""
        states = [state for state in self.board if state.is_usable() and state.serves(ask)]
        if not states:
            return ask.prompt_tokens
        held = max(self.board.held(state, ask.blocks) for state in states) if ask.blocks else 0
        return int(ask.prompt_tokens * (1.0 - held / len(ask.blocks))) if held else ask.prompt_tokens


class _Blocked:
    """Tickets for whom nothing was found; of some kinds, all but those of `borrowers`; and of payers that are
    `barred`, from a priority on.
    """

    __slots__ = ("barred", "borrowers", "kinds", "tickets")

    def __init__(self) -> None:
        self.barred: Mapping[str, int] = {}
        self.borrowers: Collection[Waiting] = ()
        self.tickets: set[Ticket] = set()
        self.kinds: set[TicketKind] = set()

    def __contains__(self, ticket: object) -> bool:
        if ticket in self.tickets:
            return True
        waiting = cast("Ticket", ticket)
        if self.barred and (barred_from := self.barred.get(waiting.ask.payer)) is not None:
            return waiting.ask.priority >= barred_from
        if not self.kinds or waiting.kind not in self.kinds:
            return False
        return not self.borrowers or (waiting.ask.payer, waiting.ask.priority) not in self.borrowers
