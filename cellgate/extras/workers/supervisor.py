"""The first process of a gate with workers: starts the control process and the
workers, and replaces those that end.

1. It has no event loop, and no thread except that of the log, which each process starts for itself: forked
   processes start clean and at once.
2. It gets the signals and passes them on, and talks to the service manager. All processes share the
   listeners.
3. A process that ends is replaced. If one ends before the gate was ready, the gate ends.
4. A blocked process (stopped, or in an endless loop) is killed, and so replaced.
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import uvloop

from cellgate.extras.workers import worker as supervisor_channel
from cellgate.extras.workers.control_start import ControlStart, run_control
from cellgate.extras.workers.worker import Page, run_worker
from cellgate.proxy.config.settings import Reload, Settings
from cellgate.proxy.handover import LISTEN, Inheritance, Listeners, listeners_of
from cellgate.proxy.observe.log import log_line
from cellgate.proxy.process.memory import name_process
from cellgate.proxy.process.signals import notify
from cellgate.proxy.process.tls import LiveTls

CONTROL = -1
"""Its number; workers count from 0."""
LIVED_S = 2.0
"""A process that has lived this long is replaced at once; others after a pause, doubled each time."""
PAUSE_S = 0.1
PAUSE_MAX_S = 5.0
SUPERVISOR_LATE_S = 30.0
"""Processes that have not ended this long after they should are killed."""
CONTROL_STILL_S = 3.0
"""A control process that was blocked for this long is replaced: without it no new request is served."""
WORKER_STILL_S = 30.0
"""A blocked worker gets more time, because its clients are lost with it, and others accept new ones."""
SUPERVISOR_LAG_S = 1.0
"""If the supervisor itself was delayed for longer, the others may have been as well: their time restarts."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_ENDING = (signal.SIGTERM, signal.SIGINT)


