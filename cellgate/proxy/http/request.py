"""A request as it was read, and the checks of its head that the parser does not do. Pure.

In this order: `Request`, `FirstLine`, `RequestReader`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import httptools

from cellgate.extras import EXTRAS, MissingExtraError
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.heads import (
    EXPLAIN_FIELD,
    OPTION_FIELDS,
    PLACING_FIELDS,
    REQUEST_FIELDS,
    Fields,
    KnownLines,
    connection_tokens,
    crossing,
)

if TYPE_CHECKING:
    from cellgate.proxy.config.settings import Limits


REALTIME = b"/v1/realtime"
"""The only path of a WebSocket."""
_ABSOLUTE = re.compile(
    rb"https?://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{0,5})?(?P<path>/[^#]*)?", re.IGNORECASE
)
"""A target with its authority: a host and a port, and nothing that programs could read in two ways."""


class Request:
    """One whole request. `lines` and `fields` hold its head (see heads.py); `routing` are the lines that
    say how it is to be routed.

    `is_placed`: it names its unit (see request/routes.py); `is_explained`: it asks for an explanation of the
    choice (see docs/routing.md); `is_uncontinued`: no other unit may resume its stream; `upgrades`: it
    asks for a WebSocket; `loan`: how far above the limits of units it may go (see
    router/pick.py).

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
        "loan",
        "method",
        "path",
        "pieces",
        "received_at",
        "reserved",
        "routing",
        "target",
        "upgrades",
    )

    def __init__(
        self,
        received_at: float,
        lines: list[bytes],
        fields: Fields,
        routing: Fields,
        said: tuple[bytes, bytes, bytes] = (b"", b"", b""),
        body: bytes = b"",
    ) -> None:
        self.received_at = received_at
        self.method, self.target, self.path = said
        self.lines = lines
        self.fields = fields
        self.routing = routing
        self.given_id = self.forwarded_for = self.coding = b""
        self.http10 = False
        self.is_placed = False
        self.is_explained = False
        self.is_uncontinued = False
        self.loan = 0
        self.keep_alive = True
        self.upgrades = False
        self.expects_continue = False
        self.body = body
        self.length = self.body_size = len(body)
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
    else:
        request.is_uncontinued = request.is_uncontinued or value == b"off"


def _check_connection(request: Request) -> Failure | None:
    fields = request.fields
    tokens = sum(value.count(b",") + 1 for name, value in fields if name == b"connection")
    if tokens > LIMITS.connection_tokens:
        reached("connection_tokens")
        reason = f"its Connection header names {tokens} headers, more than {LIMITS.connection_tokens}"
        return Failure(FailureKind.BAD_REQUEST, reason)
    # Any other upgrade is ignored (RFC 9110, 7.8): Java's client and `curl --http2` ask for h2c.
    if request.method == b"GET" and request.target.partition(b"?")[0] == REALTIME:
        wanted = b",".join([value for name, value in fields if name == b"upgrade"]).lower()
        if b"websocket" in map(bytes.strip, wanted.split(b",")) and b"upgrade" in connection_tokens(fields):
            if "realtime" not in EXTRAS:
                reason = f"protocol upgrades are not supported: a WebSocket {MissingExtraError('realtime')}"
                return Failure(FailureKind.METHOD_NOT_SUPPORTED, reason)
            request.upgrades = True
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


# The usual request: it comes in one read, alone and whole, and nothing in its head is unusual.
#
# What is not exactly that is left to the parser (below), which would read the same from what is. No byte
# of it may be doubtful, or the gate and a proxy before it could take different bytes for a request.


FIRST_LINES_MAX = 256
"""So many first lines are kept; then all are forgotten."""
FIRST_LINE_BYTES = 256
"""No longer one is kept, and none with a query: there may be something secret in it."""

_REQUEST_FIRST_LINE = re.compile(
    rb"(GET|POST) (/[A-Za-z0-9/._~:@%=+-]*)(\?[A-Za-z0-9/._~:@%=+&,-]*)? HTTP/1\.1"
)
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
        found = _REQUEST_FIRST_LINE.fullmatch(line)
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


