"""The memory that all request bodies share: reading pauses when it is used up, and resumes when some is
freed.

1. A body reserves memory as it arrives, and ahead in proportion, up to its declared length. So a client that
   only declares a large body reserves nothing, and one that has sent a sixteenth can complete its body:
   bodies do not deadlock.
2. A part is kept for small bodies, which are read on while large ones wait.
"""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.config.limits import LIMITS

_AHEAD = 16
"""A body may reserve this many times what has arrived of it."""
_KEPT_PART = 8
"""One part in this many is kept for small bodies."""


def wanted(size: int, length: int) -> int:
    """The memory to be held for a body of which `size` bytes have come; `length` were declared (0: none)."""
    return max(size, min(length, _AHEAD * size))


class BodyMemory:
    """Counts bytes. A caller that is refused leaves a callback, which is called when bytes are freed.

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
        """Count bytes that have already arrived, whether there was room for them or not."""
        self.used += size

    def give(self, size: int) -> None:
        """Free bytes and call the waiters, in their order."""
        self.used -= size
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for waiter in waiters:
                waiter()

    def wait(self, waiter: Callable[[], None]) -> None:
        """Have `waiter` called once, after bytes were freed; it must then reserve again."""
        self._waiters[waiter] = None

    def forget(self, waiter: Callable[[], None]) -> None:
        """The waiter is gone."""
        self._waiters.pop(waiter, None)
