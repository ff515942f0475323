"""A client's connection of the benchmark: what it reads is counted, and when."""

import time
from dataclasses import dataclass, field
from typing import Self

from loadtests.wire.client import Connection
from loadtests.wire.reply import Reply

_TOKEN = b'" token '


@dataclass(slots=True)
class Tally:
    """What one load came to. `answers` are requests or, for streams, tokens; times in seconds.

    `gap_s` is the longest time between two reads of one stream.
    """

    answers: int = 0
    reads: int = 0
    seconds: float = 0.0
    gap_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class MeasuredConnection:
    """One kept connection whose exchanges are counted and timed. `body` is that of the latest answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.tally = Tally()
        self.body: list[bytes] = []
        self.sent_at = self.first_body_at = self._last_body_at = 0.0

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect. Raises OSError."""
        return cls(await Connection.open(port))

    @property
    def is_usable(self) -> bool:
        """False once the server has closed it."""
        return self._connection.is_usable

    @property
    def reads(self) -> int:
        """How often bytes have come."""
        return self._connection.reads

    def close(self) -> None:
        """The client leaves."""
        self._connection.close()

    async def exchange(self, request: bytes, began_at: float = 0.0) -> str | None:
        """Send `request` and wait for its answer. Returns what went wrong. `began_at`: when the client
        began, where that was before now.
        """
        if not self.is_usable:
            return "the connection was closed between two requests"
        self.body = []
        reply = Reply(self._take)
        self.sent_at = began_at or time.perf_counter()
        try:
            await self._connection.exchange(request, reply)
        except ConnectionError as failure:
            return repr(failure)
        return None if reply.status == 200 else f"status {reply.status}: {reply.body[:200]!r}"

    def _take(self, data: bytes) -> None:
        now, tally = time.perf_counter(), self.tally
        if self.body:
            tally.gap_s = max(tally.gap_s, now - self._last_body_at)
        else:
            self.first_body_at = now
            tally.ttfts_s.append(now - self.sent_at)
        self._last_body_at = now
        self.body.append(data)
        tally.answers += data.count(_TOKEN)
