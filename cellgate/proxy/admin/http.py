"""HTTP of the admin port: aiohttp reads requests and writes responses; pages.py says what.

In this order: `AdminServer`, `Connection`, `Bodies`, `NotHereError`, `link_of`, `unencrypted`.
"""

from __future__ import annotations

import asyncio
import difflib
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from math import inf
from typing import cast

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong

from cellgate.proxy.config.settings import MIB, Peers, is_address, is_token
from cellgate.proxy.http.errors import Failure, FailureKind, error_body
from cellgate.proxy.http.heads import own_response
from cellgate.proxy.ingress.reports import HeaderPairs
from cellgate.proxy.process.tcp_info import bound_unsent, reset


class AdminServer(web.Server):
    """Makes the protocol of a connection when called. `handler` answers."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(self._answer, handler_cancellation=True)
        self._handler = handler
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self._call_exception_handler = loop.call_exception_handler
        self.clients: dict[Connection, None] = {}

    def __call__(self) -> Connection:
        return Connection(self, self.clients, self._defect)

    def tick(self, now: float) -> None:
        """Close connections that have been idle, in the middle of a head, or closing, for too long."""
        for client in list(self.clients):
            client.tick(now)

    async def close(self) -> None:
        """Close all connections. Answers in flight have a while to end."""
        self.pre_shutdown()
        await self.shutdown(END_S)
        for client in list(self.clients):
            client.cut()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = cast(Connection, request.protocol)
        connection.begun()
        try:
            response = await self._answered(request)
            # Sent here, because the next request waits until the caller has read this response.
            if not request.keep_alive:
                response.headers["Connection"] = "close"
            await response.prepare(request)
            if isinstance(response, Stream):
                await response.send()
            await response.write_eof()
            await request.writer.drain()
            return response
        finally:
            connection.ended()

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.version >= HttpVersion11 and "Host" not in request.headers:
            return refusal_reply(_NO_HOST)
        if (request.content_length or 0) > BODY_BYTES:
            return refusal_reply(_TOO_LARGE)
        try:
            return await self._handler(request)
        except web.HTTPRequestEntityTooLarge:
            return refusal_reply(_TOO_LARGE)
        except web.HTTPRequestTimeout:
            return refusal_reply(_LATE_BODY)

    def _defect(self, error: BaseException | None) -> None:
        """Make a defect of the gate's own loud."""
        self._call_exception_handler({"message": "admin port: an answer failed", "exception": error})


def reply(
    body: bytes,
    status: int = HTTPStatus.OK,
    *,
    content_type: str = "application/json",
    headers: HeaderPairs = (),
) -> web.Response:
    """A whole response. A large one is written piece by piece, and the loop turns between two."""
    return web.Response(body=io.BytesIO(body), status=status, headers=_fields(content_type, headers))


def refusal_reply(failure: Failure) -> web.Response:
    """The response to a request that is refused unread; it closes its connection."""
    response = reply(error_body(failure), failure.kind.row.status, headers=(("Connection", "close"),))
    response.force_close()
    return response


class Stream(web.StreamResponse):
    """A response whose `parts` are sent as they come; they are closed when the caller leaves."""

    def __init__(
        self, parts: AsyncGenerator[bytes, None], content_type: str, headers: HeaderPairs = ()
    ) -> None:
        super().__init__(headers=_fields(content_type, headers))
        self._parts = parts

    async def send(self) -> None:
        """Send all parts, until there is none."""
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await self.write(part)


def _fields(content_type: str, headers: HeaderPairs) -> HeaderPairs:
    # By itself aiohttp names its own version as the server.
    return (("Content-Type", content_type), ("Server", "cellgate"), *headers)


# One connection to the admin port: aiohttp's, and the bounds that aiohttp leaves open.
#
# How long a head may take, how long a caller may not read, and how long a connection that is closed may
# linger; and what is no request is answered as the rest of the gate does.


CONNECTIONS_MAX = 1024
"""With more, the one that has been idle for longest is closed."""
ADMIN_IDLE_S = 75.0
ADMIN_HEAD_S = 10.0
"""From the first byte of a head to its end."""
LINE_BYTES = 8190
"""Of a line of a head, of which there are at most 128 (aiohttp's own bounds)."""
SEND_TIMEOUT_S = 30.0
"""How long a caller may not read at all before its connection is dropped."""
CLOSE_S = 5.0
"""How long a connection that is closed may take to send what it has."""
LINGER_S = 2.0
"""How long an unused body is still received, so that its sender sees the response."""