class Supervisor:
    """All processes of one gate."""

    def __init__(
        self, settings: Settings, reload: Reload, listeners: Listeners, heritage: Inheritance | None
    ) -> None:
        self._settings = settings
        self._reload = reload
        # Made before any process: one that is started later has at least the certificates of the start.
        self._tls = LiveTls(settings.tls)
        self._listeners = listeners
        self._heritage = heritage
        self._page = Page(settings.workers)
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._children: dict[int, Child] = {}
        self._due: dict[int, float] = {}
        """The processes to be started, and when."""
        self._unlinked: set[int] = set()
        """Workers that could not be introduced to the control process."""
        self._short_lives: dict[int, int] = {}
        self._starts = 0
        """Of control processes, so far."""
        self._reloaded = False
        """Whether units may be others than at the start."""
        self._served = False
        self._judges_from = 0.0
        """When blocked processes are checked again."""
        self._end_by: float | None = None
        self._code = 0

    def run(self) -> int:
        """Returns when all processes have ended."""
        for sock in (self._woken, self._waker):
            sock.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for each in _SIGNALS:
            signal.signal(each, _nothing)
        self._selector.register(self._woken, selectors.EVENT_READ)
        gc.collect()
        gc.freeze()
        self._start(CONTROL)
        if self._heritage is not None:
            self._heritage.leave_to_child()
            self._heritage = None
        for number in range(self._settings.workers):
            self._start(number)
        while self._children or self._due:
            self._wait()
        return self._code

    # -- processes -----------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        self._due.pop(number, None)
        self._page.await_beat(number)
        try:
            ours, theirs = supervisor_channel.pair()
            pid = os.fork()
        except OSError as error:
            if not self._served:
                raise
            log_line("error", f"{_title(number)} cannot be started: {error.strerror}; it is retried")
            self._due[number] = time.monotonic() + PAUSE_MAX_S
            return
        if pid == 0:
            self._become(number, ours, theirs)
        theirs.close()
        ours.setblocking(False)
        child = self._children[number] = Child(number, pid, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, child)
        self._starts += number == CONTROL
        # A new process is connected to those on the other side.
        for other in list(self._children):
            if (other == CONTROL) is not (number == CONTROL):
                self._introduce(max(number, other))

    def _introduce(self, worker: int) -> None:
        """Give the control process and a worker the two ends of a socket."""
        self._unlinked.discard(worker)
        try:
            one, other = socket.socketpair()
            with one, other:
                supervisor_channel.send(self._children[CONTROL].line, {"do": "meet", "worker": worker}, one)
                supervisor_channel.send(self._children[worker].line, {"do": "meet", "worker": worker}, other)
        except (KeyError, BrokenPipeError, ConnectionResetError):
            # One of them has ended. Its replacement will be connected as well.
            return
        except OSError as error:
            log_line("error", f"{_title(worker)} is not linked yet: {error.strerror}; it is retried")
            self._unlinked.add(worker)

    def _tell(self, child: Child, what: dict[str, Any]) -> None:
        # A process that has ended, or does not read, is handled elsewhere.
        with suppress(OSError):
            supervisor_channel.send(child.line, what)

    def _become(self, number: int, ours: socket.socket, line: socket.socket) -> NoReturn:
        """What a forked process does, to its end."""
        code = 1
        try:
            name_process("cellgate-ctl" if number == CONTROL else f"cellgate-{number}")
            signal.set_wakeup_fd(-1)
            for each in _SIGNALS:
                # They may be sent to all processes of a service; only the supervisor acts on them.
                # Not ignored, because programs that are started from here would inherit that.
                signal.signal(each, _nothing)
            self._selector.close()
            for sock in (ours, self._woken, self._waker, *(child.line for child in self._children.values())):
                sock.close()
            self._tls.is_quiet = number != CONTROL
            code = uvloop.run(self._control(line) if number == CONTROL else self._worker(number, line))
        except BaseException as error:
            log_line("error", f"{_title(number)} failed: {error!r}")
        # Exit handlers of a process must run at the end of this one as well.
        sys.exit(code)

    async def _control(self, line: socket.socket) -> int:
        start = ControlStart(
            self._settings,
            self._reload,
            self._tls,
            self._listeners,
            line,
            self._heritage,
            self._starts,
            partial(self._page.beat, CONTROL),
            reloaded=self._reloaded,
        )
        return await run_control(start)

    async def _worker(self, number: int, line: socket.socket) -> int:
        mine = []
        for name, listeners in self._listeners.items():
            for listener in listeners:
                if name.startswith(LISTEN):
                    mine.append(listener)
                else:
                    listener.close()
        return await run_worker(self._settings, self._tls, mine, line, self._page, number)

    def _ended(self, child: Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.line)
        child.line.close()
        del self._children[child.number]
        if child.number != CONTROL:
            self._page.leave(child.number)
        if self._end_by is not None:
            return
        how = f"was killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended"
        if os.WIFEXITED(status):
            how = f"exited with code {os.WEXITSTATUS(status)}"
        if not self._served:
            log_line("error", f"{child.name} {how} before the gate was ready; the gate ends")
            self._code = 1
            self._pass_on(signal.SIGINT)
            return
        pause_s = self._pause_s(child)
        when = f"in {pause_s:g} s" if pause_s else "now"
        log_line("error", f"{child.name} {how}; a new one is started {when}")
        self._due[child.number] = time.monotonic() + pause_s

    def _pause_s(self, child: Child) -> float:
        if time.monotonic() - child.began_at >= LIVED_S:
            self._short_lives[child.number] = 0
            return 0.0
        count = self._short_lives[child.number] = self._short_lives.get(child.number, 0) + 1
        # The first early end may be an accident.
        return 0.0 if count == 1 else min(PAUSE_S * 2.0**count, PAUSE_MAX_S)

    # -- what comes ----------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for something to happen, and act on it."""
        due = min(self._due.values(), default=None)
        now = time.monotonic()
        left_s = 1.0 if due is None else min(1.0, max(0.0, due - now))
        woken = self._selector.select(left_s)
        if time.monotonic() - now > left_s + SUPERVISOR_LAG_S:
            self._judges_from = time.monotonic() + CONTROL_STILL_S
        for key, _ in woken:
            if key.data is None:
                for number in self._woken.recv(64):
                    self._signalled(number)
            else:
                self._received(key.data)
        for number in [number for number, at in self._due.items() if at <= time.monotonic()]:
            self._start(number)
        for number in list(self._unlinked):
            self._introduce(number)
        self._reap()
        self._replace_still(time.monotonic())
        if self._end_by is not None and time.monotonic() > self._end_by:
            self._end_by = time.monotonic() + SUPERVISOR_LATE_S
            for child in self._children.values():
                log_line("error", f"{child.name} did not end in time and is killed")
                os.kill(child.pid, signal.SIGKILL)

    def _replace_still(self, now: float) -> None:
        """Kill blocked processes; their end is then handled like any other."""
        if self._end_by is not None or now < self._judges_from:
            return
        for child in self._children.values():
            still_s = self._page.still_s(child.number, now)
            limit_s = CONTROL_STILL_S if child.number == CONTROL else WORKER_STILL_S
            if still_s is None:
                still_s, limit_s = now - child.began_at, SUPERVISOR_LATE_S
            if still_s > limit_s:
                log_line("error", f"{child.name} has been blocked for {still_s:.0f} s and is killed")
                os.kill(child.pid, signal.SIGKILL)
                # Killed once: by the time it has ended there may be a new one.
                self._page.beat(child.number, now)

    def _received(self, child: Child) -> None:
        received = supervisor_channel.receive(child.line)
        if received is None:
            self._ended(child)
            return
        what, _ = received
        if what["do"] == "ready":
            self._served = True
        elif what["do"] == "reloaded":
            self._reloaded = True
        else:
            notify(*what["words"])
            if any(word.startswith("MAINPID=") for word in what["words"]):
                # There is a successor. Requests in flight end at these workers.
                self._end()
                self._pass_on(signal.SIGUSR2, but=CONTROL)

    def _signalled(self, number: int) -> None:
        if number not in _ENDING:
            self._reloaded |= number == signal.SIGHUP
            # Units, cells and successors are the control process's.
            if (control := self._children.get(CONTROL)) is not None:
                self._tell(control, {"do": "signal", "number": number})
            return
        notify("STOPPING=1")
        self._pass_on(number)

    def _pass_on(self, number: int, but: int | None = None) -> None:
        if number in _ENDING:
            self._end()
        for child in self._children.values():
            if child.number != but:
                self._tell(child, {"do": "signal", "number": number})

    def _end(self) -> None:
        """Nobody is replaced any more, and those that accept are the last to hold the listeners."""
        self._due.clear()
        timeouts = self._settings.timeouts
        self._end_by = time.monotonic() + timeouts.drain_delay_s + timeouts.drain_s + SUPERVISOR_LATE_S
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()

    def _reap(self) -> None:
        """As the first process of a container it also becomes the parent of what those that ended left."""
        known = {child.pid for child in self._children.values()}
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in known:
                    return
                os.waitpid(found.si_pid, 0)


@dataclass(slots=True, eq=False)
class Child:
    """One process."""

    number: int
    pid: int
    line: socket.socket
    began_at: float

    @property
    def name(self) -> str:
        """Its name in the log."""
        return f"{_title(self.number)} (process {self.pid})"


def supervise(settings: Settings, reload: Reload, heritage: Inheritance | None) -> int:
    """Run a gate with workers until it is told to stop; returns the exit code.

    Raises OSError when it cannot listen.
    """
    listeners = asyncio.run(listeners_of(settings, heritage))
    return Supervisor(settings, reload, listeners, heritage).run()


def _title(number: int) -> str:
    return "the control process" if number == CONTROL else f"worker {number}"


def _nothing(_number: int, _frame: object) -> None:
    """What a signal does by itself."""
