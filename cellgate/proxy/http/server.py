"""The client's side: bytes in, whole requests in order out, answers back.

Rules:
1. Requests are parsed as they arrive and answered one after another, in order (RFC 9112, 9.3.2).
2. A malformed request is answered after those before it, and the connection is then closed.
3. While a request is in flight its client is still read, up to 64 KiB of pipelined bytes, so that a close is
   seen.
4. No request is started while the client has not read most of the answers before it.
5. The exchange in flight learns once that the client has left, and bodies free their memory.
6. The work of one turn of the loop is bounded (config/limits.py); the rest follows in the next turn, in the
   same order, and nothing more is read until then.

In this order: `ClientConnection`, `Intake`, `first_to_close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import nsmallest
from math import inf
from typing import cast

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.body_memory import ArrivingBody, wanted
from cellgate.proxy.http.client import ClientExchange, ConnectionHost
from cellgate.proxy.http.errors import Failure, FailureKind, error_body
from cellgate.proxy.http.heads import own_response
from cellgate.proxy.http.request import Request, RequestReader
from cellgate.proxy.http.slow_readers import SlowReader
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.process.tcp_info import bound_held, bound_unsent, has_left, reset


class ClientConnection(asyncio.Protocol):
    """One client connection. `deadline` is when the present phase must end; the gate's tick checks it, from
    `look_at` on.

    `write` is the transport's own method: it checks nothing, and must not be used once the client has left.
    """

    __slots__ = (
        "_ended",
        "_host",
        "_intake",
        "_loan",
        "_pumping",
        "_queued_bytes",
        "_reading",
        "_rejected",
        "_serving",
        "_slow",
        "_transport",
        "_turn_due",
        "_write_paused",
        "deadline",
        "exchange",
        "look_at",
        "peer",
        "secure",
        "shows_internals",
        "write",
    )

    def __init__(self, host: ConnectionHost) -> None:
        self._host = host
        self._intake = Intake(self, host)
        self._transport: asyncio.Transport | None = None
        self._queued_bytes = 0
        self._pumping = self._ended = self._rejected = self._turn_due = self._write_paused = False
        self._serving: Request | None = None
        self._slow: SlowReader | None = None
        self._reading = True
        self._loan = 1
        """How far above the limits of units it may go (see router/pick.py)."""
        self.exchange: ClientExchange | None = None
        self.peer = ""
        self.secure = self.shows_internals = False
        self.deadline, self.look_at = inf, 0.0
        self.write: Callable[[bytes], None] = _to_nobody

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            self._open(transport)
        except Exception as error:
            # Otherwise it would stay open without an owner.
            self._host.defect("a client could not be accepted", error)
            cast(asyncio.Transport, transport).abort()

    def _open(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, so this cannot be asserted.
        transport = cast(asyncio.Transport, transport)
        self._transport, self.write = transport, transport.write
        peername = transport.get_extra_info("peername")
        self.peer = str(peername[0]) if peername else ""
        self.secure = transport.get_extra_info("sslcontext") is not None
        self.shows_internals = self._host.shows_internals(self.peer)
        bound_unsent(transport)
        bound_held(transport)
        self._host.clients[self] = None
        self.deadline = self._host.now() + self._host.limits.idle_timeout_s

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            intake = self._intake
            failure = intake.feed(data)
            if failure is not None:
                self.reject(failure)
            if self.exchange is not None or self._write_paused:
                self._queued_bytes += len(data)
                self.update_reading()
            elif (queue := intake.queue) and not self._turn_due:
                transport = self._transport
                if (
                    len(queue) == 1
                    and intake.request is None
                    and not intake.unread
                    and transport is not None
                    and not transport.is_closing()
                    and self._host.start_scheduler.has_room(_REQUEST_BYTES)
                ):
                    # Most clients wait for the answer before they send more.
                    self._queued_bytes = 0
                    self._begin(queue.pop())
                else:
                    self.serve()
            elif intake.unread:
                if not self._turn_due:
                    self._turn_due = True
                    self._host.read_scheduler.join(self)
                self.update_reading()
        except Exception as error:
            self.crashed("the bytes of a client could not be processed", error)

    def resume_parsing(self, _size: int, /) -> tuple[int, bool]:
        """Its turn to parse what has come, and to go on: what parsing cost (see turns.py). Never raises."""
        self._turn_due, cost = False, 0
        try:
            intake = self._intake
            if not intake.queue and intake.unread and not self._ended and not intake.awaiting_memory:
                cost = intake.resume_parsing()
                if intake.failure is not None:
                    self.reject(intake.failure)
            self.serve()
        except Exception as error:
            self.crashed("the bytes of a client could not be processed", error)
        return cost, False

    def eof_received(self) -> bool:
        # A client that sends EOF has left: no API client half-closes, and waiting would keep its unit busy.
        return False

    def connection_lost(self, _exc: Exception | None) -> None:
        self._ended = True
        self._transport, self.write = None, _to_nobody
        self.deadline = inf
        self._host.clients.pop(self, None)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            guarded(exchange, exchange.client_left)
        if self._serving is not None:
            self._host.memory.release(self._serving)
        self._intake.close()
        self._catch_up()

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._transport is not None and self._slow is None:
            host = self._host
            self._slow = SlowReader(
                self._transport, host.backlogs, host.now(), self._make_wait, self._give_way
            )

    def _make_wait(self) -> bool:
        """As much waits for it as may be: whether that has a unit wait."""
        if self.exchange is not None:
            guarded(self.exchange, self.exchange.client_paused, True)
        return self.exchange is not None

    def _catch_up(self) -> None:
        slow, self._slow = self._slow, None
        if slow is not None:
            slow.end()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._catch_up()
        if self.exchange is not None:
            guarded(self.exchange, self.exchange.client_paused, False)
        else:
            self.serve()

    # -- what an exchange may do ---------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Write to the client, if it is still there."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            if self._slow is not None:
                self._slow.look()

    def hint(self, heads: bytes) -> None:
        """Write heads that come before that of the answer."""
        self.send(heads)

    def finish(self, request: Request, *, keep_alive: bool) -> None:
        """The answer to `request` is complete; the next one may begin, or the connection ends."""
        self.exchange = self._serving = None
        host = self._host
        host.memory.release(request)
        if self._transport is None:
            return
        if not keep_alive:
            self.close()
            return
        now = host.now()
        self._loan = 2 if now - request.received_at < LIGHT_S else 0
        if self._intake.answered(now) and self._reading:
            # Most clients wait for the answer before they send more.
            return
        try:
            self.serve()
        except Exception as error:
            # It has to do with the next request, and not with this one.
            self.crashed("the next request could not be started", error)

    def switch(self, protocol: asyncio.Protocol) -> None:
        """From now on `protocol` reads from the client, and tells `connection_lost` when it is gone."""
        assert self._transport is not None
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)

    def abort(self, exchange: ClientExchange, request: Request) -> None:
        """The exchange has failed: if it is still in flight, the connection ends with it."""
        if self.exchange is exchange:
            self.finish(request, keep_alive=False)

    def crashed(self, what: str, error: Exception) -> None:
        """A defect of the gate's own, in no exchange: what was being read is answered 500, in its turn."""
        self._host.defect(what, error)
        try:
            self.reject(Failure(FailureKind.INTERNAL, "the gate failed on this request; see its log"))
        except Exception as another:
            self._host.defect(what, another)
            self.cut()

    def close(self) -> None:
        """Flush and close; what the client still sends is read and forgotten until it has seen the answer."""
        self._ended = True
        self.deadline = self._host.now() + CLOSE_S
        if self._slow is not None and self._transport is not None:
            # So long it may take to read what waits.
            self.deadline += self._transport.get_write_buffer_size() / LIMITS.slow_reader_bytes_per_s
        self._intake.forget_queue()
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
        if self._transport is not None:
            reset(self._transport)

    def leave_if_idle(self, linger_s: float) -> None:
        """Close a connection without a request in flight after this time, because the gate stops."""
        if self.is_idle():
            self.deadline = min(self.deadline, self._host.now() + linger_s)

    def is_idle(self) -> bool:
        """True while nothing is in flight, nor being read."""
        return self.exchange is None and self._intake.is_empty

    @property
    def idle_since(self) -> float:
        """Since when a connection without a request has been idle; else when it has to be heard of next."""
        return self.deadline - self._host.limits.idle_timeout_s

    @property
    def has_asked(self) -> bool:
        """Whether anything has ever come on it."""
        return self._intake.begun_at > 0.0

    def is_slow(self, now: float, after_s: float) -> bool:
        """True while only a head is being read that began this long ago."""
        return self.exchange is None and self._intake.has_head_only and now - self._intake.begun_at > after_s

    def close_idle(self) -> None:
        """Close an idle connection, to make room for others."""
        if self._intake.in_head:
            why = "the request's head did not arrive while others waited"
            self.reject(Failure(FailureKind.HEAD_TIMEOUT, why))
        else:
            self.close()

    def tick(self, now: float) -> None:
        """Check the deadlines of this connection and of its exchange."""
        if not self._reading and self._transport is not None and has_left(self._transport):
            self.cut()
        elif self._slow is not None and (
            limit := self._slow.limit_passed(now, is_awaited=self._is_awaited())
        ):
            self._end_slow(now, limit)
        elif now > self.deadline:
            self._expire()
        elif self.exchange is not None:
            guarded(self.exchange, self.exchange.tick, now)
        elif self._host.memory.is_short and self._intake.is_stalled(now):
            reached("body_stall_s")
            why = f"the request's {too_slow(LIMITS.body_stall_s)} while others waited for memory"
            self.reject(Failure(FailureKind.BODY_TIMEOUT, why))

    def _is_awaited(self) -> bool:
        """Whether others wait for the slot that its answer holds."""
        return self.exchange is not None and self.exchange.is_awaited()

    def _give_way(self) -> None:
        """Too many clients have their units wait, and it reads slowest."""
        most = LIMITS.held_back_streams
        self._cut_short(self._host.now(), f"more than {most} clients read too slowly, and this one slowest")

    def _end_slow(self, now: float, limit: str) -> None:
        """It takes too little: its unit and the gate's memory are for others."""
        reached(limit)
        least, for_s = LIMITS.slow_reader_bytes_per_s, getattr(LIMITS, limit)
        beside = " while others waited for its slot" if limit == "slow_reader_awaited_s" else ""
        self._cut_short(now, f"the client read less than {least} bytes a second for {for_s:g} s{beside}")

    def _cut_short(self, now: float, why: str) -> None:
        if self._ended:
            self.cut()
            return
        if self.exchange is not None:
            self.exchange.stop(Failure(FailureKind.SLOW_READER, why))
        if not self._ended:
            self.close()
        # What the error stands behind may never be read.
        self.deadline = now + CLOSE_S

    def _expire(self) -> None:
        """The deadline has passed: close a connection without a request, else answer 408."""
        self.deadline = inf
        if self._ended:
            self.cut()
        elif (failure := self._intake.overdue(self._host.now())) is not None:
            self.reject(failure)
        elif self._intake.request is None:
            self.close()
        self.serve()

    # -- inside --------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve waiting requests, as many as one turn allows. Not re-entrant."""
        if self._pumping or self._turn_due:
            return
        self._pumping, intake, served = True, self._intake, 0
        try:
            while intake.queue and served < LIMITS.pipelined_requests_per_turn and self._is_free():
                if not self._host.start_scheduler.has_room(_REQUEST_BYTES):
                    break
                served += 1
                item = intake.queue.pop(0)
                if not intake.queue:
                    self._queued_bytes = len(intake.unread)
                self._begin(item)
        finally:
            self._pumping = False
        if intake.queue or intake.unread:
            if self._is_free() and (intake.queue or not intake.awaiting_memory):
                self._turn_due = True
                host = self._host
                if intake.queue:
                    host.start_scheduler.join_next(self, self._payer(intake.queue[0]))
                else:
                    host.read_scheduler.join_next(self)
                if served == LIMITS.pipelined_requests_per_turn:
                    reached("pipelined_requests_per_turn")
            self.update_reading()
        elif not self._reading:
            self.update_reading()

    def _payer(self, item: Request | Failure) -> str:
        """In whose turn it begins: an address, since keys are looked at only then."""
        return self._host.payer(self.peer, b"" if isinstance(item, Failure) else item.forwarded_for)

    def _is_free(self) -> bool:
        if self.exchange is not None or self._write_paused:
            return False
        return self._transport is not None and not self._transport.is_closing()

    def _begin(self, request: Request | Failure) -> None:
        if isinstance(request, Failure):
            self._refuse(request)
            return
        self.deadline = inf
        self._serving, exchange = request, None
        request.loan = self._loan
        try:
            self.exchange = exchange = self._host.exchange(self, request)
            exchange.start()
        except Exception as error:
            if exchange is not None:
                exchange.crashed(error)
                return
            self._host.memory.release(request)
            self.crashed("a request could not be started", error)

    def reject(self, failure: Failure) -> None:
        """Stop parsing; the failure is answered in its turn."""
        if self._ended:
            return
        self._ended = self._rejected = True
        if (request := self._intake.request) is not None:
            failure = replace(failure, lines=failure.lines + self._host.own_lines(request))
        self._intake.end(failure)
        if self.exchange is None:
            self.serve()

    def _refuse(self, failure: Failure) -> None:
        self._host.refused(self.peer, failure)
        self.send(refusal_unread(failure))
        self.close()

    def update_reading(self) -> None:
        """Read from the client, unless enough is waiting already."""
        if self.exchange is not None or self._write_paused:
            is_full = self._queued_bytes > PIPELINED_BYTES
        else:
            # The rest follows in another turn of the loop.
            is_full = bool(self._intake.unread)
        if is_full or self._intake.awaiting_memory:
            if self._reading and self._transport is not None and not self._transport.is_closing():
                self._reading = False
                self._transport.pause_reading()
        elif not self._reading:
            self._resume()

    def _resume(self) -> None:
        if not self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()


