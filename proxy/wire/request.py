"""A request as it was read, and the checks of a head that the parser leaves to us. Pure."""

from __future__ import annotations

from proxy.failure import Failure, Kind
from proxy.wire.heads import Headers, connection_tokens


class Request:
    """One whole request. `target` is path and query as sent, `path` without the query; `reserved` counts
    the bytes of shared body memory it holds.
    """

    __slots__ = (
        "body",
        "body_size",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "path",
        "received_at",
        "reserved",
        "target",
    )

    def __init__(self, received_at: float) -> None:
        self.received_at = received_at
        self.method = b""
        self.target = b""
        self.path = b""
        self.headers: Headers = []
        self.http10 = False
        self.keep_alive = True
        self.body = b""
        self.body_size = 0
        self.reserved = 0


def check_head(request: Request, version: str) -> Failure | None:
    """What is wrong with a head that parsed, if anything. Fills in `path` and `http10`."""
    names = [name for name, _ in request.headers]
    request.http10 = version == "1.0"
    if version not in ("1.0", "1.1"):
        return Failure(Kind.BAD_REQUEST, f"HTTP/{version} is not spoken here; use HTTP/1.1")
    if request.http10 and b"transfer-encoding" in names:
        return Failure(Kind.BAD_REQUEST, "an HTTP/1.0 request cannot carry Transfer-Encoding")
    hosts = names.count(b"host")
    if hosts > 1 or (hosts == 0 and not request.http10):
        return Failure(Kind.BAD_REQUEST, f"exactly one Host header is required, {hosts} were sent")
    if request.method == b"CONNECT":
        return Failure(Kind.METHOD_NOT_SUPPORTED, "CONNECT is not supported; send plain requests to the API")
    if b"upgrade" in names and b"upgrade" in connection_tokens(request.headers):
        return Failure(
            Kind.METHOD_NOT_SUPPORTED, "protocol upgrades are not supported; use HTTP/1.1 requests"
        )
    return _check_target(request) or _check_expectation(request)


def expects_continue(request: Request) -> bool:
    """True when the client waits for a 100 before it sends its body."""
    return not request.http10 and any(name == b"expect" for name, _ in request.headers)


def _check_target(request: Request) -> Failure | None:
    target = request.target
    if not target.startswith(b"/"):
        scheme, found, rest = target.partition(b"://")
        if not found or scheme.lower() not in (b"http", b"https"):
            return Failure(Kind.BAD_REQUEST, "the request target must be a path such as /v1/chat/completions")
        target = b"/" + rest.partition(b"/")[2]
    # A fragment is the client's business and never travels (RFC 9112, 3.2).
    if b"#" in target:
        return Failure(Kind.BAD_REQUEST, "the request target must not carry a fragment")
    request.target = target
    request.path = target.partition(b"?")[0]
    return None


def _check_expectation(request: Request) -> Failure | None:
    for name, value in request.headers:
        if name == b"expect" and value.lower() != b"100-continue":
            return Failure(Kind.BAD_EXPECTATION, "the only expectation understood is 100-continue")
    return None
