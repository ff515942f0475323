"""The queue: first requests that lost their unit, in their order, then all others in fair order.

Limited in number, bytes and time, for each pool of units by itself.

In this order: `Queue`, `Ring`, `FairQueue`, `Pools`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import ceil, inf
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from cellgate.router.nouns import FIXED, Ask, Refusal
from cellgate.router.shares import ADDRESS, Waiting
from cellgate.router.unit_state import Lease


class Queue:
    """All who wait: those who lost their unit, and the others by pool. The rules hold for each pool alone."""

    def __init__(self, rules: FairRules) -> None:
        self.rules = rules
        self.retries = 0
        """How many of them draw on the retry budget."""
        self.size = 0
        """How many wait."""
        self._moved: dict[Ticket, None] = {}
        self._pools: dict[str, PoolQueue] = {}
        self.awaited: Container[str] = self._pools.keys()
        """The pools for which somebody waits, at any time."""

    def __len__(self) -> int:
        return self.size

    @property
    def moved_count(self) -> int:
        """How many have lost their unit."""
        return len(self._moved)

    @property
    def tokens(self) -> int:
        """Uncached work of all who have not lost a unit."""
        return sum(queue.fair_queue.tokens for queue in self._pools.values())

    def entries(self) -> Iterator[Entry[Ticket]]:
        """The places of all who have not lost a unit."""
        return (entry for queue in self._pools.values() for entry in queue.fair_queue)

    def pools(self) -> list[tuple[str, PoolQueue]]:
        """The pools for which somebody waits; a copy, because serving one may end its queue."""
        return list(self._pools.items()) if self._pools else []

    def pool(self, name: str) -> PoolQueue:
        """The queue of a pool; an empty one, if nobody waits for it."""
        return self._pools.get(name) or PoolQueue(self.rules)

    def moved(self) -> list[Ticket]:
        """Those who lost their unit, oldest first; a copy, because serving one removes it."""
        return list(self._moved) if self._moved else []

    def add_moved(self, ticket: Ticket) -> bool:
        """Queue one that lost its unit; False when too many wait already."""
        if len(self._moved) >= max(self.rules.limit, 1):
            return False
        self._moved[ticket] = None
        self._count(ticket, 1)
        return True

    def add(self, ticket: Ticket, now: float, *, tokens: int, size: int, tokens_s: float) -> Refusal | None:
        """Queue one with `tokens` of uncached work and a body of `size` bytes, where `tokens_s` are computed
        (infinite while that is a guess).

        Returns why it may not wait. A request displaced by it is refused at once.
        """
        queue = self.pool(ticket.pool)
        entered = queue.fair_queue.add(
            ticket,
            now,
            tokens_s=tokens_s,
            tenant=ticket.ask.tenant,
            session=ticket.ask.session,
            payer=ticket.ask.payer,
            priority=ticket.ask.priority,
            tokens=tokens,
            size=size,
            deadline_at=ticket.expires_at,
            group=ticket,
        )
        if isinstance(entered, NoEntry):
            return _REFUSALS[entered]
        self._pools[ticket.pool] = queue
        queue.entries[ticket] = entered.entry
        queue.kinds[ticket.kind] += 1
        queue.payers[ticket.ask.payer, ticket.ask.priority] += 1
        queue.loans[ticket.loan] += 1
        self._count(ticket, 1)
        if entered.displaced is not None:
            displaced = entered.displaced.item
            queue.leave(displaced)
            self._count(displaced, -1)
            displaced.on_result(Refusal.FULL)
        return None

    def take(self, ticket: Ticket) -> None:
        """One of the others is served: its tenant pays for it."""
        self._leave(ticket, served=True)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out unserved: its client left, or its time is up. Once it is out, nothing happens."""
        if ticket in self._moved:
            del self._moved[ticket]
            self._count(ticket, -1)
        elif ticket in self.pool(ticket.pool).entries:
            self._leave(ticket, served=False)

    def _leave(self, ticket: Ticket, *, served: bool) -> None:
        queue = self._pools[ticket.pool]
        entry = queue.leave(ticket)
        if served:
            queue.fair_queue.take(entry)
        else:
            queue.fair_queue.remove(entry)
        self._count(ticket, -1)
        if not queue.entries:
            del self._pools[ticket.pool]

    def _count(self, ticket: Ticket, by: int) -> None:
        self.size += by
        self.retries += by * ticket.retry

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._moved or ticket in self.pool(ticket.pool).entries


