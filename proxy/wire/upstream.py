"""The unit's side: one connection to a unit, and what its bytes mean.

Rules:
1. Bytes are parsed before anyone sees them: nothing of a read that does not parse goes on. The common read of
   a stream, exactly one chunk, is recognised by its size line and need not trouble the parser.
2. A reply ends where HTTP says, decided here and nowhere else: a HEAD reply at its head, 1xx never ends an
   exchange, EOF is complete only for a body delimited by close.
3. A second message in the same read means that the unit misbehaves; the read is dropped with the connection.
4. A connection is reused only after a reply that ended cleanly and said keep-alive.
5. A large read is parsed in its turn (see rota.py), and nothing more is read before that. Where the client
   cannot take more, it waits for that, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.heads import REPLY_FIELDS, Fields, head_size
from cellgate.proxy.wire.rota import PIECE_BYTES
from cellgate.proxy.wire.taken import took_all

if TYPE_CHECKING:
    from cellgate.proxy.wire.pool import Pool

HEAD_BYTES = 64 * 1024
EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""How a chunk ends whose last event is complete."""

_BODILESS = (204, 304)
_FEW_BYTES = 3 * LIMITS.header_lines
"""A head of no more bytes cannot have too many lines: each takes three at least."""
_TOO_LARGE = f"the head of its reply is larger than {HEAD_BYTES} bytes"
# How the chunk of a token begins, by the length of the whole chunk: its size line, and the event as an
# OpenAI-style engine writes it. Any other spelling, and any longer chunk, is left to the parser.
_TOKEN_STARTS = {len(b"%x\r\n\r\n" % size) + size: b'%x\r\ndata: {"id":' % size for size in range(1, 8192)}

_SIZE_LINE = len(b"1fff\r\n")
"""The longest size line of those."""


class ReplyHead:
    """The head of a unit's reply, in `lines` and `fields` (see heads.py).

    `length` (as sent) and `coding` (of the transfer) tell how the body is delimited; neither: by close.
    """

    __slots__ = (
        "bodiless",
        "coding",
        "connection_tokens",
        "content_type",
        "encoded",
        "fields",
        "length",
        "lines",
        "status",
    )

    def __init__(self, status: int, lines: list[bytes], fields: Fields, *, to_head: bool) -> None:
        self.status = status
        self.lines = lines
        self.fields = fields
        self.coding = b""
        self.encoded = False
        self.length: bytes | None = None
        self.content_type = b""
        self.connection_tokens = 0
        for name, value in fields:
            if name == b"content-length":
                self.length = value
            elif name == b"content-type":
                self.content_type = value
            elif name == b"transfer-encoding":
                # Of several fields each is a coding of its own, and together they are none that is known.
                self.coding += value.strip().lower()
            elif name == b"content-encoding":
                self.encoded = value != b"identity"
            elif name == b"connection":
                self.connection_tokens += value.count(b",") + 1
        self.bodiless = to_head or status in _BODILESS


class Sink(Protocol):
    """Who receives a reply. Every method is called synchronously from the transport's callbacks."""

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """A read that parsed: raw `data`, and the body `pieces` in it. `conn.head` is set once the head is
        complete, `conn.ended` once the reply is.
        """

    def on_failed(self, failure: Failure) -> None:
        """The reply will not (go on to) come; the connection is gone."""


