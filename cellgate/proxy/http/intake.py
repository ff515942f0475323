"""Reads whole requests of one client in order, within the shared memory for bodies and within deadlines.

Rules:
1. The failure of a malformed request is queued after the requests before it, and nothing is read after it:
   the begin of the next request is unknown.
2. A body without memory is not read on until some is freed.
3. A request must be complete by a deadline, which moves as its body arrives, and does not run while its
   client waits for the gate.
4. The memory of a body is freed exactly once, however its request ends.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.body_memory import wanted
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.request import Request, RequestReader

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ConnectionHost

_BODY_RATE = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Intake:
    """What one client has sent. `queue` has complete requests that wait to be answered.

    `begun_at` is when the last request began (0: there was none); `awaiting_memory`: a body is held back;
    `payer` is whose body it is, once a part of it has come.
    """

    __slots__ = (
        "_grown_at",
        "_grown_from",
        "_host",
        "_owes_continue",
        "_sender",
        "awaiting_memory",
        "begun_at",
        "payer",
        "queue",
        "reader",
    )

    def __init__(self, sender: Sender, host: ConnectionHost) -> None:
        self._sender = sender
        self._host = host
        self._owes_continue = False
        # Since when, and from which size on, a body has come at less than the least rate.
        self._grown_at, self._grown_from = 0.0, 0
        self.payer = ""
        self.reader = RequestReader(self, host.limits, host.now, host.routing_fields)
        # No deque: an empty one takes 760 bytes, for each client.
        self.queue: list[Request | Failure] = []
        self.awaiting_memory = False
        self.begun_at = 0.0

    # -- what the reader tells -----------------------------------------------------------------------------

    def begun(self, request: Request) -> None:
        """The first byte of a request has come."""
        sender, self.begun_at = self._sender, request.received_at
        if sender.exchange is None:
            sender.deadline = request.received_at + self._host.limits.head_timeout_s

    def head_read(self, request: Request) -> Failure | None:
        """A head is complete and in order; its body comes next, unless it is turned away."""
        if _is_long(request) and (failure := self._host.turns_away(request)) is not None:
            return failure
        sender, host, self._owes_continue = self._sender, self._host, request.expects_continue
        self._grown_at, self._grown_from = host.now(), 0
        if sender.exchange is None:
            sender.deadline = self._grown_at + host.limits.body_timeout_s
        if self._owes_continue:
            self._maybe_continue()
        return None

    def body_read(self, request: Request) -> None:
        """A part of a body has come, and draws on the memory for bodies."""
        self._owes_continue, now = False, self._host.now()
        if self._grew_in(request, now):
            self._grown_at, self._grown_from = now, request.body_size
        if not request.reserved:
            self.payer = self._host.body_payer(self._sender.peer, request)
        if not self.awaiting_memory and not self._reserve(request):
            self.awaiting_memory = True
            if self._sender.exchange is None:
                self._sender.deadline = now + self._host.limits.body_timeout_s
            self._sender.update_reading()

    def whole(self, request: Request) -> None:
        """A request is complete, and answered in its turn."""
        self._owes_continue = False
        self.queue.append(request)
        self._sender.deadline = inf
        if request.reserved:
            self._host.memory.arrived(self)
        # Bytes that have arrived need no reservation, but they count.
        self._host.memory.used += request.body_size - request.reserved
        request.reserved = request.body_size
        if self.awaiting_memory:
            self._await_no_memory()
            self._sender.update_reading()

    def at_once(self, request: Request) -> None:
        """A request has begun, its head is read, and it is complete."""
        self.begun_at = request.received_at
        self.queue.append(request)
        self._sender.deadline = inf
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
        return self.reader.request is None and not self.queue and not self.reader.unread

    @property
    def in_head(self) -> bool:
        """Whether only a part of a head is unanswered."""
        return not self.queue and self.reader.in_head

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
        reader = self.reader
        if reader.request is None:
            self._sender.deadline = now + self._host.limits.idle_timeout_s
        else:
            self.begun_at = self._grown_at = now
            self._sender.deadline = now + self._host.limits.head_timeout_s
            self._maybe_continue()
        return not self.queue and not reader.unread

    def forget_queue(self) -> None:
        """Drop the waiting requests: the connection closes after the last answer."""
        self.reader.unread = b""
        queue, self.queue = self.queue, []
        for item in queue:
            if isinstance(item, Request):
                self._host.memory.release(item)

    def close(self) -> None:
        """The client has left. Reference cycles are broken, so that no garbage collection is needed."""
        self.forget_queue()
        self._forget_unfinished()
        self.reader.close()
        self._host.memory.forget(self._on_memory)
        del self._sender

    def is_stalled(self, now: float) -> bool:
        """Whether memory is held by a body that has stopped arriving, or drips."""
        request = self.reader.request
        holds = request is not None and request.reserved > 0 and not self.awaiting_memory
        return holds and now - self._grown_at > LIMITS.body_stall_s

    def whole_in_s(self, now: float) -> float:
        """How long its body will hold its memory before it is whole, by how fast it has come; 0: it has had
        no time yet to show it.
        """
        request = self.reader.request
        if request is None or (age_s := now - self.begun_at) <= LIMITS.body_stall_s:
            return 0.0
        left = request.length - request.body_size if request.length else inf
        return age_s * left / max(request.body_size, 1)

    def abort(self) -> None:
        """Others need the memory of its body."""
        why = (
            "others wait for memory, of which bodies of this client hold most; send fewer at once, or faster"
        )
        self._sender.refuse_body(Failure(FailureKind.BODY_TIMEOUT, why))

    def overdue(self, now: float) -> Failure | None:
        """The deadline has passed: what is wrong with the request that is read, if its time is over."""
        if self.awaiting_memory:
            return Failure(
                FailureKind.NO_MEMORY, "the gate has no memory left for request bodies; retry later"
            )
        request = self.reader.request
        if request is None:
            return None
        if self.reader.in_head:
            return Failure(FailureKind.HEAD_TIMEOUT, "the request's head did not arrive in time")
        if (allowed := self._whole_by(request)) > now:
            self._sender.deadline = allowed
            return None
        if now - self._grown_at > LIMITS.body_idle_s:
            reached("body_idle_s")
            return Failure(FailureKind.BODY_TIMEOUT, f"the request's {too_slow(LIMITS.body_idle_s)}")
        return Failure(FailureKind.BODY_TIMEOUT, "the request's body did not arrive in time")

    # -- inside --------------------------------------------------------------------------------------------

    def _maybe_continue(self) -> None:
        if (
            self._owes_continue
            and self._sender.exchange is None
            and not self.queue
            and not self.awaiting_memory
        ):
            self._owes_continue = False
            self._sender.send(_CONTINUE)

    def _reserve(self, request: Request) -> bool:
        """Reserve memory for the body, or wait for some."""
        missing = wanted(request.body_size, request.length) - request.reserved
        if missing > 0:
            if not self._host.memory.take(missing, request.reserved, self):
                self._host.memory.wait(self._on_memory, self.payer)
                return False
            request.reserved += missing
        return True

    def _on_memory(self) -> None:
        """Body memory came back: ask again for what was missing."""
        request = self.reader.request
        if request is not None and self._reserve(request):
            self.awaiting_memory = False
            # Until now the gate kept the body from arriving.
            self._grown_at, self._grown_from = self._host.now(), request.body_size
            self._sender.update_reading()
            self._sender.serve()

    def _await_no_memory(self) -> None:
        self.awaiting_memory = False
        self._host.memory.forget(self._on_memory)

    def _forget_unfinished(self) -> None:
        if (request := self.reader.forget()) is not None:
            if request.reserved:
                self._host.memory.arrived(self)
            self._host.memory.release(request)

    def _grew_in(self, request: Request, now: float) -> bool:
        """Whether its body has come at the least rate since that was last so."""
        return request.body_size - self._grown_from >= LIMITS.body_bytes_per_s * (now - self._grown_at)

    def _whole_by(self, request: Request) -> float:
        """By when it must be whole, if it goes on until then."""
        limits, begun_at = self._host.limits, self.begun_at + self._host.limits.head_timeout_s
        whole_at = begun_at + limits.body_timeout_s + request.body_size / _BODY_RATE
        return min(whole_at, max(self._grown_at, begun_at) + LIMITS.body_idle_s)


class Sender(Protocol):
    """The connection that requests come from. `deadline` is when its present phase must end. Intake and
    connection know each other: without this port their modules would import each other.
    """

    deadline: float
    peer: str

    @property
    def exchange(self) -> object | None:
        """The exchange of the request that is being answered, if any."""

    def send(self, data: bytes) -> None: ...
    def update_reading(self) -> None: ...
    def serve(self) -> object: ...
    def refuse_body(self, failure: Failure) -> None: ...


def too_slow(for_s: float) -> str:
    """The words for a body that comes too slowly."""
    return f"body came at less than {LIMITS.body_bytes_per_s} bytes a second for {for_s:g} s"


def _is_long(request: Request) -> bool:
    """Whether a body is to come that takes more to be read than its refusal."""
    return request.length > LIMITS.parsed_bytes or any(
        name == b"transfer-encoding" for name, _ in request.fields
    )
