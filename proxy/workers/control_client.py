"""A worker's line to the brain: what it says, what it asks, and what becomes of that while there is no brain.

1. What is to be told waits for the next brain; so does what is asked, for a second, and is asked anew.
2. Each question gets one answer: a lease, or why there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.request.dispatcher import PickRequest, Waiter
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.workers.link import Link
from cellgate.proxy.workers.protocol import Message, Say, request_out
from cellgate.router.lease import Lease

QUEUED_S = 0.01
"""A question that takes longer is about one that waits."""
WITHOUT_BRAIN_S = 1.0
"""So long a question waits for a brain; a new one is there after a fifth of it."""
SILENT_S = 1.0
"""A brain that has not been heard for so long is taken for lost; it speaks four times a second."""
UNSAID_MAX = 65_536


class Question:
    """A request for a unit that the brain has not answered yet."""

    __slots__ = ("_line", "_waiter", "asked_at", "number", "request")

    def __init__(self, line: Line, number: int, request: PickRequest, waiter: Waiter, now: float) -> None:
        self._line = line
        self._waiter = waiter
        self.asked_at = now
        self.number = number
        self.request = request

    @property
    def queued_at(self) -> float | None:
        """Since when it has a place in the queue, as far as can be seen from here; None: it has none."""
        return self.asked_at if self._line.now() - self.asked_at > QUEUED_S else None

    def settle(self, found: Lease | Failure) -> None:
        """The brain's answer, or that there will be none."""
        guarded(self._waiter, self._waiter.on_result, found)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._line.leave(self.number)


class Line:
    """One worker's. `greet` gives what a new brain is told first, `heard` is told what the brain says."""

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
        self._asks: dict[int, Question] = {}

    def __len__(self) -> int:
        """Questions that are open."""
        return len(self._asks)

    def meet(self) -> Link:
        """There is a brain, to be connected by what is returned: the first, or one after another."""
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
            link.send((Say.PICK, number, request_out(question.request)))
        return link

    def has_brain(self) -> bool:
        """Whether there is somebody to ask."""
        return self._link is not None and self._loop.time() - self._heard_at <= SILENT_S

    def close(self) -> None:
        """Send what was said, and end."""
        if self._link is not None:
            self._link.close()

    # -- saying --------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        """Say something that is to be acted on at once."""
        if self._link is not None:
            self._link.send(message)
        else:
            self._unsaid.append(message)

    def mention(self, message: Message) -> None:
        """Say something for which nobody waits."""
        if self._link is not None:
            self._link.later(message)
        else:
            self._unsaid.append(message)

    def rare(self, name: str, *what: Any) -> None:
        """Tell of what seldom happens."""
        self.mention((Say.RARE, name, what))

    # -- asking --------------------------------------------------------------------------------------------

    def ask(self, request: PickRequest, waiter: Waiter) -> Question:
        """Have the brain find a unit, and tell `waiter`. The lease will have the number of the question."""
        self._number = number = self._number + 1
        self._asks[number] = question = Question(self, number, request, waiter, self.now())
        if self._link is not None:
            self._link.send((Say.PICK, number, request_out(request)))
        if not self.has_brain():
            self._loop.call_later(WITHOUT_BRAIN_S, self._give_up, number)
        return question

    def leave(self, number: int) -> None:
        """Nobody waits for that answer any more."""
        if self.answered(number) is not None:
            self.mention((Say.LEAVE, number))

    def answered(self, number: int) -> Question | None:
        """The question of that number, which is closed; None: nobody waits for it any more."""
        return self._asks.pop(number, None)

    def tick(self, now: float) -> None:
        """Give up what a brain that stands still was asked before it did."""
        if self._link is not None and not self.has_brain():
            for number, question in list(self._asks.items()):
                if now - question.asked_at > WITHOUT_BRAIN_S:
                    self._give_up(number)

    def _hear(self, message: Message) -> None:
        self._heard_at = self._loop.time()
        self._heard(message)

    def _lost(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        for number in self._asks:
            self._loop.call_later(WITHOUT_BRAIN_S, self._give_up, number)

    def _give_up(self, number: int) -> None:
        if self.has_brain() or (question := self.answered(number)) is None:
            return
        self.mention((Say.LEAVE, number))
        reason = "the process that knows the units has ended, or stands still; another is on its way; retry"
        question.settle(Failure(Kind.NO_BRAIN, reason))