_LONG_LINE = Failure(
    FailureKind.HEAD_TOO_LARGE, f"a line of the request's head is larger than {LINE_BYTES} bytes"
)
_LATE_HEAD = Failure(FailureKind.HEAD_TIMEOUT, "the request's head did not arrive in time")
_DEFECT = Failure(FailureKind.INTERNAL, "the gate failed on this request; see its log")


class Connection(web.RequestHandler):
    """`clients` are the server's, in the order of their last request; `on_defect` is called for defects."""

    __slots__ = ("_clients", "_clock", "_deadline", "_in_head", "_link", "_on_defect", "_unread")

    def __init__(
        self,
        server: web.Server,
        clients: dict[Connection, None],
        on_defect: Callable[[BaseException | None], None],
    ) -> None:
        self._clock = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=self._clock,
            lingering_time=LINGER_S,
            max_line_size=LINE_BYTES,
            max_field_size=LINE_BYTES,
            auto_decompress=False,
        )
        self._clients = clients
        self._on_defect = on_defect
        self._link: asyncio.Transport | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._in_head = False
        self._deadline = inf

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # aiohttp forgets its transport when it closes it, and not when that is closed.
        self._link = cast(asyncio.Transport, transport)
        bound_unsent(self._link)
        if len(self._clients) >= CONNECTIONS_MAX:
            next((each for each in self._clients if each.is_idle()), self).cut()
        self.ended()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.pop(self, None)
        self._link = None
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and self.is_idle() and not self._in_head:
            self._in_head = True
            self._deadline = self._clock.time() + ADMIN_HEAD_S
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._clock.call_later(SEND_TIMEOUT_S, self.cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    # -- the life of a request -----------------------------------------------------------------------------

    def begun(self) -> None:
        """A request is being answered: the only timeout is that of a caller that does not read."""
        self._in_head = False
        self._deadline = inf

    def ended(self) -> None:
        """It waits for a request, unless it is closed."""
        if self._link is None:
            return
        self._deadline = self._clock.time() + ADMIN_IDLE_S
        self._clients.pop(self, None)
        self._clients[self] = None

    def is_idle(self) -> bool:
        """True while no request is answered."""
        return self._deadline < inf

    def tick(self, now: float) -> None:
        if now <= self._deadline or self._link is None:
            return
        if self._link.is_closing():
            self._link.abort()
            return
        if self._in_head:
            self._link.write(own_response(408, error_body(_LATE_HEAD), close=True))
        self._deadline = now + CLOSE_S
        self.force_close()

    def cut(self) -> None:
        """End it so that the caller cannot take what it got for a whole response."""
        if self._link is not None:
            reset(self._link)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a malformed request, or to one whose handler has failed. Raises ConnectionError
        when the caller has left, or something was sent already.
        """
        if isinstance(exc, ConnectionError):
            raise exc
        if isinstance(exc, LineTooLong):
            return refusal_reply(_LONG_LINE)
        if status == HTTPStatus.BAD_REQUEST:
            why = (message or "").partition("\n")[0].rstrip(":")
            return refusal_reply(Failure(FailureKind.BAD_REQUEST, f"malformed request: {why}"))
        self._on_defect(exc)
        if request.writer.output_size:
            self.cut()
            raise ConnectionError("the response was cut off")
        return refusal_reply(_DEFECT)


BODY_BYTES = MIB
"""aiohttp's own bound for a body that is read as a whole."""
BODY_S = 30.0
BODIES_AT_ONCE = 16
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Bodies:
    """Reads bodies of requests to the admin port, within limits of size, time and number."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(BODIES_AT_ONCE)

    async def read(self, request: web.BaseRequest) -> bytes:
        """The whole body. Raises HTTPRequestTimeout and HTTPRequestEntityTooLarge."""
        try:
            async with asyncio.timeout(BODY_S), self._places:
                expects = request.headers.get("Expect", "").lower()
                if expects == "100-continue" and request.transport is not None:
                    request.transport.write(_CONTINUE)
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None


# Errors of the admin port: one line of JSON, whose message says what to do.


NAMES_SHOWN = 20


class NotHereError(Exception):
    """There is nothing of this name; the message lists the names."""


def unknown(noun: str, name: str, known: Iterable[str]) -> NotHereError:
    """No `noun` has this name: the error names one that is near, or what there is."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    some = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {some or 'none'}"
    return NotHereError(f"no {noun} is named {name!r}{hint}")


def error_reply(status: HTTPStatus, message: str, headers: HeaderPairs = ()) -> web.Response:
    """`{"error": {"code", "message"}}`."""
    error = {"error": {"code": status.name.lower(), "message": message}}
    return reply(orjson.dumps(error, option=orjson.OPT_APPEND_NEWLINE), status, headers=headers)


# HTTP of the admin port: aiohttp reads requests and writes responses; pages.py says what.


END_S = 1.0
"""How long a stopping gate waits for answers in flight."""

_NO_HOST = Failure(FailureKind.BAD_REQUEST, "the request has no Host")
_TOO_LARGE = Failure(FailureKind.BODY_TOO_LARGE, f"the request's body is larger than {BODY_BYTES} bytes")
_LATE_BODY = Failure(FailureKind.BODY_TIMEOUT, "the request's body did not arrive in time")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def link_of(request: web.BaseRequest) -> tuple[bool, bool]:
    """Whether a request came over TLS, and whether with a client certificate that was verified."""
    transport = request.transport
    if transport is None or transport.get_extra_info("sslcontext") is None:
        return False, False
    return True, bool(transport.get_extra_info("peercert"))


# Who may see and do what on the admin port. Pure.
#
# Probes and scrapers need no secret: liveness, readiness and metrics are for everyone. So is the status page,
# which has no data of its own. Everything else shows addresses or changes rotation, and needs the token or a
# trusted peer: this machine, or one in a network that the configuration names. A caller that sends a token is
# judged by it alone: a wrong one is refused from anywhere.


OPEN_PATHS = frozenset({"/", "/livez", "/readyz", "/metrics", "/metrics/engine"})

_NOT_FROM_HERE = ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "Origin")
"""A trusted peer that sends one of these acts for another: a proxy's client, a page in a browser."""
_LOOPBACK = Peers()