PIPELINED_BYTES = 64 * 1024
CLOSE_S = 5.0
LIGHT_S = 1.0
"""A client whose last answer took no longer has given its slot back soon, and may go farthest above limits;
one whose last answer took longer may not."""
_REQUEST_BYTES = LIMITS.request_bytes_per_turn // LIMITS.requests_per_turn
"""What beginning a request counts as, in bytes of bodies."""


def refusal_unread(failure: Failure) -> bytes:
    """The answer to a request that was not read, after which the connection is closed."""
    row = failure.kind.row
    wait_s = row.retry_after_s if failure.retry_after_s is None else failure.retry_after_s
    own = failure.lines + (b"" if wait_s is None else b"retry-after: %d\r\n" % wait_s)
    return own_response(row.status, error_body(failure), own=own, close=True)


def _to_nobody(_data: bytes) -> None:
    """There is no client."""


# Reads whole requests of one client in order, within the shared memory for bodies and within deadlines.
#
# Rules:
# 1. The failure of a malformed request is queued after the requests before it, and nothing is read after it:
#    the begin of the next request is unknown.
# 2. A body without memory is not read on until some is freed.
# 3. A request must be complete by a deadline, which moves as its body arrives, and does not run while its
#    client waits for the gate.
# 4. The memory of a body is freed exactly once, however its request ends.


