"""The usual request: it comes in one read, alone and whole, and nothing in its head is unusual.

What is not exactly that is left to the parser (reader.py), which would read the same from what is. No byte of
it may be doubtful, or the gate and a proxy before it could take different bytes for a request.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from cellgate.proxy.wire.heads import REQUEST_FIELDS
from cellgate.proxy.wire.known_lines import KnownLines
from cellgate.proxy.wire.request import Request

FIRST_LINES_MAX = 256
"""So many first lines are kept; then all are forgotten."""
FIRST_LINE_BYTES = 256
"""No longer one is kept, and none with a query: there may be something secret in it."""

_FIRST_LINE = re.compile(rb"(GET|POST) (/[A-Za-z0-9/._~:@%=+-]*)(\?[A-Za-z0-9/._~:@%=+&,-]*)? HTTP/1\.1")
_USUAL_FIELDS = frozenset(
    {
        b"accept-encoding",
        b"content-length",
        b"endpoint-load-metrics-format",
        b"host",
        b"x-cellgate-token",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-haproxy-server-state",
        b"x-request-id",
    }
)
"""Of REQUEST_FIELDS; and `Connection: keep-alive`."""


class FirstLine(NamedTuple):
    """What the first line of a request says."""

    method: bytes
    target: bytes
    path: bytes


class _KnownFirstLines(dict[bytes, FirstLine | None]):
    """First lines by their bytes; None: unusual."""

    def __missing__(self, line: bytes) -> FirstLine | None:
        found = _FIRST_LINE.fullmatch(line)
        if found is None:
            return None
        said = FirstLine(found[1], found[2] + (found[3] or b""), found[2])
        if len(line) <= FIRST_LINE_BYTES and found[3] is None:
            if len(self) >= FIRST_LINES_MAX:
                self.clear()
            self[line] = said
        return said


_FIRST_LINES = _KnownFirstLines()


@lru_cache(maxsize=8)
def request_lines(routing_fields: frozenset[bytes]) -> KnownLines:
    """The known lines of requests; `routing_fields` are the names of those that say how to route them."""
    return KnownLines(REQUEST_FIELDS, _USUAL_FIELDS, routing_fields)


def plain_request(data: bytes, known: KnownLines, *, head_bytes: int, body_bytes: int) -> Request | None:
    """The request that `data` is, and nothing else; None if that is not certain.

    `head_bytes` and `body_bytes` are the largest sizes allowed.
    """
    head, end, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    said = _FIRST_LINES[lines.pop(0)]
    if said is None or not end or len(head) > head_bytes:
        return None
    read = known.head(lines)
    if read is None:
        return None
    forwarded, fields, routing = read
    given = dict(fields)
    length = len(body)
    # A field that comes twice is unusual.
    if len(given) != len(fields) or b"host" not in given or length > body_bytes:
        return None
    if given.get(b"content-length", b"0") != b"%d" % length:
        return None
    request = Request(0.0)
    request.method, request.target, request.path = said
    request.lines, request.fields, request.routing = forwarded, fields, routing
    request.given_id = given.get(b"x-request-id", b"")
    request.forwarded_for = given.get(b"x-forwarded-for", b"")
    request.length = request.body_size = length
    request.body = body
    return request
