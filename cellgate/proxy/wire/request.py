"""A request as it was read, and the checks of its head that the parser does not do. Pure."""

from __future__ import annotations

import re

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.heads import (
    CONTINUE_FIELD,
    EXPLAIN_FIELD,
    OPTION_FIELDS,
    PLACING_FIELDS,
    Fields,
    connection_tokens,
    crossing,
)

REALTIME = b"/v1/realtime"
"""The only path of a WebSocket."""
_ABSOLUTE = re.compile(
    rb"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?(?P<path>/[^#]*)?", re.IGNORECASE
)
"""A target with its authority: a host and a port, and nothing that programs could read in two ways."""


class Request:
    """One whole request. `lines` and `fields` hold its head (see heads.py); `routing` are the lines that
    say how it is to be routed.

    `is_placed`: it names its unit (see placement.py); `is_explained`: it asks for an explanation of the
    choice (see docs/routing.md); `is_uncontinued`: no other unit may resume its stream; `may_come_back`: its
    client may lose its connection and ask for the rest of its stream (see docs/reconnect.md); `upgrades`: it
    asks for a WebSocket.

    `target` is path and query as sent, `path` without the query, `given_id` the client's request id,
    `coding` that of its content, `forwarded_for` what the last proxy before the gate says of whom it speaks
    for, `length` the declared size of the body, `pieces` in how many it came (if more than one), `reserved`
    the bytes of shared body memory held.
    """

    __slots__ = (
        "body",
        "body_size",
        "coding",
        "expects_continue",
        "fields",
        "forwarded_for",
        "given_id",
        "http10",
        "is_explained",
        "is_placed",
        "is_uncontinued",
        "keep_alive",
        "length",
        "lines",
        "may_come_back",
        "method",
        "path",
        "pieces",
        "received_at",
        "reserved",
        "routing",
        "target",
        "upgrades",
    )

    def __init__(self, received_at: float) -> None:
        self.received_at = received_at
        self.method = b""
        self.target = b""
        self.path = b""
        self.lines: list[bytes] = []
        self.fields: Fields = []
        self.routing: Fields = []
        self.given_id = self.forwarded_for = self.coding = b""
        self.http10 = False
        self.is_placed = False
        self.is_explained = False
        self.is_uncontinued = False
        self.may_come_back = False
        self.keep_alive = True
        self.upgrades = False
        self.expects_continue = False
        self.length = 0
        self.body = b""
        self.body_size = 0
        self.pieces = 0
        self.reserved = 0

    def head_size(self) -> int:
        """About how many bytes the head took."""
        fields = sum(len(name) + len(value) + 4 for name, value in self.fields)
        return len(self.target) + fields + sum(map(len, self.lines))


def check_head(request: Request, version: str) -> Failure | None:
    """What is wrong with a head that parsed, if anything; fills in what is read from it."""
    if version != "1.1":
        if version != "1.0":
            return Failure(FailureKind.BAD_REQUEST, f"HTTP/{version} is not supported; use HTTP/1.1")
        request.http10 = True
    if request.method == b"CONNECT":
        return Failure(
            FailureKind.METHOD_NOT_SUPPORTED, "CONNECT is not supported; send plain requests to the API"
        )
    hosts = 0
    has_tokens = False
    for name, value in request.fields:
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            request.length = int(value)
        elif name == b"x-request-id":
            request.given_id = value.strip()
        elif name == b"x-forwarded-for":
            # Several lines are one list, and the last word is that of the peer.
            request.forwarded_for = value.strip()
        elif name == b"content-encoding":
            coding = value.strip().lower()
            # Several fields are one list (RFC 9110, 5.3).
            request.coding = request.coding + b", " + coding if request.coding else coding
        elif name == b"expect":
            if value.strip().lower() != b"100-continue":
                return Failure(FailureKind.BAD_EXPECTATION, "the only supported expectation is 100-continue")
            request.expects_continue = not request.http10
        elif name == b"transfer-encoding" and request.http10:
            return Failure(FailureKind.BAD_REQUEST, "an HTTP/1.0 request cannot carry Transfer-Encoding")
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return Failure(FailureKind.BAD_REQUEST, "the only supported transfer coding is chunked")
        elif name in PLACING_FIELDS:
            request.is_placed = True
        elif name in OPTION_FIELDS:
            _read_option(request, name, value.strip().lower())
        elif name == b"connection":
            has_tokens = True
    if has_tokens:
        if (failure := _check_connection(request)) is not None:
            return failure
        request.lines = crossing(request.lines, request.fields)
    if hosts != 1 and (hosts or not request.http10):
        return Failure(FailureKind.BAD_REQUEST, f"exactly one Host header is required, {hosts} were sent")
    return _check_target(request)


def _read_option(request: Request, name: bytes, value: bytes) -> None:
    """A line by which a client chooses what the gate does with its request."""
    if name == EXPLAIN_FIELD:
        request.is_explained = value == b"1"
    elif name == CONTINUE_FIELD:
        request.is_uncontinued = request.is_uncontinued or value == b"off"
    else:
        request.may_come_back = value == b"on"


def _check_connection(request: Request) -> Failure | None:
    fields = request.fields
    tokens = sum(value.count(b",") + 1 for name, value in fields if name == b"connection")
    if tokens > LIMITS.connection_tokens:
        reached("connection_tokens")
        reason = f"its Connection header names {tokens} headers, more than {LIMITS.connection_tokens}"
        return Failure(FailureKind.BAD_REQUEST, reason)
    wanted = [value.strip().lower() for name, value in fields if name == b"upgrade"]
    is_realtime = request.method == b"GET" and request.target.partition(b"?")[0] == REALTIME
    # Any other upgrade is ignored (RFC 9110, 7.8): Java's client and `curl --http2` ask for h2c.
    if wanted == [b"websocket"] and is_realtime and b"upgrade" in connection_tokens(fields):
        # Seldom, and another exchange, like a stream whose client may come back: one question for both.
        request.upgrades = request.may_come_back = True
        request.keep_alive = False
    return None


def _check_target(request: Request) -> Failure | None:
    target = request.target
    if not target.startswith(b"/"):
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            return Failure(
                FailureKind.BAD_REQUEST, "the request target must be a path such as /v1/chat/completions"
            )
        # An empty path is the root (RFC 9112, 3.2.2).
        request.target = target = found["path"] or b"/"
    # A fragment is the client's business and never travels (RFC 9112, 3.2).
    if b"#" in target:
        return Failure(FailureKind.BAD_REQUEST, "the request target must not carry a fragment")
    request.path = target.partition(b"?")[0] if b"?" in target else target
    return None
