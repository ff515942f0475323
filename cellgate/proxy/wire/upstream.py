"""The unit's side: one connection to a unit, and what its bytes mean.

Rules:
1. Bytes are parsed (reply_reader.py) before they are used: nothing of a malformed read is passed on, and its
   connection is closed. The common read of a stream, exactly one chunk, is recognised by its size line and
   does not need the parser.
2. A connection is reused only after a reply that ended cleanly and said keep-alive.
3. A large read is parsed in its turn (see rota.py), and nothing more is read before that. It also waits while
   the client is paused.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.proxy.wire.reply_reader import ReplyReader
from cellgate.proxy.wire.rota import PIECE_BYTES, ReadScheduler
from cellgate.proxy.wire.sse import ABORT
from cellgate.proxy.wire.tcp import took_all
from cellgate.proxy.wire.usual_reply import UsualReply

EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")
"""How a chunk ends whose last event is complete."""

# How the chunk of a token begins, by the length of the whole chunk: its size line, and the event as an
# OpenAI-style engine writes it. Any other spelling, and any longer chunk, is left to the parser.
_TOKEN_STARTS = {len(b"%x\r\n\r\n" % size) + size: b'%x\r\ndata: {"id":' % size for size in range(1, 8192)}

_SIZE_LINE = len(b"1fff\r\n")
"""The longest size line of those."""


class ReplySink(Protocol):
    """Receives a reply. Every method is called synchronously from the transport's callbacks."""

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """A parsed read: raw `data`, and the body `pieces` in it; `conn.reply` has the state of the reply."""

    def on_failed(self, failure: Failure) -> None:
        """The reply failed; the connection is closed."""


