"""What a client sends: whole requests in order, their bodies within the memory for all, and in time.

Rules:
1. What does not parse is queued behind what came before it, and nothing is read after it: where the next
   request would begin can no longer be known.
2. A body that finds no memory is not read on until some comes back.
3. A request has until a deadline to become whole: a later one the more of its body has come, and none while
   its client waits for us.
4. Memory that a body holds is given back once, whatever becomes of its request.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Protocol

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.wire.body_memory import wanted
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.reader import RequestReader
from cellgate.proxy.wire.request import Request

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import Limits
    from cellgate.proxy.wire.body_memory import BodyMemory

_BODY_RATE = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class IntakeBounds(Protocol):
    """What the clients of one listener share."""

    limits: Limits
    fields_read: frozenset[bytes]
    memory: BodyMemory

    def now(self) -> float: ...


class Sender(Protocol):
    """The connection that requests come from. `deadline` is when its present phase must end."""

    deadline: float

    @property
    def exchange(self) -> object | None:
        """What answers a request of it, if there is one to be answered."""

    def send(self, data: bytes) -> None: ...
    def update_reading(self) -> None: ...
    def serve(self) -> object: ...


class Intake:
    """What has come of one client. `queue` has what is whole and waits to be answered.

    `begun_at` is when the last request began (0: there was none); `awaiting_memory`: a body is held back.
    """

    __slots__ = (
        "_grown_at",
        "_host",
        "_owes_continue",
        "_sender",
        "awaiting_memory",
        "begun_at",
        "queue",
        "reader",
    )

    def __init__(self, sender: Sender, host: IntakeBounds) -> None:
        self._sender = sender
        self._host = host
        self._owes_continue = False
        self._grown_at = 0.0
        self.reader = RequestReader(self, host.limits, host.now, host.fields_read)
        self.queue: deque[Request | Failure] = deque()
        self.awaiting_memory = False
        self.begun_at = 0.0

    # -- what the reader tells -----------------------------------------------------------------------------

    def begun(self, request: Request) -> None:
        """The first byte of a request has come."""
        self.begun_at = begun_at = request.received_at
        if self._sender.exchange is None:
            self._sender.deadline = begun_at + self._host.limits.head_timeout_s

    def head_read(self, request: Request) -> None:
        """A head is complete and in order; its body comes next."""
        self._owes_continue = request.expects_continue
        if self._sender.exchange is None:
            self._sender.deadline = self._host.now() + self._host.limits.body_timeout_s
        if self._owes_continue:
            self._maybe_continue()

    def body_read(self, request: Request) -> None:
        """A part of a body has come, and draws on the memory for bodies."""
        self._owes_continue = False
        self._grown_at = self._host.now()
        if not self.awaiting_memory and not self._reserve(request):
            self.awaiting_memory = True
            if self._sender.exchange is None:
                self._sender.deadline = self._grown_at + self._host.limits.body_timeout_s
            self._sender.update_reading()

    def whole(self, request: Request) -> None:
        """A request is complete, and answered in its turn."""
        self._owes_continue = False
        self.queue.append(request)
        self._sender.deadline = inf
        # What is there needs no room any more, but it counts.
        missing = request.body_size - request.reserved
        if missing:
            request.reserved = request.body_size
            self._host.memory.hold(missing)
        if self.awaiting_memory:
            self._await_no_memory()
            self._sender.update_reading()

    # -- what the connection asks for ----------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be answered, nor is being read."""
        return self.reader.request is None and not self.queue and not self.reader.unread

    @property
    def in_head(self) -> bool:
        """Whether all that has come and is not answered is a part of a head."""
        return not self.queue and self.reader.in_head

    def end(self, failure: Failure) -> None:
        """Nothing more is read; the failure is answered in its turn."""
        self.queue.append(failure)
        self._await_no_memory()
        # What was read of it is of no use any more, and the refused client may be long in leaving.
        self._forget_unfinished()

    def answered(self, now: float) -> None:
        """The request before is answered: until now it may have been us who kept the client from sending."""
        limits = self._host.limits
        if self.reader.request is None:
            self._sender.deadline = now + limits.idle_timeout_s
        else:
            self.begun_at = self._grown_at = now
            self._sender.deadline = now + limits.head_timeout_s
            self._maybe_continue()

    def release(self, request: Request) -> None:
        """Give back the memory that the body of a request holds."""
        size, request.reserved = request.reserved, 0
        if size:
            self._host.memory.give(size)

    def forget_queue(self) -> None:
        """What waits is not served any more: the answer before it was the last."""
        self.reader.unread = b""
        queue, self.queue = self.queue, deque()
        for item in queue:
            if isinstance(item, Request):
                self.release(item)

    def close(self) -> None:
        """The client is gone. Unless each lets go of the other, they would be left to the collector."""
        self.forget_queue()
        self._forget_unfinished()
        self.reader.close()
        self._host.memory.forget(self._on_memory)
        del self._sender

    def is_stalled(self, now: float) -> bool:
        """Whether memory is held for a body that does not grow."""
        request = self.reader.request
        holds = request is not None and request.reserved > 0 and not self.awaiting_memory
        return holds and now - self._grown_at > LIMITS.body_stall_s

    def overdue(self, now: float) -> Failure | None:
        """The deadline has passed: what is wrong with the request that is being read, if there is one and it
        has no more time.
        """
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
        """Draw on the memory for bodies, or wait for some."""
        missing = wanted(request.body_size, request.length) - request.reserved
        if missing > 0:
            if not self._host.memory.take(missing, request.reserved):
                self._host.memory.wait(self._on_memory)
                return False
            request.reserved += missing
        return True

    def _on_memory(self) -> None:
        """Body memory came back: ask again for what was missing."""
        request = self.reader.request
        if request is not None and self._reserve(request):
            self.awaiting_memory = False
            # Until now it was us who kept the body from growing.
            self._grown_at = self._host.now()
            self._sender.update_reading()
            self._sender.serve()

    def _await_no_memory(self) -> None:
        self.awaiting_memory = False
        self._host.memory.forget(self._on_memory)

    def _forget_unfinished(self) -> None:
        if (request := self.reader.forget()) is not None:
            self.release(request)

    def _whole_by(self, request: Request) -> float:
        """By when it must be whole, if it goes on until then."""
        limits, begun_at = self._host.limits, self.begun_at + self._host.limits.head_timeout_s
        whole_at = begun_at + limits.body_timeout_s + request.body_size / _BODY_RATE
        return min(whole_at, max(self._grown_at, begun_at) + LIMITS.body_idle_s)
