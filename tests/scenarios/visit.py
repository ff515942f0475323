"""One request of one client, and whether what came back is honest.

What an engine says is a function of what it is asked, so the bytes that must come are known beforehand: an
honest answer is all of them, or the beginning of them and then an end that the client can tell from a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import orjson

from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.request.routes import RouteKind, find_route
from tests.scenarios.agent_answers import unlike
from tests.sim.agent_speech import is_for_agents
from tests.sim.behaviour import Behaviour
from tests.sim.conversation import End, Reply
from tests.sim.http_server import Exchange
from tests.sim.sequence import BLOCK_PATHS, Sequence, Served
from tests.sim.speech import render, render_blocks

_COMMENT = re.compile(rb"(?m)^:[^\n]*\n\n")
_ERROR_EVENT = b'data: {"error"'
_NAMED_ERROR = b"event: error\n"
_KINDS = {kind.value: kind for kind in FailureKind}
_CUT_SHORT = (End.TRUNCATED, End.RESET, End.LEFT, End.TIMEOUT)
_NEVER_BEGAN = (End.CLOSED, End.RESET, End.LEFT, End.TIMEOUT)


@dataclass(slots=True)
class Visit:
    """What was asked and what came. `body` is None unless a generation was asked for."""

    request_id: str
    path: str
    body: dict[str, Any] | None = None
    reply: Reply = field(default_factory=lambda: Reply(0.0))
    may_time_out: bool = False

    @property
    def is_answered(self) -> bool:
        """Whole, from a unit, and without an error in it."""
        return self.reply.status == 200 and self.reply.is_whole and self.reply.error is None

    @property
    def code(self) -> str | None:
        """The code of the error that came, if any."""
        error = self.reply.error
        return None if error is None else str(error["code"])

    @property
    def unit(self) -> str | None:
        """The unit whose answer it is; None when the gate answered."""
        return self.reply.headers.get("x-cellgate-unit")

    def dishonesty(self) -> str | None:
        """What is wrong with the answer, in a sentence; None for an honest one."""
        reply = self.reply
        if reply.end is End.TIMEOUT and not self.may_time_out:
            return "it hung"
        if reply.end is None or reply.end in (End.GARBAGE, End.REFUSED):
            return f"it ended in {reply.end}"
        if reply.status is None:
            return None if reply.end in _NEVER_BEGAN else f"it ended in {reply.end} without a status"
        if reply.headers.get("x-request-id") != self.request_id:
            return f"it carries the request id {reply.headers.get('x-request-id')}"
        if self.unit is None:
            return self._dishonesty_of_the_gate()
        if reply.status != 200 or self.body is None:
            return None
        if not self.body.get("stream"):
            return self._dishonesty_of_a_whole()
        try:
            return self._dishonesty_of_a_stream()
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
            return f"{reply.body[:200]!r} is no stream of answers: {error!r}"

    def _dishonesty_of_the_gate(self) -> str | None:
        reply = self.reply
        if find_route(self.path.encode()).kind is RouteKind.LOCAL:
            return None
        kind = _KINDS.get(self.code or "")
        if kind is None or kind.row.status != reply.status:
            return f"{reply.status} {reply.body[:200]!r} is no row of the failure table"
        if reply.headers.get("retry-after") != _text(kind.row.retry_after_s):
            return f"{kind} came with retry-after {reply.headers.get('retry-after')}"
        return None

    def _dishonesty_of_a_whole(self) -> str | None:
        expected, reply = self.expected(), self.reply
        if reply.is_whole:
            return None if reply.body == expected else f"{reply.body!r} is not {expected!r}"
        return self._dishonesty_of_a_part(reply.body, expected)

    def _dishonesty_of_a_stream(self) -> str | None:
        expected, reply = self.expected(), self.reply
        body = _COMMENT.sub(b"", reply.body)
        if self.path not in BLOCK_PATHS and is_for_agents(render(self.body or {})):
            return unlike(body, expected, is_whole=reply.is_whole)
        shown, error, said = body.partition(self._error_event)
        if not error:
            if reply.is_whole:
                is_same = body == expected or _documents(body) == _documents(expected)
                return None if is_same else f"{body!r} is not the whole {expected!r}"
            return self._dishonesty_of_a_part(body, expected)
        if not expected.startswith(shown) or (shown and not shown.endswith(b"\n\n")):
            return f"before its error came {shown!r}, which does not begin {expected!r}"
        by_gate = any(f'"code":"{name}"'.encode() in said for name in _KINDS)
        if by_gate and reply.is_whole:
            return f"it was broken off with {said!r}, and then ended as if it were whole"
        return None

    def _dishonesty_of_a_part(self, body: bytes, expected: bytes) -> str | None:
        # An error event may itself be cut off.
        shown = body if expected.startswith(body) else body[: body.rfind(b"\n\n") + 2]
        if not expected.startswith(shown) or not self._error_event.startswith(
            body[len(shown) :][: len(self._error_event)]
        ):
            return f"{body!r} does not begin {expected!r}"
        return None if self.reply.end in _CUT_SHORT else f"a part of the answer ended in {self.reply.end}"

    @property
    def _error_event(self) -> bytes:
        """How an event begins that reports an error."""
        return _NAMED_ERROR if self.path in BLOCK_PATHS else _ERROR_EVENT

    def expected(self) -> bytes:
        """The body that any engine alone would give."""
        assert self.body is not None
        transcript = _Transcript(self.path)
        text = render_blocks(self.body) if self.path in BLOCK_PATHS else render(self.body)
        served = Served(self.request_id, text, 0.0)
        sequence = Sequence(cast(Exchange, transcript), self.body, served, behaviour := Behaviour())
        if sequence.stream:
            sequence.begin(behaviour, cast(Any, None))
        while not sequence.advance():
            pass
        return b"".join(transcript.said)


class _Transcript:
    """In the place of an engine's connection: writes down what is said."""

    def __init__(self, path: str) -> None:
        self.request = SimpleNamespace(path=path)
        self.said: list[bytes] = []

    def begin(self, content_type: str, *, chunked: bool) -> None:
        """Heads are not kept."""

    def send(self, data: bytes) -> None:
        self.said.append(data)

    def end(self) -> None:
        """Neither is framing."""

    def reply(self, status: int, body: bytes) -> None:
        self.said.append(body)


def chat(prompt: str, *, stream: bool = True, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """The body of a chat request."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": "tiny", "messages": messages, "stream": stream, "max_tokens": max_tokens} | fields


def encode(body: dict[str, Any]) -> bytes:
    """A body as it is sent."""
    return orjson.dumps(body)


def _documents(body: bytes) -> list[Any]:
    """What a stream says. Where the gate has to say the end itself, fields are in an order of its own."""
    events = (event.rpartition(b"data: ")[2] for event in body.split(b"\n\n"))
    return [orjson.loads(event) if event.startswith(b"{") else event for event in events]


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)
