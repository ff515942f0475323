"""The head of a request as a unit gets it: the client's lines and the gate's own. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.request.response import Response
from cellgate.proxy.wire.heads import RANK_FIELD, forwarded_lines, unit_head

if TYPE_CHECKING:
    from cellgate.proxy.wire.client import ResponseClient
    from cellgate.proxy.wire.request import Request


def names_rank(request: Request) -> bool:
    """Whether the client has chosen the data parallel rank itself."""
    return any(line.startswith(RANK_FIELD) for line in request.lines)


def rank_line(rank: int) -> bytes:
    """The header line that sends a request to a data parallel rank."""
    return b"%b: %d\r\n" % (RANK_FIELD, rank)


def head_for_unit(
    request: Request,
    client: ResponseClient,
    response: Response,
    lines: bytes,
    target: bytes,
    length: int,
) -> bytes:
    """The head of a request for `target` with a body of `length` bytes; it begins with the `lines`."""
    for observer in response.observers:
        lines += observer.unit_lines
    scheme = b"https" if client.secure else b"http"
    forwarded = forwarded_lines(request.fields, client.peer.encode(), scheme)
    own = b"%b%bx-request-id: %b\r\n" % (lines, forwarded, response.request_id)
    return unit_head(request.method, target, request.lines, own=own, length=length)
