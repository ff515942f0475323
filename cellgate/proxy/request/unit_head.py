"""The head of a request as a unit gets it: the client's lines and the gate's own. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.http.heads import RANK_FIELD

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.response import Response

_HEAD_FOR_UNIT = (
    b"%b %b HTTP/1.1\r\n%b%bx-forwarded-for: %b\r\nx-forwarded-proto: %b\r\nx-forwarded-host: %b\r\n"
    b"x-request-id: %b\r\n%b\r\n"
)
_WITH_BODY = (b"POST", b"PUT", b"PATCH")


def head_for_unit(
    request: Request, client: ResponseClient, response: Response, lines: bytes, target: bytes, length: int
) -> bytes:
    """The head of a request for `target` with a body of `length` bytes; `lines` are more of the gate's own.

    The peer is appended to X-Forwarded-For; -Proto and -Host stay as a proxy before us has set them.
    """
    for observer in response.observers:
        lines += observer.unit_lines
    given, chain = dict(request.fields), client.peer.encode()
    if b"x-forwarded-for" in given:
        # Several fields are one list (RFC 9110, 5.3).
        chain = b", ".join([*(value for key, value in request.fields if key == b"x-forwarded-for"), chain])
    return _HEAD_FOR_UNIT % (
        request.method,
        target,
        b"".join(request.lines),
        lines,
        chain,
        given.get(b"x-forwarded-proto", b"https" if client.secure else b"http"),
        given.get(b"x-forwarded-host") or given.get(b"host", b""),
        response.request_id,
        b"content-length: %d\r\n" % length if length or request.method in _WITH_BODY else b"",
    )


def names_rank(request: Request) -> bool:
    """Whether the client has chosen the data parallel rank itself."""
    return any(line.startswith(RANK_FIELD) for line in request.lines)


def rank_line(rank: int) -> bytes:
    """The header line that sends a request to a data parallel rank."""
    return b"%b: %d\r\n" % (RANK_FIELD, rank)
