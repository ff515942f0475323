"""The usual reply of an engine: `200 OK` with a body whose end leaves no doubt. Pure.

What is not exactly that is left to the parser (reply_reader.py), which would read the same from what is.
"""

from __future__ import annotations

import re

from cellgate.proxy.wire.heads import REPLY_FIELDS, Fields
from cellgate.proxy.wire.known_lines import KnownLines

_FIRST_LINE = b"HTTP/1.1 200 OK"
_LAST_CHUNK = b"0\r\n\r\n"
_SIZE_LINE = re.compile(rb"([1-9a-f][0-9a-f]{0,5})\r\n")
_UNUSUAL = frozenset(
    {
        b"connection",
        b"content-encoding",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
    }
)
"""Of REPLY_FIELDS; but `Connection: keep-alive` is usual."""
_LINES = KnownLines(REPLY_FIELDS, REPLY_FIELDS - _UNUSUAL)


def plain_head(head: bytes) -> tuple[list[bytes], Fields] | None:
    """The forwarded lines and the fields of a head, without the empty line behind it; or None."""
    lines = head.split(b"\r\n")
    if lines.pop(0) != _FIRST_LINE or (read := _LINES.head(lines)) is None:
        return None
    forwarded, fields, _ = read
    # A field that comes twice is unusual.
    return (forwarded, fields) if len(dict(fields)) == len(fields) else None


def whole_chunks(data: bytes) -> tuple[list[bytes], bool] | None:
    """The content of each chunk, and whether the last, empty one came behind them; None if `data` is not
    whole chunks and nothing else.
    """
    pieces: list[bytes] = []
    at, size = 0, len(data)
    while at < size:
        line = _SIZE_LINE.match(data, at)
        if line is None:
            is_last = data[at:] == _LAST_CHUNK
            return (pieces, True) if is_last else None
        begin = line.end()
        end = begin + int(line[1], 16)
        if data[end : end + 2] != b"\r\n":
            return None
        pieces.append(data[begin:end])
        at = end + 2
    return pieces, False