class NoEntry(Enum):
    """Why an ask may not wait."""

    FULL = "full"
    HOPELESS = "hopeless"
    """It would be served after its deadline."""


MOVED_S = 30.0
"""How long a request that lost its unit may wait; it has waited for its answer once already."""

TicketKind = tuple[str | None, str | None, frozenset[str]]

_REFUSALS = {NoEntry.FULL: Refusal.FULL, NoEntry.HOPELESS: Refusal.LATE}


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A place in the queue of `pool`. `settle` is called exactly once, unless the ticket is removed before.

    `retry`: the attempt draws on the retry budget; `loan`: how far above the
    limits of units it may go (see pick.py).
    """

    ask: Ask
    pool: str
    tried: frozenset[str]
    entered_at: float
    expires_at: float
    on_result: Callable[[Lease | Refusal], None]
    retry: bool = False
    loan: int = 0

    @property
    def kind(self) -> TicketKind:
        """Asks of a kind may go to the same units."""
        return self.ask.model, self.ask.unit, self.tried


class PoolQueue:
    """Those who wait for one pool of units."""

    def __init__(self, rules: FairRules) -> None:
        self.fair_queue: FairQueue[Ticket] = FairQueue(rules)
        self.entries: dict[Ticket, Entry[Ticket]] = {}
        self.kinds: Counter[TicketKind] = Counter()
        """How many of each kind wait."""
        self.payers: Counter[Waiting] = Counter()
        """How many of each payer and priority."""
        self.loans = [0, 0, 0]
        """How many of each loan."""

    def leave(self, ticket: Ticket) -> Entry[Ticket]:
        """Forget where a ticket stands."""
        self.kinds[ticket.kind] -= 1
        if not self.kinds[ticket.kind]:
            del self.kinds[ticket.kind]
        self.loans[ticket.loan] -= 1
        waiting = ticket.ask.payer, ticket.ask.priority
        self.payers[waiting] -= 1
        if not self.payers[waiting]:
            del self.payers[waiting]
        return self.entries.pop(ticket)


# Deficit round robin among tenants, in tokens (Shreedhar and Varghese, 1995). Pure.
#
# Each visit of the round adds a quantum to the deficit of a tenant; one with enough for its first ask is
# served. While two tenants wait, they get the same service except for a quantum and the largest ask of each.
# A tenant without waiting asks keeps no deficit. Names of tenants may be anybody's word, so the tenants of
# one payer share a quantum. Sessions are words of a tenant's clients, and count nowhere but among its own.


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """A place in the queue, for `item`. `tokens` is its uncached work (at least 1), `size` its bytes.

    `group` says which units could serve it: where one of a group finds no room, no other of it does.
    `priority` counts among all; `due`, which begins with what its client says of that, among those of its
    payer. `session` is what it belongs to among those of its tenant; empty: to nothing.
    """

    item: T
    tenant: str
    priority: int
    tokens: int
    size: int
    entered_at: float
    deadline_at: float
    group: Hashable
    due: tuple[int, float, int]
    payer: str = ""
    session: str = ""

    @property
    def of(self) -> tuple[str, str]:
        """Whose it is: a tenant of a payer."""
        return self.payer, self.tenant


def priorities(payer: str, priority: int) -> tuple[int, int]:
    """What a priority counts as among the asks of a payer, and among all."""
    return (priority, 0) if payer.startswith(ADDRESS) else (0, priority)


class SessionQueue(Generic[T]):
    """What waits of one session of a tenant, and when its next is due: as if it had come when the one before
    it was due. So an agent with many sub-agents takes the turns of one. An ask without a session is one.
    """

    __slots__ = ("_rules", "_served", "due", "entries")

    def __init__(self, rules: FairRules, entry: Entry[T]) -> None:
        self._rules = rules
        self._served = -inf
        self.entries = [entry]
        self.due = entry.due

    def add(self, entry: Entry[T]) -> None:
        insort(self.entries, entry, key=_DUE)
        self._order()

    def remove(self, entry: Entry[T], *, served: bool) -> None:
        """One does not wait any more; others do."""
        if served:
            self._served = self._due_of(entry, self._served)[1]
        self.entries.remove(entry)
        self._order()

    def tokens_before(self, entry: Entry[T]) -> int:
        """The work that comes before an ask of another session."""
        tokens, served = 0, self._served
        for other in self.entries:
            due = self._due_of(other, served)
            if due >= entry.due:
                break
            tokens += other.tokens
            served = due[1]
        return tokens

    def _order(self) -> None:
        self.due = self._due_of(self.entries[0], self._served)

    def _due_of(self, entry: Entry[T], served: float) -> tuple[int, float, int]:
        own, due, entered = entry.due
        return own, max(due, self._rules.due_at(entry.tokens, served)), entered


_DUE = attrgetter("due")


class Tenant(Generic[T]):
    """One tenant's places, in the order of its sessions, and what it may spend."""

    __slots__ = ("_named", "_rules", "count", "deficit", "name", "sessions", "size", "tokens")

    def __init__(self, name: tuple[str, str], rules: FairRules) -> None:
        self.name = name
        self._rules = rules
        self.deficit = 0.0
        self.count = self.tokens = self.size = 0
        self.sessions: list[SessionQueue[T]] = []
        """By when their next is due."""
        self._named: dict[Hashable, SessionQueue[T]] = {}

    def add(self, entry: Entry[T]) -> None:
        """A new place."""
        self._count(entry, 1)
        session = self._named.get(_session_of(entry))
        if session is None:
            session = self._named[_session_of(entry)] = SessionQueue(self._rules, entry)
        else:
            self.sessions.remove(session)
            session.add(entry)
        insort(self.sessions, session, key=_DUE)

    def remove(self, entry: Entry[T], *, served: bool) -> None:
        """Take a place out that is there."""
        self._count(entry, -1)
        session = self._named[_session_of(entry)]
        self.sessions.remove(session)
        if len(session.entries) == 1:
            del self._named[_session_of(entry)]
            return
        session.remove(entry, served=served)
        insort(self.sessions, session, key=_DUE)

    def first(self, blocked: Container[Hashable]) -> Entry[T] | None:
        """The first place whose group is not blocked."""
        first = self.sessions[0].entries[0]
        if first.group not in blocked:
            # As a rule, and of thousands of tenants for each that is served.
            return first
        places = (entry for session in self.sessions for entry in session.entries)
        return next((entry for entry in places if entry.group not in blocked), None)

    def last(self) -> Entry[T]:
        """The place that is served last."""
        return self.sessions[-1].entries[-1]

    def tokens_before(self, entry: Entry[T]) -> int:
        """The work that comes before an ask of this tenant."""
        own = self._named.get(_session_of(entry))
        before = sum(session.tokens_before(entry) for session in self.sessions if session is not own)
        return before + sum(other.tokens for other in own.entries if other.due < entry.due) if own else before

    def tokens_beside(self, entry: Entry[T]) -> int:
        """The work that takes turns with a place of another tenant: of its own payer, what goes no later."""
        if self.name[0] != entry.payer:
            return self.tokens
        places = (other for session in self.sessions for other in session.entries)
        return sum(other.tokens for other in places if other.due[0] <= entry.due[0])

    def _count(self, entry: Entry[T], by: int) -> None:
        self.count += by
        self.tokens += by * entry.tokens
        self.size += by * entry.size


