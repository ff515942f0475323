"""The text of an answer, from the bytes that its client gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from cellgate.proxy.wire.framing import CHUNKED, LAST_CHUNK, unframed
from cellgate.proxy.wire.sse import end_of_events, payload, split

_HEAD_END = b"\r\n\r\n"
_DONE = b"[DONE]"
_DEPTH = 8
_NAMES = frozenset(
    {
        "arguments",
        "content",
        "delta",
        "input_json",
        "partial_json",
        "reasoning",
        "reasoning_content",
        "refusal",
        "text",
        "thinking",
    }
)
"""Keys whose strings are written by a model: of chat, completions, messages and responses."""
_INSIDE = frozenset({"choices", "content_block", "delta", "function", "message", "part", "tool_calls"})


class WrittenText:
    """What of an answer has not been shown to the guardrail yet.

    `has_head`: the head of the response comes first; `is_chunked`: its body is sent in whole chunks.
    """

    def __init__(self, *, has_head: bool, is_chunked: bool, is_events: bool) -> None:
        self._has_head = has_head
        self._is_chunked = is_chunked
        self._is_events = is_events
        self._tail: list[bytes] = []
        self._before = b"\n"
        """The byte before the next one: a line end where an event may begin."""
        self._texts: list[str] = []
        self.size = 0
        """About how many bytes of text there are, of whole events."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Bytes that are sent next: up to the end of the last event that is complete with them, and the rest.
        They stay as they are, unless an event ends within.
        """
        head, body = self._without_head(data)
        is_last = False
        if self._is_chunked:
            body, is_last = unframed(body)
        end = end_of_events(body, self._before) if self._is_events else 0
        if not end:
            if body:
                self._tail.append(body)
                self._before = body[-1:]
            return (b"", data) if self._tail else (data, b"")
        whole, rest = body[:end], body[end:]
        self._read(whole)
        self._tail, self._before = [rest] if rest else [], rest[-1:] or b"\n"
        if not rest:
            return data, b""
        return head + self.framed(whole), self.framed(rest) + (LAST_CHUNK if is_last else b"")

    def framed(self, body: bytes) -> bytes:
        """A part of the body as it is sent."""
        return CHUNKED.frame(body) if self._is_chunked else body

    def take(self) -> str:
        """The text of whole events, which then is no longer there."""
        texts, self._texts, self.size = self._texts, [], 0
        return "".join(texts)

    def end(self) -> None:
        """The answer has ended: what there is of an event is all of it."""
        if self._is_events:
            self._read(b"")
            self.forget_begun()

    def forget_begun(self) -> None:
        """What there is of an event that is not complete will not be shown."""
        self._tail = []

    def plain(self) -> bytes:
        """A plain body, whole."""
        return b"".join(self._tail)

    def _without_head(self, data: bytes) -> tuple[bytes, bytes]:
        if not self._has_head:
            return b"", data
        self._has_head = False
        end = data.index(_HEAD_END) + len(_HEAD_END)
        return data[:end], data[end:]

    def _read(self, end: bytes) -> None:
        """The event that has begun is complete with this `end`, which may have others behind it."""
        if text := text_of(b"".join((*self._tail, end))):
            self._texts.append(text)
            self.size += len(text)


def text_of(events: bytes) -> str:
    """What a model wrote in whole events; of an event that is not understood, all of it."""
    return "".join(_texts(events))


def _texts(events: bytes) -> Iterator[str]:
    whole, tail = split(events)
    for event in (*whole, tail):
        data = (payload(event) or b"").strip()
        if not data or data == _DONE:
            continue
        try:
            yield from _written(orjson.loads(data), _DEPTH)
        except orjson.JSONDecodeError:
            yield data.decode("utf-8", "replace")


def _written(value: Any, depth: int) -> Iterator[str]:
    if depth == 0:
        return
    if isinstance(value, list):
        for each in value:
            yield from _written(each, depth - 1)
    elif isinstance(value, dict) and not str(value.get("type", "")).endswith(".done"):
        for key, found in value.items():
            if key in _NAMES and isinstance(found, str):
                yield found
            elif key in _INSIDE:
                yield from _written(found, depth - 1)
