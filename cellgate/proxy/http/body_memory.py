"""The memory that all request bodies share: reading pauses when it is used up, and resumes when some is
freed.

1. A body reserves memory as it arrives, and ahead in proportion, up to its declared length. So a client
that only declares a large body reserves nothing, and one that has sent a sixteenth can complete its body:
bodies do not deadlock.
2. A part is kept for small bodies, which are read on while large ones wait; half of it for those of payers
that hold little.
3. While somebody waits whose bodies that are not whole yet hold less than an equal share, whoever's hold
most gives up those that would hold theirs for longest. Alone anybody may have all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from cellgate.proxy.config.limits import LIMITS, reached

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request

_AHEAD = 16
"""A body may reserve this many times what has arrived of it."""
_BODY_KEPT_PART = 8
"""One part in this many is kept for small bodies."""
_GIVEN_UP_AT_ONCE = 16
"""So many bodies are given up in one tick."""


class BodyMemory:
    """Counts bytes. A caller that is refused leaves a callback, which is called when bytes are freed.

    `largest` is the size of the largest body there may be: one of them always has room.
    """

    def __init__(self, total: int, largest: int) -> None:
        self.total = total
        self.used = 0
        self._for_large = max(total - total // _BODY_KEPT_PART, min(largest, total))
        self._little = total // _BODY_KEPT_PART // 2
        self._for_small = max(total - self._little, self._for_large)
        self._arriving: dict[ArrivingBody, int] = {}
        """What each has taken."""
        self._held: Counter[str] = Counter()
        """The same by payer."""
        self._waiters: dict[Callable[[], None], str] = {}

    @property
    def is_short(self) -> bool:
        """True while somebody waits."""
        return bool(self._waiters)

    def take(self, size: int, held: int = 0, body: ArrivingBody | None = None) -> bool:
        """Reserve `size` bytes for a body that has `held` already; False, and none reserved: no room."""
        room = self._for_large
        if held + size <= LIMITS.small_body_bytes:
            has_little = body is None or self._held[body.payer] + size <= self._little
            room = self.total if has_little else self._for_small
        if self.used + size > room:
            return False
        self.used += size
        if body is not None:
            self._arriving[body] = self._arriving.get(body, 0) + size
            self._held[body.payer] += size
        return True

    def arrived(self, body: ArrivingBody) -> None:
        """A body is whole, or gone: what it holds is no longer held by one that arrives."""
        size = self._arriving.pop(body, 0)
        self._held[body.payer] -= size
        if self._held[body.payer] <= 0:
            del self._held[body.payer]

    def release(self, request: Request) -> None:
        """Free what the body of a request holds."""
        size, request.reserved = request.reserved, 0
        self.used -= size
        if size and self._waiters:
            self.give(0)

    def give(self, size: int) -> None:
        """Free bytes and call the waiters, in their order."""
        self.used -= size
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            waiter()

    def wait(self, waiter: Callable[[], None], payer: str = "") -> None:
        """Have `waiter` called once, after bytes were freed; it must then reserve again."""
        self._waiters[waiter] = payer

    def forget(self, waiter: Callable[[], None]) -> None:
        self._waiters.pop(waiter, None)

    def tick(self, now: float) -> None:
        """Take back what the payer with most holds for long, while others wait for their share."""
        if not self._waiters or (hog := self._hog()) is None:
            return
        late = [(body.whole_in_s(now), body) for body in self._arriving if body.payer == hog]
        late.sort(key=lambda each: each[0], reverse=True)
        for whole_in_s, body in late[:_GIVEN_UP_AT_ONCE]:
            if whole_in_s <= LIMITS.body_stall_s or self._hog() != hog:
                return
            reached("body_stall_s")
            body.abort()

    def _hog(self) -> str | None:
        """The payer that holds most, and more than a share, while one waits that holds less."""
        if not self._held:
            return None
        share = self.total / len(self._held.keys() | set(self._waiters.values()))
        hog, most = self._held.most_common(1)[0]
        if most <= share or all(self._held[payer] >= share for payer in self._waiters.values()):
            return None
        return hog


def wanted(size: int, length: int) -> int:
    """The memory to be held for a body of which `size` bytes have come; `length` were declared (0: none)."""
    return max(size, min(length, _AHEAD * size))


class ArrivingBody:
    """A body that is not whole yet, and who pays for it. `abort` has it give back what it holds: others need
    that.
    """

    __slots__ = ("abort", "begun_at", "payer", "request")

    def __init__(self, request: Request, payer: str, begun_at: float, abort: Callable[[], None]) -> None:
        self.request = request
        self.payer = payer
        self.begun_at = begun_at
        self.abort = abort

    def whole_in_s(self, now: float) -> float:
        """How long it will hold its memory before it is whole, by how fast it has come; 0: it has had no time
        yet to show it.
        """
        request, age_s = self.request, now - self.begun_at
        if age_s <= LIMITS.body_stall_s:
            return 0.0
        left = request.length - request.body_size if request.length else inf
        return age_s * left / max(request.body_size, 1)
