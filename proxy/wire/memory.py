"""The memory all request bodies share: reading pauses when it is spent, and goes on when some comes back."""

from __future__ import annotations

from collections.abc import Callable


class BodyMemory:
    """Counts bytes. Whoever gets no for an answer leaves a callback and is called when bytes came back."""

    __slots__ = ("_waiters", "total", "used")

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._waiters: dict[Callable[[], None], None] = {}

    def take(self, size: int) -> bool:
        """Reserve `size` bytes; False, with nothing reserved, when they are not there."""
        if self.used + size > self.total:
            return False
        self.used += size
        return True

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
