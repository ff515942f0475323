"""The text of an answer, from the bytes that its client gets. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from cellgate.proxy.config.limits import LIMITS

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
        self.is_chunked = is_chunked
        self._is_events = is_events
        self._tail = b""
        self._texts: list[str] = []
        self.size = 0
        """About how many bytes of text there are."""

    def feed(self, data: bytes) -> None:
        """Bytes that are sent next."""
        if self._has_head:
            data, self._has_head = data.partition(b"\r\n\r\n")[2], False
        body = _unchunked(data) if self.is_chunked else data
        if not self._is_events:
            self._tail += body
            self.size += len(body)
            return
        events, end, rest = (self._tail + body).rpartition(b"\n\n")
        if len(rest) > LIMITS.event_bytes:
            events, rest = events + end + rest, b""
        self._tail = rest
        if text := text_of(events):
            self._texts.append(text)
            self.size += len(text)

    def take(self) -> str:
        """The text, which then is no longer there."""
        texts, self._texts, self.size = self._texts, [], 0
        return "".join(texts)

    def plain(self) -> bytes | None:
        """A plain body, whole, if it is JSON."""
        try:
            orjson.loads(self._tail)
        except orjson.JSONDecodeError:
            return None
        self.size = 0
        return self._tail


def _unchunked(data: bytes) -> bytes:
    """The content of whole chunks (RFC 9112, 7.1)."""
    parts, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        parts.append(data[end + 2 : end + 2 + size])
        at = end + size + 4
    return b"".join(parts)


def text_of(events: bytes) -> str:
    """What a model wrote in whole events; of an event that is not understood, all of it."""
    return "".join(_texts(events))


def _texts(events: bytes) -> Iterator[str]:
    for line in events.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == _DONE:
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
