"""The memory all request bodies share: reading pauses when it is spent, and goes on when some comes back.

1. A body draws as it comes, and ahead in proportion to that, up to what was declared. So who only declares a
   large body has nothing, and who has sent a sixteenth can end: not all wait for one another.
2. A part is kept for small bodies, which go on while large ones wait.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.config.limits import LIMITS

_AHEAD = 16
"""So many times what has come of a body is drawn for it."""
_KEPT_PART = 8
"""One part in so many is kept for small bodies."""


def wanted(size: int, length: int) -> int:
    """The memory to be held for a body of which `size` bytes have come; `length` were declared (0: none)."""
    return max(size, min(length, _AHEAD * size))


class BodyMemory:
    """Counts bytes. Whoever gets no for an answer leaves a callback and is called when bytes came back.

    `largest` is the size of the largest body there may be: one of them always has room.
    """

    __slots__ = ("_for_large", "_waiters", "total", "used")

    def __init__(self, total: int, largest: int) -> None:
        self.total = total
        self.used = 0
        self._for_large = max(total - total // _KEPT_PART, min(largest, total))
        self._waiters: dict[Callable[[], None], None] = {}

    @property
    def is_short(self) -> bool:
        """True while somebody waits."""
        return bool(self._waiters)

    def take(self, size: int, held: int = 0) -> bool:
        """Reserve `size` bytes for a body that has `held` of them already; False, with nothing reserved, when
        they are not there.
        """
        room = self.total if held + size <= LIMITS.small_body_bytes else self._for_large
        if self.used + size > room:
            return False
        self.used += size
        return True

    def hold(self, size: int) -> None:
        """Count bytes that are there already, whether there was room for them or not."""
        self.used += size

    def give(self, size: int) -> None:
        """Give bytes back and call those who wait, in the order they came."""
        self.used -= size
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter()

    def wait(self, waiter: Callable[[], None]) -> None:
        """Have `waiter` called once, after bytes came back; it asks anew then."""
        self._waiters[waiter] = None

    def forget(self, waiter: Callable[[], None]) -> None:
        """The waiter is gone."""
        self._waiters.pop(waiter, None)
