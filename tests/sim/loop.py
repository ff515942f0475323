"""An asyncio event loop in virtual time.

When nothing is ready the clock jumps to the next event instead of waiting, so an hour costs what its
callbacks cost. Two heaps hold the future: asyncio's own (`call_later`), which belongs to the program under
test, and `outside`, which belongs to the simulated world (bytes on the wire, engine steps). A leaked timer
is always the program's.
"""

from __future__ import annotations

import asyncio
import heapq
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


class SimLoop(asyncio.BaseEventLoop):
    """Virtual time, no sockets, no threads. `network` must be set before anything connects or listens.

    `problems` collects what reaches the exception handler and the tasks that failed unheard: each fails the
    test. `run_until_complete` raises `Deadlock` when no event is left, or `limit_s` of virtual time has
    passed.
    """

    network: Network
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self, limit_s: float = 7200.0) -> None:
        super().__init__()
        self._now_s = START_S
        self._end_s = START_S + limit_s
        self._selector = _Future(self)
        self._failed: list[asyncio.Task[Any]] = []
        self._problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self._problems.append(context))

    def time(self) -> float:
        return self._now_s

    def block(self, delay_s: float) -> None:
        """Let time pass inside the running callback, as work that hogs the loop does."""
        self._now_s += delay_s

    def outside(self, delay_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> asyncio.Handle:
        """Schedule an event of the world outside the program; the handle can be cancelled."""
        return self._selector.add(self._now_s + delay_s, asyncio.Handle(callback, args, self, Context()))

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

    def _process_events(self, event_list: list[asyncio.Handle]) -> None:
        self._ready.extend(event_list)

    def _write_to_self(self) -> None:
        """Nothing to wake: the loop never sleeps."""

    def pending(self) -> str:
        """The unfinished tasks and the program's timers, for an error message."""
        tasks = sorted(repr(task) for task in asyncio.all_tasks(self))
        return "\n  ".join(
            [f"{len(tasks)} tasks pending:", *tasks, f"{len(self.timers)} timers", *map(repr, self.timers)]
        )


class _Future:
    """The world's heap of events, in the place of a selector: `select` moves the clock instead of waiting."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, asyncio.Handle]] = []
        self._order = count()
        self._turns = 0

    def add(self, when_s: float, handle: asyncio.Handle) -> asyncio.Handle:
        heapq.heappush(self._heap, (when_s, next(self._order), handle))
        return handle

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        loop = self._loop
        if timeout == 0:
            self._turns += 1
            if self._turns > TURNS_IN_ONE_INSTANT:
                self._turns = 0
                raise Deadlock(f"time stands still at {loop.time():.3f} s; {loop.pending()}")
        else:
            self._turns = 0
            loop._now_s = self._next_instant()
        due = []
        while self._heap and self._heap[0][0] <= loop._now_s:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def _next_instant(self) -> float:
        loop = self._loop
        while self._heap and self._heap[0][2].cancelled():
            heapq.heappop(self._heap)
        moments = [self._heap[0][0]] if self._heap else []
        if loop._scheduled:
            moments.append(loop._scheduled[0].when())
        if not moments:
            raise Deadlock(f"nothing will ever happen after {loop.time():.3f} s; {loop.pending()}")
        if min(moments) > loop._end_s:
            raise Deadlock(f"the time limit passed at {loop._end_s:.3f} s; {loop.pending()}")
        return max(loop.time(), min(moments))

    def close(self) -> None:
        self._heap.clear()


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
