"""How a client is told where a body ends. Pure."""

from __future__ import annotations

from enum import Enum, auto

LAST_CHUNK = b"0\r\n\r\n"


class Framing(Enum):
    """How the client is told where the body ends."""

    CHUNKED = auto()
    IDENTITY = auto()
    """By content-length, or by close for an HTTP/1.0 client."""

    def frame(self, data: bytes) -> bytes:
        """`data`, not empty, as a part of the body."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self is Framing.CHUNKED else data

    @property
    def end(self) -> bytes:
        """What ends the body."""
        return LAST_CHUNK if self is Framing.CHUNKED else b""
