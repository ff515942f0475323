"""The fair queue: which asks wait for a unit, and in which order they are served. Pure; times are passed in.

Rules:
1. A lower priority number goes first; within a class tenants take turns (see deficit_round_robin.py).
2. Within a tenant short work goes first, and an ask is overtaken only by those that come within `age_s`.
3. At most `limit` asks of at most `limit_bytes` wait. In a full queue a tenant with few asks displaces the
   last ask of the tenant with most, one for one, so a flood takes only its own share. Between payers that
   holds before all else, because a client may name any tenant and any priority.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from cellgate.router.deficit_round_robin import Entry, Ring, Tenant

T = TypeVar("T")

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
    limit_bytes: int = 256 << 20
    max_wait_s: float = 60.0
    backlog_s: float = 0.25
    quantum_tokens: int = 64
    age_s: float = 8.0
    age_tokens: int = 32768

    def due_at(self, tokens: int, now: float) -> float:
        """The time after which new asks no longer overtake an ask of `tokens` that came `now`."""
        return now + self.age_s * min(tokens / self.age_tokens, 1.0)


class NoEntry(Enum):
    """Why an ask may not wait."""

    FULL = "full"
    HOPELESS = "hopeless"
    """It would be served after its deadline."""


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
    ) -> Entered[T] | NoEntry:
        """Queue an ask, or say why it may not wait. `tokens_s`: how fast the queue is worked off."""
        tokens = max(tokens, 1)
        self._entered += 1
        due = (self.rules.due_at(tokens, now), self._entered)
        entry = Entry(item, tenant, priority, tokens, size, now, deadline_at, group, due, payer)
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
        self._rings.setdefault(priority, Ring(self.rules.quantum_tokens)).add(entry)
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
                ahead += mine + sum(min(tenant.tokens, due) for tenant in ring.tenants if tenant is not own)
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
        if last == entry.priority:
            own = ring.tenant(entry.of) or Tenant(entry.of)
            if self._held(most) <= self._held(own, also=entry):
                return None
        victim = most.entries[-1]
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
