"""HTTP of the admin port: aiohttp reads requests and writes responses; application.py says what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import HttpVersion11, web

from cellgate.proxy.admin.bodies import BODY_BYTES
from cellgate.proxy.admin.connection import Connection
from cellgate.proxy.admin.responses import Stream, refusal_reply
from cellgate.proxy.wire.failure import Failure, FailureKind

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
