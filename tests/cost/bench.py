"""The gate without sockets: requests and chunks are handed to it as its transports would, and counted.

What is counted are the bytecodes that Python executes. They are the same on every machine and at every hour,
so that a slower hot path is seen in the change that makes it slower; what a bytecode takes is not (for that
there is `make bench`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean, median
from types import CodeType, FrameType
from typing import Any, NamedTuple

from cellgate.proxy.app import make_gate
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.server import ClientConnection
from cellgate.proxy.http.turns import ReadScheduler
from cellgate.proxy.http.unit import UnitConnection
from cellgate.proxy.observe.access_log import AccessLog
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.request.body import read_ask
from cellgate.router.nouns import Ask, Evidence, Fleet, Sign, Strength, Unit

UNITS = 2
TICK_S = 2.0**-17
"""What passes between two looks at the clock: what is learned of times is always the same."""


class Wire(asyncio.Transport):
    """A transport that leads nowhere; `written` is called when something is written."""

    def __init__(self, written: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._written = written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written()

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """Nobody is told; there is nothing to read or to end."""

    close = pause_reading = resume_reading = abort

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default


class Nowhere:
    """Where the access log goes."""

    def write(self, data: memoryview, /) -> int | None:
        return len(data)


class Bench:
    """A gate with everything on that is by default, before units that are UP, and one client. `options` are
    more fields of Settings.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, units: int = UNITS, **options: Any) -> None:
        loop.time = partial(next, map(TICK_S.__mul__, itertools.count()))  # type: ignore[method-assign]
        fleet = Fleet(
            units=tuple(Unit(f"u{n}", "c", f"http://127.0.0.1:{n}", ("m",)) for n in range(1, units + 1))
        )

        async def read(body: bytes, *_: object) -> Ask | Failure:
            return read_ask(body)

        self._log = AccessLog("json", Nowhere(), lambda: 1.7e9)
        gate = make_gate(
            Settings(fleet, **options),
            loop,
            random.Random(1),
            events=EventLog(lambda: 0.0, 2, lambda *_: None),
            access_log=self._log,
            read=read,
        )
        self.plane = gate.plane
        self.gateway, board, now = gate.gateway, gate.plane.board, loop.time()
        # The loop stands still: what is due in its next turn is done at once.
        at_once = ReadScheduler(lambda turn: turn(), LIMITS.request_bytes_per_turn)
        self.gateway.start_scheduler = self.gateway.services.start_scheduler = at_once
        board.configure(fleet, now)
        for state in board:
            board.observe(Evidence(state.unit.name, Sign.GOOD, Strength.STRONG, "canary", "it answered", now))
            state.up_since = now - 1e6
            self._connect(state.unit.name)
        board.tick(now)
        self._asked: list[UnitConnection] = []
        self.welcome()

    def welcome(self) -> None:
        """From now on another client asks."""
        self.client = ClientConnection(self.gateway)
        self.client.connection_made(Wire())

    def ask(self, request: bytes) -> UnitConnection:
        """Hand over a whole request; the connection of the unit that got it."""
        self._asked.clear()
        self.client.data_received(request)
        (conn,) = self._asked
        return conn

    def close(self) -> None:
        """End its thread."""
        self._log.close()

    def _connect(self, unit: str) -> None:
        pool = self.gateway.services.pool(self.plane.board.units[unit])
        conn = UnitConnection(pool)
        conn.connection_made(Wire(lambda: self._asked.append(conn)))
        pool.connections[conn] = 0
        pool.give_back(conn)


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """The bytecodes that are executed inside, by function; not those of what happens to be collected then."""
    counts: Counter[CodeType] = Counter()
    gc.disable()
    try:
        with _counting(counts):
            yield counts
    finally:
        gc.enable()
    for code in list(counts):
        if code.co_filename == __file__:
            del counts[code]


if sys.version_info >= (3, 12):

    @contextmanager
    def _counting(counts: Counter[CodeType]) -> Iterator[None]:
        """From 3.12 on a trace function misses the first call of each function; this does not."""
        monitoring = sys.monitoring
        tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION

        def count(code: CodeType, _offset: int) -> None:
            counts[code] += 1

        monitoring.use_tool_id(tool, "counted")
        monitoring.register_callback(tool, event, count)
        monitoring.set_events(tool, event)
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

else:

    @contextmanager
    def _counting(counts: Counter[CodeType]) -> Iterator[None]:
        def trace(frame: FrameType, event: str, _arg: object) -> Any:
            if event == "call":
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
            elif event == "opcode":
                counts[frame.f_code] += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class Cost(NamedTuple):
    """Bytecodes by function, of something done so many times."""

    counts: Counter[CodeType]
    times: int

    @property
    def each(self) -> float:
        """Bytecodes each time."""
        return self.counts.total() / self.times

    def __str__(self) -> str:
        dearest = self.counts.most_common(12)
        return "\n".join(f"{n / self.times:8.1f}  {code.co_qualname}" for code, n in dearest)


def costs_what_works(what: str, few: Sequence[int], many: Sequence[int]) -> None:
    """Assert that with many units of which few work it costs what it costs with those few alone."""
    print(
        f"{what}: {median(few):.0f} and {median(many):.0f} bytecodes; on average {fmean(few):.0f} and "
        f"{fmean(many):.0f}; at most {max(few)} and {max(many)}"
    )
    assert median(many) <= 1.2 * median(few)
    assert fmean(many) <= 1.2 * fmean(few)