def _session_of(entry: Entry[T]) -> Hashable:
    return entry.session or entry


class Ring(Generic[T]):
    """The tenants of one class, in the order of the round. The first is being visited, or will be next."""

    __slots__ = ("_is_visiting", "_named", "_payers", "_rules", "tenants")

    def __init__(self, rules: FairRules) -> None:
        self._rules = rules
        self.tenants: list[Tenant[T]] = []
        self._named: dict[tuple[str, str], Tenant[T]] = {}
        self._payers: Counter[str] = Counter()
        self._is_visiting = False

    def tenant(self, name: tuple[str, str]) -> Tenant[T] | None:
        """The tenant of that payer and name, if it waits."""
        return self._named.get(name)

    def add(self, entry: Entry[T]) -> None:
        """A new tenant comes last in the round."""
        tenant = self.tenant(entry.of)
        if tenant is None:
            tenant = self._named[entry.of] = Tenant(entry.of, self._rules)
            self._payers[entry.payer] += 1
            self.tenants.append(tenant)
        tenant.add(entry)

    def remove(self, entry: Entry[T], *, served: bool = False) -> None:
        """Take a place out that is there."""
        tenant = self.tenant(entry.of)
        assert tenant is not None
        tenant.remove(entry, served=served)
        if not tenant.count:
            if tenant is self.tenants[0]:
                self._is_visiting = False
            self.tenants.remove(tenant)
            del self._named[tenant.name]
            self._payers[entry.payer] -= 1
            if not self._payers[entry.payer]:
                del self._payers[entry.payer]

    def first(self, blocked: Container[Hashable]) -> Entry[T] | None:
        """The one to be served next, of those that are not blocked; nothing changes by asking."""
        firsts: list[tuple[int, Entry[T]]] = []
        best: dict[str, int] = {}
        for at, tenant in enumerate(self.tenants):
            if (entry := tenant.first(blocked)) is not None:
                firsts.append((at, entry))
                own = entry.due[0]
                if own < best.get(entry.payer, own + 1):
                    best[entry.payer] = own
        turns = [
            (self._turn(at, entry), at, entry) for at, entry in firsts if entry.due[0] == best[entry.payer]
        ]
        return min(turns)[2] if turns else None

    def take(self, entry: Entry[T]) -> None:
        """Serve one: the round goes on to its tenant as often as it needs, and the tenant pays."""
        at = self.tenants.index(self._named[entry.of])
        passes, until = self._turn(at, entry)
        # Without calls: a flood may have a thousand names, each of which is visited here.
        quantum, payers, stands = self._rules.quantum_tokens, self._payers, self._stands(0)
        for number, tenant in enumerate(self.tenants):
            payer = tenant.name[0]
            each = quantum / payers[payer] if payer else quantum
            visits = passes if (number or stands) <= until else passes - 1
            if visits > 0:
                tenant.deficit += visits * each
            # A tenant that was blocked for lack of a unit does not accumulate deficit.
            most = tenant.sessions[0].entries[0].tokens
            if tenant.deficit > most and number != at:
                tenant.deficit = min(tenant.deficit, max(most, each))
        self.tenants = self.tenants[at:] + self.tenants[:at]
        self._is_visiting = True
        self.tenants[0].deficit -= entry.tokens
        self.remove(entry, served=True)

    def _turn(self, at: int, entry: Entry[T]) -> tuple[int, int]:
        """In which pass of the round a tenant can pay for a place, and where in that pass. (0, 0): now."""
        tenant = self.tenants[at]
        visits = ceil((entry.tokens - tenant.deficit) / self._quantum(tenant))
        if self._stands(at) == at:
            return max(visits, 1), at
        return (visits, self._stands(at)) if visits > 0 else (0, 0)

    def _quantum(self, tenant: Tenant[T]) -> float:
        """What a visit of a tenant is worth."""
        payer = tenant.name[0]
        quantum = self._rules.quantum_tokens
        return quantum / self._payers[payer] if payer else quantum

    def _stands(self, at: int) -> int:
        """Where in a pass a tenant is visited: the one that is being visited comes last again."""
        return len(self.tenants) if at == 0 and self._is_visiting else at


