"""A client whose answer comes faster than it reads it: what is kept for it, and when it is too slow.

Its unit goes on until `LIMITS.unsent_bytes` wait in the gate: so a slot is held for as long as its engine
works, and not for as long as its client reads. All clients together have `LIMITS.unsent_total_bytes`; who
comes when that is used up has its unit paused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.process.tcp_info import acknowledged

LOOK_S = 0.01
"""How often what waits is looked at, beside with each read that is not passed on unread: the loop tells only
once that something does.
"""


class SlowReader:
    """From when on something waits for a client until all of it was taken. `hold_back` is called once, when
    its unit has to wait.
    """

    __slots__ = ("_acknowledged", "_backlogs", "_has_room", "_hold_back", "_since", "_timer", "_transport")

    def __init__(
        self, transport: asyncio.Transport, backlogs: Backlogs, now: float, hold_back: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._backlogs = backlogs
        self._hold_back = hold_back
        self._since, self._acknowledged = now, acknowledged(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._has_room = backlogs.take()
        if self._has_room:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        else:
            hold_back()

    def look(self) -> None:
        """Hold its unit back if as much waits as may."""
        if self._timer is not None and self._transport.get_write_buffer_size() >= LIMITS.unsent_bytes:
            self._timer.cancel()
            self._timer = None
            reached("unsent_bytes")
            self._hold_back()

    def _look_again(self) -> None:
        self.look()
        if self._timer is not None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def is_too_slow(self, now: float) -> bool:
        """Whether it has taken too little for too long."""
        if self._acknowledged is None or now - self._since < LIMITS.slow_reader_s:
            return False
        before, self._acknowledged = self._acknowledged, acknowledged(self._transport)
        self._since = now
        if self._acknowledged is None:
            return False
        return self._acknowledged - before < LIMITS.slow_reader_s * LIMITS.slow_reader_bytes_per_s

    def end(self) -> None:
        """It has taken all, or has left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._has_room:
            self._has_room = False
            self._backlogs.give()


class Backlogs:
    """The memory for what slow clients have yet to read. Each has all that it may have, or none."""

    def __init__(self) -> None:
        self.held = 0

    def take(self) -> bool:
        """Reserve as much as one may have; False: there is not so much left."""
        if self.held + LIMITS.unsent_bytes > LIMITS.unsent_total_bytes:
            reached("unsent_total_bytes")
            return False
        self.held += LIMITS.unsent_bytes
        return True

    def give(self) -> None:
        """Give back what one had."""
        self.held -= LIMITS.unsent_bytes
