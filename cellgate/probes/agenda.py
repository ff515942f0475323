"""The agenda: calls that are due at their times, with one timer of the loop for all of them.

A timer of the loop for each look would cost as much as the look. Calls that are due at about the same time
are made together: that wakes the process less often, and code and data that were just used are still in the
caches. Calls are kept by slots of time and not in one order: most deadlines are cancelled long before their
time, and need no order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, TypeVar

A = TypeVar("A")

RESOLUTION_S = 0.001
"""Timers of the loop may fire so much too early."""
PER_TURN = 32
"""Calls made in one turn of the loop; the next ones wait for another, so that others have their turn."""
SLOTS_PER_S = 100
SPARE = 64
"""Slots without calls that are kept until their time, beside two for each call."""

_when = attrgetter("when")


class Due:
    """A call that is to be made at a time; `call` is None once it was made or cancelled."""

    __slots__ = ("call", "when")

    def __init__(self, when: float, call: Callable[[], None]) -> None:
        self.when = when
        self.call: Callable[[], None] | None = call


class Agenda:
    """Calls, each made once unless it is cancelled: at its time, or up to `early_s` earlier, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, early_s: float = RESOLUTION_S) -> None:
        self._loop = loop
        self._early_s = early_s
        self._slots: dict[int, dict[Due, None]] = {}
        """Calls by the slot of their time, in the order in which they were added."""
        self._order: list[int] = []
        """A heap of the numbers of these slots."""
        self._next: deque[Due] = deque()
        """Calls whose time has come."""
        self._count = 0
        """Calls that are neither made nor cancelled."""
        self._answers: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = inf

    def at(self, when: float, call: Callable[[], None]) -> Due:
        """Make this call then; what is returned is for `cancel`."""
        due, slot, slots = Due(when, call), int(when * SLOTS_PER_S), self._slots
        if slot in slots:
            slots[slot][due] = None
        else:
            slots[slot] = {due: None}
            heappush(self._order, slot)
            if len(slots) > 2 * self._count + SPARE:
                self._forget_empty()
        self._count += 1
        if when < self._wakes_at:
            self._wake_at(when)
        return due

    def cancel(self, due: Due) -> None:
        """Do not make that call, if it was not made yet."""
        if due.call is None:
            return
        due.call = None
        slot = self._slots.get(int(due.when * SLOTS_PER_S))
        if slot is not None:
            slot.pop(due, None)
        self._count -= 1
        if not self._count:
            self._slots.clear()
            self._order.clear()
            self._next.clear()
            self._wake_at(inf)

    def _forget_empty(self) -> None:
        self._slots = {number: slot for number, slot in self._slots.items() if slot}
        self._order[:] = self._slots
        heapify(self._order)

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
        # What is added by these calls needs no timer yet.
        self._wakes_at, self._timer = -inf, None
        following, left = self._next, PER_TURN
        try:
            self._collect(self._loop.time() + self._early_s)
            while following and left:
                due = following.popleft()
                call, due.call = due.call, None
                if call is not None:
                    self._count -= 1
                    left -= 1
                    call()
        finally:
            self._wake_at(self._next_at())

    def _collect(self, until: float) -> None:
        """Find the calls whose time has come."""
        order, slots, last = self._order, self._slots, int(until * SLOTS_PER_S)
        found: list[Due] = []
        while order and order[0] < last:
            found += slots.pop(heappop(order))
        if order and order[0] == last:
            slot = slots[last]
            due_now = [due for due in slot if due.when <= until]
            for due in due_now:
                del slot[due]
            found += due_now
        found.sort(key=_when)
        self._next += found

    def _next_at(self) -> float:
        """When the next call is due."""
        if self._next:
            return self._next[0].when
        order, slots = self._order, self._slots
        while order:
            if slot := slots[order[0]]:
                return min(slot, key=_when).when
            del slots[heappop(order)]
        return inf
