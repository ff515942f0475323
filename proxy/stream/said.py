"""What a stream of chat or completions has said so far, read from its events. Pure.

Only what is known to be plain text of one choice is taken for it. Whatever else an event carries (reasoning,
tool calls, log probabilities, a second choice) makes the stream one that no other unit can go on with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from proxy.stream.sse import payload, split

TEXT_CHARS = 1 << 20
"""Longer texts are not continued: they would have to be sent as a prompt, and kept until then."""
DONE = b"[DONE]"

_FRAME = ("id", "created", "model", "system_fingerprint")
_OF_A_CHOICE = frozenset({"index", "delta", "text", "finish_reason", "stop_reason", "matched_stop"})
_OF_A_DELTA = frozenset({"role", "content"})
_EMPTY: tuple[object, ...] = (None, "", [], {}, False)
_NO_MOULD = (b"\0", b"\0")
"""Nothing is like it."""


class Said:
    """What one client has been shown of one answer; `framed`, when that is read in whole HTTP chunks.

    `frame` is what all its events have in common, `finish` its finish reason, `strange` what it has carried
    that is no plain text, `closed` whether its last event was complete, `events` how many had an object.
    """

    __slots__ = (
        "_around",
        "_lines",
        "_mould",
        "_parts",
        "_size",
        "_tail",
        "closed",
        "events",
        "finish",
        "frame",
        "has_choice",
        "has_role",
        "has_usage",
        "is_done",
        "strange",
    )

    def __init__(self, *, framed: bool = False) -> None:
        self._parts: list[str] = []
        self._size = 0
        self._tail = b""
        self._mould = _NO_MOULD
        self._around = len(b"\r\n") if framed else 0
        self._lines = 4 if framed else 2
        self.frame: dict[str, Any] = {}
        self.events = 0
        self.finish = self.strange = ""
        self.has_choice = self.has_role = self.has_usage = self.is_done = False
        self.closed = True

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def why_not(self) -> str:
        """Why it cannot be continued, as far as the stream tells; empty when it can."""
        if self.strange:
            return f"its stream has carried {self.strange}"
        if self._size > TEXT_CHARS:
            return f"it is longer than {TEXT_CHARS} characters"
        return ""

    def read(self, pieces: Iterable[bytes]) -> None:
        """Take in what was shown; what follows the last complete event waits for the next piece."""
        casts: list[bytes] = []
        (before, behind), lines, around = self._mould, self._lines, self._around
        skipped, cut = len(before), -len(behind)
        for piece in pieces:
            start = piece.index(b"\n") + 1 if around else 0
            # This is for each token of long streams. A piece may hold several events, or a part of one.
            is_alike = piece.startswith(before, start) and piece.endswith(behind)
            if is_alike and piece.count(b"\n") == lines and self.closed:
                casts.append(piece[start + skipped : cut])
                continue
            self._take_casts(casts)
            for event in self._events(piece[start:-around] if around else piece):
                self._read_event(event)
            before, behind = self._mould
            skipped, cut = len(before), -len(behind)
        self._take_casts(casts)

    def skip(self) -> None:
        """What is read next does not follow what was read last."""
        self._tail, self.closed = b"", True

    def _events(self, data: bytes) -> list[bytes]:
        events, self._tail = split(self._tail + data)
        self.closed = not self._tail
        return events

    def _read_event(self, event: bytes) -> None:
        if (data := payload(event) or b"") == DONE:
            self.is_done = True
        elif data:
            self._parse(data, event)

    def take(self, document: dict[str, Any]) -> None:
        """Take the object of one event in."""
        self.events += 1
        if not self.frame:
            self.frame = {key: document[key] for key in _FRAME if key in document}
        self.has_usage = self.has_usage or bool(document.get("usage"))
        choices = document.get("choices") or []
        for choice in choices if isinstance(choices, list) else [choices]:
            self._take_choice(choice)

    def _parse(self, data: bytes, event: bytes) -> None:
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            self.strange = "an event that is no JSON object"
            return
        known = len(self._parts)
        self.take(document)
        if len(self._parts) == known + 1 and not self.finish and not document.get("usage"):
            self._make_mould(event, self._parts[-1])

    def _make_mould(self, event: bytes, text: str) -> None:
        """Nearly all events of a stream differ in their text alone: what stands around it is remembered."""
        key = b'"content":' if b'"content":' in event else b'"text":'
        before, found, behind = event.partition(key + orjson.dumps(text))
        if found and key not in behind:
            self._mould = (before + key, behind + b"\r\n"[: self._around])

    def _take_casts(self, casts: list[bytes]) -> None:
        """Take in what stood in events that are otherwise like those before: the JSON of a text, each."""
        if not casts:
            return
        try:
            texts = orjson.loads(b"[%b]" % b",".join(casts))
        except orjson.JSONDecodeError:
            texts = []
        if len(texts) == len(casts) and set(map(type, texts)) == {str}:
            self.events += len(texts)
            self._add("".join(texts))
        else:
            before, behind = self._mould
            for cast in casts:
                self._read_event(before + cast + behind)
        casts.clear()

    def _take_choice(self, choice: Any) -> None:
        self.has_choice = True
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            self.strange = self.strange or "a choice of another form"
            return
        strange = _strange(choice, _OF_A_CHOICE) or _strange(delta, _OF_A_DELTA)
        self.strange = self.strange or ("a second choice" if choice.get("index") else strange)
        self.has_role = self.has_role or bool(delta.get("role"))
        self.finish = choice.get("finish_reason") or self.finish
        text = delta.get("content") or choice.get("text") or ""
        if isinstance(text, str):
            self._add(text)
        else:
            self.strange = self.strange or "a content that is no text"

    def _add(self, text: str) -> None:
        self._size += len(text)
        if text and self._size <= TEXT_CHARS:
            self._parts.append(text)


def _strange(fields: dict[str, Any], known: frozenset[str]) -> str:
    """A field that is not known and says something."""
    return next((key for key in fields.keys() - known if fields[key] not in _EMPTY), "")
