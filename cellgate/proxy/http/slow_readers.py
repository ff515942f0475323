"""A client whose answer comes faster than it reads it: what is kept for it, and when it is too slow.

Its unit goes on until `LIMITS.unsent_bytes` wait in the gate: so a slot is held for as long as its engine
works, and not for as long as its client reads. All clients together have `LIMITS.unsent_total_bytes`; who
comes when that is used up has its unit paused at once. A unit that was paused for a second needs no slot for
that answer any more (see `UnitState.park`), so that these are limited in number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.process.tcp_info import acknowledged

READER_LOOK_S = 0.01
"""How often what waits is looked at, beside with each read that is not passed on unread: the loop tells only
once that something does.
"""


class SlowReader:
    """From when on something waits for a client until all of it was taken. `make_wait` is called once, when
    its unit has to wait, and says whether there is one; `abort` may be, in a turn of its own, when too many
    wait: its answer is to end.
    """

    __slots__ = (
        "_abort",
        "_acknowledged",
        "_backlogs",
        "_late_at",
        "_late_from",
        "_make_wait",
        "_since",
        "_timer",
        "_transport",
        "has_room",
        "is_over",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        backlogs: Backlogs,
        now: float,
        make_wait: Callable[[], bool],
        abort: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._backlogs = backlogs
        self._make_wait, self._abort, self.is_over = make_wait, abort, False
        self._since = self._late_at = now
        self._acknowledged = self._late_from = acknowledged(transport)
        self._timer: asyncio.TimerHandle | None = None
        self.has_room = backlogs.take()
        if self.has_room:
            self._timer = asyncio.get_running_loop().call_later(READER_LOOK_S, self._look_again)
        else:
            self._hold()

    def look(self) -> None:
        """Hold its unit back if as much waits as may."""
        if self._timer is not None and self._transport.get_write_buffer_size() >= LIMITS.unsent_bytes:
            self._timer.cancel()
            self._timer = None
            reached("unsent_bytes")
            self._hold()

    def _hold(self) -> None:
        if self._make_wait():
            self._backlogs.hold(self)

    def abort(self) -> None:
        """Others have their units wait as well, and take more."""
        if not self.is_over:
            self._abort()

    def _look_again(self) -> None:
        self.look()
        if self._timer is not None:
            self._timer = asyncio.get_running_loop().call_later(READER_LOOK_S, self._look_again)

    def limit_passed(self, now: float, *, is_awaited: bool) -> str:
        """The limit that it has passed, because it has taken too little for too long; empty: none.
        `is_awaited`: others wait for what it occupies.
        """
        if self._acknowledged is None or now - self._late_at < LIMITS.slow_reader_awaited_s:
            return ""
        taken, least = acknowledged(self._transport), LIMITS.slow_reader_bytes_per_s
        if taken is None or self._late_from is None:
            return ""
        late_s, late = now - self._late_at, taken - self._late_from
        self._late_at, self._late_from = now, taken
        if is_awaited and late < late_s * least:
            return "slow_reader_awaited_s"
        if now - self._since < LIMITS.slow_reader_s:
            return ""
        since_s, before = now - self._since, self._acknowledged
        self._since, self._acknowledged = now, taken
        return "slow_reader_s" if taken - before < since_s * least else ""

    def taken_each_s(self, now: float) -> float:
        """How many bytes a second it has taken lately: since it was last looked at, or last but one."""
        taken = acknowledged(self._transport)
        if taken is None or self._acknowledged is None:
            return 0.0
        return (taken - self._acknowledged) / max(now - self._since, READER_LOOK_S)

    def end(self) -> None:
        """It has taken all, or has left."""
        if self._timer is not None:
            self._timer.cancel()
        self.is_over = True
        self._backlogs.abort(self)
        if self.has_room:
            self.has_room = False
            self._backlogs.give()


class Backlogs:
    """The memory for what slow clients have yet to read. Each has all that it may have, or none."""

    def __init__(self) -> None:
        self.held = 0
        self._held_back: dict[SlowReader, None] = {}

    def hold(self, reader: SlowReader) -> None:
        """The unit of a client has to wait. If too many do, the answer of who reads slowest ends."""
        self._held_back[reader] = None
        if len(self._held_back) > LIMITS.held_back_streams:
            loop = asyncio.get_running_loop()
            now = loop.time()
            slowest = min(self._held_back, key=lambda one: one.taken_each_s(now))
            self.abort(slowest)
            reached("held_back_streams")
            loop.call_soon(slowest.abort)

    def abort(self, reader: SlowReader) -> None:
        """It does not have to wait any more."""
        self._held_back.pop(reader, None)

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
