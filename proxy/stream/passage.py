"""Events of one reply on their way: which may go on to the client, and what is wrong with the next. Pure."""

from __future__ import annotations

from proxy.failure import Failure, Kind
from proxy.stream.sse import (
    before_error,
    carries_data,
    end_of_events,
    is_error,
    message_of,
    without_comments,
)
from proxy.stream.stitch import Stitch, UnlikeError

HELD_BYTES = 64 * 1024
TAIL_BYTES = 16 * 1024


class Passage:
    """Holds the beginning of a stream until it shows what it is, and later the beginning of each event.

    `in_event`: a large event was shown in part. `stitch` rewrites the events of a unit that goes on for
    another.
    """

    __slots__ = ("_tail", "in_event", "stitch")

    def __init__(self) -> None:
        self._tail = b""
        self.in_event = False
        self.stitch: Stitch | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._tail

    @property
    def is_over(self) -> bool:
        """Whether all was said, though the unit may not have ended."""
        return self.stitch is not None and self.stitch.is_over

    def begin(self, body: bytes, *, ended: bool) -> bytes | Failure | None:
        """All that has come, once it shows work; None: not yet; or what is wrong. `ended`: that is all."""
        self._tail = held = without_comments(self._tail + body)
        end = end_of_events(held)
        if end and carries_data(held[:end]):
            if is_error(held[:end]):
                return Failure(Kind.FIRST_EVENT_ERROR, f"its stream began with an error: {message_of(held)}")
            self._tail = b""
            return held
        if ended:
            return Failure(Kind.CLOSED_EARLY, "its stream ended without an event")
        if len(held) > HELD_BYTES:
            return Failure(Kind.GARBAGE, f"its first event is larger than {HELD_BYTES} bytes")
        return None

    def feed(self, body: bytes, *, ended: bool) -> tuple[bytes, Failure | None]:
        """What may be shown now, and what is wrong with what follows."""
        events = self._tail + body
        end = len(events) if ended else end_of_events(events)
        if len(events) - end > TAIL_BYTES:
            end = len(events)
            self.in_event = True
        elif end:
            self.in_event = False
        events, self._tail = events[:end], events[end:]
        failure = None
        good = before_error(events)
        if len(good) < len(events):
            reason = message_of(events[len(good) :])
            failure = Failure(Kind.STREAM_ERROR, f"it failed in its stream: {reason}")
            events = good
        if events and self.stitch is not None:
            try:
                events = self.stitch.feed(events)
            except UnlikeError as error:
                return b"", Failure(Kind.NOT_CONTINUED, f"it went on with {error}")
        return events, failure
