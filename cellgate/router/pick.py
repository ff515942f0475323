"""The router: turns an ask into a lease, a place in the queue, or a refusal.

Synchronous and without I/O. Waiting asks are called back from `serve_waiting`, which the caller invokes when
room may have appeared (a lease closed, a unit came UP, a drain ended), and from `tick`. Rules:
1. An ask waits here and not at a unit: which unit is best is decided when there is room (late binding).
2. A new ask never overtakes asks that wait for the same units, except by the fair order.
3. No ask is refused that a unit with room could serve in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from math import inf
from typing import NamedTuple, cast

from cellgate.router.board import Board
from cellgate.router.cost import Cost, Expected
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.departures import is_stalled
from cellgate.router.learning import MODELS_MAX
from cellgate.router.nouns import USABLE, Ask, Candidate, Policy, Refusal, SplitPlan, Verdict
from cellgate.router.prefix import Reuses
from cellgate.router.queue import MOVED_S, PoolQueue, Queue, Ticket, TicketKind
from cellgate.router.sampling import COMMON, LOOK_AT_ALL, SHARE, Explorer, Sampler
from cellgate.router.shares import Asking, Shares, Waiting, is_crowded, to_read
from cellgate.router.unit_state import Lease, UnitState, Usable

_NO_SPLITS: Mapping[str, SplitPlan] = {}


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
        self._asking = Asking()
        board.awaited = queue.awaited

    def pick(
        self, ask: Ask, now: float, tried: Collection[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        """The best unit for `ask` that was not tried yet, or why there is none.

        `evicted` asks may go above max_in_flight by `evict_overcommit`; `retry` marks a lease that draws on
        the retry budget. FULL means that the ask may wait.
        """
        overcommit = self.board.rules.evict_overcommit if evicted else 0.0
        beside_others = ask.payer != self._asking.only and self._notes(ask, now)
        best = self._best(ask, now, tried, overcommit)
        if not isinstance(best, tuple):
            return best
        if not best[0].has_room or (
            self.queue.size and not (tried or evicted or retry) and self.comes_after(ask)
        ):
            if (lent := self._lend(ask, now, tried)) is None:
                return Refusal.FULL
            best = lent
        if beside_others and not evicted:
            spared = self._spared(best, ask, now, tried)
            if spared is None:
                return Refusal.FULL
            best = spared
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
        loan: int = 0,
        waited_s: float = 0.0,
    ) -> Ticket | Lease | Refusal:
        """Queue an ask with a body of `size` bytes; `settle` is called once, later. Or why it may not wait.

        `moved`: it lost its unit, and is served before all others; `loan`: how far it may go above the
        limits of units; `waited_s`: so long it has waited before. A lease: it cannot be queued, and a unit
        has room; never with `must_wait`.
        """
        pool = self.board.pools.of(ask.model)
        if moved:
            ticket = Ticket(ask, pool, tried, now, now + MOVED_S, on_result, retry)
            return ticket if self.queue.add_moved(ticket) else Refusal.FULL
        expires_at = min(now + self.queue.rules.max_wait_s - waited_s, ask.deadline_at)
        ticket = Ticket(ask, pool, tried, now, expires_at, on_result, retry, loan)
        tokens_s = self._sure_tokens_s(pool)
        refusal = self.queue.add(ticket, now, tokens=self._uncached(ask), size=size, tokens_s=tokens_s)
        if refusal is None:
            return ticket
        best = refusal if must_wait else self._best(ask, now, tried)
        if isinstance(best, tuple) and best[0].has_room:
            spared = self._spared(best, ask, now, tried)
            return refusal if spared is None else self._open(spared, ask, now, retry=retry)
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
                    ticket.on_result(self._why_held_up(ticket, now) or Refusal.LATE)
        self.serve_waiting(now)

    def drain_s(self, model: str | None = None) -> float:
        """The predicted time until all asks that wait for a model's units are served; 0: none wait."""
        pool = self.board.pools.of(model)
        fair = self.queue.pool(pool).fair_queue
        return fair.drain_s(self.board.tokens_s(pool)) if len(fair) else 0.0

    def _sure_tokens_s(self, pool: str) -> float:
        """The prefill rate of a pool for refusals; nothing is refused unmeasured, or without usable units."""
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
        return any(state.serves(other) for state in self.board.able(ask, tried))

    def _best(
        self,
        ask: Ask,
        now: float,
        tried: Collection[str],
        overcommit: float = 0.0,
        wait_s: float = 0.0,
        backlog_s: float | None = None,
    ) -> Best | Refusal:
        board, bounds, chance, among = self.board, self._bounds, self._rng.random(), None
        if overcommit or wait_s:
            bounds = bounds._replace(overcommit=overcommit, wait_s=wait_s)
        if backlog_s is not None:
            bounds = bounds._replace(backlog_s=backlog_s)
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
        explorer.budget_s += SHARE * best.cost_s
        is_due = now >= explorer.look_at or not best.has_room
        if not is_due and explorer.is_any_cold:
            is_due = found.expected.charged <= COMMON
        if is_due and self._by_seconds:
            return explorer.choose(found.rows, best, ask, found.expected, now)
        return best

    def _near(self, rows: list[Candidate], ask: Ask, expected: Expected, now: float) -> list[Candidate]:
        """Those at the least distance, and farther ones where it would itself wait less, distance included.

        What others are spared is no reason to send it away.
        """
        states = self.board.units
        least_s = min(states[row.unit].far_s for row in rows)
        own_s = {}
        for row in rows:
            cost = self._cost(row, ask, expected, now)
            own_s[row] = row.cost_s - cost.slowdown_of_others_s - cost.queue_penalty_s
        near_s = min(own_s[row] for row in rows if states[row.unit].far_s == least_s)
        return [row for row in rows if states[row.unit].far_s == least_s or own_s[row] < near_s]

    def _cost(self, row: Candidate, ask: Ask, expected: Expected, now: float) -> Cost:
        costs = self.board.units[row.unit].costs
        return Cost(*costs.estimate(ask, row.cached_blocks, expected, now).terms)

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
        held = row.cached_blocks if self._bounds.by_cache else None
        return board.open(unit, ask, now, retry, expected, held)

    def _open_split(
        self, unit: str, ask: Ask, now: float, split: SplitPlan, expected: Expected, *, retry: bool
    ) -> Lease:
        """A lease on a decoder whose prompt another unit is to compute: nothing of it is left to do here, and
        how long its first token takes says nothing about this unit's prefill.
        """
        lease = self.board.open(unit, ask, now, retry=retry, expected=expected, held=len(ask.blocks))
        costs = lease.unit_state.costs
        costs.backlog.take_as_computed(lease, now)
        lease.split = split._replace(may_wait=not lease.job.had_slot or costs.backlog.queued > 0)
        # What an engine says of its prefix cache does not count blocks that came from elsewhere.
        ttft_s = split.prefill_s + split.transfer_s
        lease.job = lease.job._replace(cached_blocks=0, cached_tokens=0, ttft_s=ttft_s)
        self.board.pairs.link(split.prefiller, unit).use(now)
        return lease

    def _is_over(self, ticket: Ticket, why: Lease | Refusal, now: float) -> bool:
        """Whether one that lost its unit has waited long enough: as long as any other for units on hold."""
        more_s = max(0.0, self.queue.rules.max_wait_s - MOVED_S) if why in _NOBODY_MOVES else 0.0
        return now >= ticket.expires_at + more_s

    def _why_held_up(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why it still waits, if that is only because all its units stand still."""
        found = self._best(ticket.ask, now, ticket.tried)
        return found if isinstance(found, Refusal) and found in _NOBODY_MOVES else None

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
                continue
            has_room = isinstance(best, tuple) and best[0].has_room
            found = best if has_room else self._lend(ticket.ask, now, ticket.tried)
            if found is None and ticket.loan > blocked.loan:
                found = self._lend_briefly(ticket, now)
                if found is None:
                    blocked.loan = ticket.loan
            if isinstance(found, tuple):
                waited_s = now - ticket.entered_at
                spared = self._spared(found, ticket.ask, now, ticket.tried, waited_s)
                if spared is None:
                    blocked.payers.add(ticket.ask.payer)
                    continue
                self.queue.take(ticket)
                ticket.on_result(self._open(spared, ticket.ask, now, retry=ticket.retry))
            else:
                # It waits for a unit that is better than those with room, or there is none.
                ahead += entry.tokens
                blocked.tickets.add(ticket)
                if not isinstance(best, tuple) or not self._has_room(ticket, now):
                    blocked.kinds.add(ticket.kind)
                    if blocked.kinds >= queue.kinds.keys() and not (
                        blocked.borrowers or any(queue.loans[blocked.loan + 1 :])
                    ):
                        return

    def _shares(self, pool: str, now: float) -> Shares:
        """Who holds which part of a pool, not long ago."""
        found = self._counted.get(pool)
        if found is None or not found.is_fresh(now):
            states = (state for state in self.board if self.board.pools.of_unit(state.unit.name) == pool)
            found = self._counted[pool] = Shares.count(states, now)
        return found

    def _lend(self, ask: Ask, now: float, tried: Collection[str]) -> Best | None:
        """A place above the limit of a unit, or behind more prompts than it is to have, for whoever has less
        than a share while another one hogs. None: there is none, or it was the engine that took no more.
        """
        if not ask.payer:
            return None
        pool = self.board.pools.of(ask.model)
        who, waiting = (ask.payer, ask.priority), self.queue.pool(pool).payers
        shares = self._shares(pool, now)
        if shares.may_overtake(who, waiting, self._uncached(ask)):
            best = self._best(ask, now, tried, backlog_s=inf)
            if isinstance(best, tuple) and best[0].has_room:
                return best
        if not shares.may_borrow(who, waiting):
            return None
        best = self._best(ask, now, tried, self.board.rules.evict_overcommit)
        if not isinstance(best, tuple) or not best[0].has_room:
            return None
        state = self.board.units[best[0].unit]
        return best if state.learnt_limit >= state.unit.max_in_flight else None

    def _lend_briefly(self, ticket: Ticket, now: float) -> Best | None:
        """A place above the limit of a unit for a client that has not held one for long: those that hold all
        of them may be of its own address, so that no share tells it from them.
        """
        part = self.board.rules.evict_overcommit * LOAN_PART * ticket.loan
        best = self._best(ticket.ask, now, ticket.tried, part)
        if not isinstance(best, tuple) or not best[0].has_room:
            return None
        state = self.board.units[best[0].unit]
        most, tokens_s = state.unit.max_in_flight * (1.0 + part), state.costs.rates.prefill_tokens_s.value
        if (
            state.has_room(now, 0.0)
            or state.in_flight + 1 > most
            or state.learnt_limit < state.unit.max_in_flight
        ):
            return None
        # Where prompts wait to be computed, a slot is of no use.
        backlog_tokens = state.costs.backlog.backlog_tokens(now, tokens_s)
        return best if backlog_tokens <= self._bounds.backlog_s * tokens_s else None

    def _notes(self, ask: Ask, now: float) -> bool:
        """Whether others ask for the units of an ask as well."""
        return self._asking.note(ask.payer, self.board.pools.of(ask.model), now)

    def _spared(
        self, best: Best, ask: Ask, now: float, tried: Collection[str], waited_s: float = 0.0
    ) -> Best | None:
        """The best unit with room that has not too much to read of whoever pays for the ask; None: there is
        none, while others ask for these units as well.
        """
        crowded = [*tried]
        if not self._asking.has_several(self.board.pools.of(ask.model), now):
            return best
        while True:
            row = best[0]
            state = self.board.units[row.unit]
            if not is_crowded(state, ask, to_read(state, ask, row.cached_blocks), now, waited_s):
                return best
            crowded.append(row.unit)
            found = self._best(ask, now, crowded)
            if not isinstance(found, tuple) or not found[0].has_room:
                return None
            if len(crowded) > len(tried) + SPARED_UNITS:
                return None
            best = found

    def _has_room(self, ticket: Ticket, now: float) -> bool:
        bounds = Bounds(self.queue.rules.backlog_s)
        return any(
            row.has_room for row in find_candidates(self.board, ticket.ask, now, ticket.tried, bounds).rows
        )

    def _uncached(self, ask: Ask) -> int:
        """What would have to be computed of it where most of it is cached."""
        states = list(self.board.able(ask))
        if not states:
            return ask.prompt_tokens
        held = max(self.board.held(state, ask.blocks) for state in states) if ask.blocks else 0
        return int(ask.prompt_tokens * (1.0 - held / len(ask.blocks))) if held else ask.prompt_tokens


class Candidates(NamedTuple):
    """`rows` are those of the first kind of units of which one has room; `refusal` is what to say when
    there is none.

    `expected` is what was expected of the ask wherever it goes; `shared` is how often that part of its
    prompt came recently which some unit holds (None: none does). `splits` are the units for which another one
    is to compute the prompt.
    """

    rows: list[Candidate]
    refusal: Refusal
    expected: Expected
    shared: Reuses | None
    splits: Mapping[str, SplitPlan] = _NO_SPLITS


LOOKS = 16
"""The most waiting asks that are checked each time there may be room."""
LOAN_PART = 0.25
"""So much of `evict_overcommit` is lent to clients that come first on their connection, and twice as much to
those whose last answer was short."""
SPARED_UNITS = 3
"""So many units that have enough to read of somebody are passed over for the next one."""
_WAITS = (Refusal.UNSURE, Refusal.ON_HOLD, Refusal.STALLED, Refusal.FULL)
"""Refusals that may be over soon, without room on another unit."""
_NOBODY_MOVES = (Refusal.ON_HOLD, Refusal.STALLED)
OnResult = Callable[[Lease | Refusal], None]
Best = tuple[Candidate, Candidates]
"""The unit that ranks first, and the candidates."""


class _Blocked:
    """Tickets for whom nothing was found; of some kinds, all but those of `borrowers`; of payers that are
    `barred`, from a priority on; and of those of which all units have enough to read. Those of no greater
    `loan` find no room above the limits either.
    """

    __slots__ = ("barred", "borrowers", "kinds", "loan", "payers", "tickets")

    def __init__(self) -> None:
        self.loan = 0
        self.barred: Mapping[str, int] = {}
        self.borrowers: Collection[Waiting] = ()
        self.payers: set[str] = set()
        self.tickets: set[Ticket] = set()
        self.kinds: set[TicketKind] = set()

    def __contains__(self, ticket: object) -> bool:
        if ticket in self.tickets:
            return True
        waiting = cast("Ticket", ticket)
        if waiting.ask.payer in self.payers:
            return True
        if self.barred and (barred_from := self.barred.get(waiting.ask.payer)) is not None:
            return waiting.ask.priority >= barred_from
        if not self.kinds or waiting.kind not in self.kinds:
            return False
        if waiting.loan > self.loan:
            return False
        return not self.borrowers or (waiting.ask.payer, waiting.ask.priority) not in self.borrowers


# The candidates for an ask: one row for each unit, in predicted seconds, for a policy to rank. Pure.
#
# Units in cooling or slow start are candidates only when no other has room, SUSPECT ones only when no other
# has a free slot. An ask may wait for a unit with many prompts to compute: that time can be predicted.
# It does not wait for one without a free slot while others have one: the length of answers is unknown.


_NO_UNIT = Refusal.NO_UNIT
Known = tuple[str, UnitState, int]
"""A unit that may get the ask, and how many blocks of its prompt it is believed to hold."""
_NONE_HELD = repeat(0)
_new = tuple.__new__
"""What a named tuple's own constructor calls: half as long for a row."""


class Bounds(NamedTuple):
    """What counts as room. A unit with more than `backlog_s` seconds of this gate's prompts to compute has
    none.

    `wait_s` is added to the cost of units without room: so long others come before the ask here. With
    `overcommit` (a share of max_in_flight) only places count, for work that is lost otherwise.
    """

    backlog_s: float
    wait_s: float = 0.0
    overcommit: float = 0.0
    by_seconds: bool = True
    by_cache: bool = True
    """As Policy has them."""


def find_candidates(
    board: Board,
    ask: Ask,
    now: float,
    tried: Collection[str],
    bounds: Bounds,
    among: Iterable[str] | None = None,
    chance: float = 0.0,
) -> Candidates:
    """The candidates for an ask. `among`: only these units are looked at. `chance` is 0 to 1, random for each
    ask: a unit in slow start is a candidate for only a share of asks.
    """
    model, pairs = ask.model, board.pairs
    usable = board.usable.get(model) or _prepared(board, model)
    states, is_sure, steady_at = usable
    if tried or among is not None or not is_sure or ask.unit is not None or ask.build is not None:
        states, _, steady_at = _narrowed(board, usable, ask, tried, among)
    known: Iterable[Known]
    most, shared, charged = 0, None, 1.0
    blocks = ask.blocks if states and bounds.by_cache else ()
    if not blocks:
        known = zip(states, states.values(), _NONE_HELD)  # noqa: B905
    else:
        held = [state.costs.cache.match(blocks) for state in states.values()]
        most = max(held)
        known = zip(states, states.values(), held)  # noqa: B905
        if board.remote:
            known, most = _with_remote(board.remote.match(blocks), blocks, list(known), most)
        if most:
            shared = board.shared.of(blocks[most - 1], now)
            # As many will share that beginning again: to compute it on one more unit is charged to them all.
            charged = 1.0 / (1.0 + shared.count / len(pairs.decoders if ask.unit is None else board.units))
    why_none = _NO_UNIT if states and not pairs.has_needy else _why_none(board, ask, tried, among)
    if pairs.has_needy:
        known, why_none = pairs.served(ask, list(known), why_none, now)
    expected = _new(Expected, (board.answer_lengths.expected(model, ask.max_tokens), most, charged))
    rows, is_any_full = rows_of(known, ask, expected, bounds, now)
    if bounds.wait_s or not bounds.by_seconds:
        rows = [_bounded(board, row, bounds) for row in rows]
    if is_any_full or now < steady_at or now < board.cool_until:
        rows = _first_kind(board, rows, bounds.overcommit, now, chance)
    if model in board.adapters:
        rows = [
            row._replace(cost_s=row.cost_s + adapter_s(board.units[row.unit], ask, expected)) for row in rows
        ]
    splits = _NO_SPLITS
    if pairs.prefillers and ask.splits:
        rows, splits = pairs.splits(ask, rows, board.units, expected, now)
    return _new(Candidates, (rows, why_none, expected, shared, splits))


def usable_of(board: Board, states: Mapping[str, UnitState], model: str | None) -> Usable:
    """Those of the units that are in rotation and serve a model."""
    found = {n: state for n, state in states.items() if state.is_usable() and state.serves_model(model)}
    if any(state.kept is None and not state.needs_prefiller for state in found.values()):
        # What is kept until another unit serves the model gets no more of its requests.
        found = {name: state for name, state in found.items() if state.kept is None}
    is_sure = all(state.restart_suspected_at < 0.0 for state in found.values())
    slow_start_s = board.rules.slow_start_s
    steady_at = max((state.steady_at(slow_start_s) for state in found.values()), default=0.0)
    return Usable(found, is_sure, steady_at)


def _prepared(board: Board, model: str | None) -> Usable:
    """The units for requests of a model, kept until something about that changes."""
    if len(board.usable) >= MODELS_MAX:
        # Whoever asks may name any model.
        board.usable.clear()
    found = board.usable[model] = usable_of(board, board.pairs.decoders, model)
    return found


def _narrowed(
    board: Board, usable: Usable, ask: Ask, tried: Collection[str], among: Iterable[str] | None
) -> Usable:
    """Those that an ask may go to that was tried elsewhere, is bound, or shall be looked for in a sample."""
    if (only := ask.unit) is not None:
        # One that only computes prompts must be named.
        named = {only: board.units[only]} if only in board.units else {}
        usable = usable_of(board, named, ask.model)
    states = usable.states
    if among is not None:
        states = {name: states[name] for name in among if name in states}
    if tried:
        states = {name: state for name, state in states.items() if name not in tried}
    if ask.build is not None:
        states = {name: state for name, state in states.items() if state.build.key == ask.build}
    if not usable.is_sure:
        states = {name: state for name, state in states.items() if not state.is_restart_suspected()}
    return usable._replace(states=states)


def _why_none(board: Board, ask: Ask, tried: Collection[str], among: Iterable[str] | None) -> Refusal:
    """What to say when no unit is there for an ask."""
    states = board.pairs.decoders if ask.unit is None else board.units
    found = _NO_UNIT
    for name in states if among is None else among:
        state = states.get(name)
        if state is None or state.drained or name in tried:
            continue
        if state.case.verdict not in USABLE:
            if found is _NO_UNIT and is_stalled(state) and state.serves(ask):
                found = Refusal.STALLED
        elif state.serves(ask):
            if state.is_restart_suspected():
                return Refusal.UNSURE
            if state.hold is not None:
                found = Refusal.ON_HOLD
    return found


def _with_remote(
    remote: Mapping[str, int], blocks: Sequence[int], known: list[Known], most: int
) -> tuple[list[Known], int]:
    """With the blocks that other gates have proven at units, and the most that one of them holds."""
    for number, (name, state, held) in enumerate(known) if remote else ():
        if (reported := remote.get(name, 0)) > held and not state.costs.cache.lacks(blocks[held]):
            known[number] = name, state, reported
            most = max(most, reported)
    return known, most


def adapter_s(state: UnitState, ask: Ask, expected: Expected) -> float:
    """What the LoRA adapter of an ask costs on a unit, in seconds; 0 for an ask without one."""
    answer_s = expected.answer_tokens * state.costs.cost_terms.step_s
    return state.adapters.cost_s(ask.model, answer_s) if ask.model is not None else 0.0


def foreign_at(board: Board, state: UnitState) -> int:
    """Requests of others at a unit. The engine's report includes those of other gates, but is older."""
    remote_load = board.remote_load.get(state.unit.name)
    return state.foreign if remote_load is None else max(state.foreign, remote_load.in_flight)


def rows_of(
    known: Iterable[Known], ask: Ask, expected: Expected, bounds: Bounds, now: float
) -> tuple[list[Candidate], bool]:
    """A row for each unit; and whether one of them takes no more requests.

    This is made for each unit and ask. So costs are the totals of CostModel.quote without the terms, and from
    a price a tick old.
    """
    prompt_bytes, (answer_tokens, shared, charged) = ask.prompt_bytes, expected
    backlog_s, _, overcommit, _, _ = bounds
    spread, is_any_full = 1.0 + overcommit, False
    rows: list[Candidate] = []
    add = rows.append
    for name, state, held in known:
        costs = state.costs
        room, fixed_s, step_s, token_s, byte_tokens, front = costs.backlog.cost_inputs or costs.cost_inputs()
        tokens, in_flight = prompt_bytes * byte_tokens, len(state.leases)
        cost_s = fixed_s + answer_tokens * step_s
        has_room = in_flight < state.limit * spread and now >= state.full_until
        if not has_room:
            is_any_full = True
        if front is not None:
            # As Backlog.backlog_tokens, without the call.
            behind, front_tokens, since, tokens_s, queued_s, sure_tokens_s = front
            queued = behind + (abs(front_tokens - (now - since) * tokens_s) if now > since else front_tokens)
            if queued > 0.0:
                cost_s += queued * queued_s
                # Prompts for others queue at their prefiller: to wait there was part of the price.
                if queued > backlog_s * sure_tokens_s and not overcommit and state.unit.role != "prefill":
                    has_room = False
        if tokens + answer_tokens > room:
            cost_s = costs.estimate(ask, held, expected, now).terms[0]
        else:
            if held:
                tokens -= held * BLOCK_BYTES * byte_tokens * costs.prefixes.trust
            if tokens < 1.0:
                tokens = 1.0
            if shared > held:
                tokens -= (shared - held) * BLOCK_BYTES * byte_tokens * (1.0 - charged)
                if tokens < 0.0:
                    tokens = 0.0
            cost_s += tokens * token_s
        add(_new(Candidate, (name, in_flight, 0.0, 1.0, cost_s, has_room, held)))
    return rows, is_any_full


def _bounded(board: Board, row: Candidate, bounds: Bounds) -> Candidate:
    """A row with the wait for room, or for a policy that does not rank by seconds."""
    if bounds.wait_s and not row.has_room:
        row = row._replace(cost_s=row.cost_s + bounds.wait_s)
    if bounds.by_seconds:
        return row
    state = board.units[row.unit]
    return row._replace(load=float(row.in_flight + foreign_at(board, state)), weight=state.steady_weight)


def _first_kind(
    board: Board, rows: list[Candidate], overcommit: float, now: float, chance: float
) -> list[Candidate]:
    """The rows of the first kind of units of which one has room."""
    up: list[Candidate] = []
    cooling: list[Candidate] = []
    suspect: list[Candidate] = []
    full: list[Candidate] = []
    for row in rows:
        state = board.units[row.unit]
        if not (row.has_room or state.has_room(now, overcommit)):
            full.append(row)
        elif state.case.verdict is not Verdict.UP:
            suspect.append(row)
        elif state.cool_until > now or state.ramp(now, board.rules) < chance:
            cooling.append(row)
        else:
            up.append(row)
    if cooling and up:
        # One at a time is no burden for a unit in slow start, and spares the others.
        units = board.units
        up += [row for row in cooling if not row.in_flight and units[row.unit].cool_until <= now]
    for kind in (up, cooling):
        if any(row.has_room for row in kind):
            return kind
    return up or cooling or suspect or full
