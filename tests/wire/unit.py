"""A unit that plays a script on a raw connection, and writes down what reached it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from tests.wire.replies import Fields

PATIENCE_S = 5.0
PAUSE_S = 0.02
"""Long enough for bytes to be read on their own."""

HEAD_LIMIT = 1 << 20


def whole(body: bytes = b"{}", status: str = "200 OK", head: str = "") -> bytes:
    """A plain reply, whole."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{head}\r\n"
    ).encode() + body


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
TOKENS = [b'data: {"id":"t-%d"}\n\n' % number for number in range(4)]
STREAM = SSE_HEAD + b"".join(map(chunk, TOKENS)) + LAST_CHUNK
"""A whole stream as engines write it: each event a chunk."""


class Received(Fields):
    """One request as it reached the unit, and the means to answer it."""

    def __init__(self, head: bytes, connection: Connection) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, self.version = first.split(" ")
        self.fields = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        self.body = b""
        self.connection = connection

    def write(self, data: bytes) -> None:
        """Write bytes of the reply, unless the gate is gone."""
        if not self.connection.writer.is_closing():
            self.connection.writer.write(data)


class Connection:
    """One connection of the gate's; `requests` counts those that came on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.requests = 0

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()

    def abort(self) -> None:
        """Close at once."""
        self.writer.transport.abort()

    def reset(self) -> None:
        """Close at once and say so."""
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # On, and for no time: closing resets.
        self.writer.get_extra_info("socket").setsockopt(1, 13, linger)
        self.abort()

    @property
    def is_gone(self) -> bool:
        """Whether the gate has closed it."""
        return self.reader.at_eof() or self.reader.exception() is not None

    async def until_gone(self) -> None:
        """Wait until the gate has closed it."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_gone:  # noqa: ASYNC110 - whoever reads is busy with the script.
                await asyncio.sleep(0.001)


Play = Callable[[Received], Awaitable[None]]
Script = Play | bytes
"""What the unit does with a request: a coroutine, or the bytes it writes."""


def then_close(data: bytes) -> Play:
    """Write, then close in good order."""

    async def play(request: Received) -> None:
        request.write(data)
        request.connection.close()

    return play


def then_reset(data: bytes) -> Play:
    """Write, and reset the connection once the gate has read what was written."""

    async def play(request: Received) -> None:
        request.write(data)
        await asyncio.sleep(PAUSE_S)
        request.connection.reset()

    return play


def in_turn(*pieces: bytes) -> Play:
    """Write pieces that the gate reads one by one."""

    async def play(request: Received) -> None:
        request.write(pieces[0])
        for piece in pieces[1:]:
            await asyncio.sleep(PAUSE_S)
            request.write(piece)

    return play


class ScriptedUnit:
    """A unit. `script` answers each request; `requests` and `connections` are its record, in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Received] = []
        self.connections: list[Connection] = []
        self.port = 0
        self.server: asyncio.Server | None = None
        self._arrived = asyncio.Condition()

    async def received(self, count: int = 1) -> Received:
        """The `count`th request, once it has arrived whole."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)
        return self.requests[count - 1]

    async def stop_listening(self) -> None:
        """Refuse connections from now on."""
        assert self.server is not None
        self.server.close()
        await asyncio.sleep(0)

    async def serve(self, connection: Connection) -> None:
        """Play the script for each request on one connection."""
        writer = connection.writer
        try:
            while not writer.is_closing():
                request = await self._read(connection)
                async with self._arrived:
                    self.requests.append(request)
                    self._arrived.notify_all()
                if isinstance(self.script, bytes):
                    request.write(self.script)
                else:
                    await self.script(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _read(self, connection: Connection) -> Received:
        head = await connection.reader.readuntil(b"\r\n\r\n")
        request = Received(head[:-4], connection)
        request.body = await connection.reader.readexactly(int(request.get("content-length") or 0))
        connection.requests += 1
        return request


@asynccontextmanager
async def listening(unit: ScriptedUnit, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedUnit]:
    """Let the unit listen; every connection it has is closed at the end."""
    plays: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        unit.connections.append(connection)
        task = asyncio.create_task(unit.serve(connection))
        plays.add(task)
        task.add_done_callback(plays.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", unit.port, limit=HEAD_LIMIT, ssl=tls)
    unit.server = server
    unit.port = server.sockets[0].getsockname()[1]
    try:
        yield unit
    finally:
        server.close()
        # One turn for those that were accepted in this one. On a busy machine strangers knock as well:
        # whoever looks for somebody else who had this port before.
        await asyncio.sleep(0)
        for connection in unit.connections:
            connection.abort()
        for task in tuple(plays):
            task.cancel()
        results = await asyncio.gather(*plays, return_exceptions=True)
        errors = [error for error in results if isinstance(error, Exception)]
        if errors:
            raise ExceptionGroup("the script failed", errors)
