"""An asyncio event loop in virtual time.

When nothing is ready the clock jumps to the next event instead of waiting, so an hour costs what its
callbacks cost. Two heaps hold the future: asyncio's own (`call_later`), which belongs to the program under
test, and `outside`, which belongs to the simulated world (bytes on the wire, engine steps). A leaked timer
is always the program's.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from tests.sim.network import Network

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_S = 1000.0
EXECUTOR_DELAY_S = 0.001
TURNS_IN_ONE_INSTANT = 100_000


class Deadlock(RuntimeError):  # noqa: N818
    """The simulation cannot go on: nothing will ever happen, time stands still, or its limit has passed."""


class Event:
    """What happens outside the program, in no context of its own, unless it is cancelled before."""

    __slots__ = ("_args", "_callback", "_cancelled", "_loop")

    def __init__(self, loop: SimLoop, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._args = ()

    def _run(self) -> None:
        try:
            self._callback(*self._args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            message = f"exception in {self._callback!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})


class SimLoop(asyncio.BaseEventLoop):
    """Virtual time, no sockets, no threads. `network` must be set before anything connects or listens.

    `problems` collects what reaches the exception handler and the tasks that failed unheard: each fails the
    test. `run_until_complete` raises `Deadlock` when no event is left, or `limit_s` of virtual time has
    passed.
    """

    network: Network
    _ready: deque[asyncio.Handle | Event]
    _scheduled: list[asyncio.TimerHandle]
    _clock_resolution: float
    _stopping: bool

    def __init__(self, limit_s: float = 7200.0) -> None:
        super().__init__()
        self.now_s = START_S
        self._end_s = START_S + limit_s
        self._future: list[tuple[float, int, Event]] = []
        self._order = count()
        self._turns = 0
        self._failed: list[asyncio.Task[Any]] = []
        self._problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self._problems.append(context))

    def time(self) -> float:
        return self.now_s

    def block(self, delay_s: float) -> None:
        """Let time pass inside the running callback, as work that hogs the loop does."""
        self.now_s += delay_s

    def outside(self, delay_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> Event:
        """Schedule an event of the world outside the program; it can be cancelled."""
        event = Event(self, callback, args)
        heapq.heappush(self._future, (self.now_s + delay_s, next(self._order), event))
        return event

    @property
    def timers(self) -> list[asyncio.TimerHandle]:
        """The program's timers that have yet to fire, soonest first."""
        return sorted(handle for handle in self._scheduled if not handle.cancelled())

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Exception-handler contexts, in order, then the tasks whose exception nobody took."""
        return self._problems + [
            {"message": f"{task!r} failed unheard", "exception": _error(task)}
            for task in filter(_is_unheard, self._failed)
        ]

    def forgive(self) -> None:
        """Forget the problems so far: for tests that cause one on purpose."""
        self._problems.clear()
        for task in self._failed:
            task.exception()

    # What asyncio asks of a loop

    def create_task(
        self, coro: Any, *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = super().create_task(coro, name=name, context=context)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and _is_unheard(task):
            # Those whose exception was taken meanwhile are let go, with all that their frames hold.
            self._failed = [*filter(_is_unheard, self._failed), task]

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` in this thread, a little later."""
        future: asyncio.Future[T] = self.create_future()
        self.outside(EXECUTOR_DELAY_S, _settle, future, func, args)
        return future

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        addresses = await self.network.resolve(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (ip, port)) for ip in addresses]

    async def create_connection(self, factory: Any, host: Any, port: Any, **options: Any) -> Any:  # type: ignore[override]
        _refuse_tls(options)
        return await self.network.connect(factory, host, port)

    async def create_server(self, factory: Any, host: Any, port: Any, **options: Any) -> Any:  # type: ignore[override]
        _refuse_tls(options)
        return self.network.listen(factory, host, port)

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop never sleeps."""

    def _run_once(self) -> None:
        """As asyncio's, but that the clock jumps to the next event instead of waiting for it."""
        ready, future, timers = self._ready, self._future, self._scheduled
        if ready or self._stopping:
            self._turns += 1
            if self._turns > TURNS_IN_ONE_INSTANT:
                self._turns = 0
                raise Deadlock(f"time stands still at {self.now_s:.3f} s; {self.pending()}")
        else:
            self._turns = 0
            self._jump()
        while future and future[0][0] <= self.now_s:
            ready.append(heapq.heappop(future)[2])
        while timers and timers[0]._when < self.now_s + self._clock_resolution:  # type: ignore[attr-defined]
            ready.append(heapq.heappop(timers))
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self) -> None:
        future, timers = self._future, self._scheduled
        while future and future[0][2]._cancelled:
            heapq.heappop(future)
        while timers and timers[0].cancelled():
            heapq.heappop(timers)
        next_s = min(future[0][0] if future else math.inf, timers[0].when() if timers else math.inf)
        if next_s == math.inf:
            raise Deadlock(f"nothing will ever happen after {self.now_s:.3f} s; {self.pending()}")
        if next_s > self._end_s:
            raise Deadlock(f"the time limit passed at {self._end_s:.3f} s; {self.pending()}")
        self.now_s = max(self.now_s, next_s)

    def pending(self) -> str:
        """The unfinished tasks and the program's timers, for an error message."""
        tasks = sorted(repr(task) for task in asyncio.all_tasks(self))
        return "\n  ".join(
            [f"{len(tasks)} tasks pending:", *tasks, f"{len(self.timers)} timers", *map(repr, self.timers)]
        )


def _settle(future: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(func(*args))
    except Exception as error:
        future.set_exception(error)


def _is_unheard(task: asyncio.Task[Any]) -> bool:
    """Whether nobody has taken its exception."""
    return getattr(task, "_log_traceback", False)


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    """A failed task's exception, without marking it as taken."""
    return getattr(task, "_exception", None)


def _refuse_tls(options: dict[str, Any]) -> None:
    if options.get("ssl"):
        raise NotImplementedError("the simulated network has no TLS")