class TokenSink(Protocol):
    """Receives the chunks of a stream unchanged."""

    @property
    def usual_ends(self) -> tuple[bytes, ...]:
        """Only those that end in one of these come here; the others are read first."""

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk that holds the event of a token and ends it."""


class Home(Protocol):
    """Where connections come from and go back to: the pool."""

    read_scheduler: ReadScheduler

    def give_back(self, conn: UnitConnection) -> None: ...
    def forget(self, conn: UnitConnection) -> None: ...
    def closed(self, conn: UnitConnection, *, broken: bool, unused: bool) -> None: ...
    def report(self, error: Exception) -> None: ...


class UnitConnection(asyncio.Protocol):
    """One connection to a unit, carrying one request at a time; `reply` is what has come of its reply.

    `raw` is set by the relaying response while the stream is between two chunks and two events; a reply that
    is like the `usual` one is not parsed.
    """

    __slots__ = (
        "_held",
        "_late",
        "_late_at",
        "_pool",
        "_taken",
        "idle_since",
        "raw",
        "reply",
        "reused",
        "sink",
        "transport",
        "usual",
    )

    def __init__(self, pool: Home) -> None:
        self._pool = pool
        self._held = self._taken = False
        # What was read, and from where on it has yet to be parsed.
        self._late = b""
        self._late_at = 0
        self.transport: asyncio.Transport | None = None
        self.sink: ReplySink | None = None
        self.reply = ReplyReader()
        self.raw: TokenSink | None = None
        self.usual: UsualReply | None = None
        self.reused = False
        self.idle_since = 0.0

    # -- use -----------------------------------------------------------------------------------------------

    def send(
        self, head: bytes, body: bytes, sink: ReplySink, *, to_head: bool, usual: UsualReply | None = None
    ) -> None:
        """Send one request; its reply goes to `sink`. `to_head` says that the method is HEAD, `usual` is the
        reply that will probably come.
        """
        self.sink = sink
        self.usual = usual
        self.reply.expect(to_head=to_head)
        transport = self.transport
        if transport is None or transport.is_closing():
            self._fail(
                FailureKind.STALE_CONNECTION if self.reused else FailureKind.CLOSED_EARLY,
                "it closed the connection before the request",
            )
        elif len(body) < 16384:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def drop(self) -> None:
        """Drop the reply and close the connection at once: the unit must stop working for it."""
        self._pool.forget(self)
        self._late = b""
        self.sink = self.raw = None
        if self.transport is not None:
            self.transport.abort()

    def discard(self) -> None:
        """Drop the reply, and keep the connection if the reply is complete."""
        if not self.reply.ended:
            self.drop()

    def pause(self) -> None:
        """Stop reading: the receiver is paused."""
        self._held = True
        self._update_reading()

    def resume(self) -> None:
        """Read on, once all that was read before is parsed."""
        self._held = False
        if self._late:
            self._pool.read_scheduler.join(self)
        self._update_reading()

    @property
    def usable(self) -> bool:
        """True when another request may be sent."""
        return self.transport is not None and not self.transport.is_closing()

    # -- the transport's callbacks -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, so this cannot be asserted.
        transport = cast(asyncio.Transport, transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        raw = self.raw
        if raw is not None:
            start = _TOKEN_STARTS.get(len(data))
            is_event = start is not None and data.startswith(start) and data.endswith(raw.usual_ends)
            if is_event and ABORT not in data and data.find(b"\n", _SIZE_LINE) == len(data) - 4:
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
        late, at = self._late, self._late_at
        is_sized = self.reply.has_head and self.reply.length is not None
        end = len(late) if is_sized else at + size
        part = late[at:end]
        self._late, self._late_at = (late, end) if end < len(late) else (b"", 0)
        pieces = 0
        try:
            pieces = self._parse(part)
        except Exception as error:
            self._crash(error)
        if not self._late:
            self._update_reading()
        return len(part) + PIECE_BYTES * pieces, bool(self._late)

    def _parse(self, data: bytes) -> int:
        """Parse a read, and pass it on; in how many pieces the body in it came."""
        sink = self.sink
        if sink is None:
            # There was no request: the connection cannot be trusted with one.
            self.drop()
            return 0
        reply, usual = self.reply, self.usual
        if usual is not None and not reply.begun and usual.is_like(data):
            pieces = reply.repeat(usual.head, usual.body)
        else:
            pieces = reply.feed(data)
        if reply.misbehaved:
            self._fail(FailureKind.GARBAGE, reply.misbehaved)
        else:
            sink.on_read(data, pieces, self)
            if reply.ended:
                self._release()
        return len(pieces)

    def eof_received(self) -> bool:
        if self.reused and not self.reply.begun and self.sink is not None and self.transport is not None:
            # Distinguish a stale connection from a unit that died of the request.
            self._taken = took_all(self.transport)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        transport, self.transport = self.transport, None
        if self._late:
            self._parse_late()
        reply = self.reply
        reply.close()
        waited = self.sink is not None and not reply.ended
        ends_by_close = waited and exc is None and reply.is_ended_by_close()
        is_stale = waited and self.reused and not reply.begun
        if is_stale and exc is not None and transport is not None:
            self._taken = took_all(transport)
        unused = is_stale and not self._taken
        try:
            self._pool.closed(self, broken=waited and not unused and not ends_by_close, unused=unused)
        except Exception as error:
            # The receiver of the reply must learn of the failure all the same.
            self._pool.report(error)
        if not waited:
            return
        if ends_by_close:
            sink, self.sink, self.raw = self.sink, None, None
            assert sink is not None
            try:
                sink.on_read(b"", [], self)
            except Exception as error:
                self.sink = sink
                self._crash(error)
            return
        if is_stale:
            self._fail(FailureKind.STALE_CONNECTION, "it closed the kept-alive connection before its reply")
        else:
            where = "in the middle of" if reply.has_head else "before"
            self._fail(FailureKind.CLOSED_EARLY, f"it closed the connection {where} its reply")

    def pause_writing(self) -> None:
        """Requests are held whole in memory either way: nothing to pause."""

    def resume_writing(self) -> None:
        """See `pause_writing`."""

    # -- inside --------------------------------------------------------------------------------------------

    def _put_aside(self, data: bytes) -> None:
        if not self._late:
            self._late_at = 0
        self._late += data
        self._pool.read_scheduler.join(self)
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

    def _crash(self, error: Exception) -> None:
        # An exception that leaves the callback would close the transport without an answer to the client.
        self._pool.report(error)
        self._fail(FailureKind.INTERNAL, f"the gate failed on its reply: {error!r}")

    def _release(self) -> None:
        if self._late:
            # There are bytes after the end of the reply: this connection must not get another request.
            self.drop()
            return
        self.sink = self.raw = None
        if self.reply.keep_alive:
            if self._held:
                # The last read may have filled its client's buffer; the next one has nothing to do with it.
                self.resume()
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()

    def _fail(self, kind: FailureKind, reason: str) -> None:
        sink, self.sink, self.raw = self.sink, None, None
        self._late = b""
        if self.transport is not None:
            self.transport.abort()
        if sink is not None:
            sink.on_failed(Failure(kind, reason, taken=self._taken))
