"""A worker's client of the control process: sends messages, and keeps requests until they are answered.

1. Without a control process, messages wait for the next one. Requests wait as well, for a second, and are
   then sent again.
2. Each request gets one answer: a lease, or why there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.request.dispatcher import PickRequest, Waiter
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.workers.protocol import Message, ToControl, request_out
from cellgate.proxy.workers.socket_link import Link
from cellgate.router.unit_state import Lease

QUEUED_S = 0.01
"""A request without an answer for this long waits in the queue."""
WITHOUT_CONTROL_S = 1.0
"""How long a request waits for a control process; a new one is ready after a fifth of it."""
SILENT_S = 1.0
"""A control process that has sent nothing for this long counts as lost; it sends four times a second."""
UNSAID_MAX = 65_536


class RemoteRequest:
    """A request for a unit that has not been answered yet."""

    __slots__ = ("_client", "_waiter", "asked_at", "number", "request")

    def __init__(
        self, client: ControlClient, number: int, request: PickRequest, waiter: Waiter, now: float
    ) -> None:
        self._client = client
        self._waiter = waiter
        self.asked_at = now
        self.number = number
        self.request = request

    @property
    def queued_at(self) -> float | None:
        """Since when it has been queued, as far as this process knows; None: it is not."""
        return self.asked_at if self._client.now() - self.asked_at > QUEUED_S else None

    def resolve(self, found: Lease | Failure) -> None:
        """The answer of the control process, or a failure without one."""
        guarded(self._waiter, self._waiter.on_result, found)

    def cancel(self) -> None:
        """Cancel the request."""
        self._client.leave(self.number)


class ControlClient:
    """The client of one worker. `greet` gives the first message for a new control process, `heard` gets its
    messages.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greet: Callable[[], list[Message]],
        heard: Callable[[Message], None],
    ) -> None:
        self._loop = loop
        self.now = loop.time
        self._greet = greet
        self._heard = heard
        self._link: Link | None = None
        self._unsaid: deque[Message] = deque(maxlen=UNSAID_MAX)
        self._heard_at = loop.time()
        self._number = 0
        self._asks: dict[int, RemoteRequest] = {}

    def __len__(self) -> int:
        """Requests without an answer yet."""
        return len(self._asks)

    def meet(self) -> Link:
        """A control process has started; returns the link to be connected to it."""
        before = self._link
        link = Link(self._loop, self._hear, lambda: self._lost(link))
        self._link, self._heard_at = link, self._loop.time()
        if before is not None:
            before.close()
        for message in self._greet():
            link.send(message)
        while self._unsaid:
            link.send(self._unsaid.popleft())
        for number, question in self._asks.items():
            link.send((ToControl.ACQUIRE, number, request_out(question.request)))
        return link

    def has_control(self) -> bool:
        """Whether there is a control process."""
        return self._link is not None and self._loop.time() - self._heard_at <= SILENT_S

    def close(self) -> None:
        """Send pending messages, and end."""
        if self._link is not None:
            self._link.close()

    # -- saying --------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        """Send a message at once."""
        if self._link is not None:
            self._link.send(message)
        else:
            self._unsaid.append(message)

    def mention(self, message: Message) -> None:
        """Send a message that is not urgent."""
        if self._link is not None:
            self._link.later(message)
        else:
            self._unsaid.append(message)

    # -- asking --------------------------------------------------------------------------------------------

    def ask(self, request: PickRequest, waiter: Waiter) -> RemoteRequest:
        """Acquire a unit for `waiter`. The lease will have the id of the request."""
        self._number = number = self._number + 1
        self._asks[number] = question = RemoteRequest(self, number, request, waiter, self.now())
        if self._link is not None:
            self._link.send((ToControl.ACQUIRE, number, request_out(request)))
        if not self.has_control():
            self._loop.call_later(WITHOUT_CONTROL_S, self._give_up, number)
        return question

    def leave(self, number: int) -> None:
        """Cancel a request."""
        if self.answered(number) is not None:
            self.mention((ToControl.CANCEL, number))

    def answered(self, number: int) -> RemoteRequest | None:
        """Remove and return the request with this id; None: it was cancelled."""
        return self._asks.pop(number, None)

    def tick(self, now: float) -> None:
        """Give up requests that a blocked control process has not answered."""
        if self._link is not None and not self.has_control():
            for number, question in list(self._asks.items()):
                if now - question.asked_at > WITHOUT_CONTROL_S:
                    self._give_up(number)

    def _hear(self, message: Message) -> None:
        self._heard_at = self._loop.time()
        self._heard(message)

    def _lost(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        for number in self._asks:
            self._loop.call_later(WITHOUT_CONTROL_S, self._give_up, number)

    def _give_up(self, number: int) -> None:
        if self.has_control() or (question := self.answered(number)) is None:
            return
        self.mention((ToControl.CANCEL, number))
        reason = "the control process of the gate has ended or is blocked, and is being replaced; retry"
        question.resolve(Failure(FailureKind.NO_CONTROL_PROCESS, reason))