_BODY_RATE = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Intake(RequestReader):
    """What one client has sent. `queue` has complete requests that wait to be answered.

    `begun_at` is when the last request began (0: there was none); `awaiting_memory`: a body is held back.
    """

    __slots__ = (
        "_arriving",
        "_client",
        "_grown_at",
        "_grown_from",
        "_host",
        "_owes_continue",
        "awaiting_memory",
        "begun_at",
        "queue",
    )

    def __init__(self, client: ClientConnection, host: ConnectionHost) -> None:
        super().__init__(host.limits, host.now, host.routing_fields)
        self._client = client
        self._host = host
        self._owes_continue = False
        # Since when, and from which size on, a body has come at less than the least rate.
        self._grown_at, self._grown_from = 0.0, 0
        # One of which a part has come.
        self._arriving: ArrivingBody | None = None
        # No deque: an empty one takes 760 bytes, for each client.
        self.queue: list[Request | Failure] = []
        self.awaiting_memory = False
        self.begun_at = 0.0

    # -- what its reading tells ----------------------------------------------------------------------------

    def begun(self, request: Request) -> None:
        """The first byte of a request has come."""
        client, self.begun_at = self._client, request.received_at
        if client.exchange is None:
            client.deadline = request.received_at + self._host.limits.head_timeout_s

    def head_read(self, request: Request) -> Failure | None:
        """A head is complete and in order; its body comes next, unless it is turned away."""
        if _is_long(request) and (failure := self._host.turns_away(request)) is not None:
            return failure
        client, host, self._owes_continue = self._client, self._host, request.expects_continue
        self._grown_at, self._grown_from = host.now(), 0
        if client.exchange is None:
            client.deadline = self._grown_at + host.limits.body_timeout_s
        if self._owes_continue:
            self._maybe_continue()
        return None

    def body_read(self, request: Request) -> None:
        """A part of a body has come, and draws on the memory for bodies."""
        self._owes_continue, now = False, self._host.now()
        if self._grew_in(request, now):
            self._grown_at, self._grown_from = now, request.body_size
        if (body := self._arriving) is None:
            payer = self._host.body_payer(self._client.peer, request)
            self._arriving = body = ArrivingBody(request, payer, self.begun_at, self._abort)
        if not self.awaiting_memory and not self._reserve(body):
            self.awaiting_memory = True
            if self._client.exchange is None:
                self._client.deadline = now + self._host.limits.body_timeout_s
            self._client.update_reading()

    def whole(self, request: Request) -> None:
        """A request is complete, and answered in its turn."""
        self._owes_continue = False
        self.queue.append(request)
        self._client.deadline = inf
        self._end_body()
        # Bytes that have arrived need no reservation, but they count.
        self._host.memory.used += request.body_size - request.reserved
        request.reserved = request.body_size
        if self.awaiting_memory:
            self._await_no_memory()
            self._client.update_reading()

    def at_once(self, request: Request) -> None:
        """A request has begun, its head is read, and it is complete."""
        self.begun_at = request.received_at
        self.queue.append(request)
        self._client.deadline = inf
        request.reserved = size = request.body_size
        self._host.memory.used += size

    def upgrading(self) -> Request | None:
        """The last request, if it asks for a WebSocket and is not answered yet."""
        last = self.queue[-1] if self.queue else None
        return last if isinstance(last, Request) and last.upgrades else None

    # -- what the connection asks for ----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether no request waits or is being read."""
        return self.request is None and not self.queue and not self.unread

    @property
    def has_head_only(self) -> bool:
        """Whether only a part of a head is unanswered."""
        return not self.queue and self.in_head

    def end(self, failure: Failure) -> None:
        """Nothing more is read; the failure is answered in its turn."""
        self.queue.append(failure)
        self._await_no_memory()
        # The part that was read is useless now, and the refused client may stay connected for long.
        self._forget_unfinished()

    def answered(self, now: float) -> bool:
        """The previous request is answered: until now the gate may have kept the client from sending. Whether
        there is nothing more to be served.
        """
        if self.request is None:
            self._client.deadline = now + self._host.limits.idle_timeout_s
        else:
            self.begun_at = self._grown_at = now
            if self._arriving is not None:
                self._arriving.begun_at = now
            self._client.deadline = now + self._host.limits.head_timeout_s
            self._maybe_continue()
        return not self.queue and not self.unread

    def forget_queue(self) -> None:
        """Drop the waiting requests: the connection closes after the last answer."""
        self.unread = b""
        queue, self.queue = self.queue, []
        for item in queue:
            if isinstance(item, Request):
                self._host.memory.release(item)

    def close(self) -> None:
        """The client has left. Reference cycles are broken, so that no garbage collection is needed."""
        self.forget_queue()
        self._forget_unfinished()
        super().close()
        self._host.memory.forget(self._on_memory)
        del self._client

    def is_stalled(self, now: float) -> bool:
        """Whether memory is held by a body that has stopped arriving, or drips."""
        request = self.request
        holds = request is not None and request.reserved > 0 and not self.awaiting_memory
        return holds and now - self._grown_at > LIMITS.body_stall_s

    def _abort(self) -> None:
        """Others need the memory of its body."""
        why = (
            "others wait for memory, of which bodies of this client hold most; send fewer at once, or faster"
        )
        self._client.reject(Failure(FailureKind.BODY_TIMEOUT, why))

    def overdue(self, now: float) -> Failure | None:
        """The deadline has passed: what is wrong with the request that is read, if its time is over."""
        if self.awaiting_memory:
            return Failure(
                FailureKind.NO_MEMORY, "the gate has no memory left for request bodies; retry later"
            )
        request = self.request
        if request is None:
            return None
        if self.in_head:
            return Failure(FailureKind.HEAD_TIMEOUT, "the request's head did not arrive in time")
        if (allowed := self._whole_by(request)) > now:
            self._client.deadline = allowed
            return None
        if now - self._grown_at > LIMITS.body_idle_s:
            reached("body_idle_s")
            return Failure(FailureKind.BODY_TIMEOUT, f"the request's {too_slow(LIMITS.body_idle_s)}")
        return Failure(FailureKind.BODY_TIMEOUT, "the request's body did not arrive in time")

    # -- inside --------------------------------------------------------------------------------------------

    def _maybe_continue(self) -> None:
        if (
            self._owes_continue
            and self._client.exchange is None
            and not self.queue
            and not self.awaiting_memory
        ):
            self._owes_continue = False
            self._client.send(_CONTINUE)

    def _reserve(self, body: ArrivingBody) -> bool:
        """Reserve memory for the body, or wait for some."""
        request = body.request
        missing = wanted(request.body_size, request.length) - request.reserved
        if missing > 0:
            if not self._host.memory.take(missing, request.reserved, body):
                self._host.memory.wait(self._on_memory, body.payer)
                return False
            request.reserved += missing
        return True

    def _on_memory(self) -> None:
        """Body memory came back: ask again for what was missing."""
        if self._arriving is not None and self._reserve(self._arriving):
            self.awaiting_memory = False
            # Until now the gate kept the body from arriving.
            self._grown_at, self._grown_from = self._host.now(), self._arriving.request.body_size
            self._client.update_reading()
            self._client.serve()

    def _await_no_memory(self) -> None:
        self.awaiting_memory = False
        self._host.memory.forget(self._on_memory)

    def _forget_unfinished(self) -> None:
        if (request := self.forget()) is not None:
            self._end_body()
            self._host.memory.release(request)

    def _end_body(self) -> None:
        """A body is whole, or gone."""
        body, self._arriving = self._arriving, None
        if body is not None:
            self._host.memory.arrived(body)

    def _grew_in(self, request: Request, now: float) -> bool:
        """Whether its body has come at the least rate since that was last so."""
        return request.body_size - self._grown_from >= LIMITS.body_bytes_per_s * (now - self._grown_at)

    def _whole_by(self, request: Request) -> float:
        """By when it must be whole, if it goes on until then."""
        limits, begun_at = self._host.limits, self.begun_at + self._host.limits.head_timeout_s
        whole_at = begun_at + limits.body_timeout_s + request.body_size / _BODY_RATE
        return min(whole_at, max(self._grown_at, begun_at) + LIMITS.body_idle_s)


