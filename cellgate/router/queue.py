"""The queue: first requests that lost their unit, in their order, then all others in fair order.

Limited in number, bytes and time, for each pool of units (pools.py) by itself. fair_queue.py has the order of
the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cellgate.router.deficit_round_robin import Entry
from cellgate.router.fair_queue import FairQueue, FairRules, NoEntry
from cellgate.router.nouns import Ask, Refusal
from cellgate.router.shares import Waiting
from cellgate.router.unit_state import Lease

MOVED_S = 30.0
"""How long a request that lost its unit may wait; it has waited for its answer once already."""

TicketKind = tuple[str | None, str | None, frozenset[str]]

_REFUSALS = {NoEntry.FULL: Refusal.FULL, NoEntry.HOPELESS: Refusal.LATE}


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A place in the queue of `pool`. `settle` is called exactly once, unless the ticket is removed before.

    `retry`: the attempt draws on the retry budget.
    """

    ask: Ask
    pool: str
    tried: frozenset[str]
    entered_at: float
    expires_at: float
    on_result: Callable[[Lease | Refusal], None]
    retry: bool = False

    @property
    def kind(self) -> TicketKind:
        """Asks of a kind may go to the same units."""
        return self.ask.model, self.ask.unit, self.tried


class PoolQueue:
    """Those who wait for one pool of units."""

    __slots__ = ("entries", "fair_queue", "kinds", "payers")

    def __init__(self, rules: FairRules) -> None:
        self.fair_queue: FairQueue[Ticket] = FairQueue(rules)
        self.entries: dict[Ticket, Entry[Ticket]] = {}
        self.kinds: Counter[TicketKind] = Counter()
        """How many of each kind wait."""
        self.payers: Counter[Waiting] = Counter()
        """How many of each payer and priority."""

    def leave(self, ticket: Ticket) -> Entry[Ticket]:
        """Forget where a ticket stands."""
        self.kinds[ticket.kind] -= 1
        if not self.kinds[ticket.kind]:
            del self.kinds[ticket.kind]
        waiting = ticket.ask.payer, ticket.ask.priority
        self.payers[waiting] -= 1
        if not self.payers[waiting]:
            del self.payers[waiting]
        return self.entries.pop(ticket)


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
        """Take a ticket out without serving it: its client left, or its time is up. Once it is out, nothing
        happens.
        """
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
