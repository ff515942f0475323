"""Parses plain requests for /livez and /readyz. Pure.

Plain is what probes send: GET or HEAD in one piece, HTTP/1.0 or 1.1, no body, no negotiation. Everything else
needs a full HTTP server.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# RFC 9112: request line, then `token ":" value` lines, none of them folded.
_HEAD = re.compile(
    rb"(GET|HEAD) /(livez|readyz)(?:\?[!-~]*)? HTTP/1\.([01])\r\n"
    rb"((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*)\r\n"
)
_CONNECTION = re.compile(rb"^connection:(.*?)\r$", re.IGNORECASE | re.MULTILINE)
_NOT_PLAIN = re.compile(
    rb"^(?:content-length|transfer-encoding|expect|upgrade):", re.IGNORECASE | re.MULTILINE
)


class HealthRequest(NamedTuple):
    """One request. `name` is livez or readyz, `size` the bytes it took."""

    name: str
    head_only: bool
    keep_alive: bool
    size: int


def parse_health_request(data: bytes) -> HealthRequest | None:
    """The plain request at the beginning of `data`; None: it is something else."""
    match = _HEAD.match(data)
    if match is None:
        return None
    method, name, minor, fields = match.groups()
    if _NOT_PLAIN.search(fields):
        return None
    return HealthRequest(name.decode(), method == b"HEAD", _keeps_alive(minor, fields), match.end())


def _keeps_alive(minor: bytes, fields: bytes) -> bool:
    routing_headers = {
        wish.strip().lower() for line in _CONNECTION.findall(fields) for wish in line.split(b",")
    }
    return b"close" not in routing_headers and (minor == b"1" or b"keep-alive" in routing_headers)
