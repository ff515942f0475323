"""Those who wait for a unit: first those who lost theirs, in their order, then all others in their turn.

Bounded in count, in bytes and in time. Whose turn it is among the others is said in fair.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.fair import FairQueue, FairRules, NoPlace
from router.lease import Lease
from router.nouns import Ask, Refusal
from router.turns import Place

MOVED_S = 30.0
"""Who lost its unit has waited for its answer once already."""

Kind = tuple[str | None, str | None, frozenset[str]]

_REFUSALS = {NoPlace.FULL: Refusal.FULL, NoPlace.HOPELESS: Refusal.LATE}


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A place in the queue. `settle` is called exactly once, unless the ticket is removed before."""

    ask: Ask
    tried: frozenset[str]
    entered_at: float
    expires_at: float
    settle: Callable[[Lease | Refusal], None]

    @property
    def kind(self) -> Kind:
        """Asks of a kind may go to the same units."""
        return self.ask.model, self.ask.unit, self.tried


class Waiting:
    """All who wait."""

    def __init__(self, rules: FairRules) -> None:
        self.rules = rules
        self.fair: FairQueue[Ticket] = FairQueue(rules)
        self._moved: dict[Ticket, None] = {}
        self._places: dict[Ticket, Place[Ticket]] = {}
        self.kinds: Counter[Kind] = Counter()
        """How many of each kind wait, but for those who lost their unit."""

    def __len__(self) -> int:
        return len(self._moved) + len(self.fair)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._places or ticket in self._moved

    def moved(self) -> list[Ticket]:
        """Those who lost their unit, oldest first; a copy, because serving one removes it."""
        return list(self._moved) if self._moved else []

    def add_moved(self, ticket: Ticket) -> bool:
        """Queue one that lost its unit; False when too many wait already."""
        if len(self._moved) >= max(self.rules.limit, 1):
            return False
        self._moved[ticket] = None
        return True

    def add(self, ticket: Ticket, now: float, *, tokens: int, size: int, tokens_s: float) -> Refusal | None:
        """Queue one with `tokens` of uncached work and a body of `size` bytes, where `tokens_s` are computed.

        Returns why it may not wait. Who has to go for it is told at once.
        """
        entered = self.fair.add(
            ticket,
            now,
            tokens_s=tokens_s,
            tenant=ticket.ask.tenant,
            priority=ticket.ask.priority,
            tokens=tokens,
            size=size,
            deadline_at=ticket.expires_at,
            group=ticket,
        )
        if isinstance(entered, NoPlace):
            return _REFUSALS[entered]
        self._places[ticket] = entered.place
        self.kinds[ticket.kind] += 1
        if entered.displaced is not None:
            displaced = entered.displaced.item
            self._leave(displaced)
            displaced.settle(Refusal.FULL)
        return None

    def take(self, ticket: Ticket) -> None:
        """One of the others is served: its tenant pays for it."""
        self.fair.take(self._leave(ticket))

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out without serving it: its client left, or its time is up."""
        self._moved.pop(ticket, None)
        if ticket in self._places:
            self.fair.remove(self._leave(ticket))

    def _leave(self, ticket: Ticket) -> Place[Ticket]:
        self.kinds[ticket.kind] -= 1
        if not self.kinds[ticket.kind]:
            del self.kinds[ticket.kind]
        return self._places.pop(ticket)

    def late(self, now: float, tokens_s: float) -> Iterator[Ticket]:
        """Those who would miss their deadline even if they were served now."""
        return (place.item for place in self.fair.hopeless(now, tokens_s))
