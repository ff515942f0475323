"""The queue of asks that lost their unit before they had shown a token: bounded in count and in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.lease import Lease
from router.nouns import Ask, Refusal


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A place in the queue. `settle` is called exactly once, unless the ticket is removed before."""

    ask: Ask
    tried: frozenset[str]
    expires_at: float
    settle: Callable[[Lease | Refusal], None]


class Waiting:
    """First come, first served; at most `limit` tickets, each for at most `max_wait_s`."""

    def __init__(self, limit: int = 1024, max_wait_s: float = 30.0) -> None:
        self.limit = limit
        self.max_wait_s = max_wait_s
        self._tickets: dict[Ticket, None] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(
        self, ask: Ask, now: float, tried: frozenset[str], settle: Callable[[Lease | Refusal], None]
    ) -> Ticket | None:
        """Queue an ask; None when `limit` tickets wait already."""
        if len(self._tickets) >= self.limit:
            return None
        ticket = Ticket(ask, tried, now + self.max_wait_s, settle)
        self._tickets[ticket] = None
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out: it was served, or its client left."""
        self._tickets.pop(ticket, None)

    def in_order(self) -> list[Ticket]:
        """The tickets, oldest first; a copy, because serving one removes it."""
        return list(self._tickets) if self._tickets else []
