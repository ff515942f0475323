"""What a client was sent of a stream, kept in case its unit breaks it. Pure.

Bytes are kept as they were sent. They are parsed only when there are many or the stream has broken, so
keeping them costs an append. Of a stream that no unit could resume, only the end is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from cellgate.proxy.resume.eligible import OPEN
from cellgate.proxy.resume.transcript import DONE, Transcript
from cellgate.proxy.wire.sse import is_end

FOLD_BYTES = 12 * 1024
"""Above this many raw bytes they are replaced by their text."""
_USUAL_ENDS = (b"e\r\ndata: [DONE]\n\n\r\n", b"data: [DONE]\n\n")
END_CHUNKS = 3
"""Enough for the last token, the usage and the end."""


class AnyTranscript(Protocol):
    """What one client was sent of one answer, read from its events."""

    is_done: bool
    closed: bool

    @property
    def size(self) -> int:
        """How many characters were generated."""

    @property
    def is_broken_off(self) -> bool:
        """Whether it breaks off in the middle of an answer."""

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


class StreamShape(NamedTuple):
    """How the streams of one API are read. Their end is recognised without parsing: by the usual last chunks,
    or by a look at the last one.
    """

    transcript: MakeTranscript
    usual_ends: tuple[bytes, ...]
    is_end: Callable[[bytes], bool]


PLAIN = StreamShape(Transcript, _USUAL_ENDS, partial(is_end, end=DONE))
"""Streams of chat and completions."""


class ReplayBuffer:
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order.

    `ways` are the ways to resume it (eligible.py). Without any, its end alone is kept.
    """

    __slots__ = ("_folded", "_framed", "_shape", "chunks", "ways")

    def __init__(self, *, framed: bool, ways: int = OPEN, shape: StreamShape = PLAIN) -> None:
        self._framed = framed
        self._shape = shape
        self._folded: AnyTranscript | None = None
        self.ways = ways
        self.chunks: list[bytes] | deque[bytes] = [] if ways else deque(maxlen=END_CHUNKS)

    def read(self) -> AnyTranscript:
        """Parse all that was kept, and return the transcript."""
        transcript = self._transcript()
        transcript.read(self.chunks)
        self.chunks.clear()
        return transcript

    def end(self) -> bytes:
        """The end of what was sent, as far as it is still raw."""
        return b"".join(list(self.chunks)[-END_CHUNKS:])

    def keep_tail(self) -> None:
        """The stream cannot be resumed: from now on keep only its end."""
        self.ways = 0
        self._transcript().skip()
        self.chunks = deque(self.chunks, maxlen=END_CHUNKS)

    def is_incomplete(self) -> bool:
        """Whether it breaks off in the middle of an answer."""
        _, usual_ends, is_end = self._shape
        if self.chunks and ((last := self.chunks[-1]) in usual_ends or is_end(last)):
            return False
        return self.read().is_broken_off

    def _transcript(self) -> AnyTranscript:
        """The transcript so far. Most answers end before anything is parsed."""
        if self._folded is None:
            self._folded = self._shape.transcript(framed=self._framed, ways=self.ways)
        return self._folded


def plain(replay: ReplayBuffer) -> Transcript:
    """The transcript of a stream of chat or completions."""
    transcript = replay.read()
    assert isinstance(transcript, Transcript)
    return transcript