def plain_request(data: bytes, known: KnownLines, limits: Limits) -> Request | None:
    """The request that `data` is, and nothing else; None if that is not certain."""
    head, end, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    said = _FIRST_LINES[lines.pop(0)]
    if said is None or not end or len(head) > limits.head_bytes:
        return None
    read = known.head(lines)
    if read is None:
        return None
    forwarded, fields, routing = read
    given = dict(fields)
    length = len(body)
    # A field that comes twice is unusual.
    if len(given) != len(fields) or b"host" not in given or length > limits.body_bytes:
        return None
    if given.get(b"content-length", b"0") != b"%d" % length:
        return None
    request = Request(0.0, forwarded, fields, routing, said, body)
    request.given_id = given.get(b"x-request-id", b"")
    request.forwarded_for = given.get(b"x-forwarded-for", b"")
    return request


# Parses requests from what a client sends, within limits, and passes on complete ones.
#
# 1. A request is passed on when its last byte has arrived, in order; nothing of a failed one is.
# 2. After a failure nothing more is read, because the begin of the next request is unknown.
# 3. The work of one turn of the loop is bounded: once a request is complete, or many bytes outside of bodies
#    were read, the rest is left for another turn.
# 4. Work and memory are linear in the bytes received, however small the pieces.
# 5. The usual request needs no parser. One is made for any other, and stays until a body
#    has ended exactly with a read: only then is it certain that the parser holds nothing of what comes next.


_METHOD = re.compile(rb"[A-Za-z]+ ")
_LARGE = re.compile(rb"\r\ncontent-length: ?[0-9]{5,}\r\n", re.IGNORECASE)
"""In the head of a large body, as most clients write it."""
_OTHER_PROTOCOL = re.compile(rb" (?:RTSP|ICE)/")
"""What the parser takes for HTTP in a first line, and is none."""
_FIRST_WORDS = re.compile(rb"[A-Za-z_-]+ +[^ \r\n]+ *")
_REQUEST_MARK_BYTES = len(b" RTSP/") - 1
_PLAIN_BYTES = 4 * LIMITS.parsed_bytes
"""A read up to this size that is a whole usual request takes no turn of its own: only its head is looked
through, and its body is copied once."""
_JOINED_BYTES = 4 << 20
"""Large parts of a body up to this size are kept as they came, and joined at its end: that takes half a
millisecond."""
_SIZE_LINE_BYTES = len(b"12345678\r\n\r\n") + 4
"""What is around a chunk, with four bytes to spare for leading zeros or the like."""
_BODY_BYTES_EACH = LIMITS.request_bytes_per_turn // LIMITS.parsed_bytes
"""The cost of a byte outside of bodies, relative to one of a body."""


