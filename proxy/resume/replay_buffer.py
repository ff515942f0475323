"""What a client was sent of a stream, kept in case its unit breaks it. Pure.

Bytes are kept as they were sent. They are parsed only when there are many or the stream has broken, so
keeping them costs an append. Of a stream that no unit could resume, only the end is kept.
"""

from __future__ import annotations

from collections import deque

from cellgate.proxy.resume.eligible import OPEN
from cellgate.proxy.resume.transcript import DONE, Transcript
from cellgate.proxy.wire.sse import is_end

FOLD_BYTES = 12 * 1024
"""Above this many raw bytes they are replaced by their text."""
_USUAL_ENDS = (b"e\r\ndata: [DONE]\n\n\r\n", b"data: [DONE]\n\n")
"""The usual end of a stream, recognised without parsing."""
END_CHUNKS = 3
"""Enough for the last token, the usage and the end."""


class ReplayBuffer:
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order.

    `ways` are the ways to resume it (eligible.py). Without any, its end alone is kept.
    """

    __slots__ = ("_folded", "_framed", "chunks", "ways")

    def __init__(self, *, framed: bool, ways: int = OPEN) -> None:
        self._framed = framed
        self._folded: Transcript | None = None
        self.ways = ways
        self.chunks: list[bytes] | deque[bytes] = [] if ways else deque(maxlen=END_CHUNKS)

    def read(self) -> Transcript:
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
        if self.chunks and ((last := self.chunks[-1]) in _USUAL_ENDS or is_end(last, DONE)):
            return False
        transcript = self.read()
        return transcript.has_choice and not transcript.is_done and not transcript.finish

    def _transcript(self) -> Transcript:
        """The transcript so far. Most answers end before anything is parsed."""
        if self._folded is None:
            self._folded = Transcript(framed=self._framed, text_only=self.ways == OPEN)
        return self._folded
