"""What one turn of the loop may cost: large reads of all connections, to units or to clients, and the begin
of requests. What has to wait is done in turn, one connection after the other.

The loop reads up to 256 kB of a connection at once, 32 times in one turn while more has arrived, and of all
connections that are ready in the same turn: with a few large bodies, or some hundred streams, that is more
than a second of work. So large reads are put aside, their connections are not read meanwhile, and one turn
of the loop parses only a bounded part of all of them.

The first read of a reply comes before those that go on: a first token with its head is larger than what is
parsed at once, and would wait for a part of each of hundreds of streams that flow as fast as they can.

If all requests of a burst began in one turn, the first would wait with their connections to units, and their
first tokens, until the last had begun, and the units would do nothing meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

PART_BYTES = 8192
"""Bytes that are parsed of one connection before the next has its turn."""
PIECE_BYTES = 1024
"""What each piece of a body counts as, beside its bytes: many small pieces take the time."""


class PendingRead(Protocol):
    """A connection with a read that is not parsed yet."""

    def resume_parsing(self, size: int, /) -> tuple[int, bool]:
        """Parse about so many bytes of it, if there are any and they may be parsed now: what that cost in
        bytes, and whether there is more to be parsed.
        """


class ReadScheduler:
    """Decides whose read is parsed next, or whose request begins: payers take turns, and the connections of
    each. `soon` schedules a callback for the next turn of the loop, which may cost `bytes_per_turn`.
    """

    def __init__(self, soon: Callable[[Callable[[], None]], object], bytes_per_turn: int) -> None:
        self._soon = soon
        self._bytes_per_turn = bytes_per_turn
        self._waiting: OrderedDict[str, dict[PendingRead, None]] = OrderedDict()
        self._next: dict[PendingRead, str] = {}
        self._firsts: dict[PendingRead, None] = {}
        # Of this turn, and of those before it that have left something: a turn is not worth a callback.
        self._left = bytes_per_turn
        self._is_due = False

    def join(self, late: PendingRead, *, is_first: bool = False) -> None:
        """Have the read of a connection parsed: now, as far as this turn allows, and in turns to come.
        `is_first`: one part of it comes before others.
        """
        if is_first:
            self._firsts[late] = None
        else:
            self._add(late, "")
        if not self._is_due:
            self._carry_on()

    def join_next(self, late: PendingRead, payer: str = "") -> None:
        """The same, but not in this turn."""
        self._next[late] = payer
        if not self._is_due:
            self._is_due = True
            self._soon(self._next_turn)

    def has_room(self, cost: int) -> bool:
        """Whether something else that costs so much may be done in this turn; it counts then."""
        left = self._left
        if left <= 0:
            return False
        self._left = left = left - cost
        if left <= 0 and not self._is_due:
            self._is_due = True
            self._soon(self._next_turn)
        return True

    def _next_turn(self) -> None:
        self._left = self._bytes_per_turn
        for late, payer in self._next.items():
            self._add(late, payer)
        self._next.clear()
        self._carry_on()

    def _add(self, late: PendingRead, payer: str) -> None:
        self._waiting.setdefault(payer, {})[late] = None

    def _carry_on(self) -> None:
        # Connections that are added meanwhile wait for their turn.
        self._is_due = True
        try:
            while self._left > 0 and (self._firsts or self._waiting):
                payer, late = self._pop()
                cost, has_more = late.resume_parsing(PART_BYTES)
                self._left -= cost
                if has_more:
                    self._add(late, payer)
        finally:
            self._is_due = self._left <= 0 or bool(self._firsts or self._waiting or self._next)
            if self._is_due:
                self._soon(self._next_turn)

    def _pop(self) -> tuple[str, PendingRead]:
        """Whose turn it is, and its payer. Half of each turn is for reads that are not the first."""
        if self._firsts and (2 * self._left > self._bytes_per_turn or not self._waiting):
            late = next(iter(self._firsts))
            del self._firsts[late]
            return "", late
        payer, own = self._waiting.popitem(last=False)
        late = next(iter(own))
        del own[late]
        if own:
            self._waiting[payer] = own
        return payer, late
