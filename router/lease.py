"""A lease: the right to spend one attempt on one unit. It closes exactly once, when the stream ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.router.backlog import ALONE
from cellgate.router.cost import Expected
from cellgate.router.cost_model import Bet
from cellgate.router.nouns import Ask

if TYPE_CHECKING:
    from cellgate.router.unit_state import Desk


class Lease:
    """One attempt on one unit, held from the pick until the stream has ended.

    `evicted` is set when the unit went DOWN; `on_evict` is called once at that moment.
    `first_at` is when something was first shown to the client; `paused` while the client reads nothing; `bet`
    is what was expected of it; `beside` is what was there while it was decoded, once it is closed;
    `explanation` is the header line that tells why it is for this unit, where the request has asked.
    """

    __slots__ = (
        "ask",
        "beside",
        "bet",
        "closed",
        "committed",
        "desk",
        "evicted",
        "explanation",
        "first_at",
        "on_evict",
        "opened_at",
        "paused",
        "retry",
        "unit",
        "was_paused",
    )

    def __init__(self, desk: Desk, ask: Ask, expected: Expected, held: int, now: float, retry: bool) -> None:
        self.desk = desk
        self.unit = desk.unit.name
        self.ask = ask
        self.bet: Bet = desk.books.enter(self, ask, expected, held, now)
        self.beside = ALONE
        self.opened_at = now
        self.retry = retry
        self.committed = False
        self.evicted = False
        self.closed = False
        self.explanation = b""
        self.paused = False
        self.was_paused = False
        self.first_at = 0.0
        self.on_evict: Callable[[], None] | None = None

    def commit(self, now: float) -> None:
        """The unit has shown its first token (or the head of a plain body)."""
        self.committed = True
        self.first_at = now
        self.desk.shown(self, now)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "evicted" if self.evicted else "open"
        return f"<Lease {self.unit} {state} committed={self.committed}>"
