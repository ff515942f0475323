"""HTTP of the admin port, on the gate's own client connections (proxy/wire/downstream.py).

Each request is answered by a task of its own, which ends when its client leaves. application.py says what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

from cellgate.proxy.admin.auth import FIELDS_READ
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.config.settings import MIB, Limits
from cellgate.proxy.ingress.envoy_health import Headers, lines
from cellgate.proxy.wire.body_memory import BodyMemory
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.failure import Failure, Kind, error_body
from cellgate.proxy.wire.heads import REQUEST_FIELDS, client_head, own_response
from cellgate.proxy.wire.request import Request
from cellgate.proxy.wire.rota import Rota

BODY_BYTES = MIB
BODIES_BYTES = 16 * MIB
END_S = 1.0
"""How long a gate that stops waits for answers under way."""
SEND_TIMEOUT_S = 30.0
"""How long a follower of a stream may not read at all before its connection is dropped."""

_NAMES = {name.lower().encode(): name for name in ("Accept", *FIELDS_READ)}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. Of its headers there are those that somebody reads; `peer` is an address, without a port;
    `name` is that of the unit or cell in its path.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    peer: str
    body: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "application/json"
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Stream:
    """A response whose `parts` are sent as they come."""

    parts: AsyncGenerator[bytes, None]
    content_type: str
    headers: Headers = ()


Handler = Callable[[Asked], Awaitable[Answer | Stream]]


class AdminServer:
    """What all connections share: a `Host` of downstream.py. `handler` answers, and does not raise."""

    limits = Limits(body_bytes=BODY_BYTES)
    fields_read = REQUEST_FIELDS | _NAMES.keys()

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.memory = BodyMemory(BODIES_BYTES, BODY_BYTES)
        self.clients: dict[ClientConnection, None] = {}
        self.answering: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.rota = Rota(loop.call_soon, LIMITS.request_bytes_per_turn)
        self._loop = loop

    def connection(self) -> ClientConnection:
        """The protocol of a connection."""
        return ClientConnection(self)

    def exchange(self, client: ClientConnection, request: Request) -> _Exchange:
        """What answers a request."""
        return _Exchange(self, client, request)

    def refused(self, client: ClientConnection, failure: Failure) -> None:
        """Something came that is no request. It is answered, and counted nowhere."""

    def defect(self, what: str, error: Exception) -> None:
        """Make a defect of the gate's own loud."""
        self._loop.call_exception_handler({"message": f"admin port: {what}", "exception": error})

    def tick(self, now: float) -> None:
        """Close connections that have been idle, or in the middle of a request, for too long."""
        for client in list(self.clients):
            try:
                client.tick(now)
            except Exception as error:
                client.crashed("a client's clocks", error)

    async def close(self) -> None:
        """End what is open. Answers under way may end, for a while."""
        if self.answering:
            await asyncio.wait(self.answering, timeout=END_S)
        for end in (ClientConnection.close, ClientConnection.cut):
            for client in list(self.clients):
                end(client)
            await asyncio.sleep(0)
        await asyncio.gather(*self.answering, return_exceptions=True)


class _Exchange:
    """One request, from when it is whole to its answer's end."""

    def __init__(self, server: AdminServer, client: ClientConnection, request: Request) -> None:
        self._server = server
        self._client = client
        self._request = request
        self._close = request.http10 or not request.keep_alive
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._begun = False

    def start(self) -> None:
        task = self._task = asyncio.get_running_loop().create_task(self._run())
        self._server.answering.add(task)
        task.add_done_callback(self._server.answering.discard)

    def client_left(self) -> None:
        self._task.cancel()

    def client_paused(self, paused: bool) -> None:
        if paused:
            self._has_room.clear()
        else:
            self._has_room.set()

    def tick(self, now: float) -> None:
        """It has no clock: an answer takes no time, and a stream minds its own."""

    def crashed(self, error: Exception) -> None:
        """The end, after a defect: 500, unless the answer was begun."""
        self._server.defect("an answer failed", error)
        if self._begun:
            self._client.cut()
        else:
            failure = Failure(Kind.INTERNAL, "the gate failed on this request; its log says more")
            self._client.send(own_response(500, error_body(failure), close=True))
            self._client.finish(self._request, keep_alive=False)

    async def _run(self) -> None:
        try:
            await self._answer()
        except Exception as error:
            self.crashed(error)

    async def _answer(self) -> None:
        answer = await self._server.handler(_asked(self._request, self._client.peer))
        if isinstance(answer, Stream):
            await self._stream(answer)
            return
        own = b"content-length: %d\r\n" % len(answer.body)
        body = b"" if self._request.method == b"HEAD" else answer.body
        head = self._head(answer, own)
        self._begun = True
        self._client.send(head + body)
        self._finish()

    async def _stream(self, stream: Stream) -> None:
        is_chunked = not self._request.http10
        head = self._head(stream, b"transfer-encoding: chunked\r\n" if is_chunked else b"")
        self._begun = True
        self._client.send(head)
        try:
            async with aclosing(stream.parts) as parts:
                async for part in parts:
                    self._client.send(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
                    async with asyncio.timeout(SEND_TIMEOUT_S):
                        await self._has_room.wait()
        except TimeoutError:
            self._client.cut()
            return
        if is_chunked:
            self._client.send(b"0\r\n\r\n")
        self._finish()

    def _head(self, answer: Answer | Stream, own: bytes) -> bytes:
        status = answer.status if isinstance(answer, Answer) else HTTPStatus.OK
        own += lines((("content-type", answer.content_type), *answer.headers))
        return client_head(status, [], own=own, close=self._close)

    def _finish(self) -> None:
        self._client.finish(self._request, keep_alive=not self._close)


def _asked(request: Request, peer: str) -> Asked:
    query = request.target.partition(b"?")[2].decode("latin-1")
    return Asked(
        request.method.decode("latin-1"),
        unquote(request.path),
        dict(parse_qsl(query, keep_blank_values=True)),
        {
            _NAMES[name]: value.decode("utf-8", "surrogateescape")
            for name, value in request.fields
            if name in _NAMES
        },
        peer,
        request.body,
    )
