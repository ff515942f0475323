"""One connection to the admin port: aiohttp's, and the bounds that aiohttp leaves open.

How long a head may take, how long a caller may not read, and how long a connection that is closed may linger;
and what is no request is answered as the rest of the gate does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from cellgate.proxy.admin.responses import refusal_reply
from cellgate.proxy.wire.failure import Failure, FailureKind, error_body
from cellgate.proxy.wire.heads import own_response
from cellgate.proxy.wire.tcp import bound_unsent, reset

CONNECTIONS_MAX = 1024
"""With more, the one that has been idle for longest is closed."""
IDLE_S = 75.0
HEAD_S = 10.0
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
    """`clients` are all of the server's, in the order of their last request; `on_defect` is called for
    defects.
    """

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
            self._deadline = self._clock.time() + HEAD_S
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
        self._deadline = self._clock.time() + IDLE_S
        self._clients.pop(self, None)
        self._clients[self] = None

    def is_idle(self) -> bool:
        """True while no request is answered."""
        return self._deadline < inf

    def tick(self, now: float) -> None:
        """Look at the clock."""
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
