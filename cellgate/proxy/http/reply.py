"""Parses replies from what a unit sends, and decides where a reply ends.

1. A reply ends where HTTP says, decided here and nowhere else: a HEAD reply at its head, 1xx never ends an
   exchange, EOF is complete only for a body delimited by close.
2. A second message in the same read means that the unit misbehaves: nothing of that read is passed on.
3. Heads, trailers and chunk extensions are limited in size.
4. The usual reply needs no parser. One is made at the first read that is not usual, for the
   rest of that reply: what came before were a whole head and whole chunks.

In this order: `ReplyReader`, `plain_head`, `UsualReply`, `Framing`.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import httptools

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.http.heads import (
    CLOSE_LINE,
    REPLY_FIELDS,
    STATUS_LINES,
    UNIT_ID_FIELD,
    Fields,
    KnownLines,
    client_head,
    client_lines,
    crossing,
    head_size,
)

HEAD_BYTES = 64 * 1024
HEADS_MAX = 256
"""So many heads of streams are kept; then all are forgotten. A unit sends the same one for a second or so."""
KEPT_HEAD_BYTES = 1024
"""No longer head is kept."""

_BODILESS = (204, 304)
_FEW_BYTES = 3 * LIMITS.header_lines
"""A head of no more bytes cannot have too many lines: each takes three at least."""
_REPLY_TOO_LARGE = f"the head of its reply is larger than {HEAD_BYTES} bytes"


class ReplyHead:
    """The head of a unit's reply, in `lines` and `fields` (see heads.py).

    `length` (as sent, and not in `fields`) and `coding` (of the transfer) tell how the body is delimited;
    neither: by close.
    `content_lines` are those that say what the content is, for the client; `is_events`: it is a stream of
    events that can be read; `is_edited`: its client gets other lines than `lines`; `framing` is that of the
    body, unless the client speaks HTTP/1.0; `shown` is what of `lines` its client gets.
    """

    __slots__ = (
        "bodiless",
        "coding",
        "content_lines",
        "fields",
        "framing",
        "is_edited",
        "is_events",
        "length",
        "lines",
        "shown",
        "status",
    )

    def __init__(self, status: int, lines: list[bytes], fields: Fields, *, to_head: bool) -> None:
        self.status = status
        self.lines = lines
        self.fields = [field for field in fields if field[0] != b"content-length"]
        self.coding = self.content_lines = b""
        self.length: bytes | None = None
        self.is_edited = False
        self.shown = b"".join(client_lines(lines))
        content_type, is_encoded = b"", False
        for name, value in fields:
            if name == b"content-length":
                self.length = value
            elif name == b"content-type":
                content_type = value
                self.content_lines += b"content-type: %b\r\n" % value
            elif name == b"transfer-encoding":
                # Several fields mean several codings, a combination that is not supported.
                self.coding += value.strip().lower()
            elif name == b"content-encoding":
                is_encoded = value != b"identity"
                self.content_lines += b"content-encoding: %b\r\n" % value
            elif name == b"connection" or name == b"x-request-id":
                self.is_edited = True
        self.bodiless = to_head or status in _BODILESS
        may_be_read = status == 200 and not is_encoded and not to_head
        self.is_events = may_be_read and content_type[:17].lower() == b"text/event-stream"
        is_sized = self.length is not None and not self.is_events
        self.framing = IDENTITY if self.bodiless or is_sized else CHUNKED

    def sized(self, length: bytes | None) -> ReplyHead:
        """The same head of a body with another length; it can be changed: replies may share this one."""
        other = ReplyHead.__new__(ReplyHead)
        other.status = self.status
        other.lines = self.lines
        other.fields = self.fields
        other.coding = self.coding
        other.content_lines = self.content_lines
        other.length = length
        other.bodiless = self.bodiless
        other.is_edited = self.is_edited
        other.is_events = self.is_events
        other.framing = self.framing
        other.shown = self.shown
        return other


_HEADS: dict[bytes | tuple[bytes, bytes], tuple[bytes, ReplyHead]] = {}
"""Usual heads by their bytes, or by those before and behind a length; with their bytes, so that all replies
share one copy."""


class ReplyReader:
    """Reads the replies of one connection, one after the other.

    `begun`: a byte of the reply has come; `has_head`: its head is complete, which `head` is as long as nobody
    has taken it away; `length` is then that of the body, where it was declared; `ended`: the reply is whole.
    `clean` is True between two chunks of a chunked body: of
    the next one at most its size was read. `keep_alive`: the unit takes another request when this has ended.
    `misbehaved` says what is wrong with the reply. `hints` are the heads that came before (103) and have yet
    to be passed on, `trailers` the lines behind the last chunk.
    """

    __slots__ = (
        "_coding",
        "_fields",
        "_interim",
        "_lines",
        "_overhead",
        "_parser",
        "_pieces",
        "_raw_head",
        "_to_head",
        "begun",
        "clean",
        "ended",
        "has_head",
        "head",
        "hints",
        "keep_alive",
        "length",
        "misbehaved",
        "trailers",
    )

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser | None = None
        # Of a usual reply in chunks: what a parser must have read before anything else.
        self._raw_head = b""
        self._lines: list[bytes]
        self._fields: Fields
        # Bytes that have come since the last ones of a body: of heads, trailers, chunk extensions.
        self._overhead = 0
        self._to_head = self._interim = False
        self._coding = b""
        self.begun = self.clean = self.ended = self.has_head = False
        self.keep_alive = False
        self.misbehaved = ""
        self.hints = self.trailers = b""
        self.head: ReplyHead | None = None
        self.length: bytes | None = None
        # Of the body, in the read that the parser has.
        self._pieces: list[bytes]

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks, as streams do."""
        return self._coding == b"chunked"

    @property
    def is_before_body(self) -> bool:
        """Whether nothing of its body was parsed yet."""
        is_head_alone = self._parser is None and not self.clean
        return not self.begun or is_head_alone or self._overhead > 0

    def expect(self, *, to_head: bool) -> None:
        """A request is sent: what comes is its reply. `to_head` says that its method is HEAD."""
        self.head = None
        self.begun = self.clean = self.ended = self.has_head = False
        self._to_head = to_head
        if self._parser is not None:
            # The last reply needed one.
            self._parser, self._overhead = None, 0
            self.hints = self.trailers = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Parse a read, and give the pieces of the body in it. To be asked for afterwards: `misbehaved`."""
        self.begun = True
        if (parser := self._parser) is None:
            plain = self._take_plain(data)
            if plain is not None:
                return plain
            parser = self._make_parser()
        self._overhead += len(data)
        self._pieces = pieces = list[bytes]()
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # One of the gate's callbacks failed: nothing is wrong with the reply.
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.misbehaved = f"its reply does not parse: {error}"
        if pieces or self.ended:
            self._overhead = 0
        elif self._overhead > _FEW_BYTES and not self.misbehaved:
            self._check_overhead()
        # An idle connection keeps nothing of what came last.
        self._pieces = []
        return pieces

    def is_ended_by_close(self) -> bool:
        """Whether the end of the connection is the end of the reply, which it is then."""
        if not self.has_head or self.ended or self.marks_its_end():
            return False
        self.ended = True
        self.keep_alive = False
        return True

    def marks_its_end(self) -> bool:
        """Whether it has a length or is chunked, so that the end of the connection is not its end."""
        return self.length is not None or bool(self._coding)

    def close(self) -> None:
        """Nothing more comes."""
        # The parser refers to our methods and we to it: without this, closed ones pile up until collection.
        self._parser = None

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.ended:
            self.misbehaved = "it sent a second reply to one request"

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if self.has_head:
            if name not in REPLY_FIELDS:
                self.trailers += b"%b: %b\r\n" % (name, value)
        elif name in REPLY_FIELDS:
            self._fields.append((name, value))
        else:
            self._lines.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        status, lines, fields = parser.get_status_code(), self._lines, self._fields
        self._lines, self._fields = [], []
        self._interim = status < 200
        if self._interim or status > 599:
            if status == 101:
                self.misbehaved = "it switched protocols without being asked to"
            elif not 100 <= status <= 599:
                self.misbehaved = f"{status} is not an HTTP status"
            elif status > 101:
                # The gate itself says when a client is to go on (100).
                self.hints += client_head(status, client_lines(crossing(lines, fields)), own=b"", close=False)
            return
        if self._overhead > _FEW_BYTES:
            self._check_head(lines, fields)
            if self.misbehaved:
                return
        self._overhead = 0
        self.keep_alive = parser.should_keep_alive()
        self.head = head = ReplyHead(status, lines, fields, to_head=self._to_head)
        self.has_head, self.length, self._coding = True, head.length, head.coding
        if head.coding not in (b"", b"chunked"):
            self.misbehaved = "it uses a transfer coding that the gate did not ask for"
        named = sum(value.count(b",") + 1 for name, value in fields if name == b"connection")
        if named > LIMITS.connection_tokens:
            reached("connection_tokens")
            self.misbehaved = f"its Connection header names more than {LIMITS.connection_tokens} headers"
        if self._to_head:
            self.ended = True

    def on_body(self, body: bytes) -> None:
        self.clean = False
        self._pieces.append(body)
        if self._to_head:
            self.misbehaved = "it sent a body in reply to HEAD"

    def on_chunk_complete(self) -> None:
        self.clean = True

    def on_message_complete(self) -> None:
        if not self._interim and not self._to_head:
            self.ended = True

    # -- inside --------------------------------------------------------------------------------------------

    def _take_plain(self, data: bytes) -> list[bytes] | None:
        """Read what is usual; None, with nothing read, if it is not."""
        if self.has_head:
            return None if self.ended else self._take_chunks(data)
        raw, end, body = data.partition(b"\r\n\r\n")
        raw, head = _HEADS.get(raw) or _plain_head(raw)
        if head is None or not end or self._to_head:
            return None
        pieces: list[bytes] | None
        if (length := head.length) is not None:
            if int(length) != len(body):
                return None
            pieces = [body]
            self.ended = True
        elif (pieces := self._take_chunks(body) if body else []) is None:
            return None
        self.has_head = self.keep_alive = True
        self.head = head
        self.length = length
        self._coding = head.coding
        self._raw_head = raw
        return pieces

    def _take_chunks(self, data: bytes) -> list[bytes] | None:
        """The same, of a body in chunks: the content of each, if `data` is whole chunks and nothing else."""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            line = _SIZE_LINE.match(data, at)
            if line is None:
                if data[at:] != LAST_CHUNK:
                    return None
                self.ended = True
                break
            begin = line.end()
            end = begin + int(line[1], 16)
            if data[end : end + 2] != b"\r\n":
                return None
            pieces.append(data[begin:end])
            at = end + 2
        self.clean = True
        return pieces

    def _make_parser(self) -> httptools.HttpResponseParser:
        """A parser that has read what has come of this reply."""
        self._lines, self._fields = [], []
        self._parser = parser = httptools.HttpResponseParser(self)
        if self.has_head and not self.ended:
            # Whoever has taken the head away has done so.
            head, self.has_head = self.head, False
            parser.feed_data(self._raw_head + b"\r\n\r\n")
            self.head = head
        return parser

    def _check_overhead(self) -> None:
        """Look at what has come since the last bytes of a body."""
        if not self.has_head:
            self._check_head(self._lines, self._fields)
            if self._overhead > HEAD_BYTES:
                self.misbehaved = _REPLY_TOO_LARGE
        elif self._overhead > HEAD_BYTES:
            # Endless ones would keep the client for ever.
            self.misbehaved = f"it sent {HEAD_BYTES} bytes of trailers or chunk extensions"

    def _check_head(self, lines: list[bytes], fields: Fields) -> None:
        """Look at as much of a head as there is."""
        if len(lines) + len(fields) > LIMITS.header_lines:
            reached("header_lines")
            self.misbehaved = f"the head of its reply has more than {LIMITS.header_lines} lines"
        elif self._overhead > HEAD_BYTES and head_size(lines, fields) > HEAD_BYTES:
            self.misbehaved = _REPLY_TOO_LARGE


def _plain_head(raw: bytes) -> tuple[bytes, ReplyHead | None]:
    """A head, if it is usual and tells how its body ends, and its bytes. Of the same server those with a
    length differ in that alone.
    """
    sized = _LENGTH_LINE.search(raw)
    if sized is None:
        return raw, _read_head(raw, raw)
    known_as = raw[: sized.start(1)], raw[sized.end() :]
    if (known := _HEADS.get(known_as)) is not None:
        return raw, known[1].sized(sized[1])
    return raw, _read_head(raw, known_as)


def _read_head(raw: bytes, known_as: bytes | tuple[bytes, bytes]) -> ReplyHead | None:
    """The same, read and kept."""
    if (read := plain_head(raw)) is None:
        return None
    head = ReplyHead(200, *read, to_head=False)
    if bool(head.coding) == (head.length is not None):
        return None
    if len(raw) <= KEPT_HEAD_BYTES:
        if len(_HEADS) >= HEADS_MAX:
            _HEADS.clear()
        _HEADS[known_as] = raw, head
    return head


# The usual reply of an engine: `200 OK` with a body whose end leaves no doubt. Pure.
#
# What is not exactly that is left to the parser, which would read the same from what is.


_FIRST_LINE = b"HTTP/1.1 200 OK"
_SIZE_LINE = re.compile(rb"([1-9a-f][0-9a-f]{0,5})\r\n")
_REPLY_UNUSUAL = frozenset(
    {
        b"connection",
        b"content-encoding",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
    }
)
"""Of REPLY_FIELDS; but `Connection: keep-alive` is usual."""
_REPLY_LINES = KnownLines(REPLY_FIELDS, REPLY_FIELDS - _REPLY_UNUSUAL)
# It begins with one byte, to which `re` jumps.
_LENGTH_LINE = re.compile(rb"\n(?<=\r\n)content-length: ([1-9][0-9]{0,9})(?=\r\n|\Z)", re.IGNORECASE)


def plain_head(head: bytes) -> tuple[list[bytes], Fields] | None:
    """The forwarded lines and the fields of a head, without the empty line behind it; or None."""
    lines = head.split(b"\r\n")
    if lines.pop(0) != _FIRST_LINE or (read := _REPLY_LINES.head(lines)) is None:
        return None
    forwarded, fields, _ = read
    # A field that comes twice is unusual.
    return (forwarded, fields) if len(dict(fields)) == len(fields) else None


# The usual reply: a server that is asked the same again and again mostly sends the same bytes each time, but
# for the time in its Date. They were parsed once, and need not be parsed again.


BYTES_MAX = 4096
"""Of a larger reply something changes most of the time."""

_REPLY_DATE = re.compile(rb"\r\ndate: ([ -~]{29})\r\n", re.IGNORECASE)
_is_time = re.compile(rb"[ -~]*").fullmatch


class UsualReply:
    """A whole reply that ended by its length and left the connection open; its `head` and `body`."""

    __slots__ = ("_after", "_before", "_date", "_size", "body", "head")

    def __init__(self, data: bytes, head: ReplyHead, body: bytes) -> None:
        found = _REPLY_DATE.search(data, 0, data.find(b"\r\n\r\n") + 2)
        begin, end = found.span(1) if found else (len(data), len(data))
        self._before, self._after, self._size = data[:begin], data[end:], len(data)
        self._date = begin, end
        self.head = head
        self.body = body

    def is_like(self, data: bytes) -> bool:
        """Whether this is the same reply, perhaps of another time."""
        return (
            len(data) == self._size
            and data.startswith(self._before)
            and data.endswith(self._after)
            and _is_time(data, *self._date) is not None
        )


def usual_reply(data: bytes, head: ReplyHead, body: bytes, *, keep_alive: bool) -> UsualReply | None:
    """The same, if it may be taken for the usual one: a whole, small reply with a declared length."""
    is_plain = keep_alive and head.length is not None and not head.coding and not head.bodiless
    return UsualReply(data, head, body) if is_plain and 0 < len(data) <= BYTES_MAX else None


# The head of a unit's reply for the client, and the framing of its body. Pure.


LAST_CHUNK = b"0\r\n\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class Framing(Enum):
    """How the end of the body is framed for the client."""

    CHUNKED = auto()
    IDENTITY = auto()
    """By content-length, or by close for an HTTP/1.0 client."""

    def frame(self, data: bytes) -> bytes:
        """`data`, not empty, as a part of the body."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self is CHUNKED else data

    @property
    def end(self) -> bytes:
        """What ends the body."""
        return LAST_CHUNK if self is CHUNKED else b""


