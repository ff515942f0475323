"""What came of one request, and the judgement on it.

What must stay true: the client takes nobody's word for anything. Only a text that is right to the last byte,
ended as the API says, is whole; everything else has a name of its own, and is counted under exactly one.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from loadtests.drill.mixes import Request

REPEAT_CHARS = 10
"""So much text that was said before, said again where a stream was stitched, is a repetition: two words."""


class End(StrEnum):
    """How a request ended for its client."""

    WHOLE = "complete"
    ERROR_EVENT = "error event"
    """Broken after a token, and it says so."""

    REFUSED = "refused"
    """429 before any token."""

    LOST = "lost"
    """No whole answer: an error before any token, or cut off without a word after one."""

    HUNG = "hung"
    REPEATED = "repeated"
    """Part of the text came twice."""

    WRONG = "wrong"
    """Any other text than the right one, or a `usage` that does not count its tokens."""


@dataclass(slots=True)
class Answer:
    """What has come so far. Times are of the wall clock, in seconds; `gaps_s` are those between tokens.
    `cut`: how HTTP itself broke; `completion_tokens`: what `usage` says.
    """

    request: Request
    sent_at: float = field(default_factory=time.time)
    status: int = 0
    text: str = ""
    tokens: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    ended_at: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""
    done: bool = False
    cut: str = ""
    hung: bool = False

    def take_line(self, line: bytes, now: float) -> None:
        """Read one line of a stream; comments and blank ones say nothing."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = orjson.loads(data)
        if "error" in event:
            self.error = _message(event)
            return
        self._take_usage(event)
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._take_text(choice["delta"].get("content") if "delta" in choice else choice["text"], now)

    def take_whole(self, body: bytes, now: float) -> None:
        """Read an answer that came in one piece."""
        document = orjson.loads(body)
        if self.status != 200 or "error" in document:
            self.error = _message(document)
            return
        self._take_usage(document)
        if "data" in document:
            self.finish_reason = "stop"
            self._take_text(orjson.dumps(document["data"][0]["embedding"]).decode(), now)
        else:
            choice = document["choices"][0]
            self.finish_reason = choice["finish_reason"]
            self._take_text(choice["message"]["content"] if "message" in choice else choice["text"], now)
        self.done = True

    def _take_usage(self, document: Any) -> None:
        if usage := document.get("usage"):
            self.completion_tokens = usage.get("completion_tokens")

    def _take_text(self, text: str | None, now: float) -> None:
        if not text:
            return
        if self.first_at is None:
            self.first_at = now
        else:
            self.gaps_s.append(now - self.last_at)
        self.last_at = now
        self.tokens += 1
        self.text += text

    def end(self) -> tuple[End, str]:
        """The judgement, and why, where it is not whole."""
        if (expected := self.request.expected()) is not None and not expected.startswith(self.text):
            return _misfit(expected, self.text)
        if self.hung:
            return End.HUNG, f"no byte any more after {self.tokens} tokens, status {self.status}"
        if self.done and not self.error and not self.cut and self.status == 200:
            return self._complete(expected)
        why = f"status {self.status}, {self.tokens} tokens; error: {self.error!r}; cut: {self.cut!r}"
        if self.first_at is None:
            return (End.REFUSED if self.status == 429 else End.LOST), why
        return (End.ERROR_EVENT if self.error else End.LOST), why

    def _complete(self, expected: str | None) -> tuple[End, str]:
        """It says that it is complete."""
        if expected is not None and self.text != expected:
            return End.WRONG, f"ended as if whole after {len(self.text)} of {len(expected)} characters"
        if self.finish_reason is None:
            return End.WRONG, "ended without a finish reason"
        wanted = self.request.max_tokens
        if wanted and self.completion_tokens not in (wanted, None):
            return End.WRONG, f"usage says {self.completion_tokens} tokens, {wanted} were asked for"
        if expected is None and wanted and self.completion_tokens is None:
            return End.WRONG, "ended without usage, so nobody knows whether it is whole"
        return End.WHOLE, ""


def _misfit(expected: str, text: str) -> tuple[End, str]:
    """A text that is no beginning of the right one: where it leaves that, and whether it went back there."""
    pairs = zip(expected, text, strict=False)
    at = next((n for n, (right, found) in enumerate(pairs) if right != found), len(expected))
    rest = text[at:]
    # The first characters behind a seam may be right by chance, so it is looked for a little before, too.
    for back in range(REPEAT_CHARS):
        piece = text[max(0, at - back) :][:REPEAT_CHARS]
        if len(piece) == REPEAT_CHARS and 0 <= expected.find(piece) < at - back:
            return End.REPEATED, f"after {at} right characters: {rest[:40]!r}, which had been said"
    return End.WRONG, f"after {at} right characters: {rest[:40]!r}, right is {expected[at : at + 40]!r}"


def _message(document: Any) -> str:
    error = document.get("error", document) if isinstance(document, dict) else document
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
