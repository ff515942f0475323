"""The agenda: calls that are due at their times, with one timer of the loop for all of them.

A timer of the loop for each look would cost as much as the look. Calls that are due at about the same time
are made together: that wakes the process less often, and code and data that were just used are still in the
caches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, TypeVar

A = TypeVar("A")

RESOLUTION_S = 0.001
"""Timers of the loop may fire so much too early."""
PER_TURN = 32
"""Calls made in one turn of the loop; the next ones wait for another, so that others have their turn."""
SPARE = 64
"""Times of cancelled calls that are kept, beside as many as there are calls."""


class Agenda:
    """Calls, each made once unless it is cancelled: at its time, or up to `early_s` earlier, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, early_s: float = RESOLUTION_S) -> None:
        self._loop = loop
        self._early_s = early_s
        self._calls: dict[int, Callable[[], None]] = {}
        """Those that are not cancelled, by number."""
        self._times: list[tuple[float, int]] = []
        """A heap of times and numbers, those of cancelled calls among them for a while."""
        self._answers: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._last = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = inf

    def at(self, when: float, call: Callable[[], None]) -> int:
        """Make this call then; the number is for `cancel`."""
        self._last = number = self._last + 1
        self._calls[number] = call
        heappush(self._times, (when, number))
        if when < self._wakes_at:
            self._wake_at(when)
        return number

    def cancel(self, number: int) -> None:
        """Do not make that call, if it was not made yet."""
        calls = self._calls
        calls.pop(number, None)
        if len(self._times) > 2 * len(calls) + SPARE:
            self._times[:] = [time for time in self._times if time[1] in calls]
            heapify(self._times)
        if not calls:
            self._times.clear()
            self._wake_at(inf)

    def soon(self, tell: Callable[[A], None], answer: A) -> None:
        """Make this call in a later turn of the loop, together with others."""
        if not self._answers:
            self._loop.call_soon(self._answer)
        self._answers.append((tell, answer))

    def _answer(self) -> None:
        answers, left = self._answers, PER_TURN
        try:
            while answers and left:
                left -= 1
                tell, answer = answers.popleft()
                tell(answer)
        finally:
            if answers:
                self._loop.call_soon(self._answer)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at = when
        self._timer = self._loop.call_at(when, self._wake) if when < inf else None

    def _wake(self) -> None:
        times, calls, left = self._times, self._calls, PER_TURN
        until = self._loop.time() + self._early_s
        # What is added by these calls needs no timer yet.
        self._wakes_at, self._timer = -inf, None
        try:
            while times and times[0][0] <= until and left:
                call = calls.pop(heappop(times)[1], None)
                if call is not None:
                    left -= 1
                    call()
        finally:
            self._wake_at(times[0][0] if calls else inf)
