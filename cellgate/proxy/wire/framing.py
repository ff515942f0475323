"""The head of a unit's reply for the client, and the framing of its body. Pure."""

from __future__ import annotations

from copy import copy
from enum import Enum, auto

from cellgate.proxy.wire.heads import client_head, crossing
from cellgate.proxy.wire.reply_reader import ReplyHead

LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class Framing(Enum):
    """How the end of the body is framed for the client."""

    CHUNKED = auto()
    IDENTITY = auto()
    """By content-length, or by close for an HTTP/1.0 client."""

    def frame(self, data: bytes) -> bytes:
        """`data`, not empty, as a part of the body."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self is CHUNKED else data

    @property
    def end(self) -> bytes:
        """What ends the body."""
        return LAST_CHUNK if self is CHUNKED else b""


# A member of an enum is a slow attribute on CPython 3.11, so those of the hot path are looked up once.
CHUNKED, IDENTITY = Framing.CHUNKED, Framing.IDENTITY


def framing_of(head: ReplyHead, *, http10: bool) -> Framing:
    """How the body of a reply goes to a client that speaks HTTP/1.0 or not."""
    if http10 or head.bodiless or (head.length is not None and not head.is_events):
        return IDENTITY
    return CHUNKED


def without(head: ReplyHead, starts: tuple[bytes, ...]) -> ReplyHead:
    """The head of a reply without the lines that begin like these. Replies may share the one given."""
    other = copy(head)
    other.lines = [line for line in head.lines if not line.startswith(starts)]
    return other


def head_of(head: ReplyHead, framing: Framing, *, own: bytes, close: bool) -> bytes:
    """The head of a reply as its client gets it, with our `own` lines."""
    own += head.content_lines
    if framing is CHUNKED:
        own += _CHUNKED
    elif head.length is not None and not head.is_events:
        own += b"content-length: %b\r\n" % head.length
    lines = crossing(head.lines, head.fields) if head.connection_tokens else head.lines
    return client_head(head.status, lines, own=own, close=close)


def unframed(chunks: bytes) -> tuple[bytes, bool]:
    """The content of whole chunks, and whether the last chunk is among them."""
    pieces: list[bytes] = []
    at = 0
    while at < len(chunks):
        line_end = chunks.index(b"\r\n", at)
        size = int(chunks[at:line_end].partition(b";")[0], 16)
        if not size:
            return b"".join(pieces), True
        at = line_end + 2 + size + 2
        pieces.append(chunks[line_end + 2 : at - 2])
    return b"".join(pieces), False
