"""A small HTTP/1.1 server for the simulated engines: requests in order, replies by callback, keep-alive.

It uses no tasks and no timers of the program's kind: what an engine does is the outside world's doing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from tests.sim.loop import Event, SimLoop

KEEP_ALIVE_S = 5.0  # uvicorn's.
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests"}

JSON = "application/json"

Handle = Callable[["Exchange"], None]


@dataclass(slots=True)
class Request:
    """A whole request; header names in lower case."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True


class Exchange:
    """One request and the means to answer it. `on_gone` is called if the client leaves before the end."""

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self.on_gone: Callable[[], None] | None = None
        self._connection = connection
        self._chunked = True

    @property
    def is_gone(self) -> bool:
        """Whether the client has left."""
        return self._connection.transport.is_closing()

    def reply(self, status: int, body: bytes, content_type: str = JSON, extra: str = "") -> None:
        """Answer at once."""
        head = self._head(status, content_type, f"content-length: {len(body)}\r\n{extra}")
        self._connection.write(head if self.request.method == "HEAD" else head + body)
        self._connection.finish(self)

    def begin(self, content_type: str, *, chunked: bool = True) -> None:
        """Send the head of a streamed answer; without `chunked` it ends when the connection does."""
        self._chunked = chunked
        framing = "transfer-encoding: chunked\r\n" if chunked else "connection: close\r\n"
        self._connection.write(self._head(200, content_type, framing))

    def send(self, data: bytes) -> None:
        """Send a piece of a streamed answer, as one chunk."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """The streamed answer is complete."""
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        else:
            self.request.keep_alive = False
        self._connection.finish(self)

    def cut(self, last_words: bytes = b"") -> None:
        """Close the connection here and now, after some raw bytes."""
        self.on_gone = None
        self._connection.write(last_words)
        self._connection.transport.close()

    def _head(self, status: int, content_type: str, more: str) -> bytes:
        reason = REASONS.get(status, "Status")
        return (
            f"HTTP/1.1 {status} {reason}\r\nserver: uvicorn\r\ncontent-type: {content_type}\r\n{more}\r\n"
        ).encode()


class Connection(asyncio.Protocol):
    """One client connection: parses requests and hands them over one at a time."""

    transport: asyncio.Transport

    def __init__(self, loop: SimLoop, handle: Handle) -> None:
        self._loop = loop
        self._handle = handle
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._current: Exchange | None = None
        self._idle: Event | None = None
        self._request = Request()
        self._target = b""
        self._is_last = False

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish(self, exchange: Exchange) -> None:
        """The exchange is answered: on to the next request, if the connection is kept."""
        self._current = None
        if self._is_last or not exchange.request.keep_alive:
            self.transport.close()
        elif self._waiting:
            self._next()
        else:
            self._idle = self._loop.outside(KEEP_ALIVE_S, self.transport.close)

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return hasattr(self, "transport") and self.transport.is_closing()

    def end_idle(self) -> None:
        """Close it now if it has no request, or after the one that it has."""
        if self._current is None:
            self.transport.close()
        else:
            self._is_last = True

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._idle = self._loop.outside(KEEP_ALIVE_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        self._stop_idling()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_idling()
        self._waiting.clear()
        if self._current is not None and self._current.on_gone is not None:
            self._current.on_gone()

    def _stop_idling(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _next(self) -> None:
        self._current = Exchange(self._waiting.popleft(), self)
        self._handle(self._current)

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._request = Request()
        self._target = b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._request.body += body

    def on_message_complete(self) -> None:
        self._request.method = self._parser.get_method().decode()
        self._request.path = self._target.decode("latin-1").partition("?")[0]
        self._request.keep_alive = self._parser.should_keep_alive()
        self._waiting.append(self._request)
        if self._current is None:
            self._next()