CHUNKED, IDENTITY = Framing.CHUNKED, Framing.IDENTITY


def last_chunk(trailers: bytes) -> bytes:
    """What ends a body in chunks that these lines follow, as far as a client gets them."""
    return b"0\r\n%b\r\n" % b"".join(client_lines(trailers.splitlines(keepends=True)))


def without(head: ReplyHead, starts: tuple[bytes, ...]) -> ReplyHead:
    """The head of a reply without the lines that begin like these."""
    other = head.sized(head.length)
    other.lines = [line for line in head.lines if not line.startswith(starts)]
    other.shown = b"".join(client_lines(other.lines))
    return other


def head_of(head: ReplyHead, framing: Framing, *, own: bytes, close: bool) -> bytes:
    """The head of a reply as its client gets it, with our `own` lines."""
    lines = b"".join(_edited(head, own)) if head.is_edited else head.shown
    ends = CLOSE_LINE if close else b""
    if framing is CHUNKED:
        ends = _CHUNKED + ends
    elif head.length is not None and not head.is_events:
        ends = b"content-length: %b\r\n%b" % (head.length, ends)
    return b"%b%b%b%b%b\r\n" % (STATUS_LINES[head.status], lines, own, head.content_lines, ends)


def _edited(head: ReplyHead, own: bytes) -> list[bytes]:
    """The lines without those that `Connection` names, and with the request id of the engine, if that is
    another one than in our `own`.
    """
    lines = client_lines(crossing(head.lines, head.fields))
    ids = [value for name, value in head.fields if name == b"x-request-id"]
    return lines + [b"%b: %b\r\n" % (UNIT_ID_FIELD, each) for each in ids if b" %b\r\n" % each not in own]


