"""The events of one reply: which may be sent to the client, and what is wrong with the next. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.sse import (
    ABORT,
    BOM,
    NO_STOP,
    before_error,
    carries_data,
    end_of_events,
    first_end,
    is_aborted,
    is_error,
    is_preamble,
    message_of,
    split,
    without_comments,
)
from cellgate.proxy.resume.eligible import OPEN, TOKENS
from cellgate.proxy.resume.shown import MismatchError
from cellgate.proxy.resume.transcript import CountLog, TokenLog, Transcript

IDLE_BYTES = 64 * 1024
"""More events without work than this are shown as they are."""
TAIL_BYTES = 16 * 1024
"""A longer event is sent before its end has arrived, unless it must be rewritten."""
_REPLAY_TOO_LARGE = f"an event larger than {LIMITS.event_bytes} bytes"


class EventFilter:
    """Holds the beginning of a stream until its first event with data, and later the beginning of each event.

    `in_event`: a large event was sent in part. `joiner` rewrites the events of a unit that resumes a stream;
    these must be whole, and so must events with token ids or counts that the client does not get (`strips`).
    `is_idle` says of whole events that nothing in them was computed: such are held like a preamble;
    `idle_events` is how many have come, `idle_at` since when nothing else has come (0: nothing
    has, of any kind).
    `may_hold` says whether there is memory for so many more bytes of the beginning, beyond `event_bytes`.
    """

    __slots__ = (
        "_before",
        "_begun",
        "_grown_from",
        "_idle_bytes",
        "_is_idle",
        "_may_hold",
        "_preamble",
        "_room",
        "_size",
        "_strips",
        "_tail",
        "idle_at",
        "idle_events",
        "in_event",
        "joiner",
    )

    def __init__(
        self,
        *,
        strips: bool = False,
        is_idle: Callable[[bytes], bool] | None = None,
        may_hold: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._strips = strips
        self._is_idle = is_idle
        self._may_hold = may_hold
        self._room = LIMITS.event_bytes
        """So much of the beginning may be held."""
        self._tail: list[bytes] = []
        self._size = 0
        self._before = b"\n"
        """The byte before the next one: a line end where an event may begin."""
        self._begun = False
        self._preamble: list[bytes] = []
        """Events that came before anything was computed."""
        self._idle_bytes = self.idle_events = self._grown_from = 0
        self.in_event = False
        self.idle_at = 0.0
        self.joiner: EventRewriter | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held or rewritten, and the next byte begins an event."""
        return not self._size and not self.in_event and self.joiner is None

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete, although the unit may not have ended its stream."""
        return self.joiner is not None and self.joiner.is_over

    def begin(self, body: bytes, *, ended: bool) -> bytes | Failure | None:
        """All that was received, once it has data; None: not yet; or the failure. `ended`: that is all."""
        events = self._take(body)
        if events and not self._begun:
            self._begun = True
            events = events.removeprefix(BOM)
        # What is large has come in many reads: it ends in this one.
        seen = edges(events, len(body))
        # Usually the first bytes are data.
        if events and (self._preamble or events.startswith(b"data:") or carries_data(seen)):
            if is_error(seen):
                self._preamble.append(events)
                return _reported(seen, FailureKind.FIRST_EVENT_ERROR, "began with")
            if not self._preamble and seen is events:
                events = seen = without_comments(events)
            if not (is_preamble(seen) or self._are_idle(seen)):
                return self._held(events)
            self._preamble.append(events)
            self.idle_events += seen.count(b"\n\n")
        elif events.startswith(b"error:"):
            # As older llama.cpp tells one.
            self._preamble.append(events)
        if ended:
            if self._preamble and self._is_idle is not None:
                return self._held(b"")
            return Failure(FailureKind.CLOSED_EARLY, "its stream ended without an event")
        return None if self._has_room() else self._overfull()

    def note_idle(self, now: float) -> None:
        """Something has come, and nothing of it shows work: it is idle, unless a large event is arriving."""
        grown = self._size - self._grown_from
        if not self.idle_at or grown >= FLOW_BYTES:
            self.idle_at = now
        if grown < 0 or grown >= FLOW_BYTES:
            self._grown_from = self._size

    def begun_with(self, *, ended: bool) -> bytes:
        """The whole events of a beginning that failed."""
        preamble, self._preamble = self._preamble, []
        return b"".join(preamble) + (self._flush() if ended else b"")

    def _held(self, events: bytes) -> bytes:
        """All of the beginning, with these events at its end."""
        preamble, self._preamble = self._preamble, []
        return b"".join((*preamble, events, self._flush())) if preamble or self._tail else events

    def _has_room(self) -> bool:
        """Whether there is memory for what is held."""
        held = self._size + sum(map(len, self._preamble))
        if held > BEGIN_BYTES and not self._strips:
            return False
        missing = held - self._room
        if missing > 0:
            if not self._may_hold(missing):
                return False
            self._room += missing
        return True

    def _overfull(self) -> bytes | Failure:
        """More has come than there is memory for: it is shown as it is, unless it must be rewritten."""
        reached("event_bytes")
        if self._strips:
            return Failure(FailureKind.NO_MEMORY, "the gate has no memory left for the begin of its stream")
        return self._held(b"")

    def _are_idle(self, events: bytes) -> bool:
        """Whether the next events show no work either."""
        if self._is_idle is None:
            return False
        if len(events) > IDLE_BYTES:
            # Only a preamble is that large: it repeats what its client has sent.
            events = b"".join(each for each in split(events)[0] if not is_preamble(each))
        self._idle_bytes += len(events)
        return self._idle_bytes <= IDLE_BYTES and self._is_idle(events)

    def feed(self, body: bytes, *, ended: bool) -> tuple[bytes, Failure | None]:
        """What may be sent now, and what is wrong with the rest."""
        if self.in_event:
            return self._feed_rest(body, ended=ended)
        events = self._take(body)
        if ended:
            events += self._flush()
        elif self._size > TAIL_BYTES and self.joiner is None and not self._strips:
            before = self._before
            events += self._flush()
            self._before, self.in_event = before, True
        is_large = len(events) > LIMITS.event_bytes and not is_error(edges(events))
        good, failure = events if is_large else before_error(events), None
        if len(good) < len(events):
            failure = _reported(events, FailureKind.STREAM_ERROR, "reported")
        elif self._size > self._room and not self._has_room():
            reached("event_bytes")
            failure = Failure(FailureKind.NOT_RESUMED, f"it sent {_REPLAY_TOO_LARGE}")
        if good and self.joiner is not None:
            try:
                good = self.joiner.feed(good)
            except MismatchError as error:
                return error.shown, Failure(FailureKind.NOT_RESUMED, f"it sent {error}")
        return good, failure

    def _feed_rest(self, body: bytes, *, ended: bool) -> tuple[bytes, Failure | None]:
        """The rest of an event that was sent in part is sent as it arrives."""
        end = first_end(body, self._before)
        if not end:
            self._before = body[-1:] or self._before
            return body, None
        self.in_event, self._before = False, b"\n"
        events, failure = self.feed(body[end:], ended=ended)
        return body[:end] + events, failure

    def _take(self, body: bytes) -> bytes:
        """The events that are complete with `body`; what follows them is held."""
        end = end_of_events(body, self._before)
        if end == len(body) and not self._tail:
            return body
        if not end:
            if body:
                self._tail.append(body)
                self._size += len(body)
                self._before = body[-1:]
            return b""
        events = b"".join((*self._tail, body[:end])) if self._tail else body[:end]
        rest = body[end:]
        self._tail, self._size = ([rest], len(rest)) if rest else ([], 0)
        self._before = rest[-1:] or b"\n"
        return events

    def _flush(self) -> bytes:
        if not self._tail:
            return b""
        held = b"".join(self._tail)
        self._tail, self._size, self._before = [], 0, b"\n"
        return held


def are_whole(events: bytes) -> bool:
    """Whether these are whole events, or nothing, and none can report an error: they need no filter."""
    return not events or (
        events.endswith(b"\n\n") and b"error" not in events and ABORT not in events and NO_STOP not in events
    )


def edges(events: bytes, behind: int = 0) -> bytes:
    """What is looked at of whole events: all, or if there is a large one, the begin, and the end with what
    came `behind` it. That looks like the same events with less text.
    """
    end = EDGE_BYTES + behind
    is_large = len(events) > max(LIMITS.event_bytes, EDGE_BYTES + end)
    return events[:EDGE_BYTES] + events[-end:] if is_large else events


class EventRewriter(Protocol):
    """Writes the events of a unit that resumes a stream as if the first unit had sent them.

    `is_over`: the answer is complete, further events are ignored.
    """

    is_over: bool

    def feed(self, events: bytes) -> bytes:
        """Complete events in, what the client gets out. Raises MismatchError."""


BEGIN_BYTES = 9 << 20
"""More of a beginning is shown as it comes: to pass on so much takes 50 ms, in which others wait."""
EDGE_BYTES = 64 << 10
"""So much is looked at of the begin and of the end of a large event."""
FLOW_BYTES = 4096
"""An event that grows by so much is on its way, however long it takes."""


def _reported(events: bytes, kind: FailureKind, how: str) -> Failure:
    """The failure that an engine reports in `events`: one of this kind, or that it has aborted the answer."""
    first = events[len(before_error(events)) :].partition(b"\n\n")[0]
    if is_aborted(first):
        return Failure(FailureKind.ABORTED, "its engine aborted the answer")
    return Failure(kind, f"its stream {how} an error: {message_of(events)}")


# What a client was sent of a stream, kept in case its unit breaks it. Pure.
#
# Bytes are kept as they were sent. They are parsed only when there are many or the stream has broken, so
# keeping them costs an append. Of a stream that no unit could resume, only the end is kept.


FOLD_BYTES = 12 * 1024
"""Above this many raw bytes they are replaced by their text."""
END_CHUNKS = 3
"""Enough for the number of the next event, and for why it cannot be resumed."""


class AnyTranscript(Protocol):
    """What one client was sent of one answer, read from its events."""

    is_done: bool
    closed: bool

    @property
    def size(self) -> int:
        """How many characters were generated."""

    @property
    def next_number(self) -> int:
        """The number of the next event, in APIs that number them."""

    @property
    def why_not(self) -> str:
        """Why it cannot be continued, as far as the stream tells; empty when it can."""

    def read(self, pieces: Iterable[bytes]) -> None:
        """Add what was sent; an incomplete event waits for the next piece."""

    def skip(self) -> None:
        """The next piece does not follow the last one."""


class MakeTranscript(Protocol):
    """Makes the transcript of a stream that has `ways` to be resumed; `framed`: read in whole HTTP chunks."""

    def __call__(self, *, framed: bool, ways: int) -> AnyTranscript: ...


class ReplayBuffer:
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order; `tokens`
    are the ids that its unit was asked for, which are in none of them, or how many it has told.

    `ways` are the ways to resume it (eligible.py). Without any, its end alone is kept.
    """

    __slots__ = ("_folded", "_framed", "_shape", "chunks", "tokens", "ways")

    def __init__(self, *, framed: bool, ways: int = OPEN, shape: MakeTranscript = Transcript) -> None:
        self._framed = framed
        self._shape = shape
        self._folded: AnyTranscript | None = None
        self.ways = ways
        self.tokens = None if ways < TOKENS else TokenLog() if ways & TOKENS else CountLog()
        self.chunks: list[bytes] | deque[bytes] = [] if ways else deque(maxlen=END_CHUNKS)

    def read(self) -> AnyTranscript:
        """Parse all that was kept, and return the transcript."""
        transcript = self._transcript()
        transcript.read(self.chunks)
        self.chunks.clear()
        return transcript

    def keep_tail(self) -> None:
        """The stream cannot be resumed: from now on keep only its end."""
        self.ways = 0
        if self.tokens is not None:
            self.tokens.drop()
        self._transcript().skip()
        self.chunks = deque(self.chunks, maxlen=END_CHUNKS)

    def _transcript(self) -> AnyTranscript:
        """The transcript so far. Most answers end before anything is parsed."""
        if self._folded is None:
            self._folded = self._shape(framed=self._framed, ways=self.ways)
        return self._folded


def plain(replay: ReplayBuffer) -> Transcript:
    """The transcript of a stream of chat or completions."""
    transcript = replay.read()
    assert isinstance(transcript, Transcript)
    log = replay.tokens
    transcript.tokens = log if isinstance(log, TokenLog) else None
    transcript.counts = log if isinstance(log, CountLog) else None
    return transcript