def too_slow(for_s: float) -> str:
    """The words for a body that comes too slowly."""
    return f"body came at less than {LIMITS.body_bytes_per_s} bytes a second for {for_s:g} s"


def _is_long(request: Request) -> bool:
    """Whether a body is to come that takes more to be read than its refusal."""
    return request.length > LIMITS.parsed_bytes or any(
        name == b"transfer-encoding" for name, _ in request.fields
    )


# Which client connections are closed first when file descriptors run short. Pure.
#
# First those that have never sent a request, then those that are idle between requests, then those with a
# slow head; of each the oldest. A connection with a complete request or an arriving body is never closed, nor
# one that was idle for only a moment: its next request may be on its way.


CLIENT_QUIET_S = 0.1
"""A connection that has been idle for this long may be closed."""
SLOW_HEAD_S = 2.0
"""So may one whose head has been arriving for this long."""


def first_to_close(clients: Iterable[ClientConnection], most: int, now: float) -> list[ClientConnection]:
    """At most `most` connections that may be closed, in their order."""
    ranked: list[tuple[int, float, int, ClientConnection]] = []
    for order, client in enumerate(clients):
        if client.is_idle():
            if now - client.idle_since >= CLIENT_QUIET_S:
                ranked.append((client.has_asked, client.idle_since, order, client))
        elif client.is_slow(now, SLOW_HEAD_S):
            ranked.append((2, client.idle_since, order, client))
    return [client for *_, client in nsmallest(most, ranked)]
