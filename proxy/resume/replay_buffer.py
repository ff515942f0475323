"""What a client has been shown of a stream, kept in case its unit breaks. Pure.

Bytes are kept as they were sent and are read only when they are many or the stream has broken: as long as
all is well, keeping costs an append. Of a stream that no unit could go on with, the end alone is kept.
"""

from __future__ import annotations

from collections import deque

from cellgate.proxy.resume.transcript import DONE, Transcript
from cellgate.proxy.wire.sse import is_end

FOLD_BYTES = 12 * 1024
"""So many bytes are kept raw; then what they say replaces them."""
_USUAL_ENDS = (b"e\r\ndata: [DONE]\n\n\r\n", b"data: [DONE]\n\n")
"""How nearly all streams end: known without being read."""
END_CHUNKS = 3
"""The last token, what was used, and the end."""


class ReplayBuffer:
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order.

    `whole`: all of it is kept, not its end alone.
    """

    __slots__ = ("_folded", "_framed", "chunks", "whole")

    def __init__(self, *, framed: bool, whole: bool = True) -> None:
        self._framed = framed
        self._folded: Transcript | None = None
        self.whole = whole
        self.chunks: list[bytes] | deque[bytes] = [] if whole else deque(maxlen=END_CHUNKS)

    def read(self) -> Transcript:
        """Fold all that was kept, and say what it amounts to."""
        transcript = self._transcript()
        transcript.read(self.chunks)
        self.chunks.clear()
        return transcript

    def end(self) -> bytes:
        """What was shown last, as far as it has not been folded."""
        return b"".join(list(self.chunks)[-END_CHUNKS:])

    def keep_tail(self) -> None:
        """Nobody could go on with it: from now on keep its end alone."""
        self.whole = False
        self._transcript().skip()
        self.chunks = deque(self.chunks, maxlen=END_CHUNKS)

    def is_incomplete(self) -> bool:
        """Whether it breaks off in the middle of an answer."""
        if self.chunks and ((last := self.chunks[-1]) in _USUAL_ENDS or is_end(last, DONE)):
            return False
        transcript = self.read()
        return transcript.has_choice and not transcript.is_done and not transcript.finish

    def _transcript(self) -> Transcript:
        """What was folded so far. Most answers end before any of them is."""
        if self._folded is None:
            self._folded = Transcript(framed=self._framed)
        return self._folded