class TokenSink(Protocol):
    """Who takes the chunks of a stream as they are."""

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk that holds the event of a token and ends it."""


class UnitConnection(asyncio.Protocol):
    """One connection to a unit, carrying one request at a time.

    `raw` is set while the stream stands between two chunks and two events, by whoever relays it.
    `clean` is True between two chunks of a chunked body: of the next one at most its size was read.
    """

    __slots__ = (
        "_begun",
        "_fields",
        "_held",
        "_in_head",
        "_interim",
        "_keep_alive",
        "_late",
        "_late_at",
        "_lines",
        "_misbehaved",
        "_overhead",
        "_parser",
        "_pieces",
        "_pool",
        "_to_head",
        "clean",
        "ended",
        "head",
        "idle_since",
        "raw",
        "reused",
        "sink",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._lines: list[bytes] = []
        self._fields: Fields = []
        self._pieces: list[bytes] = []
        # Bytes that have come since the last ones of a body: of heads, trailers, chunk extensions.
        self._overhead = 0
        self._to_head = False
        self._in_head = False
        self._begun = False
        self._keep_alive = False
        self._interim = False
        self._misbehaved = ""
        self._held = False
        # What was read, and from where on it has yet to be parsed.
        self._late = b""
        self._late_at = 0
        self.transport: asyncio.Transport | None = None
        self.sink: Sink | None = None
        self.head: ReplyHead | None = None
        self.raw: TokenSink | None = None
        self.clean = False
        self.ended = False
        self.reused = False
        self.idle_since = 0.0

    # -- use -----------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, sink: Sink, *, to_head: bool) -> None:
        """Send one request; its reply goes to `sink`. `to_head` says that the method is HEAD."""
        self.sink = sink
        self.head = None
        self.clean = self.ended = False
        self._begun = False
        self._overhead = 0
        self._to_head = to_head
        transport = self.transport
        if transport is None or transport.is_closing():
            self._fail(
                Kind.STALE_CONNECTION if self.reused else Kind.CLOSED_EARLY, "it closed before the request"
            )
        elif len(body) < 16384:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def drop(self) -> None:
        """Forget the reply and close the connection at once: the unit must see that nobody listens."""
        self._pool.forget(self)
        self._late = b""
        self.sink = self.raw = None
        if self.transport is not None:
            self.transport.abort()

    def discard(self) -> None:
        """Forget the reply, and keep the connection if it has come whole: nobody would wait for the rest."""
        if not self.ended:
            self.drop()

    def pause(self) -> None:
        """Stop reading: whoever gets the bytes cannot take more."""
        self._held = True
        self._update_reading()

    def resume(self) -> None:
        """Read on, once all that was read before is parsed."""
        self._held = False
        if self._late:
            self._pool.rota.join(self)
        self._update_reading()

    @property
    def usable(self) -> bool:
        """True when another request may be sent."""
        return self.transport is not None and not self.transport.is_closing()

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, so this cannot be asserted.
        transport = cast(asyncio.Transport, transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        raw = self.raw
        if raw is not None:
            start = _TOKEN_STARTS.get(len(data))
            is_event = start is not None and data.startswith(start) and data.endswith(b"\n\n\r\n")
            if is_event and data.find(b"\n", _SIZE_LINE) == len(data) - 4:
                # The parser stands before this chunk, and would stand as well behind it. It is one event:
                # another one in the same chunk might be an error.
                try:
                    raw.on_token(data)
                except Exception as error:
                    self._crash(error)
                return
        try:
            if len(data) > LIMITS.small_reply_bytes or self._late:
                self._put_aside(data)
            else:
                self._parse(data)
        except Exception as error:
            self._crash(error)

    def go_on(self, size: int) -> tuple[int, bool]:
        """Parse so many bytes of what was read, or all that are one piece: what that cost in bytes (see
        rota.py), and whether there is more to be parsed. Never raises.
        """
        if self._held or not self._late:
            return 0, False
        late, at, head = self._late, self._late_at, self.head
        end = at + size if head is None or head.length is None else len(late)
        part = late[at:end]
        self._late, self._late_at = (late, end) if end < len(late) else (b"", 0)
        try:
            self._parse(part)
        except Exception as error:
            self._crash(error)
        if not self._late:
            self._update_reading()
        return len(part) + PIECE_BYTES * len(self._pieces), bool(self._late)

    def _parse(self, data: bytes) -> None:
        sink = self.sink
        if sink is None:
            # Nobody asked: whatever this is, the connection cannot be trusted with a request.
            self.drop()
            return
        self._begun = True
        self._overhead += len(data)
        pieces: list[bytes] = []
        self._pieces = pieces
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            # It is one of our own callbacks that failed: nothing is wrong with the reply.
            raise error.__context__ or error from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._misbehaved = f"its reply does not parse: {error}"
        if pieces or self.ended:
            self._overhead = 0
        elif self._overhead > _FEW_BYTES and not self._misbehaved:
            self._check_overhead()
        if self._misbehaved:
            self._fail(Kind.GARBAGE, self._misbehaved)
            return
        sink.on_read(data, pieces, self)
        if self.ended:
            self._release()

    def eof_received(self) -> bool:
        if self.reused and not self._begun and self.sink is not None and self.transport is not None:
            # A stale connection is told from a unit that died of what it read.
            self._begun = took_all(self.transport)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self.transport = self.transport, None
        if self._late:
            self._parse_late()
        # The parser holds our methods and we hold it: left to the collector, closed ones would pile up.
        del self._parser
        head = self.head
        waited = self.sink is not None and not self.ended
        ends_by_close = exc is None and head is not None and head.length is None and not head.coding
        unused = waited and self.reused and not self._begun
        if unused and exc is not None and transport is not None:
            unused = not took_all(transport)
        try:
            self._pool.closed(self, broken=waited and not unused and not ends_by_close, unused=unused)
        except Exception as error:
            # Whoever waits for the reply is to be told all the same.
            self._pool.report(error)
        if not waited:
            return
        if ends_by_close:
            self.ended = True
            sink, self.sink, self.raw = self.sink, None, None
            self._keep_alive = False
            assert sink is not None
            try:
                sink.on_read(b"", [], self)
            except Exception as error:
                self.sink = sink
                self._crash(error)
            return
        if unused:
            self._fail(Kind.STALE_CONNECTION, "it had closed the kept-alive connection")
        else:
            where = "before" if head is None else "in the middle of"
            self._fail(Kind.CLOSED_EARLY, f"it closed the connection {where} its reply")

    def pause_writing(self) -> None:
        """Requests are held whole in memory either way: nothing to pause."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    # -- the parser's callbacks ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.ended:
            self._misbehaved = "it sent a second reply to one request"
        self._lines = []
        self._fields = []
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            # A trailer, which nobody asked for.
            return
        name = name.lower()
        if name in REPLY_FIELDS:
            self._fields.append((name, value))
        else:
            self._lines.append(b"%b: %b\r\n" % (name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._in_head = False
        self._interim = status < 200
        if self._interim or status > 599:
            if status == 101:
                self._misbehaved = "it switched protocols unasked"
            elif not 100 <= status <= 599:
                self._misbehaved = f"there is no status {status}"
            return
        if self._overhead > _FEW_BYTES:
            self._check_head()
            if self._misbehaved:
                return
        self._overhead = 0
        self._keep_alive = self._parser.should_keep_alive()
        self.head = head = ReplyHead(status, self._lines, self._fields, to_head=self._to_head)
        if head.coding not in (b"", b"chunked"):
            self._misbehaved = "it encodes its transfer in a way that nobody asked for"
        if head.connection_tokens > LIMITS.connection_tokens:
            reached("connection_tokens")
            self._misbehaved = f"its Connection header names more than {LIMITS.connection_tokens} headers"
        if self._to_head:
            self.ended = True

    def on_body(self, body: bytes) -> None:
        self.clean = False
        self._pieces.append(body)
        if self._to_head:
            self._misbehaved = "it sent a body in reply to HEAD"

    def on_chunk_complete(self) -> None:
        self.clean = True

    def on_message_complete(self) -> None:
        if not self._interim and not self._to_head:
            self.ended = True

    # -- inside --------------------------------------------------------------------------------------------

    def _put_aside(self, data: bytes) -> None:
        if not self._late:
            self._late_at = 0
        self._late += data
        self._pool.rota.join(self)
        if self._late:
            self._update_reading()

    def _parse_late(self) -> None:
        """The connection is gone: what it has brought still counts, even if its client cannot take it."""
        late, self._late = self._late[self._late_at :], b""
        try:
            self._parse(late)
        except Exception as error:
            self._crash(error)

    def _update_reading(self) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self._held or self._late:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _check_overhead(self) -> None:
        """Look at what has come since the last bytes of a body."""
        if self.head is None:
            self._check_head()
            if self._overhead > HEAD_BYTES:
                self._misbehaved = _TOO_LARGE
        elif self._overhead > HEAD_BYTES:
            # Trailers and chunk extensions are dropped; endless ones would keep the client for ever.
            self._misbehaved = f"it sent {HEAD_BYTES} bytes of trailers or chunk extensions"

    def _check_head(self) -> None:
        """Look at as much of a head as there is."""
        if len(self._lines) + len(self._fields) > LIMITS.header_lines:
            reached("header_lines")
            self._misbehaved = f"the head of its reply has more than {LIMITS.header_lines} lines"
        elif self._overhead > HEAD_BYTES and head_size(self._lines, self._fields) > HEAD_BYTES:
            self._misbehaved = _TOO_LARGE

    def _crash(self, error: Exception) -> None:
        # An exception that left the callback would close the transport without a word to the client.
        self._pool.report(error)
        self._fail(Kind.INTERNAL, f"the gate failed on its reply: {error!r}")

    def _release(self) -> None:
        if self._late:
            # There is something behind the end of its reply: this is no unit to send the next request to.
            self.drop()
            return
        self.sink = self.raw = None
        if self._to_head:
            # The parser still expects the body that a HEAD reply only announces.
            self._parser = httptools.HttpResponseParser(self)
        if self._keep_alive:
            if self._held:
                # The last read may have filled its client's buffer; the next one has nothing to do with it.
                self.resume()
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()

    def _fail(self, kind: Kind, reason: str) -> None:
        sink, self.sink, self.raw = self.sink, None, None
        self._late = b""
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.on_failed(Failure(kind, reason))