_PLACE = re.compile(rb"(?:content-)?location:", re.IGNORECASE)
_OWN_PATH = re.compile(
    rb"[a-z-]+: (?:/(?![/\\])|\?|[A-Za-z0-9._~%-]+(?:[/?#\r]))[^\\\t]*\r\n\Z", re.IGNORECASE
)
"""A path, or a query, at the place that was asked: no scheme, and no other authority."""


def with_own_origin(head: ReplyHead, authority: bytes) -> None:
    """Have a redirect to the unit, at `authority`, lead to wherever its client has sent the request: a path
    is relative to that (RFC 9110, 10.2.2). One to anywhere else leads nowhere: a client would follow it with
    its prompt and its key.
    """
    place = re.compile(
        rb"((?:content-)?location: )https?://%b(?=[/?#\r])" % re.escape(authority), re.IGNORECASE
    )
    for at, line in enumerate(head.lines):
        found = place.match(line)
        if found is not None:
            path = line[found.end() :]
            head.lines[at] = found[1] + (b"" if path.startswith(b"/") else b"/") + path
    head.lines = [line for line in head.lines if _PLACE.match(line) is None or _OWN_PATH.match(line)]
    head.shown = b"".join(client_lines(head.lines))


def unframed(chunks: bytes) -> tuple[bytes, bool]:
    """The content of whole chunks, and whether the last chunk is among them."""
    pieces: list[bytes] = []
    at = 0
    while at < len(chunks):
        line_end = chunks.index(b"\r\n", at)
        size = int(chunks[at:line_end].partition(b";")[0], 16)
        if not size:
            return b"".join(pieces), True
        at = line_end + 2 + size + 2
        pieces.append(chunks[line_end + 2 : at - 2])
    return b"".join(pieces), False
