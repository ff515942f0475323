"""The transcript of a stream of chat or completions: its text so far, read from its events. Pure.

Only plain text of one choice is accepted. Anything else in an event (reasoning, tool calls, log
probabilities, a second choice) means that no other unit can resume the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.wire.sse import extra_field, payload, split

TEXT_CHARS = 1 << 20
"""Longer texts are not resumed: they would have to be kept, and then sent as a prompt."""
DONE = b"[DONE]"

STOPPED_BY = ("stop_reason", "matched_stop")
"""What vLLM and SGLang call the stop string, or the token, that ended a text."""

_FRAME = ("id", "created", "model", "system_fingerprint")
_OF_A_CHOICE = frozenset({"index", "delta", "text", "finish_reason", "stop_reason", "matched_stop"})
_OF_A_DELTA = frozenset({"role", "content"})
_EMPTY: tuple[object, ...] = (None, "", [], {}, False)
_NO_TEMPLATE = (b"", b"")
_PART_CHARS = 1 << 16
"""Texts are joined up to this length."""
_FEW = 4
"""Fewer pieces than this are read one by one."""


class Transcript:
    """What one client was sent of one answer; `framed`: it is read in whole HTTP chunks.

    `frame` is what all its events have in common, `finish` its finish reason, `stop` the stop string behind
    that, `strange` what it has carried that is no plain text, `closed` whether its last event was complete,
    `events` how many had an object.
    """

    __slots__ = (
        "_is_framed",
        "_parts",
        "_size",
        "_tail",
        "_template",
        "closed",
        "events",
        "finish",
        "frame",
        "has_choice",
        "has_role",
        "has_usage",
        "is_done",
        "stop",
        "unsupported",
    )

    def __init__(self, *, framed: bool = False) -> None:
        self._parts: list[str] = []
        self._size = 0
        self._tail = b""
        self._template = _NO_TEMPLATE
        self._is_framed = framed
        self.frame: dict[str, Any] = {}
        self.events = 0
        self.finish = self.unsupported = self.stop = ""
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
        if self.unsupported:
            return f"its stream has carried {self.unsupported}"
        if self._size > TEXT_CHARS:
            return f"it is longer than {TEXT_CHARS} characters"
        return ""

    def read(self, pieces: Iterable[bytes]) -> None:
        """Add what was sent; an incomplete event waits for the next piece."""
        left, known = iter(pieces), len(self._parts)
        while self._template is _NO_TEMPLATE and (piece := next(left, None)) is not None:
            self._read_piece(piece)
        self._read_alike(list(left))
        # Very many small strings would take more memory, and leave holes in it when they go.
        if known and len(self._parts[known - 1]) < _PART_CHARS:
            known -= 1
        self._parts[known:] = ["".join(self._parts[known:])]

    def _read_alike(self, pieces: list[bytes]) -> None:
        """Read events that are mostly alike: all at once, or recursively in halves."""
        if len(pieces) > _FEW:
            if not self._match_all(pieces):
                middle = len(pieces) // 2
                self._read_alike(pieces[:middle])
                self._read_alike(pieces[middle:])
            return
        for piece in pieces:
            self._read_piece(piece)

    def _read_piece(self, piece: bytes) -> None:
        if self._is_framed:
            piece = piece[piece.index(b"\n") + 1 : -len(b"\r\n")]
        events = self._events(piece)
        if len(events) > _FEW and self._cast_events(events):
            return
        for event in events:
            self._read_event(event)

    def skip(self) -> None:
        """The next piece does not follow the last one."""
        self._tail, self.closed = b"", True

    def _events(self, data: bytes) -> list[bytes]:
        events, self._tail = split(self._tail + data)
        self.closed = not self._tail
        if len(self._tail) > LIMITS.event_bytes:
            reached("event_bytes")
            self.unsupported = self.unsupported or f"an event larger than {LIMITS.event_bytes} bytes"
            self._tail = b""
        return events

    def _read_event(self, event: bytes) -> None:
        if name := extra_field(event):
            self.unsupported = self.unsupported or f"events with {name}"
        if (data := payload(event) or b"") == DONE:
            self.is_done = True
        elif data:
            self._parse(data, event)

    def take(self, document: dict[str, Any]) -> None:
        """Add the object of one event."""
        self.events += 1
        if not self.frame:
            self.frame = {key: document[key] for key in _FRAME if key in document}
        self.unsupported = self.unsupported or unsupported_in(document)
        choices = document.get("choices") or []
        for choice in choices if isinstance(choices, list) else [choices]:
            self.has_choice = True
            if isinstance(choice, dict):
                self._take_choice(choice)
        # With a choice it is the usage so far, not the final one.
        self.has_usage = self.has_usage or (bool(document.get("usage")) and not choices)

    def _parse(self, data: bytes, event: bytes) -> None:
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            self.unsupported = "an event that is not a JSON object"
            return
        known = len(self._parts)
        self.take(document)
        is_plain = len(self._parts) == known + 1 and not self.finish and not document.get("usage")
        if is_plain and self._is_framed:
            self._learn_template(event, self._parts[-1])

    def _learn_template(self, event: bytes, text: str) -> None:
        """Nearly all events of a stream differ only in their text: what surrounds it is the template."""
        key = b'"content":' if b'"content":' in event else b'"text":'
        for space in (b"", b" "):
            before, found, behind = event.partition(key + space + orjson.dumps(text))
            if found and key not in behind:
                self._template = (before + key, behind + b"\r\n")

    def _match_all(self, pieces: list[bytes]) -> bool:
        """Add chunks that all match the template, each with one event; False, and none is added, if not.

        This runs for each token of long streams: between the halves of the template is the JSON of a text,
        and many of them are parsed at once. A second event in a chunk would not be valid JSON there.
        """
        if not self.closed:
            return False
        before, behind = self._template
        skipped, cut = len(before), -len(behind)
        casts = [
            piece[start + skipped : cut]
            for piece in pieces
            if piece.startswith(before, start := piece.index(b"\n") + 1) and piece.endswith(behind)
        ]
        return len(casts) == len(pieces) and self._take_texts(casts)

    def _cast_events(self, events: list[bytes]) -> bool:
        """The same for the events of one chunk: a unit, or its network, may send many tokens at once."""
        before, behind = self._template[0], self._template[1].removesuffix(b"\r\n")
        skipped, cut = len(before), -len(behind)
        casts = [each[skipped:cut] for each in events if each.startswith(before) and each.endswith(behind)]
        return len(casts) == len(events) and self._template is not _NO_TEMPLATE and self._take_texts(casts)

    def _take_texts(self, casts: list[bytes]) -> bool:
        """Add texts that are each the JSON of a string; False, and none is added, if they are not."""
        try:
            texts = orjson.loads(b"[%b]" % b",".join(casts))
        except orjson.JSONDecodeError:
            return False
        if len(texts) != len(casts) or set(map(type, texts)) != {str}:
            return False
        self.events += len(texts)
        self._add("".join(texts))
        return True

    def _take_choice(self, choice: dict[str, Any]) -> None:
        self.finish = choice.get("finish_reason") or self.finish
        self.stop = next(
            (stop for name in STOPPED_BY if isinstance(stop := choice.get(name), str)), self.stop
        )
        delta = choice.get("delta") or {}
        if isinstance(delta, dict):
            self.has_role = self.has_role or bool(delta.get("role"))
            text = delta.get("content") or choice.get("text")
            if isinstance(text, str):
                self._add(text)

    def _add(self, text: str) -> None:
        self._size += len(text)
        if text and self._size <= TEXT_CHARS:
            self._parts.append(text)


def unsupported_in(document: dict[str, Any]) -> str:
    """What the object of an event has besides the plain text of one choice; empty: nothing."""
    choices = document.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return "choices in an unknown format"
    if len(choices) > 1 or any(choice.get("index") for choice in choices):
        return "a second choice"
    for choice in choices:
        delta = {} if choice.get("delta") is None else choice["delta"]
        if not isinstance(delta, dict):
            return "a choice in an unknown format"
        if strange := _unknown(choice, _OF_A_CHOICE) or _unknown(delta, _OF_A_DELTA):
            return strange
        if not all(isinstance(text or "", str) for text in (delta.get("content"), choice.get("text"))):
            return "a content that is not text"
    return ""


def _unknown(fields: dict[str, Any], known: frozenset[str]) -> str:
    """An unknown field with a value."""
    return next((key for key in fields.keys() - known if fields[key] not in _EMPTY), "")
