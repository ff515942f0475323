"""What a client has been shown of a stream, kept in case its unit breaks. Pure.

Bytes are kept as they were sent and are read only when they are many or the stream has broken: as long as
all is well, keeping costs an append.
"""

from __future__ import annotations

from proxy.stream.said import Said

FOLD_BYTES = 64 * 1024
"""So many bytes are kept raw; then what they say replaces them."""


class Keep:
    """One stream's. `chunks` are whole HTTP chunks if `framed`, else bytes of the body, in order."""

    __slots__ = ("_framed", "_said", "_tail", "chunks")

    def __init__(self, *, framed: bool) -> None:
        self._framed = framed
        self._said = Said()
        self._tail = b""
        self.chunks: list[bytes] = []

    def read(self) -> Said:
        """Fold all that was kept, and say what it amounts to."""
        said, chunks = self._said, self.chunks
        body = b"".join(map(_unframed, chunks) if self._framed else chunks)
        chunks.clear()
        self._tail = said.read(self._tail + body)
        said.closed = not self._tail
        return said


def _unframed(chunk: bytes) -> bytes:
    return chunk[chunk.index(b"\r\n") + 2 : -2]
