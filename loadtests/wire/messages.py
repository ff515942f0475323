"""Requests and replies as bytes."""

JSON = b"application/json"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"


def post(body: bytes, *, path: str = "/v1/chat/completions", lines: str = "", host: str = "gate") -> bytes:
    """A POST of JSON. `lines`: more header lines, each with its end."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{lines}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body


def get(path: str, lines: str = "", *, host: str = "gate") -> bytes:
    """A GET. `lines`: more header lines, each with its end."""
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\n{lines}\r\n".encode("latin-1")


def bearer(key: str) -> str:
    """The header line that carries an API key; empty without one."""
    return f"authorization: Bearer {key}\r\n" if key else ""


def whole(body: bytes, *, kind: bytes = JSON, status: bytes = b"200 OK", lines: bytes = b"") -> bytes:
    """A reply in one piece."""
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n"
    return head % (status, kind, len(body), lines) + body


def chunk(data: bytes) -> bytes:
    """One chunk of a reply that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)
