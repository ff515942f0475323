"""The stream of a `cellgate agent`: lines, heartbeats and their absence.

The protocol is in docs/agent.md. Everything is bounded, and a heartbeat costs one comparison, so a gate can
follow a thousand agents.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

import orjson

HEARTBEAT = b'{"cellgate_agent":1}'
"""The line that means: nothing has changed."""
AGENT_PROBE_LINE_BYTES = 64 * 1024
MESSAGES_PER_S_MAX = 100
"""Ten times what an agent ever sends; heartbeats do not count."""
BEATS_PER_S_MAX = 1000
"""A hundred times what an agent sends: as many wait for a gate that has not read for more than a minute."""
AGENT_PROBE_LATE_S = 0.2
"""A timer that fires this late shows that the gate's event loop was blocked."""
CONFIRM_S = 0.05
"""A heartbeat counts as missing when it still is a turn of the loop later: the timer may fire before the
socket is read."""

_BEAT = HEARTBEAT + b"\n"
_EXCERPT = 80
_REASON = 300


class AgentStream:
    """The stream of an agent: it follows the reply as it arrives (`on_head`, `on_body` and `on_over` neither
    wait nor raise), and is an async iterator of its messages.

    It ends by AgentLostError or NotAnAgentError. `received` is called with each message and beat.
    """

    def __init__(self, received: Callable[[], None], silence_s: float) -> None:
        self._received = received
        self._silence_s = silence_s
        self._line = bytearray()
        self._is_agent = False
        self._messages: deque[AgentMessage] = deque()
        self._counted = self._beats = 0
        self._counted_from = -math.inf
        self._ending: Exception | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._received_at = 0.0
        self._is_confirming = False

    def __aiter__(self) -> Self:
        """From now on a missing heartbeat counts."""
        self._received_at = _now()
        self._arm(self._received_at + self._silence_s)
        return self

    async def __anext__(self) -> AgentMessage:
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

    # From the first error on nothing of a read counts.

    def on_head(self, status: int, *, is_stream: bool, body: bytes) -> None:
        """Whether it is an agent's reply."""
        if status != 200:
            self._end(NotAnAgentError(f"it answered GET /watch with {status} {_excerpt(body)}", status))
        elif not is_stream:
            self._end(NotAnAgentError("its reply to GET /watch is not a stream", status))
        elif body:
            self.on_body(body)

    def on_body(self, part: bytes) -> None:
        """Lines, or parts of one."""
        if self._ending is not None:
            return
        try:
            if part == _BEAT and self._is_agent and not self._line:
                self._count_beat()
                self._note_received()
            else:
                self._take_lines(part)
        except (AgentLostError, NotAnAgentError) as error:
            self._end(error)

    def on_over(self, reason: str, *, is_garbled: bool) -> None:
        """The stream ends, unless it has ended already."""
        self._end(NotAnAgentError(reason) if is_garbled and not self._is_agent else AgentLostError(reason))

    def _take_lines(self, part: bytes) -> None:
        self._line += part
        *lines, self._line = self._line.split(b"\n") if b"\n" in part else [self._line]
        if len(self._line) > AGENT_PROBE_LINE_BYTES:
            raise self._garbled("a line that does not end")
        for line in lines:
            if line == HEARTBEAT:
                self._count_beat()
            else:
                self._count()
                self._messages.append(self._read(line))
                self._news.set()
            self._is_agent = True
            self._note_received()

    def _read(self, line: bytearray) -> AgentMessage:
        try:
            said = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise self._garbled(_excerpt(line)) from None
        if not isinstance(said, dict) or said.get("cellgate_agent") != 1:
            raise self._garbled(_excerpt(line))
        open_files = said.get("open_files")
        return AgentMessage(
            _text(said.get("state")),
            _text(said.get("reason")),
            _text(said.get("epoch")),
            float(open_files) if isinstance(open_files, int | float) else 0.0,
        )

    def _count(self) -> None:
        self._begin_second()
        self._counted += 1
        if self._counted > MESSAGES_PER_S_MAX:
            raise AgentLostError(f"more than {MESSAGES_PER_S_MAX} messages in a second")

    def _count_beat(self) -> None:
        self._begin_second()
        self._beats += 1
        if self._beats > BEATS_PER_S_MAX:
            raise AgentLostError(f"more than {BEATS_PER_S_MAX} heartbeats in a second")

    def _begin_second(self) -> None:
        if (now := _now()) - self._counted_from >= 1.0:
            self._counted_from, self._counted, self._beats = now, 0, 0

    def _garbled(self, what: str) -> Exception:
        """After a valid message the agent is lost; before one it never was an agent."""
        return (
            AgentLostError(f"its stream is garbled: {what}")
            if self._is_agent
            else NotAnAgentError(f"it sent {what}")
        )

    # Missing heartbeats, and the end

    def _note_received(self) -> None:
        self._received_at = _now()
        self._received()

    def _arm(self, at: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(at, self._check, at)

    def _check(self, due: float) -> None:
        """One timer for each connection: it is not moved with each heartbeat, but checks when the last one
        came.
        """
        now, silent_at = _now(), self._received_at + self._silence_s
        if now < silent_at:
            self._is_confirming = False
            self._arm(silent_at)
        elif now - due > AGENT_PROBE_LATE_S:
            self._arm(now + self._silence_s)
        elif not self._is_confirming:
            self._is_confirming = True
            self._arm(now + CONFIRM_S)
        else:
            self._end(AgentLostError(f"it has sent nothing for {now - self._received_at:.2f} s"))

    def _end(self, ending: Exception) -> None:
        if self._ending is None:
            self._ending = ending
            self._news.set()
            self.close()


class AgentLostError(Exception):
    """The agent sends nothing any more, or never did; `str()` has the reason."""


class NotAnAgentError(Exception):
    """The server is not an agent, or refuses this gate; `status` is that of its HTTP reply, 0 without one."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class AgentMessage(NamedTuple):
    """A report of the agent on its processes; `open_files` is a share of the limit."""

    state: str
    reason: str
    epoch: str
    open_files: float


def _now() -> float:
    return asyncio.get_running_loop().time()


def _text(value: object) -> str:
    """A text that is safe for a log line."""
    text = value[:_REASON] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "?" for char in text)


def _excerpt(data: bytes | bytearray) -> str:
    return ascii(data[:_EXCERPT].decode("utf-8", "replace"))
