"""From start to exit: what the signals mean.

SIGTERM: stop gracefully; a second one, or SIGINT: stop now. SIGHUP: reload the configuration of units.
SIGUSR2: start a successor; once it accepts clients, let requests in flight end, and exit.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from cellgate.proxy.config.settings import Timeouts
from cellgate.proxy.logs.log import Level, log_line
from cellgate.proxy.process.systemd import notify


class Stoppable(Protocol):
    """A gate, as far as its end is concerned."""

    def announce_stop(self) -> None:
        """The gate is about to stop: health checks report it from now on."""
        ...

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop gracefully."""
        ...

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Let requests in flight end; another process accepts clients."""
        ...


OnSignal = Callable[[int, Callable[[], None]], object]


class Signals:
    """Waits for signals and acts on them. `hand_over` returns whether there is a successor now.

    `on_signal` registers for signals that another process receives; `pid` is the process that receives them;
    `tell` is called with what happens.
    """

    def __init__(
        self,
        gate: Stoppable,
        timeouts: Timeouts,
        reload: Callable[[], None],
        hand_over: Callable[[], Awaitable[bool]],
        on_signal: OnSignal | None = None,
        pid: int | None = None,
        tell: Callable[[Level, str], None] = log_line,
    ) -> None:
        self._gate = gate
        self._timeouts = timeouts
        self._hand_over = hand_over
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._pid = os.getpid() if pid is None else pid
        self._gently, self._hurry, self._succeeded = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._handing_over: asyncio.Task[None] | None = None
        handlers = {
            signal.SIGTERM: self._terminate,
            signal.SIGINT: self._hurry.set,
            signal.SIGHUP: reload,
            signal.SIGUSR2: self._begin_handing_over,
        }
        for number, handler in handlers.items():
            (on_signal or self._loop.add_signal_handler)(number, handler)

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait for `event`, or for a signal to end."""
        await self._first_of(event, self._gently, self._hurry)

    async def run(self) -> None:
        """Returns when the gate has stopped."""
        await self._first_of(self._gently, self._hurry, self._succeeded)
        if self._handing_over is not None and not self._succeeded.is_set():
            self._handing_over.cancel()
            await asyncio.wait([self._handing_over])
        timeouts = self._timeouts
        if self._succeeded.is_set():
            self._tell(
                "info",
                f"a successor accepts clients; answers in flight here have {timeouts.drain_s:g} s to end",
            )
            await self._unless_in_a_hurry(self._gate.leave_to_successor(drain_s=timeouts.drain_s))
        elif not self._hurry.is_set():
            delay_s, drain_s = timeouts.drain_delay_s, timeouts.drain_s
            notify("STOPPING=1")
            accepting = f"not ready, accepting for {delay_s:g} s more"
            self._tell("info", f"stopping: {accepting}, then answers in flight have {drain_s:g} s to end")
            await self._unless_in_a_hurry(self._gate.stop(delay_s=delay_s, drain_s=drain_s))
        if self._hurry.is_set():
            self._tell("info", "stopping now: connections are cut")
            await self._gate.stop(delay_s=0.0, drain_s=0.0)

    def _terminate(self) -> None:
        # The first one after a hand-over changes nothing: a service manager signals all processes of a
        # service.
        if self._gently.is_set():
            self._hurry.set()
            return
        self._gently.set()
        if not self._succeeded.is_set():
            # At once: answers before the turn in which `run` continues must report it as well.
            self._gate.announce_stop()

    def _begin_handing_over(self) -> None:
        if self._pid == 1:
            # When process 1 ends, the container ends.
            self._tell("error", "no hand-over: this is process 1; start another gate, then send SIGTERM here")
        elif self._gently.is_set() or self._succeeded.is_set():
            self._tell("warning", "no hand-over: this gate is stopping already")
        elif self._handing_over is not None:
            self._tell("warning", "no hand-over: another one is in progress")
        else:
            self._handing_over = self._loop.create_task(self._try_to_hand_over())

    async def _try_to_hand_over(self) -> None:
        try:
            if await self._hand_over():
                self._succeeded.set()
        finally:
            self._handing_over = None

    async def _unless_in_a_hurry(self, ending: Awaitable[None]) -> None:
        """Wait for `ending`; a signal to stop now cancels it."""
        task = asyncio.ensure_future(ending)
        hurried = self._loop.create_task(self._hurry.wait())
        await asyncio.wait([task, hurried], return_when=asyncio.FIRST_COMPLETED)
        for each in (task, hurried):
            each.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _first_of(self, *events: asyncio.Event) -> None:
        waiting = [self._loop.create_task(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
