"""What the lines of heads mean, by their bytes: clients and engines send the same lines again and again.

Only lines that every parser reads alike are known. Whatever is the least unusual, or may change where a
message ends, is left to the real parser, which then reads the whole head.
"""

from __future__ import annotations

import re
from collections.abc import Container

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.wire.heads import KEY_FIELDS, Fields

LINES_MAX = 2048
"""So many lines are kept; then all are forgotten, and learned again."""
LINE_BYTES = 256
"""No longer line is kept."""

_LINE = re.compile(rb"([A-Za-z0-9-]+): ([!-~](?:[ -~]*[!-~])?)")
_LENGTH = re.compile(rb"[1-9][0-9]{0,9}")
_SECRET = re.compile(rb"auth|key|token|cookie|secret|session|credential", re.IGNORECASE)
"""What may be secret is not to stay in memory when its request has gone."""
_CHANGING = frozenset({b"traceparent", b"tracestate", b"x-request-id"})
"""What is another with each request need not be kept."""

Field = tuple[bytes, bytes]


KnownLine = tuple[bytes | None, Field | None, Field | None]
"""First the line as it is forwarded, or what the gate reads of it: it is one of the two, or unusual. Last the
field of either, if it says how a request is to be routed.
"""
_UNUSUAL: KnownLine = (None, None, None)


class KnownLines(dict[bytes, KnownLine]):
    """The lines of requests, or of replies. Those with a name in `fields` are fields; of these only the ones
    in `usual` are usual.
    """

    def __init__(
        self, fields: Container[bytes], usual: Container[bytes], routing_fields: Container[bytes] = ()
    ) -> None:
        super().__init__()
        self._fields = fields
        self._usual = usual
        self.routing_fields = routing_fields

    def __missing__(self, line: bytes) -> KnownLine:
        found = _LINE.fullmatch(line)
        if found is None:
            return _UNUSUAL
        name, value = found.groups()
        name = name.lower()
        routing = (name, value) if name in self.routing_fields else None
        known: KnownLine = (b"%b: %b\r\n" % (name, value), None, routing)
        if name in self._fields:
            known = (None, (name, value), routing) if self._is_usual(name, value) else _UNUSUAL
        if name not in KEY_FIELDS and name not in _CHANGING and not _SECRET.search(name):
            self._keep(line, known)
        return known

    def head(self, lines: list[bytes]) -> tuple[list[bytes], Fields, Fields] | None:
        """What is forwarded of a head, its fields, and the routing fields; None if anything is unusual."""
        if len(lines) > LIMITS.header_lines:
            return None
        forwarded: list[bytes] = []
        fields: Fields = []
        routing: Fields = []
        for line in lines:
            unchanged, field, routes = self[line]
            if unchanged is not None:
                forwarded.append(unchanged)
            elif field is not None:
                fields.append(field)
            else:
                return None
            if routes is not None:
                routing.append(routes)
        return forwarded, fields, routing

    def _keep(self, line: bytes, known: KnownLine) -> None:
        if len(line) <= LINE_BYTES:
            if len(self) >= LINES_MAX:
                self.clear()
            self[line] = known

    def _is_usual(self, name: bytes, value: bytes) -> bool:
        match name:
            case b"content-length":
                return _LENGTH.fullmatch(value) is not None
            case b"connection":
                return value in (b"keep-alive", b"Keep-Alive")
            case b"transfer-encoding":
                return value == b"chunked" and name in self._usual
            case _:
                return name in self._usual
