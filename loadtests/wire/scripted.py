"""The scripted engine: each request is handed to a script, which answers it byte for byte.

Beside `loadtests.simunit`, which behaves as an engine does, it is the only engine of the load tools. What
must stay true: it costs little, so that it is the gate which is measured.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, cast

import httptools

Script = Callable[["Request"], Coroutine[Any, Any, None] | None]
"""Answers a request, at once or later. While a coroutine runs, the next request on its connection waits."""


class Request:
    """One request, and the way to answer it. `on_gone`: what to call when its client leaves."""

    __slots__ = ("_connection", "body", "keeps_connection", "method", "on_gone", "target", "write")

    def __init__(self, connection: "_Connection", method: bytes, target: bytes, body: bytes) -> None:
        self.method, self.target, self.body = method, target, body
        self.keeps_connection = True
        self.on_gone: Callable[[], object] | None = None
        self.write = connection.transport.write
        self._connection = connection

    @property
    def is_gone(self) -> bool:
        """Whether nobody takes an answer any more."""
        return self._connection.transport.is_closing()

    async def send(self, data: bytes) -> None:
        """Write, and wait until there is room for more. Raises ConnectionResetError: the client has gone."""
        self.write(data)
        await self._connection.has_room.wait()
        if self.is_gone:
            raise ConnectionResetError

    async def until_gone(self) -> None:
        """Wait until the client leaves."""
        await self._connection.gone.wait()

    def close(self) -> None:
        """Close the connection in good order."""
        self._connection.transport.close()

    def abort(self) -> None:
        """Close it at once."""
        self._connection.transport.abort()


class _Connection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, script: Script) -> None:
        self.has_room, self.gone = asyncio.Event(), asyncio.Event()
        self.has_room.set()
        self._script = script
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._body: list[bytes] = []
        self._request: Request | None = None
        self._playing: asyncio.Task[None] | None = None
        self._waiting: deque[Request] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # No script speaks another protocol; it may answer and be silent.
            pass
        except httptools.HttpParserError:
            # Some routers try HTTP/2 first.
            self.transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self.gone.set()
        self.has_room.set()
        if self._request is not None and self._request.on_gone is not None:
            self._request.on_gone()

    def pause_writing(self) -> None:
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.has_room.set()

    def on_message_begin(self) -> None:
        self._target, self._body = b"", []

    def on_url(self, piece: bytes) -> None:
        self._target += piece

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        request = Request(self, self._parser.get_method(), self._target, b"".join(self._body))
        request.keeps_connection = self._parser.should_keep_alive()
        if self._playing is None:
            self._play(request)
        else:
            self._waiting.append(request)

    def _play(self, request: Request) -> None:
        self._request = request
        playing = self._script(request)
        if playing is not None:
            self._playing = asyncio.create_task(self._finish(playing))

    async def _finish(self, playing: Coroutine[Any, Any, None]) -> None:
        with suppress(ConnectionError):
            await playing
        self._playing = None
        while self._waiting and self._playing is None:
            self._play(self._waiting.popleft())


async def listen(script: Script, port: int = 0, host: str = "127.0.0.1") -> asyncio.Server:
    """Let a script answer at a port; 0 finds a free one. Raises OSError."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(partial(_Connection, script), host, port, backlog=1024)


def port_of(server: asyncio.Server) -> int:
    """Where it listens."""
    port: int = server.sockets[0].getsockname()[1]
    return port


async def announce(ports: object) -> None:
    """Say on a line of JSON where it listens, and return when whoever reads that has gone: as standard input
    ends. `processes.announcing` is the other side.
    """
    print(json.dumps(ports), flush=True)
    await asyncio.to_thread(sys.stdin.read)