# The fair queue: which asks wait for a unit, and in which order they are served. Pure; times are passed in.
#
# Rules:
# 1. A lower priority number goes first; within a class tenants take turns. That of an address
#    is only its word: all of them are one class, and it counts among what the address asks.
# 2. Within a tenant short work goes first, and an ask is overtaken only by those that come within `age_s`;
#    of a session that has several, each counts from when the one before it was due.
# 3. At most `limit` asks of at most `limit_bytes` wait. In a full queue a tenant with few asks displaces the
#    last ask of the tenant with most, one for one, so a flood takes only its own share. Between payers that
#    holds before all else, because a client may name any tenant and any priority.


_COUNT, _SIZE = attrgetter("count"), attrgetter("size")


@dataclass(frozen=True, slots=True)
class FairRules:
    """limit (1024), limit_bytes (256 MiB): what may wait; max_wait_s (60): for how long at most.

    backlog_s (0.25): a unit that has so many seconds of prompts to compute gets no more of them: what comes
    waits for whichever unit is the best when it is its turn.

    quantum_tokens (64): what one visit is worth. Less than most asks, so that tenants alternate by the ask:
    visits are counted, not made, and cost nothing.
    age_s (8): how long an ask of `age_tokens` (32768) or more may be overtaken; of fewer, in proportion.
    """

    limit: int = 1024
    limit_bytes: int = field(default=256 << 20, metadata=FIXED)
    max_wait_s: float = 60.0
    backlog_s: float = field(default=0.25, metadata=FIXED)
    quantum_tokens: int = field(default=64, metadata=FIXED)
    age_s: float = field(default=8.0, metadata=FIXED)
    age_tokens: int = field(default=32768, metadata=FIXED)

    def due_at(self, tokens: int, now: float) -> float:
        """The time after which new asks no longer overtake an ask of `tokens` that came `now`."""
        return now + self.age_s * min(tokens / self.age_tokens, 1.0)


