"""A client's side of one connection: replies in order, each parsed and timed, and how each of them ended."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import httptools
import orjson

from tests.sim.loop import SimLoop


class End(Enum):
    """How a reply ended. TRUNCATED: closed before the reply was whole, CLOSED: before it began.

    GARBAGE: it was no HTTP, or more came than was asked for. LEFT: this client hung up.
    """

    COMPLETE = "complete"
    TRUNCATED = "truncated"
    CLOSED = "closed"
    RESET = "reset"
    GARBAGE = "garbage"
    TIMEOUT = "timeout"
    LEFT = "left"
    REFUSED = "refused"


@dataclass(slots=True)
class Reply:
    """What a client saw of one reply. Times are the loop's; `end` is None while it goes on.

    has_begun: bytes came while this was the first reply open.
    events: data of each complete server-sent event, with the time it was complete in `event_times_s`.
    """

    sent_s: float
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    interim: list[int] = field(default_factory=list)
    has_begun: bool = False
    pieces: list[bytes] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    event_times_s: list[float] = field(default_factory=list)
    comments: int = 0
    head_s: float = math.nan
    ended_s: float = math.nan
    end: End | None = None

    @property
    def is_whole(self) -> bool:
        return self.end is End.COMPLETE

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def text(self) -> str:
        """What was generated, streamed or not, as far as it came."""
        documents = [orjson.loads(event) for event in self.events if event != b"[DONE]"]
        if not documents and self.is_whole and self.status == 200:
            documents = [self.json]
        choices = [choice for document in documents for choice in document.get("choices", [])]
        return "".join(map(_content, choices))

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object: of the body, or of an event in the stream."""
        documents = [orjson.loads(event) for event in self.events if b'"error"' in event]
        if not documents and self.is_whole and self.status != 200 and self.body:
            documents = [self.json]
        return next((document["error"] for document in documents if "error" in document), None)

    @property
    def is_done(self) -> bool:
        """Whether the stream said that it is done."""
        return self.events[-1:] == [b"[DONE]"]

    @property
    def ttft_s(self) -> float:
        """From sending to the first event."""
        return self.event_times_s[0] - self.sent_s if self.event_times_s else math.nan


def _content(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""


class Conversation(asyncio.Protocol):
    """`all_ended` is done when every expected reply has ended."""

    transport: asyncio.Transport
    _latest: Reply

    def __init__(self, loop: SimLoop, leave_after_events: int | None, read_every_s: float) -> None:
        self._loop = loop
        self._leave_after_events = leave_after_events
        self._read_every_s = read_every_s
        self._parser = httptools.HttpResponseParser(self)
        self._open: deque[tuple[Reply, str]] = deque()
        self._headers: dict[str, str] = {}
        self._is_stream = False
        self._partial_event = b""
        self.all_ended: asyncio.Future[None] = loop.create_future()

    def expect(self, method: str) -> Reply:
        """The reply to a request that is being sent."""
        reply = Reply(self._loop.time())
        self._open.append((reply, method))
        return reply

    def leave(self) -> None:
        """Hang up, as a client that lost interest does."""
        self.finish(End.LEFT)
        self.transport.abort()

    def finish(self, end: End) -> None:
        """Nothing more will come: every reply that is open ends like this."""
        while self._open:
            reply, _ = self._open.popleft()
            if end in (End.TRUNCATED, End.CLOSED):
                end = self._how_closed(reply)
            self._end(reply, end)
        if not self.all_ended.done():
            self.all_ended.set_result(None)

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._open[0][0].has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.finish(End.GARBAGE)
            self.transport.abort()
        if self._read_every_s and not self.transport.is_closing():
            self.transport.pause_reading()
            self._loop.outside(self._read_every_s, self._read_on)

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(End.RESET if exc else End.TRUNCATED)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _how_closed(self, reply: Reply) -> End:
        if reply.status is None:
            return End.TRUNCATED if reply.has_begun else End.CLOSED
        delimited = {"content-length", "transfer-encoding"} & reply.headers.keys()
        return End.TRUNCATED if delimited else End.COMPLETE

    def _end(self, reply: Reply, end: End) -> None:
        reply.end = end
        reply.ended_s = self._loop.time()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._headers = {}
        self._partial_event = b""
        if not self._open:
            self._latest.end = End.GARBAGE
            raise ValueError("a reply that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        reply, method = self._open[0]
        status = self._parser.get_status_code()
        if status < 200:
            reply.interim.append(status)
            return
        reply.status, reply.headers, reply.head_s = status, self._headers, self._loop.time()
        self._is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
        if method == "HEAD":
            self._complete()

    def on_body(self, body: bytes) -> None:
        reply = self._open[0][0]
        reply.pieces.append(body)
        if self._is_stream:
            self._scan(reply, body)

    def on_message_complete(self) -> None:
        if self._open and self._open[0][0].status is not None:
            self._complete()

    def _complete(self) -> None:
        self._latest = self._open.popleft()[0]
        self._end(self._latest, End.COMPLETE)
        if not self._open and not self.all_ended.done():
            self.all_ended.set_result(None)

    def _scan(self, reply: Reply, body: bytes) -> None:
        *events, self._partial_event = (self._partial_event + body).split(b"\n\n")
        for event in events:
            name, found, data = event.rpartition(b"data: ")
            if found and (not name or name.startswith(b"event: ")):
                # The id of an event may follow its data.
                reply.events.append(data.partition(b"\nid: ")[0])
                reply.event_times_s.append(self._loop.time())
            else:
                reply.comments += 1
            if len(reply.events) == self._leave_after_events:
                self.leave()
                return
