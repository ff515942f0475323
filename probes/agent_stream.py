"""What comes over the wire from a `cellgate agent`: the head of its reply, chunks, lines, beats and silence.

The protocol is in docs/agent.md. Everything is bounded, and the common read (one beat, whole) costs one
comparison: a gate may listen to a thousand agents.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self, cast

import orjson

from cellgate.probes.agent import HEARTBEAT, chunk

HEAD_BYTES = 8 * 1024
LINE_BYTES = 64 * 1024
MESSAGES_PER_S_MAX = 100
"""Ten times what any agent has to say; beats do not count."""
LATE_S = 0.2
"""A timer that comes so much late shows that this gate itself stood still."""
CONFIRM_S = 0.05
"""Silence is believed when a turn of the loop later it still is: the timer may come before what waits in the
socket is read."""

_BEAT = chunk(HEARTBEAT)
_START = b"HTTP/1.1 "
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[ \r]")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.I)
_SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")
_SIZE_LINE_BYTES = 10
_EXCERPT = 80
_REASON = 300


class LostError(Exception):
    """The agent was heard, or should have been, and no longer is; `str()` says how that shows."""


class StrangerError(Exception):
    """What answers is no agent, or not for us; `status` is that of its HTTP reply, 0 when it sent none."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class Message(NamedTuple):
    """What the agent says of its processes; `open_files` is a share of the limit."""

    state: str
    reason: str
    epoch: str
    open_files: float


class AgentStream(asyncio.Protocol):
    """One connection to an agent, and an async iterator of its messages.

    It ends by LostError or StrangerError. `heard` is called with each message and beat.
    """

    def __init__(self, request: bytes, heard: Callable[[], None], silence_s: float) -> None:
        self._request = request
        self._heard = heard
        self._silence_s = silence_s
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._line = bytearray()
        self._has_head = self._is_agent = False
        self._messages: deque[Message] = deque()
        self._counted = 0
        self._counted_from = -math.inf
        self._ending: Exception | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        self._is_confirming = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        while not self._messages:
            if self._ending is not None:
                raise self._ending
            self._news.clear()
            await self._news.wait()
        return self._messages.popleft()

    def close(self) -> None:
        """Leave nothing behind."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # The transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        self._heard_at = self._loop.time()
        self._arm(self._heard_at + self._silence_s)

    def data_received(self, data: bytes) -> None:
        """Take a read; nothing of it counts from the first error on."""
        if data == _BEAT and self._is_agent and not self._buffer:
            self._note_heard()
            return
        self._buffer += data
        try:
            if self._has_head or self._take_head():
                self._take_chunks()
        except (LostError, StrangerError) as error:
            self._end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over, unless that was known already."""
        self._end(LostError(f"the connection broke: {exc}" if exc else "it closed the connection"))

    # Bytes to messages

    def _take_head(self) -> bool:
        if not self._buffer.startswith(_START[: len(self._buffer)]):
            raise StrangerError(f"it said {_excerpt(self._buffer)}")
        end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= HEAD_BYTES:
                raise StrangerError(f"the head of its reply is larger than {HEAD_BYTES} bytes")
            return False
        head = bytes(self._buffer[: end + 2])
        del self._buffer[: end + 4]
        status = _STATUS.match(head)
        if status is None or int(status[1]) != 200:
            first = _excerpt(head.partition(b"\r\n")[0])
            raise StrangerError(
                f"to GET /watch it said {first} {_excerpt(self._buffer)}", int(status[1]) if status else 0
            )
        if not _CHUNKED.search(head):
            raise StrangerError("its reply to GET /watch is no stream", 200)
        self._has_head = True
        return True

    def _take_chunks(self) -> None:
        buffer = self._buffer
        while (end := buffer.find(b"\r\n", 0, _SIZE_LINE_BYTES)) >= 0:
            if not _SIZE.fullmatch(buffer, 0, end):
                break
            size = int(buffer[:end], 16)
            if size == 0:
                raise LostError("it ended its stream")
            if size > LINE_BYTES:
                raise self._garbled(f"a chunk of {size} bytes")
            start, stop = end + 2, end + 2 + size
            if len(buffer) < stop + 2:
                return
            if buffer[stop : stop + 2] != b"\r\n":
                break
            self._line += buffer[start:stop]
            del buffer[: stop + 2]
            self._take_lines()
        if end >= 0 or len(buffer) >= _SIZE_LINE_BYTES:
            raise self._garbled(_excerpt(buffer))

    def _take_lines(self) -> None:
        *lines, self._line = self._line.split(b"\n")
        if len(self._line) > LINE_BYTES:
            raise self._garbled("a line without an end")
        for line in lines:
            if line != HEARTBEAT:
                self._count()
                self._messages.append(self._read(line))
                self._news.set()
            self._is_agent = True
            self._note_heard()

    def _read(self, line: bytearray) -> Message:
        try:
            said = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._garbled(_excerpt(line)) from None
        if not isinstance(said, dict) or said.get("cellgate_agent") != 1:
            raise self._garbled(_excerpt(line))
        open_files = said.get("open_files")
        return Message(
            _text(said.get("state")),
            _text(said.get("reason")),
            _text(said.get("epoch")),
            float(open_files) if isinstance(open_files, int | float) else 0.0,
        )

    def _count(self) -> None:
        now = self._loop.time()
        if now - self._counted_from >= 1.0:
            self._counted_from, self._counted = now, 0
        self._counted += 1
        if self._counted > MESSAGES_PER_S_MAX:
            raise LostError(f"more than {MESSAGES_PER_S_MAX} messages in a second")

    def _garbled(self, what: str) -> Exception:
        """Whoever has shown that it is an agent may break; anybody else never was one."""
        return (
            LostError(f"its stream is garbled: {what}")
            if self._is_agent
            else StrangerError(f"it said {what}")
        )

    # Silence, and the end

    def _note_heard(self) -> None:
        self._heard_at = self._loop.time()
        self._heard()

    def _arm(self, at: float) -> None:
        self._timer = self._loop.call_at(at, self._check, at)

    def _check(self, due: float) -> None:
        """One timer for a connection: it is not moved with each beat, but looks when the last one was."""
        now, silent_at = self._loop.time(), self._heard_at + self._silence_s
        if now < silent_at:
            self._is_confirming = False
            self._arm(silent_at)
        elif now - due > LATE_S:
            self._arm(now + self._silence_s)
        elif not self._is_confirming:
            self._is_confirming = True
            self._arm(now + CONFIRM_S)
        else:
            self._end(LostError(f"not heard for {now - self._heard_at:.2f} s"))

    def _end(self, ending: Exception) -> None:
        if self._ending is None:
            self._ending = ending
            self._news.set()
            self.close()


def _text(value: object) -> str:
    """A text fit for a log line, whatever was sent."""
    text = value[:_REASON] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text)


def _excerpt(data: bytes | bytearray) -> str:
    return ascii(bytes(data[:_EXCERPT]).decode("utf-8", "replace"))
