"""Heads: what crosses the gate, what is dropped, what is added. Pure functions on bytes.

Header names are lower case from the moment they are parsed. Hop-by-hop fields (RFC 9110, 7.6.1), and the
fields that `Connection` names, never cross. Framing is always the gate's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_FRAMING = frozenset({b"content-length"})
# The gate answers `expect`, addresses the unit by `host`, and adds to or sets the others itself. A compressed
# answer could not be scanned for events, so none is asked for.
_NOT_TO_UNIT = (
    _HOP_BY_HOP
    | _FRAMING
    | {
        b"accept-encoding",
        b"expect",
        b"host",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-request-id",
    }
)
_NOT_TO_CLIENT = _HOP_BY_HOP | _FRAMING | {b"x-request-id"}

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}

_ID_MAX = 128
_ID_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:=+/@")


def find(headers: Headers, name: bytes) -> bytes | None:
    """The first value of a header, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def connection_tokens(headers: Headers) -> frozenset[bytes]:
    """The lower-case tokens of all `Connection` fields."""
    values = [value for key, value in headers if key == b"connection"]
    if not values:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))


def is_request_id(value: bytes) -> bool:
    """True when a client's request id may be kept: short, and harmless in a log."""
    return 0 < len(value) <= _ID_MAX and _ID_BYTES.issuperset(value)


def unit_head(
    method: bytes,
    target: bytes,
    headers: Headers,
    *,
    authority: bytes,
    forwarded: bytes,
    request_id: bytes,
    length: int,
) -> bytes:
    """The head of a request as the unit gets it.

    `forwarded` holds the ready X-Forwarded-* lines; `length` is the body's, left out where there is none.
    """
    dropped = _NOT_TO_UNIT | connection_tokens(headers)
    lines = [
        method + b" " + target + b" HTTP/1.1\r\nhost: " + authority + b"\r\n",
        *[key + b": " + value + b"\r\n" for key, value in headers if key not in dropped],
        forwarded,
        b"x-request-id: " + request_id,
    ]
    if length or method in (b"POST", b"PUT", b"PATCH"):
        lines.append(b"\r\ncontent-length: %d" % length)
    lines.append(b"\r\n\r\n")
    return b"".join(lines)


def forwarded_lines(headers: Headers, peer: bytes, scheme: bytes) -> bytes:
    """X-Forwarded-For (the peer appended), -Proto and -Host (kept when a proxy before us set them)."""
    chain, proto, host, original = [], scheme, b"", b""
    for key, value in headers:
        if key == b"x-forwarded-for":
            chain.append(value)
        elif key == b"x-forwarded-proto":
            proto = value
        elif key == b"x-forwarded-host":
            original = value
        elif key == b"host":
            host = value
    chain.append(peer)
    parts = (b", ".join(chain), proto, original or host)
    return b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nx-forwarded-host: %b\r\n" % parts


def client_head(
    status: int, headers: Headers, *, extra: Iterable[bytes], framing: bytes, close: bool
) -> bytes:
    """The head of a response as the client gets it.

    `extra` are complete lines of the gate's own, `framing` the content-length or transfer-encoding line, or
    nothing for an answer without a body.
    """
    dropped = _NOT_TO_CLIENT | connection_tokens(headers)
    lines = [
        _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status,
        *[key + b": " + value + b"\r\n" for key, value in headers if key not in dropped],
        *extra,
        framing,
    ]
    if close:
        lines.append(b"connection: close\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def own_response(
    status: int,
    body: bytes,
    *,
    content_type: bytes = b"application/json",
    extra: Iterable[bytes] = (),
    close: bool,
) -> bytes:
    """A whole response of the gate's own."""
    framing = b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))
    return client_head(status, [], extra=extra, framing=framing, close=close) + body
