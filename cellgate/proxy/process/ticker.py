"""The one timer of a process: all deadlines are checked a few times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cellgate.proxy.config.settings import TICK_S
from cellgate.proxy.logs.defects import report_defect


class Ticker:
    """Calls all of `looks` with the time, in order, every TICK_S seconds.

    A failure of one does not stop the others. `lag_s` is how late this tick is.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.looks: list[Callable[[float], object]] = []
        self.lag_s = 0.0
        self._loop = loop
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """The first tick is due after one period."""
        self._due = self._loop.time() + TICK_S
        self._handle = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        self.lag_s = max(0.0, now - self._due)
        for look in tuple(self.looks):
            try:
                look(now)
            except Exception as error:
                report_defect(self._loop, "the gate's timer", error)
        self.start()