class Entered(NamedTuple, Generic[T]):
    """An ask waits now; `displaced` was removed for it."""

    entry: Entry[T]
    displaced: Entry[T] | None = None


class FairQueue(Generic[T]):
    """All waiting places, by priority."""

    def __init__(self, rules: FairRules) -> None:
        self.rules = rules
        self.size = 0
        """Bytes of all waiting asks."""
        self.tokens = 0
        """Their uncached work."""
        self._rings: dict[int, Ring[T]] = {}
        self._entries: dict[Entry[T], None] = {}
        self._entered = 0
        self._payers: dict[str, list[int]] = {}
        """How many asks of each payer wait, and their bytes."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries)

    def add(
        self,
        item: T,
        now: float,
        *,
        tokens_s: float,
        tenant: str = "",
        priority: int = 0,
        tokens: int = 1,
        size: int = 0,
        deadline_at: float = inf,
        group: Hashable = None,
        payer: str = "",
        session: str = "",
    ) -> Entered[T] | NoEntry:
        """Queue an ask, or say why it may not wait. `tokens_s`: how fast the queue is worked off."""
        tokens = max(tokens, 1)
        self._entered += 1
        own, priority = priorities(payer, priority)
        due = (own, self.rules.due_at(tokens, now), self._entered)
        entry = Entry(item, tenant, priority, tokens, size, now, deadline_at, group, due, payer, session)
        # An ask that would be in time even as the last needs no position.
        is_in_time = now + self.drain_s(tokens_s) <= deadline_at
        if not is_in_time and now + self.wait_s(entry, tokens_s) > deadline_at:
            return NoEntry.HOPELESS
        displaced = None
        if not self._fits(entry):
            displaced = self._displaced_by(entry)
            if displaced is None:
                return NoEntry.FULL
            self.remove(displaced)
        self._rings.setdefault(priority, Ring(self.rules)).add(entry)
        self._entries[entry] = None
        self.tokens += tokens
        self.size += size
        self._count_payer(entry, 1)
        return Entered(entry, displaced)

    def first(self, blocked: Container[Hashable] = ()) -> Entry[T] | None:
        """The one to be served next, of those whose group is not `blocked`; nothing changes by asking."""
        for priority in sorted(self._rings):
            entry = self._rings[priority].first(blocked)
            if entry is not None:
                return entry
        return None

    def take(self, entry: Entry[T]) -> None:
        """One is served: its tenant pays for it, and the turn passes on."""
        self._rings[entry.priority].take(entry)
        self._left(entry)

    def remove(self, entry: Entry[T]) -> bool:
        """Remove a place without serving it. False: it was removed already."""
        if entry not in self._entries:
            return False
        self._rings[entry.priority].remove(entry)
        self._left(entry)
        return True

    def hopeless(self, now: float, tokens_s: float) -> list[Entry[T]]:
        """Those that would miss their deadline even if a unit of this prefill rate took them now.

        At a rate of 0 only those whose deadline has passed.
        """
        token_s = 1.0 / tokens_s if tokens_s > 0.0 else 0.0
        return [entry for entry in self._entries if now + entry.tokens * token_s > entry.deadline_at]

    def drain_s(self, tokens_s: float) -> float:
        """How long until all waiting asks are served, at `tokens_s` tokens a second; infinite at 0."""
        return _seconds(self.tokens, tokens_s)

    def wait_s(self, entry: Entry[T], tokens_s: float) -> float:
        """How long until `place` is served if no ask comes after it, at `tokens_s` tokens a second."""
        ahead = 0
        for priority, ring in self._rings.items():
            if priority < entry.priority:
                ahead += sum(tenant.tokens for tenant in ring.tenants)
            elif priority == entry.priority:
                own = ring.tenant(entry.of)
                mine = own.tokens_before(entry) if own is not None else 0
                # While the own ones are served, each other tenant gets as much, if it has as much.
                due = mine + entry.tokens
                beside = (tenant.tokens_beside(entry) for tenant in ring.tenants if tenant is not own)
                ahead += mine + sum(min(tokens, due) for tokens in beside)
        return _seconds(ahead, tokens_s)

    def _left(self, entry: Entry[T]) -> None:
        del self._entries[entry]
        self.tokens -= entry.tokens
        self.size -= entry.size
        self._count_payer(entry, -1)
        if not self._rings[entry.priority].tenants:
            del self._rings[entry.priority]

    def _fits(self, entry: Entry[T], instead_of: Entry[T] | None = None) -> bool:
        count, size = (1, instead_of.size) if instead_of is not None else (0, 0)
        rules = self.rules
        return len(self) - count < rules.limit and self.size - size + entry.size <= rules.limit_bytes

    def _displaced_by(self, entry: Entry[T]) -> Entry[T] | None:
        """The last ask of the tenant that holds most of the last class; None when that would not be fair."""
        if (hog := self._hog_for(entry)) is not None:
            victim = next(each for each in reversed(self._entries) if each.payer == hog)
            return victim if self._fits(entry, instead_of=victim) else None
        last = max(self._rings, default=entry.priority - 1)
        if last < entry.priority:
            return None
        ring = self._rings[last]
        # Of thousands of tenants: with what is compared in C, a hundred times a turn.
        most = max(max(ring.tenants, key=_COUNT), max(ring.tenants, key=_SIZE), key=self._held)
        victim = most.last()
        goes_later = victim.payer == entry.payer and victim.due[0] > entry.due[0]
        if last == entry.priority and not goes_later:
            own = ring.tenant(entry.of) or Tenant(entry.of, self.rules)
            if self._held(most) <= self._held(own, also=entry):
                return None
        return victim if self._fits(entry, instead_of=victim) else None

    def _count_payer(self, entry: Entry[T], by: int) -> None:
        counted = self._payers.setdefault(entry.payer, [0, 0])
        counted[0] += by
        counted[1] += by * entry.size
        if not counted[0]:
            del self._payers[entry.payer]

    def _hog_for(self, entry: Entry[T]) -> str | None:
        """The payer that holds most of the queue, if it is another one and holds more than this one would."""
        if not entry.payer or not self._payers:
            return None
        rules = self.rules

        def part(counted: list[int], more: int = 0, size: int = 0) -> float:
            return max(
                (counted[0] + more) / max(rules.limit, 1), (counted[1] + size) / max(rules.limit_bytes, 1)
            )

        hog = max(self._payers, key=lambda payer: part(self._payers[payer]))
        own = part(self._payers.get(entry.payer, [0, 0]), 1, entry.size)
        return hog if hog not in ("", entry.payer) and part(self._payers[hog]) > own else None

    def _held(self, tenant: Tenant[T], also: Entry[T] | None = None) -> float:
        """The share of the queue that a tenant holds: of its places or of its bytes, whichever is larger."""
        count, size = (1, also.size) if also is not None else (0, 0)
        count_share = (tenant.count + count) / max(self.rules.limit, 1)
        return max(count_share, (tenant.size + size) / max(self.rules.limit_bytes, 1))


def _seconds(tokens: int, tokens_s: float) -> float:
    if tokens_s > 0.0:
        return tokens / tokens_s
    return inf if tokens else 0.0


# Pools: units with common models, which can replace each other. Pure.
#
# Requests of one pool wait in one queue, and do not wait for those of other pools.


ANY = ""
"""The pool of requests without a model, if there are several pools."""


@dataclass(slots=True, eq=False)
class _Group:
    """Units that share models with each other, as far as all units have been looked at."""

    names: list[str] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    takes_any: bool = False

    def shares(self, models: frozenset[str]) -> bool:
        """Whether a unit of these models belongs to it; none are any."""
        return self.takes_any or not models or not models.isdisjoint(self.models)


class _Known(NamedTuple):
    """The pool of each unit, of each model, and of all other requests."""

    of_unit: Mapping[str, str]
    of_model: Mapping[str, str]
    other: str


class Pools:
    """The pools of a fleet, named by their first unit. A unit whose models are not known may serve any.

    Units are looked at when a pool is first asked for: of a thousand that start, each tells its models.
    """

    def __init__(self, units: Iterable[tuple[str, frozenset[str]]] = ()) -> None:
        self._units = units

    @cached_property
    def _known(self) -> _Known:
        groups: list[_Group] = []
        for unit, models in self._units:
            joined = [group for group in groups if group.shares(models)]
            if not joined:
                joined = [_Group()]
                groups += joined
            first, *others = joined
            for group in others:
                first.names += group.names
                first.models |= group.models
                first.takes_any |= group.takes_any
                groups.remove(group)
            first.names.append(unit)
            first.models |= models
            first.takes_any |= not models
        alone = groups[0].names[0] if len(groups) == 1 else ANY
        return _Known(
            {name: group.names[0] for group in groups for name in group.names},
            {model: group.names[0] for group in groups for model in group.models},
            next((group.names[0] for group in groups if group.takes_any), alone),
        )

    def of(self, model: str | None) -> str:
        """Where a request for `model` waits."""
        known = self._known
        return known.of_model.get(model, known.other) if model is not None else known.other

    def of_unit(self, unit: str) -> str:
        return self._known.of_unit.get(unit, ANY)

    def has(self, pool: str, unit: str) -> bool:
        return pool == ANY or self._known.of_unit.get(unit) == pool
