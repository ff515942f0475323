"""A client's connection of the benchmark: a raw protocol that counts what it reads, and when."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

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


class Connection(asyncio.Protocol):
    """One keep-alive connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answered: asyncio.Future[None] | None = None
        self.tally = Tally()
        self.body: list[bytes] = []
        self.sent_at = self.first_body_at = self._last_body_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes) -> str | None:
        """Send `request` and wait for its answer, whose body then is `self.body`. Returns what went wrong."""
        if self._transport.is_closing():
            return "the connection was closed between two requests"
        self.body = []
        self._answered = asyncio.get_running_loop().create_future()
        self.sent_at = time.perf_counter()
        self._transport.write(request)
        try:
            await self._answered
        except (ConnectionError, httptools.HttpParserError) as failure:
            return repr(failure)
        status = self._parser.get_status_code()
        return None if status == 200 else f"status {status}: {b''.join(self.body)[:200]!r}"

    def data_received(self, data: bytes) -> None:
        self.tally.reads += 1
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as failure:
            self._end(failure)

    def on_body(self, data: bytes) -> None:
        now, tally = time.perf_counter(), self.tally
        if self.body:
            tally.gap_s = max(tally.gap_s, now - self._last_body_at)
        else:
            self.first_body_at = now
            tally.ttfts_s.append(now - self.sent_at)
        self._last_body_at = now
        self.body.append(data)
        tally.answers += data.count(_TOKEN)

    def on_message_complete(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("closed before the answer was complete"))

    def _end(self, failure: Exception | None) -> None:
        if self._answered is None or self._answered.done():
            return
        if failure is None:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(failure)