def unencrypted(path: str, peer: str | None) -> tuple[HTTPStatus, str] | None:
    """Why a port with TLS refuses a request that came without: a token must not travel like that."""
    if path in OPEN_PATHS or _LOOPBACK.trusts(peer or ""):
        return None
    return HTTPStatus.FORBIDDEN, "this port speaks TLS with callers of other machines: use https://"


def refusal(
    method: str,
    path: str,
    peer: str | None,
    headers: Mapping[str, str],
    token: str | None,
    peers: Peers,
    *,
    certified: bool = False,
) -> tuple[HTTPStatus, str] | None:
    """None when the request is allowed, else the status and what the caller can do about it. `certified`: it
    came with a client certificate that counts like the token.
    """
    if path in OPEN_PATHS and method in ("GET", "HEAD"):
        return None
    given = _shown_token(headers)
    if given is not None:
        return None if token is not None and is_token(given, token) else _wrong(token)
    speaks_for_itself = not any(name in headers for name in _NOT_FROM_HERE)
    if certified and speaks_for_itself:
        return None
    if peers.trusts(peer or "") and speaks_for_itself and _asks_for_here(peer or "", headers):
        return None
    if token is None:
        return HTTPStatus.FORBIDDEN, (
            "this is for callers on the gate's own machine or in a network of `trusted`, and no admin token "
            "is configured: call it from there (not through a proxy), or set an admin token and send "
            "`Authorization: Bearer TOKEN`"
        )
    return HTTPStatus.UNAUTHORIZED, (
        "this needs the gate's admin token: send `Authorization: Bearer TOKEN`, or call from the gate's own "
        "machine or a network of `trusted` (not through a proxy)"
    )


def _shown_token(headers: Mapping[str, str]) -> bytes | None:
    """The token that the caller sends, if any: other schemes of authorization are not for the gate."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.encode(errors="surrogateescape") if scheme.lower() == "bearer" else None


def _wrong(token: str | None) -> tuple[HTTPStatus, str]:
    why = (
        "because this gate has no admin token"
        if token is None
        else "because it is not the gate's admin token"
    )
    return HTTPStatus.UNAUTHORIZED, (
        f"the token was rejected, {why}: send the right one, or none from the gate's own machine or a "
        "network of `trusted`"
    )


def _asks_for_here(peer: str, headers: Mapping[str, str]) -> bool:
    """Whether a request from this machine is meant for it: by an address, or as localhost.

    A page of somebody else may have its name made to point here (DNS rebinding): then the browser sends that.
    """
    host = headers.get("Host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return not _LOOPBACK.trusts(peer) or name in ("", "localhost") or is_address(name)
