"""From start to exit: what the signals mean.

SIGTERM: stop gracefully; a second one, or SIGINT: stop now. SIGHUP: reload the configuration of units.
SIGUSR2: start a successor; once it accepts clients, let requests in flight end, and exit.

In this order: `Signals`, `notify`, `taken`, `Ticker`, `WatchedFiles`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from cellgate.proxy.config.settings import TICK_S, Timeouts
from cellgate.proxy.observe.counters import RELOADS, tally
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.observe.log import Level, log_line


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


def notify(*words: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send assignments such as READY=1 to systemd (sd_notify). Without it nothing happens."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # A leading @ means the abstract namespace.
    place = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1.0)
            sock.sendto("\n".join(words).encode(), place)
    except OSError as error:
        log_line("warning", f"systemd could not be notified of {' '.join(words)}: {error}")


# What was read again while the gate runs, and whether it was good.


def taken(what: str) -> None:
    """New files are in use."""
    tally(RELOADS, what, "taken")


def refused(what: str, *problems: str) -> None:
    """New files are not used, and what was in use stays: one line in the log for each reason."""
    tally(RELOADS, what, "refused")
    for problem in problems:
        log_line("error", f"{what} not reloaded, what was in use stays: {problem}")


class Ticker:
    """The one timer of a process: calls all of `looks` with the time, in order, every TICK_S seconds.

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


# Files that others replace while the gate runs: certificates, keys and tokens.


Signature = tuple[int, int, int, int] | None
"""What changes with a file: device, inode, size, and time in nanoseconds; None: there is none."""


class WatchedFiles:
    """Notices that one of these files was replaced or rewritten, also behind symbolic links.

    Kubernetes swaps a link to a folder, cert-manager's volumes as well: so what a path leads to is compared,
    and not the path's own entry.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._taken = self._seen = self._look()

    def changed(self) -> bool:
        """Whether they differ from what was taken before, and did not change since the last call; then that
        is what was taken. So who writes two files one after the other is not caught between them.
        """
        if not self._paths:
            return False
        seen, self._seen = self._seen, self._look()
        if self._seen != seen or seen == self._taken:
            return False
        self._taken = seen
        return True

    def _look(self) -> tuple[Signature, ...]:
        return tuple(map(signature, self._paths))


def signature(path: str) -> Signature:
    """What tells one content of a file from another. Links are followed."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
