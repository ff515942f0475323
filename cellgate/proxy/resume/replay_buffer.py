"""What a client was sent of a stream, kept in case its unit breaks it. Pure.

Bytes are kept as they were sent. They are parsed only when there are many or the stream has broken, so
keeping them costs an append. Of a stream that no unit could resume, only the end is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from cellgate.proxy.resume.eligible import OPEN
from cellgate.proxy.resume.transcript import Transcript

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
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order.

    `ways` are the ways to resume it (eligible.py). Without any, its end alone is kept.
    """

    __slots__ = ("_folded", "_framed", "_shape", "chunks", "ways")

    def __init__(self, *, framed: bool, ways: int = OPEN, shape: MakeTranscript = Transcript) -> None:
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

    def keep_tail(self) -> None:
        """The stream cannot be resumed: from now on keep only its end."""
        self.ways = 0
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
    return transcript
