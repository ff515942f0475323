"""The client's side: bytes in, whole requests in order out, answers back.

Rules:
1. Requests are parsed as they come and answered one after the other, in order (RFC 9112, 9.3.2).
2. What does not parse is answered after those before it, and the connection ends there: where the next
   request would begin can no longer be known.
3. While a request is in flight its client is read on, up to 64 KiB of pipelined bytes, so that its leaving
   is seen.
4. No request is begun while the client has yet to read much of the answers before it.
5. Whatever happens here, the exchange in flight is told once, and bodies give their memory back.
6. What is parsed and begun in one turn of the loop is bounded (see limits.py); the rest goes on in the next,
   in the same order, and nothing more is read until then.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Protocol, cast

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.wire.body_memory import wanted
from cellgate.proxy.wire.failure import Failure, Kind, error_body
from cellgate.proxy.wire.heads import own_response
from cellgate.proxy.wire.reader import RequestReader
from cellgate.proxy.wire.request import Request

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import Limits
    from cellgate.proxy.wire.body_memory import BodyMemory
    from cellgate.proxy.wire.rota import Rota

PIPELINED_BYTES = 64 * 1024
CLOSE_S = 5.0
UNSENT_BYTES = 64 * 1024
"""The kernel takes no more than this of what it cannot send yet. By itself it takes up to 4 MB a connection:
more than any stream of tokens, so that a client that never reads would never hold back its unit.
"""
_BODY_RATE = 64 * 1024
_NO_LINGER = struct.pack("ii", 1, 0)
_GONE = (7, 8)
"""States of a TCP connection (tcp_states.h): reset, and closed by the other side."""
_REQUEST_BYTES = LIMITS.request_bytes_per_turn // LIMITS.pipelined_requests_per_turn
"""What a pipelined request costs, in bytes of bodies."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchanging(Protocol):
    """What a connection knows of the exchange that answers its request."""

    def start(self) -> None: ...
    def crashed(self, error: Exception) -> None: ...
    def client_left(self) -> None: ...
    def client_paused(self, paused: bool) -> None: ...
    def tick(self, now: float) -> None: ...


class Host(Protocol):
    """What the connections of one listener share."""

    limits: Limits
    fields_read: frozenset[bytes]
    memory: BodyMemory
    clients: dict[ClientConnection, None]
    rota: Rota

    def now(self) -> float: ...
    def exchange(self, client: ClientConnection, request: Request) -> Exchanging: ...
    def refused(self, client: ClientConnection, failure: Failure) -> None: ...
    def defect(self, what: str, error: Exception) -> None: ...