class RequestReader:
    """Reads the requests of one connection. `routing_fields` are the names of header fields that say how a
    request is to be routed; they are passed on. What becomes of requests is for a subclass, which is told
    of them from within `feed`.

    `request` is the one being read, `failure` the reason why reading ended, `unread` bytes that are left for
    another turn of the loop.
    """

    __slots__ = (
        "_body",
        "_bypasses",
        "_fed",
        "_has_whole",
        "_head_end",
        "_heading",
        "_is_first",
        "_known",
        "_limits",
        "_now",
        "_parser",
        "_parts",
        "_pieces",
        "_read_bytes",
        "failure",
        "request",
        "unread",
    )

    def __init__(
        self, limits: Limits, now: Callable[[], float], routing_fields: frozenset[bytes] = frozenset()
    ) -> None:
        self._known = request_lines(routing_fields)
        self._limits = limits
        self._now = now
        self._parser: httptools.HttpRequestParser | None = None
        # Of a body that comes in several reads: large parts of it, and the small ones behind them.
        self._parts: list[bytes] = []
        self._body: io.BytesIO | None = None
        # The rest of this body is taken as it comes, by no parser.
        self._bypasses = False
        # Of the read that is being parsed.
        self._pieces: list[bytes] = []
        # Bytes of the request, its body's among them.
        self._fed = 0
        self._read_bytes = 0
        self._is_first = True
        self._has_whole = False
        self._heading: Request | None = None
        # The last bytes of a head that is being read.
        self._head_end = b""
        self.request: Request | None = None
        self.failure: Failure | None = None
        self.unread = b""

    # -- for a subclass ------------------------------------------------------------------------------------

    def begun(self, request: Request) -> None:
        """The first byte of a request has come."""

    def head_read(self, request: Request) -> Failure | None:
        """A head is complete and in order; its body comes next, unless it fails for this reason."""

    def body_read(self, request: Request) -> None:
        """`request.body_size` has grown, and more is to come."""

    def whole(self, request: Request) -> None:
        """A request is complete."""

    def at_once(self, request: Request) -> None:
        """A request has begun, its head is read, and it is complete."""

    def upgrading(self) -> Request | None:
        """The last request, if it asks for a WebSocket and is not answered yet."""

    # -- reading -------------------------------------------------------------------------------------------

    @property
    def in_head(self) -> bool:
        """Whether the head of `request` is being read."""
        return self._heading is not None

    def feed(self, data: bytes) -> Failure | None:
        """Read on, unless it is much; the failure that ends the reading, after which no call comes."""
        if self.unread or self._bypasses or len(data) > _PLAIN_BYTES:
            self.unread += data
            return None
        if self._parser is None:
            request = plain_request(data, self._known, self._limits)
            if request is not None:
                request.received_at = self._now()
                self.at_once(request)
                return None
        if len(data) > LIMITS.parsed_bytes:
            self.unread += data
            return None
        return self._parse(data)

    def resume_parsing(self) -> int:
        """Read what is unread: at least a part, at most what one turn of the loop may cost. What it cost, in
        bytes of bodies: these cost next to nothing; size lines of chunks, heads and trailers do.
        """
        unread, at, grown = self.unread, 0, 0
        parts, size = memoryview(unread), len(unread)
        self._has_whole = False
        while at < size and not self._has_whole and at - grown <= LIMITS.parsed_bytes:
            missing, before = max(0, self._missing()), self._body_size()
            end = min(size, at + (missing or LIMITS.parsed_bytes))
            if self.request is None and end < size:
                head = unread.find(b"\r\n\r\n", at, end)
                if head > at and _LARGE.search(unread, at, head + 2) is not None:
                    # What follows is a body that needs no parser.
                    end = head + 4
            if missing and (self._bypasses or self._may_bypass(end - at)):
                self._take(unread if end - at == size else bytes(parts[at:end]))
            else:
                self._parse(parts[at:end])
            if self.failure is not None:
                self.unread = b""
                return size
            at = end
            grown += self._body_size() - before
        self.unread = unread[at:]
        return at + (at - grown) * _BODY_BYTES_EACH

    def forget(self) -> Request | None:
        """Drop the request that is being read; it is returned, so that its memory can be freed."""
        request, self.request, self._heading = self.request, None, None
        self._pieces.clear()
        self._parts.clear()
        self._body, self._bypasses = None, False
        self.unread = b""
        return request

    def close(self) -> None:
        """The connection is closed. The parser is dropped, which refers to this: otherwise closed connections
        pile up until garbage is collected.
        """
        self._parser = None

    @property
    def _the_parser(self) -> httptools.HttpRequestParser:
        if self._parser is None:
            self._parser = httptools.HttpRequestParser(self)
        return self._parser

    def _body_size(self) -> int:
        return 0 if self.request is None else self.request.body_size

    def _missing(self) -> int:
        """How many bytes of a body of known length are missing."""
        request = self.request
        return 0 if request is None or self.in_head else request.length - request.body_size

    def _may_bypass(self, size: int) -> bool:
        """Whether the rest of a body needs no parser: its length is known, and much of it has come."""
        request = self.request
        assert request is not None
        is_plain = request.keep_alive and not self._the_parser.should_upgrade()
        return is_plain and 0 < request.length <= _JOINED_BYTES and size >= LIMITS.parsed_bytes

    def _take(self, data: bytes) -> None:
        """The next part of a body, none of which a parser sees any more."""
        request = self.request
        assert request is not None
        self._parser, self._bypasses = None, True
        self._fed += len(data)
        self._pieces.append(data)
        request.body_size += len(data)
        if request.body_size == request.length:
            self._end()
        else:
            self._check_begun(request)

    def _parse(self, data: bytes | memoryview) -> Failure | None:
        is_head = self.request is None or self.in_head
        at = self._other_protocol_at(data) if is_head else -1
        rest: bytes | memoryview | None = data if at < 0 else data[:at]
        while rest:
            rest = self._parse_part(rest)
        if at >= 0:
            reason = "malformed request: its protocol is not HTTP; use HTTP/1.1"
            self._fail(Failure(FailureKind.BAD_REQUEST, reason))
        return self.failure

    def _parse_part(self, data: bytes | memoryview) -> memoryview | None:
        """Parse a read; what follows the head of a request whose upgrade is ignored is yet to be parsed."""
        self._read_bytes = size = len(data)
        self._fed += size
        going_on = self.request
        self._is_first = going_on is None
        ends_exactly = going_on is not None and going_on.keep_alive and size == self._missing()
        try:
            self._the_parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = memoryview(data)[upgrade.args[0] :]
            if (request := self.upgrading()) is not None:
                # What came before the answer to the upgrade.
                request.body = bytes(rest)
            elif self.failure is None:
                self._ignore_upgrade()
                self._fed -= len(rest) if self.request is not None else self._fed
                return rest
        except httptools.HttpParserCallbackError as error:
            # A defect of the gate, not of the request.
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            # The offset at which a pipelined request begins is unknown, so its first bytes are as well.
            self._fail(_malformed(error, data if self._is_first else b""))
        else:
            if (request := self.request) is not None:
                self._check_begun(request)
            elif ends_exactly:
                self._parser = None
        return None

    def _ignore_upgrade(self) -> None:
        """The parser takes all behind a head with an upgrade for another protocol: another parser reads on,
        behind a head after which the same body follows.
        """
        request, self._parser = self.request, None
        assert request is not None
        is_chunked = any(name == b"transfer-encoding" for name, _ in request.fields)
        framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % request.length
        closes = b"" if request.keep_alive else b"connection: close\r\n"
        self._the_parser.feed_data(b"POST / HTTP/1.1\r\n%b%b\r\n\r\n" % (closes, framing))

    def _other_protocol_at(self, data: bytes | memoryview) -> int:
        """Where among these bytes a first line begins that names another protocol; -1: nowhere."""
        begun = self._heading
        before = b"" if begun is None else self._head_end
        seen = before + bytes(data)
        self._head_end = seen[-_REQUEST_MARK_BYTES:]
        for found in _OTHER_PROTOCOL.finditer(seen):
            begin = seen.rfind(b"\n", 0, found.start()) + 1
            if not begin and begun is not None:
                # It began in another read, and is the first line if no other one has come.
                if not begun.fields and not begun.lines:
                    return 0
            elif _FIRST_WORDS.fullmatch(seen, begin, found.start()):
                return max(0, begin - len(before))
        return -1

    def _check_begun(self, request: Request) -> None:
        """Look at a request that goes on after this read."""
        if self.in_head:
            if self._fed > self._limits.head_bytes:
                self._fail(self._head_too_large())
            elif len(request.lines) + len(request.fields) > LIMITS.header_lines:
                self._fail(_too_many_lines())
        else:
            has_grown = bool(self._pieces)
            self._collect(request)
            if self._is_within(request) and has_grown:
                self.body_read(request)

    def _collect(self, request: Request) -> None:
        """Join the pieces of a body: each piece by itself would take 33 bytes more."""
        request.pieces += len(self._pieces)
        part = b"".join(self._pieces)
        self._pieces.clear()
        if len(part) >= LIMITS.parsed_bytes and 0 < request.length <= _JOINED_BYTES:
            if self._body is not None:
                self._parts.append(self._body.getvalue())
                self._body = None
            self._parts.append(part)
            return
        if self._body is None:
            self._body = io.BytesIO()
        self._body.write(part)

    def _is_within(self, request: Request) -> bool:
        """Whether a body is within its bounds; else it has failed."""
        # Trailers and chunk extensions count as well, or they could go on for ever.
        around = 2 * self._limits.head_bytes + _SIZE_LINE_BYTES * request.pieces
        if self._fed - request.body_size > around:
            self._fail(self._head_too_large())
        elif request.pieces > LIMITS.body_chunks:
            reached("body_chunks")
            reason = f"the request's body comes in more than {LIMITS.body_chunks} chunks; send larger ones"
            self._fail(Failure(FailureKind.BAD_REQUEST, reason))
        else:
            return True
        return False

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.failure is None and self.request is None:
            self.request = self._heading = request = Request(self._now(), [], [], [])
            self.begun(request)

    def on_url(self, url: bytes) -> None:
        if self._heading is not None:
            self._heading.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._heading
        if request is None:
            # After the head these are trailers, which are dropped.
            return
        name = name.lower()
        if name in self._known.routing_fields:
            request.routing.append((name, value))
        if name in REQUEST_FIELDS:
            request.fields.append((name, value))
        else:
            request.lines.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        request = self._heading
        if request is None:
            return
        self._heading = None
        if len(request.lines) + len(request.fields) > LIMITS.header_lines:
            self._fail(_too_many_lines())
            return
        limit = self._limits.head_bytes
        # Behind another request `_fed` begins with the next read only.
        if (self._fed > limit or self._read_bytes > limit) and request.head_size() > limit:
            self._fail(self._head_too_large())
            return
        parser = self._the_parser
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive()
        failure = check_head(request, parser.get_http_version())
        if failure is None and request.length > self._limits.body_bytes:
            failure = self._body_too_large()
        if failure is None:
            failure = self.head_read(request)
        if failure is not None:
            self._fail(failure)

    def on_body(self, body: bytes) -> None:
        request = self.request
        if request is None or self.failure is not None:
            return
        self._pieces.append(body)
        request.body_size += len(body)
        if request.body_size > self._limits.body_bytes:
            self._fail(self._body_too_large())

    def on_message_complete(self) -> None:
        request = self.request
        if request is None or self.failure is not None:
            return
        if self._the_parser.should_upgrade() and not request.upgrades:
            # Its body is still to come.
            return
        self._end()

    def _end(self) -> None:
        request = self.request
        assert request is not None
        if request.length and len(self._pieces) == 1 and not request.pieces:
            request.body = self._pieces.pop()
        elif request.body_size:
            self._collect(request)
            if not self._is_within(request):
                return
            # The buffer itself and no copy: copying a large body takes time.
            rest = b"" if self._body is None else self._body.getvalue()
            request.body = b"".join((*self._parts, rest)) if self._parts else rest
            self._parts.clear()
            self._body = None
        self._is_first = self._bypasses = False
        self._has_whole = True
        self._fed = 0
        self.whole(request)
        self.request = None

    # -- failures ------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._heading = None

    def _head_too_large(self) -> Failure:
        limit = self._limits.head_bytes
        return Failure(FailureKind.HEAD_TOO_LARGE, f"the request's head is larger than {limit} bytes")

    def _body_too_large(self) -> Failure:
        limit = self._limits.body_bytes
        return Failure(FailureKind.BODY_TOO_LARGE, f"the request's body is larger than {limit} bytes")


def _too_many_lines() -> Failure:
    reached("header_lines")
    return Failure(
        FailureKind.HEAD_TOO_LARGE, f"the request's head has more than {LIMITS.header_lines} lines"
    )


def _malformed(error: httptools.HttpParserError, data: bytes | memoryview) -> Failure:
    match error:
        case httptools.HttpParserInvalidMethodError() if _METHOD.match(data):
            return Failure(FailureKind.METHOD_NOT_SUPPORTED, "the method is not known")
        case httptools.HttpParserInvalidURLError():
            return Failure(FailureKind.BAD_REQUEST, "the request target is malformed")
        case _:
            return Failure(FailureKind.BAD_REQUEST, f"malformed request: {error}")
