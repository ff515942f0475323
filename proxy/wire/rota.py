"""The large reads of all connections to units: parsed part by part, one connection after the other.

The loop reads up to 256 kB of each connection in one turn, and of all that are ready in the same turn: with
a few hundred streams that is more than a second of work. So what is more than a little is put aside, its
connection is not read meanwhile, and one turn of the loop parses no more than `LIMITS.reply_bytes_per_turn`
of all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from proxy.limits import LIMITS

PART_BYTES = 16384
"""So much is parsed of one connection before the next has its turn."""
PIECE_BYTES = 1024
"""What each piece of a body counts as, beside its bytes: many small ones are what takes time."""


class Late(Protocol):
    """A connection of which a read has yet to be parsed."""

    def go_on(self, size: int) -> tuple[int, bool]:
        """Parse so many bytes of it, if there are any and they may be parsed now: what that cost in bytes,
        and whether there is more to be parsed.
        """


class Rota:
    """Whose read is parsed next. `soon` has something done in the next turn of the loop."""

    __slots__ = ("_is_due", "_left", "_soon", "_waiting")

    def __init__(self, soon: Callable[[Callable[[], None]], object]) -> None:
        self._soon = soon
        self._waiting: OrderedDict[Late, None] = OrderedDict()
        # Of this turn, and of those before it that have left something: a turn is not worth a callback.
        self._left = LIMITS.reply_bytes_per_turn
        self._is_due = False

    def join(self, late: Late) -> None:
        """Have the read of a connection parsed: now, as far as this turn allows, and in turns to come."""
        self._waiting[late] = None
        if not self._is_due:
            self._go_on()

    def _next_turn(self) -> None:
        self._left = LIMITS.reply_bytes_per_turn
        self._go_on()

    def _go_on(self) -> None:
        # Who joins from within waits for its turn.
        self._is_due = True
        try:
            while self._waiting and self._left > 0:
                late, _ = self._waiting.popitem(last=False)
                cost, has_more = late.go_on(PART_BYTES)
                self._left -= cost
                if has_more:
                    self._waiting[late] = None
        finally:
            self._is_due = self._left <= 0 or bool(self._waiting)
            if self._is_due:
                self._soon(self._next_turn)
