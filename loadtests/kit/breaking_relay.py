"""A TCP relay between a gate and a unit: it cuts a stream at a byte, or stops like a unit that hangs."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

_READ_BYTES = 1 << 16

Limit = Callable[[bytes], int | None]
"""How many bytes of the answer to a request pass before its connection is cut; None: all."""


class BreakingRelay:
    """Relays to the unit at `url`; its own address is at `self.url`. A context manager within a loop.

    `limit` is asked with each request. After `freezes_after` more bytes of answers it stops by itself.
    """

    def __init__(self, url: str, limit: Limit = lambda _: None) -> None:
        place = urlsplit(url)
        self._to = place.hostname or "127.0.0.1", place.port or 80
        self.limit = limit
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.freezes_after: int | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    def thaw(self) -> None:
        """The end of a freeze: connections that were open are gone, as those of a process that was killed."""
        self.freezes_after = None
        for task in self._tasks:
            task.cancel()
        self._goes_on.set()

    async def _relay(self, gate_reads: asyncio.StreamReader, gate: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection(self, gate)
        try:
            await self._goes_on.wait()
            unit_reads, unit = await asyncio.open_connection(*self._to)
            try:
                back = asyncio.create_task(connection.back(unit_reads))
                try:
                    await connection.forth(gate_reads, unit)
                finally:
                    back.cancel()
            finally:
                unit.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            gate.transport.abort()
            self._tasks.discard(task)

    def passed(self, size: int) -> None:
        """So many bytes of an answer have passed."""
        if self.freezes_after is not None:
            self.freezes_after -= size
            if self.freezes_after <= 0:
                # From now on no byte passes, and connections are accepted.
                self._goes_on.clear()

    async def pass_on(self, data: bytes, to: asyncio.StreamWriter) -> None:
        """Send it, unless nothing passes now."""
        await self._goes_on.wait()
        to.write(data)
        await to.drain()


class _Connection:
    """One connection of the gate. `left` bytes of the present answer may pass; None: all."""

    def __init__(self, relay: BreakingRelay, gate: asyncio.StreamWriter) -> None:
        self._relay = relay
        self._gate = gate
        self._left: int | None = None

    async def forth(self, reads: asyncio.StreamReader, unit: asyncio.StreamWriter) -> None:
        """What the gate sends."""
        while data := await reads.read(_READ_BYTES):
            self._left = self._relay.limit(data) if data.startswith(b"POST ") else self._left
            await self._relay.pass_on(data, unit)

    async def back(self, reads: asyncio.StreamReader) -> None:
        """What the unit answers."""
        with contextlib.suppress(OSError):
            while data := await reads.read(_READ_BYTES):
                if self._left is not None and len(data) >= self._left:
                    await self._relay.pass_on(data[: self._left], self._gate)
                    break
                if self._left is not None:
                    self._left -= len(data)
                await self._relay.pass_on(data, self._gate)
                self._relay.passed(len(data))
        self._gate.close()
