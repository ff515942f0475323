"""Deficit round robin among tenants, in tokens (Shreedhar and Varghese, 1995). Pure.

Each visit of the round adds a quantum to the deficit of a tenant; one with enough for its first ask is
served. While two tenants wait, they get the same service except for a quantum and the largest ask of each. A
tenant without waiting asks keeps no deficit. Names of tenants may be anybody's word, so the tenants of one
payer share a quantum.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """A place in the queue, for `item`. `tokens` is its uncached work (at least 1), `size` its bytes.

    `group` says which units could serve it: where one of a group finds no room, no other of it does.
    `due` is where it stands among those of its tenant.
    """

    item: T
    tenant: str
    priority: int
    tokens: int
    size: int
    entered_at: float
    deadline_at: float
    group: Hashable
    due: tuple[float, int]
    payer: str = ""

    @property
    def of(self) -> tuple[str, str]:
        """Whose it is: a tenant of a payer."""
        return self.payer, self.tenant


@dataclass(slots=True, eq=False)
class Tenant(Generic[T]):
    """One tenant's places, in their order, and what it may spend."""

    name: tuple[str, str]
    deficit: float = 0.0
    count: int = 0
    tokens: int = 0
    size: int = 0
    entries: list[Entry[T]] = field(default_factory=list)

    def first(self, blocked: Container[Hashable]) -> Entry[T] | None:
        """The first place whose group is not blocked."""
        return next((entry for entry in self.entries if entry.group not in blocked), None)

    def tokens_before(self, entry: Entry[T]) -> int:
        """The work that comes before `place`."""
        return sum(other.tokens for other in self.entries if other.due < entry.due)


class Ring(Generic[T]):
    """The tenants of one class, in the order of the round. The first is being visited, or will be next."""

    __slots__ = ("_is_visiting", "_named", "_payers", "quantum", "tenants")

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
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
            tenant = self._named[entry.of] = Tenant(entry.of)
            self._payers[entry.payer] += 1
            self.tenants.append(tenant)
        insort(tenant.entries, entry, key=lambda other: other.due)
        tenant.count += 1
        tenant.tokens += entry.tokens
        tenant.size += entry.size

    def remove(self, entry: Entry[T]) -> None:
        """Take a place out that is there."""
        tenant = self.tenant(entry.of)
        assert tenant is not None
        tenant.entries.remove(entry)
        tenant.count -= 1
        tenant.tokens -= entry.tokens
        tenant.size -= entry.size
        if not tenant.entries:
            if tenant is self.tenants[0]:
                self._is_visiting = False
            self.tenants.remove(tenant)
            del self._named[tenant.name]
            self._payers[entry.payer] -= 1
            if not self._payers[entry.payer]:
                del self._payers[entry.payer]

    def first(self, blocked: Container[Hashable]) -> Entry[T] | None:
        """The one to be served next, of those that are not blocked; nothing changes by asking."""
        turns = [
            (self._turn(at, entry), entry)
            for at, tenant in enumerate(self.tenants)
            if (entry := tenant.first(blocked)) is not None
        ]
        return min(turns, key=lambda turn: turn[0])[1] if turns else None

    def take(self, entry: Entry[T]) -> None:
        """Serve one: the round goes on to its tenant as often as it needs, and the tenant pays."""
        at = next(at for at, tenant in enumerate(self.tenants) if tenant.name == entry.of)
        turn = self._turn(at, entry)
        for number, tenant in enumerate(self.tenants):
            visits = turn[0] if self._stands(number) <= turn[1] else turn[0] - 1
            tenant.deficit += max(visits, 0) * self._quantum(tenant)
            if number != at:
                # A tenant that was blocked for lack of a unit does not accumulate deficit.
                tenant.deficit = min(tenant.deficit, max(tenant.entries[0].tokens, self._quantum(tenant)))
        self.tenants = self.tenants[at:] + self.tenants[:at]
        self._is_visiting = True
        self.tenants[0].deficit -= entry.tokens
        self.remove(entry)

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
        return self.quantum / self._payers[payer] if payer else self.quantum

    def _stands(self, at: int) -> int:
        """Where in a pass a tenant is visited: the one that is being visited comes last again."""
        return len(self.tenants) if at == 0 and self._is_visiting else at
