"""What a transport promises is checked on the simulated loop and on uvloop with real sockets.

The gate relies on these laws, and the simulation is only as good as they are. So whatever the gate relies on
must be a law, the oddities of uvloop included. No law sleeps; each waits for events, at most `TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import uvloop

from tests.sim.tcp import Link
from tests.sim.world import World

TIMEOUT_S = 10.0
LOCALHOST = "127.0.0.1"
MOST_WRITES = 1000
EXCHANGES = 30  # More than enough for whatever is on its way to have arrived.
Law = Coroutine[Any, Any, None]
Problems = list[dict[str, Any]]


class Recorder(asyncio.Protocol):
    """Writes down what the transport tells it. `keep_open` is its answer to the peer's end."""

    transport: asyncio.Transport

    def __init__(self, *, keep_open: bool = False) -> None:
        self.keep_open = keep_open
        self.log: list[str] = []
        self.data = b""
        self.error: Exception | None = None
        self._changed = asyncio.Event()

    def _note(self, what: str) -> None:
        self.log.append(what)
        self._changed.set()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> None:
        await self.until(lambda: "lost" in self.log)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._note("made")

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._note("data")

    def eof_received(self) -> bool:
        self._note("eof")
        return self.keep_open

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._note("lost")

    @property
    def story(self) -> list[str]:
        """The log with runs of equal entries told once."""
        return [what for what, before in zip(self.log, [None, *self.log], strict=False) if what != before]


@asynccontextmanager
async def listening(factory: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(factory, LOCALHOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def acting(told: str, act: Callable[[Recorder], object]) -> Recorder:
    """One that acts each time it is told something."""
    recorder = Recorder()
    note = getattr(recorder, told)

    def note_and_act(*args: object) -> object:
        answer = note(*args)
        act(recorder)
        return answer

    setattr(recorder, told, note_and_act)
    return recorder


def failing(told: str, error: Exception) -> Recorder:
    """One that raises when it is told something."""

    def fail(_: Recorder) -> None:
        raise error

    return acting(told, fail)


@asynccontextmanager
async def joined(
    client: Recorder | None = None, server: Recorder | None = None
) -> AsyncIterator[tuple[Recorder, Recorder]]:
    """Connect two; abort what is left of them at the end."""
    client, server = client or Recorder(), server or Recorder()
    async with listening(lambda: server) as port:
        await asyncio.get_running_loop().create_connection(lambda: client, LOCALHOST, port)
        await server.until(lambda: "made" in server.log)
        try:
            yield client, server
        finally:
            for end in (client, server):
                end.transport.abort()
                await end.until_lost()


async def calm() -> None:
    """Wait until what other connections have on the way must have arrived."""
    async with joined() as (near, far):
        for _ in range(EXCHANGES):
            near.transport.write(b".")
            await far.until(lambda: far.data)
            far.transport.write(b".")
            await near.until(lambda: near.data)
            near.data = far.data = b""


@contextmanager
def problems() -> Iterator[Problems]:
    """Take what reaches the exception handler."""
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    caught: Problems = []
    loop.set_exception_handler(lambda _, context: caught.append(context))
    try:
        yield caught
    finally:
        loop.set_exception_handler(before)


def fill(writer: Recorder) -> int:
    """Write until the transport asks to stop; the bytes written."""
    for count in range(MOST_WRITES):
        if "pause" in writer.log:
            return count * 65_536
        writer.transport.write(b"x" * 65_536)
    raise AssertionError("the transport never asks to stop")


def simulated(seed: int, link: Link) -> asyncio.AbstractEventLoop:
    world = World(seed)
    world.net.default_link = link
    return world.loop


EVEN = Link(latency_s=(0.001, 0.001), split=0.0, hiccup=0.0)  # What is sent together arrives together.
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "simulated, uneven": lambda: simulated(1, Link()),
    "simulated, rough": lambda: simulated(2, Link(split=0.5, hiccup=0.3)),
    "simulated, even": lambda: simulated(3, EVEN),
    "uvloop": uvloop.new_event_loop,
}
Play = Callable[[Law], None]
