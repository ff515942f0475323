"""A relay of TCP between the gate and a unit, which breaks streams at a certain event: cut, or frozen.

It runs an event loop in a thread of its own. Only answers to generations are counted and broken; while it is
frozen nothing passes in either direction, as if the machine behind it stood still.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Self
from urllib.parse import urlsplit

_READ_BYTES = 1 << 16
_GENERATES = tuple(
    b"POST /v1/%b " % path for path in (b"chat/completions", b"completions", b"messages", b"responses")
)


class Budget:
    """The next answer that is to be cut, at whichever unit. `spent`: so many were."""

    def __init__(self) -> None:
        self.spent = 0
        self._events: int | None = None

    def cut_after(self, events: int | None) -> None:
        """Cut the next answer behind so many events; None: none."""
        self._events = events

    def take(self) -> int | None:
        """Behind how many events the answer that begins now is cut."""
        events, self._events = self._events, None
        return events


class Relay:
    """Before the unit at `url`. A context manager: inside it serves at `port`."""

    def __init__(self, name: str, url: str, budget: Budget) -> None:
        self.name = name
        self._budget = budget
        self.port = 0
        self.events = 0
        """Events that have passed."""
        place = urlsplit(url)
        self._unit = place.hostname or "127.0.0.1", place.port or 80
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._moving = asyncio.Event()
        self._moving.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._server: asyncio.Server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def freeze(self, *, frozen: bool) -> None:
        """Stand still, or go on."""
        self._loop.call_soon_threadsafe(self._moving.clear if frozen else self._moving.set)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            unit_reader, unit_writer = await asyncio.open_connection(*self._unit)
            link = _Link(self, reader, writer, unit_reader, unit_writer)
            try:
                await asyncio.gather(link.ask(), link.answer(), return_exceptions=True)
            finally:
                unit_writer.transport.abort()
        writer.transport.abort()

    async def moved(self) -> None:
        """Wait until it is not frozen."""
        await self._moving.wait()

    def cut(self) -> None:
        """An answer was cut."""
        self._budget.spent += 1

    def take_cut(self) -> int | None:
        """After how many events this answer is cut."""
        return self._budget.take()


class _Link:
    """One connection of the gate."""

    def __init__(
        self,
        relay: Relay,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        unit_reader: asyncio.StreamReader,
        unit_writer: asyncio.StreamWriter,
    ) -> None:
        self._relay = relay
        self._reader, self._writer = reader, writer
        self._unit_reader, self._unit_writer = unit_reader, unit_writer
        self._left: int | None = None

    async def ask(self) -> None:
        """From the gate to the unit."""
        generates = False
        with suppress(OSError):
            while data := await self._reader.read(_READ_BYTES):
                # The body may come behind its head.
                generates = data.startswith(_GENERATES) or (generates and not data.startswith(b"POST "))
                if generates and b'"stream":true' in data:
                    self._left = self._relay.take_cut()
                await self._relay.moved()
                self._unit_writer.write(data)
        self._unit_writer.close()

    async def answer(self) -> None:
        """From the unit to the gate."""
        while data := await self._unit_reader.read(_READ_BYTES):
            await self._relay.moved()
            events = data.split(b"\n\n")
            self._relay.events += len(events) - 1
            if self._left is not None:
                if len(events) > self._left:
                    self._relay.cut()
                    self._writer.write(b"\n\n".join(events[: self._left]))
                    await self._writer.drain()
                    self._writer.transport.abort()
                    self._unit_writer.close()
                    return
                self._left -= len(events) - 1
            self._writer.write(data)
        self._writer.close()
