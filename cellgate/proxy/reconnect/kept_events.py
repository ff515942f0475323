"""The events of one stream with an id each, kept so that its client can be sent them again. Pure.

An id is `PLACE.TOKEN.NUMBER`: the worker that has the stream, 128 random bits, and the number of the event.
It is the last line of an event (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6), so
that it replaces one that a unit gave.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

from cellgate.proxy.wire.sse import carries_data, split

_ID = re.compile(rb"(\d{1,4})\.([\w-]{22})\.(\d{1,12})")


class EventId(NamedTuple):
    """What a `Last-Event-ID` says."""

    place: int
    token: bytes
    number: int


def read_id(value: bytes) -> EventId | None:
    """The parts of an id; None: it is none of a gate."""
    match = _ID.fullmatch(value)
    return EventId(int(match[1]), match[2], int(match[3])) if match else None


class KeptEvents:
    """The newest events of one stream, in at most `most_bytes`; `stem` is what their ids begin with.

    `last` is the number of the newest event, `size` the bytes of all that are kept.
    """

    __slots__ = ("_events", "_most_bytes", "_stem", "_tail", "last", "size")

    def __init__(self, stem: bytes, most_bytes: int) -> None:
        self._stem = stem
        self._most_bytes = most_bytes
        self._events: deque[bytes] = deque()
        self._tail = b""
        self.last = self.size = 0

    @property
    def is_too_large(self) -> bool:
        """Whether an event that is not complete yet could not be kept."""
        return len(self._tail) > self._most_bytes

    def add(self, body: bytes) -> bytes:
        """Take a part of the stream; returns its complete events with their ids. Comments get none."""
        events, self._tail = split(self._tail + body)
        return b"".join([self._numbered(event) if carries_data(event) else event for event in events])

    def flush(self) -> bytes:
        """The begin of an event that is not complete yet, which is no longer kept."""
        rest, self._tail = self._tail, b""
        return rest

    def has_after(self, number: int) -> bool:
        """Whether all events behind this one are kept."""
        return 0 <= self.last - number <= len(self._events)

    def after(self, number: int) -> bytes | None:
        """The events behind this one, with their ids; None: they are not kept any more, or never were."""
        if not self.has_after(number):
            return None
        return b"".join(list(self._events)[len(self._events) - (self.last - number) :])

    def _numbered(self, event: bytes) -> bytes:
        self.last += 1
        event = b"%b\nid: %b%d\n\n" % (event.rstrip(b"\r\n").lstrip(b"\r\n"), self._stem, self.last)
        self._events.append(event)
        self.size += len(event)
        while self.size > self._most_bytes:
            self.size -= len(self._events.popleft())
        return event
