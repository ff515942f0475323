"""A worker's line to the brain: what it says, what it asks, and what becomes of that while there is no brain.

1. What is to be told waits for the next brain; so does what is asked, for a second, and is asked anew.
2. Each question gets one answer: a lease, or why there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.workers.link import Link
from cellgate.proxy.workers.protocol import Message, Say
from cellgate.router.nouns import Refusal

if TYPE_CHECKING:
    from cellgate.proxy.workers.remote import RemoteSearch

WITHOUT_BRAIN_S = 1.0
"""So long a question waits for a brain; a new one is there after a fifth of it."""
SILENT_S = 1.0
"""A brain that has not been heard for so long is taken for lost; it speaks four times a second."""
UNSAID_MAX = 65_536


class Line:
    """One worker's. `greet` gives what a new brain is told first, `heard` is told what the brain says."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greet: Callable[[], list[Message]],
        heard: Callable[[Message], None],
    ) -> None:
        self._loop = loop
        self._greet = greet
        self._heard = heard
        self._link: Link | None = None
        self._unsaid: deque[Message] = deque(maxlen=UNSAID_MAX)
        self._heard_at = loop.time()
        self._number = 0
        self._asks: dict[int, tuple[RemoteSearch, Message, float]] = {}

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
        for number, (_, wanted, _) in self._asks.items():
            link.send((Say.PICK, number, wanted))
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

    def ask(self, search: RemoteSearch, wanted: Message) -> int:
        """Have the brain find a unit, as is `Wanted`, and tell `search`. The id of question and lease."""
        self._number = number = self._number + 1
        self._asks[number] = search, wanted, self._loop.time()
        if self._link is not None:
            self._link.send((Say.PICK, number, wanted))
        if not self.has_brain():
            self._loop.call_later(WITHOUT_BRAIN_S, self._give_up, number)
        return number

    def leave(self, number: int) -> None:
        """Nobody waits for that answer any more."""
        if self.answered(number) is not None:
            self.mention((Say.LEAVE, number))

    def answered(self, number: int) -> RemoteSearch | None:
        """Who asked that; None: nobody waits for it any more. The question is closed."""
        asked = self._asks.pop(number, None)
        return None if asked is None else asked[0]

    def tick(self, now: float) -> None:
        """Give up what a brain that stands still was asked before it did."""
        if self._link is not None and not self.has_brain():
            for number, (_, _, asked_at) in list(self._asks.items()):
                if now - asked_at > WITHOUT_BRAIN_S:
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
        if self.has_brain() or (search := self.answered(number)) is None:
            return
        self.mention((Say.LEAVE, number))
        reason = "the process that knows the units has ended, or stands still; another is on its way; retry"
        search.told(Refusal.NO_UNIT, Failure(Kind.NO_BRAIN, reason))