class ClientConnection(asyncio.Protocol):
    """One client connection. `deadline` is when the present phase must end; the gate's tick looks at it."""

    __slots__ = (
        "_begun_at",
        "_ended",
        "_exchange",
        "_grown_at",
        "_host",
        "_owes_continue",
        "_pumping",
        "_queue",
        "_queued_bytes",
        "_reader",
        "_reading",
        "_rejected",
        "_serving",
        "_starved",
        "_stuffed",
        "_transport",
        "_turn_due",
        "deadline",
        "peer",
        "secure",
    )

    def __init__(self, host: Host) -> None:
        self._host = host
        self._reader = RequestReader(self, host.limits, host.now, host.fields_read)
        self._transport: asyncio.Transport | None = None
        self._queue: deque[Request | Failure] = deque()
        self._queued_bytes = 0
        self._exchange: Exchanging | None = None
        self._pumping = False
        self._ended = False
        self._rejected = False
        self._serving: Request | None = None
        self._turn_due = False
        self._starved = False
        self._owes_continue = False
        self._reading = True
        self._stuffed = False
        self._begun_at = 0.0
        self._grown_at = 0.0
        self.peer = ""
        self.secure = False
        self.deadline = inf

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            self._open(transport)
        except Exception as error:
            # Else it would stay open, and nobody would know of it.
            self._host.defect("a client could not be let in", error)
            cast(asyncio.Transport, transport).abort()

    def _open(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, so this cannot be asserted.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        peername = transport.get_extra_info("peername")
        self.peer = str(peername[0]) if peername else ""
        self.secure = transport.get_extra_info("sslcontext") is not None
        sock = transport.get_extra_info("socket")
        if sock is not None:  # In a simulated network there is none.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._host.clients[self] = None
        self.deadline = self._host.now() + self._host.limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            failure = self._reader.feed(data)
            if failure is not None:
                self._reject(failure)
            if self._exchange is not None or self._stuffed:
                self._queued_bytes += len(data)
                self._update_reading()
            elif self._queue:
                self._pump()
            elif self._reader.unread and not self._turn_due:
                self._turn_due = True
                self._host.rota.join(self)
                self._update_reading()
        except Exception as error:
            self.crashed("a client's bytes could not be read", error)

    def go_on(self, _size: int, /) -> tuple[int, bool]:
        """It is this connection's turn to have parsed what has come, and to go on with what waits: what that
        cost (see rota.py). What is left is for another turn. Never raises.
        """
        self._turn_due, cost = False, 0
        try:
            if not self._queue and self._reader.unread and not self._ended and not self._starved:
                cost = self._reader.go_on()
                if self._reader.failure is not None:
                    self._reject(self._reader.failure)
            cost += self._pump() * _REQUEST_BYTES
        except Exception as error:
            self.crashed("a client's bytes could not be read", error)
        return cost, False

    def eof_received(self) -> bool:
        # A client that sends EOF has left: no API client half-closes, and waiting would keep its unit busy.
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ended = True
        self._transport = None
        self.deadline = inf
        self._host.clients.pop(self, None)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            guarded(exchange, exchange.client_left)
        if self._serving is not None:
            self._release(self._serving)
        self._forget_queue()
        if (request := self._reader.forget()) is not None:
            self._release(request)
        self._reader.close()
        self._host.memory.forget(self._fed)

    def pause_writing(self) -> None:
        self._stuffed = True
        if self._exchange is not None:
            guarded(self._exchange, self._exchange.client_paused, True)

    def resume_writing(self) -> None:
        self._stuffed = False
        if self._exchange is not None:
            guarded(self._exchange, self._exchange.client_paused, False)
        else:
            self._pump()

    # -- what the reader tells -----------------------------------------------------------------------------

    def begun(self, request: Request) -> None:
        """The first byte of a request has come."""
        self._begun_at = begun_at = request.received_at
        if self._exchange is None:
            self.deadline = begun_at + self._host.limits.head_timeout_s

    def head_read(self, request: Request) -> None:
        """A head is complete and in order; its body comes next."""
        self._owes_continue = request.expects_continue
        if self._exchange is None:
            self.deadline = self._host.now() + self._host.limits.body_timeout_s
        if self._owes_continue:
            self._maybe_continue()

    def body_read(self, request: Request) -> None:
        """A part of a body has come, and draws on the memory for bodies."""
        self._owes_continue = False
        self._grown_at = self._host.now()
        if not self._starved and not self._reserve(request):
            self._starved = True
            if self._exchange is None:
                self.deadline = self._grown_at + self._host.limits.body_timeout_s
            self._update_reading()

    def whole(self, request: Request) -> None:
        """A request is complete, and answered in its turn."""
        self._owes_continue = False
        self._queue.append(request)
        self.deadline = inf
        # What is there needs no room any more, but it counts.
        missing = request.body_size - request.reserved
        if missing:
            request.reserved = request.body_size
            self._host.memory.hold(missing)
        if self._starved:
            self._sated()
            self._update_reading()

    # -- what an exchange may do ---------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Write to the client, if it is still there."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def writer(self) -> Callable[[bytes], None]:
        """What writes to the client as `send` does, but unchecked: not to be used once it has left."""
        return self._transport.write if self._transport is not None else self.send

    def finish(self, request: Request, *, keep_alive: bool) -> None:
        """The answer to `request` is complete; the next one may begin, or the connection ends."""
        self._exchange = self._serving = None
        self._release(request)
        if self._transport is None:
            return
        if not keep_alive or not request.keep_alive:
            self.close()
            return
        now = self._host.now()
        if self._reader.request is None:
            self.deadline = now + self._host.limits.idle_timeout_s
        else:
            # Until now it may have been us who kept the client from sending.
            self._begun_at = self._grown_at = now
            self.deadline = now + self._host.limits.head_timeout_s
            self._maybe_continue()
        try:
            self._pump()
        except Exception as error:
            # It has to do with the next request, and not with this one.
            self.crashed("the next request could not be begun", error)

    def give_up(self, exchange: Exchanging, request: Request) -> None:
        """The exchange has failed: if it is still in flight, the connection ends with it."""
        if self._exchange is exchange:
            self.finish(request, keep_alive=False)

    def crashed(self, what: str, error: Exception) -> None:
        """A defect of the gate's own, in no exchange: what was being read is answered 500, in its turn."""
        self._host.defect(what, error)
        try:
            self._reject(Failure(Kind.INTERNAL, "the gate failed on this request; its log says more"))
        except Exception as another:
            self._host.defect(what, another)
            self.cut()

    def close(self) -> None:
        """Flush and close; what the client still sends is read and forgotten until it has seen the answer."""
        self._ended = True
        self.deadline = self._host.now() + CLOSE_S
        self._forget_queue()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._resume()
        # Closing while bytes come in would reset the connection under the answer, so only our half is closed
        # when the request was not read to its end.
        if self._rejected and transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def cut(self) -> None:
        """End the connection so that the client cannot take what it got for a whole answer."""
        self._ended = True
        if self._transport is None:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            # A reset: a mere end would be a whole answer to a client whose body is delimited by close.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    def leave_if_idle(self, linger_s: float) -> None:
        """Close a connection on which nothing is in flight and nothing comes for so long: the gate stops."""
        if self.is_idle():
            self.deadline = min(self.deadline, self._host.now() + linger_s)

    def is_idle(self) -> bool:
        """True while nothing is in flight, nor being read."""
        reader = self._reader
        return self._exchange is None and reader.request is None and not self._queue and not reader.unread

    @property
    def idle_since(self) -> float:
        """Since when a connection without a request has been idle; else when it has to be heard of next."""
        return self.deadline - self._host.limits.idle_timeout_s

    @property
    def has_asked(self) -> bool:
        """Whether anything has ever come on it."""
        return self._begun_at > 0.0

    def is_slow(self, now: float, after_s: float) -> bool:
        """True while a head is being read that began so long ago, and nothing else is under way."""
        is_reading = self._exchange is None and not self._queue and self._reader.in_head
        return is_reading and now - self._begun_at > after_s

    def make_way(self) -> None:
        """End a connection on which nothing is under way: others need its place."""
        if self._reader.in_head:
            self._reject(Failure(Kind.HEAD_TIMEOUT, "the request's head did not arrive while others waited"))
        else:
            self.close()

    def tick(self, now: float) -> None:
        """Look at the clocks of this connection and of its exchange."""
        if not self._reading and self._has_left():
            self.cut()
        elif now > self.deadline:
            self._expire()
        elif self._exchange is not None:
            guarded(self._exchange, self._exchange.tick, now)
        elif self._host.memory.is_short and self._is_stalled(now):
            reason = "the request's body did not go on while others waited for memory"
            reached("body_stall_s")
            self._reject(Failure(Kind.BODY_TIMEOUT, reason))

    def _expire(self) -> None:
        """The deadline has passed: for a connection without a request that is the end, else a 408."""
        self.deadline = inf
        request = self._reader.request
        if self._ended:
            self.cut()
        elif self._starved:
            reason = "the gate has no memory left for request bodies; retry later"
            self._reject(Failure(Kind.NO_MEMORY, reason))
        elif request is None:
            self.close()
        elif self._reader.in_head:
            self._reject(Failure(Kind.HEAD_TIMEOUT, "the request's head did not arrive in time"))
        elif (allowed := self._body_deadline(request)) > self._host.now():
            self.deadline = allowed
        else:
            if self._host.now() - self._grown_at > LIMITS.body_idle_s:
                reached("body_idle_s")
            self._reject(Failure(Kind.BODY_TIMEOUT, "the request's body did not arrive in time"))
        self._pump()

    def _has_left(self) -> bool:
        """Whether the client of a connection that is not read has closed it: the loop does not look there."""
        transport = self._transport
        sock = None if transport is None else transport.get_extra_info("socket")
        return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _GONE

    def _is_stalled(self, now: float) -> bool:
        """Whether memory is held for a body that does not grow."""
        request = self._reader.request
        holds = request is not None and request.reserved > 0 and not self._starved
        return holds and now - self._grown_at > LIMITS.body_stall_s

    # -- inside --------------------------------------------------------------------------------------------

    def _pump(self) -> int:
        """Serve what waits, as much as one turn of the loop allows; how many requests that were. Not
        re-entrant: an exchange that ends at once comes back through `finish`.
        """
        if self._pumping or self._turn_due:
            return 0
        self._pumping = True
        left = LIMITS.pipelined_requests_per_turn
        try:
            while self._queue and left and self._may_begin():
                left -= 1
                item = self._queue.popleft()
                if not self._queue:
                    self._queued_bytes = len(self._reader.unread)
                if isinstance(item, Failure):
                    self._refuse(item)
                    return LIMITS.pipelined_requests_per_turn - left
                self.deadline = inf
                self._begin(item)
        finally:
            self._pumping = False
        if (self._queue or self._reader.unread) and self._may_begin() and not self._starved:
            self._turn_due = True
            self._host.rota.join_next(self)
            if not left:
                reached("pipelined_requests_per_turn")
        self._update_reading()
        return LIMITS.pipelined_requests_per_turn - left

    def _may_begin(self) -> bool:
        if self._exchange is not None or self._stuffed:
            return False
        return self._transport is not None and not self._transport.is_closing()

    def _begin(self, request: Request) -> None:
        self._serving = request
        try:
            self._exchange = exchange = self._host.exchange(self, request)
        except Exception as error:
            self._release(request)
            self.crashed("a request could not be begun", error)
        else:
            guarded(exchange, exchange.start)

    def _reject(self, failure: Failure) -> None:
        """Stop parsing; the failure is answered in its turn."""
        if self._ended:
            return
        self._ended = self._rejected = True
        self._queue.append(failure)
        self._sated()
        # What was read of it is of no use any more, and the refused client may be long in leaving.
        request = self._reader.forget()
        if request is not None:
            self._release(request)
        if self._exchange is None:
            self._pump()

    def _refuse(self, failure: Failure) -> None:
        self._host.refused(self, failure)
        row = failure.kind.row
        own = b"" if row.retry_after_s is None else b"retry-after: %d\r\n" % row.retry_after_s
        self.send(own_response(row.status, error_body(failure), own=own, close=True))
        self.close()

    def _maybe_continue(self) -> None:
        if self._owes_continue and self._exchange is None and not self._queue and not self._starved:
            self._owes_continue = False
            self.send(_CONTINUE)

    def _reserve(self, request: Request) -> bool:
        """Draw on the memory for bodies, or wait for some."""
        missing = wanted(request.body_size, request.length) - request.reserved
        if missing > 0:
            if not self._host.memory.take(missing, request.reserved):
                self._host.memory.wait(self._fed)
                return False
            request.reserved += missing
        return True

    def _fed(self) -> None:
        """Body memory came back: ask again for what was missing."""
        request = self._reader.request
        if request is not None and self._reserve(request):
            self._starved = False
            # Until now it was us who kept the body from growing.
            self._grown_at = self._host.now()
            self._update_reading()
            self._pump()

    def _sated(self) -> None:
        """Nothing is waited for any more."""
        self._starved = False
        self._host.memory.forget(self._fed)

    def _release(self, request: Request) -> None:
        size, request.reserved = request.reserved, 0
        if size:
            self._host.memory.give(size)

    def _forget_queue(self) -> None:
        """What waits is not served any more: the answer before it was the last."""
        self._reader.unread = b""
        queue, self._queue = self._queue, deque()
        for item in queue:
            if isinstance(item, Request):
                self._release(item)

    def _update_reading(self) -> None:
        if self._exchange is not None or self._stuffed:
            is_full = self._queued_bytes > PIPELINED_BYTES
        else:
            # Another turn of the loop goes on with it.
            is_full = bool(self._reader.unread)
        if is_full or self._starved:
            if self._reading and self._transport is not None and not self._transport.is_closing():
                self._reading = False
                self._transport.pause_reading()
        elif not self._reading:
            self._resume()

    def _resume(self) -> None:
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _body_deadline(self, request: Request) -> float:
        """By when it must be whole, if it goes on until then."""
        limits, begun_at = self._host.limits, self._begun_at + self._host.limits.head_timeout_s
        whole_at = begun_at + limits.body_timeout_s + request.body_size / _BODY_RATE
        return min(whole_at, max(self._grown_at, begun_at) + LIMITS.body_idle_s)
