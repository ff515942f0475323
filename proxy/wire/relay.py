"""The relay: carries one unit's reply to the client, transport to transport.

Rules:
1. Nothing is shown before the commit: the first complete event that carries data, or the head of a plain
   body. Engines answer 200 before prefill, so the head of a stream proves nothing and is held until then.
2. Bytes go on raw only from one point to another where both an HTTP chunk and an SSE event end: an announced
   chunk size cannot be taken back. Any other read is framed anew, up to its last complete event; a tail of
   more than 16 KiB goes on unfinished.
3. Per read: no JSON, no logging, no metric call, no task, no timer.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from proxy.failure import Failure, Kind
from proxy.stream.sse import carries_data, end_of_events, is_error, message_of, without_comments
from proxy.wire.downstream import ClientConnection
from proxy.wire.heads import client_head, crossing
from proxy.wire.pool import Pool
from proxy.wire.upstream import EVENT_ENDS, ReplyHead, UnitConnection
from router.lease import Lease
from router.pace import GAPS_MS

TAIL_BYTES = 16 * 1024
_HELD_BYTES = 64 * 1024
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_COMMENT = b": the unit is still working\n\n"


class Framing(Enum):
    """How the client is told where the body ends."""

    CHUNKED = auto()
    IDENTITY = auto()
    """By content-length, or by close for an HTTP/1.0 client."""


class Owner(Protocol):
    """The exchange behind a relay."""

    def accepts(self, head: ReplyHead) -> bool:
        """Whether this reply goes on to the client; False: the owner has turned elsewhere."""

    def extra_lines(self) -> bytes: ...
    def closes_client(self) -> bool: ...
    def committed(self, body: bytes) -> None: ...
    def done(self) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class Relay:
    """One attempt's way back. Also the taker of its connection."""

    __slots__ = (
        "_client",
        "_conn",
        "_desk",
        "_framing",
        "_gaps",
        "_head",
        "_http10",
        "_now",
        "_owner",
        "_pool",
        "_request",
        "_sse",
        "_tail",
        "_write",
        "events",
        "head_sent",
        "last_at",
        "lease",
        "over",
        "paused",
        "sent",
        "stream_error",
    )

    def __init__(
        self, owner: Owner, client: ClientConnection, lease: Lease, now: Callable[[], float], *, http10: bool
    ) -> None:
        self._owner = owner
        self._client = client
        self._now = now
        self._http10 = http10
        self._desk = lease.desk
        self._gaps = lease.desk.gaps_ms
        self._conn: UnitConnection | None = None
        self._write: Callable[[bytes], None] = client.send
        self._head: ReplyHead | None = None
        self._sse = False
        self._framing = Framing.CHUNKED
        self._tail = b""
        self._pool: Pool | None = None
        self._request: tuple[bytes, bytes, bool] = (b"", b"", False)
        self.lease = lease
        self.head_sent = False
        self.over = False
        self.paused = False
        self.events = 0
        self.last_at = 0.0
        self.sent = 0
        self.stream_error = ""

    # -- towards the unit ----------------------------------------------------------------------------------

    def carry(self, head: bytes, body: bytes, pool: Pool, *, to_head: bool) -> None:
        """Remember the request; it is sent as soon as `pool` gives a connection."""
        self._pool = pool
        self._request = (head, body, to_head)

    def on_connected(self, conn: UnitConnection) -> None:
        """The pool's answer: send the request."""
        self._conn = conn
        head, body, to_head = self._request
        conn.send(head, body, self, to_head=to_head)

    def on_failed(self, failure: Failure) -> None:
        """The connection did not come about, or is gone."""
        self._conn = None
        if not self.over:
            self._owner.failed(failure)

    def abandon(self) -> None:
        """Stop: the client left, or the request moves elsewhere. The unit's connection closes at once."""
        self.over = True
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.drop()
        elif self._pool is not None:
            self._pool.cancel(self)

    def pause(self, *, paused: bool) -> None:
        """Mirror the client's backpressure; the clock for gaps stops meanwhile."""
        self.paused = self.lease.paused = paused
        self.last_at = self._now()
        if not paused:
            self._desk.work_at = self.last_at
        if self._conn is None:
            return
        if paused:
            self._conn.pause()
        else:
            self._conn.resume()

    # -- from the unit -------------------------------------------------------------------------------------

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """One read of the unit's reply that parsed."""
        lease = self.lease
        if not lease.committed:
            self._held(data, pieces, conn)
            return
        body = b"".join(pieces)
        if self._sse and carries_data(body):
            self._count(len(pieces))
        if conn.raw is not None and self._ends_whole(data, conn) and not conn.trailers:
            self._note_error(body)
            self._send(data)
        else:
            self._reframe(data, body, conn)
        if conn.ended:
            self._finish()

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk with the event of a token, in a stream that stands between two chunks and events.

        Nearly every token comes this way, so little is called and little is touched.
        """
        now = self._now()
        gap_ms = int((now - self.last_at) * 1000)
        self._gaps[gap_ms if gap_ms < GAPS_MS else -1] += 1
        self.last_at = self._desk.life_at = now
        self.events += 1
        self.sent += len(chunk)
        self._write(chunk)

    def show_patience(self) -> bool:
        """Send the head of a held stream, or a comment after it, to keep the client's connection warm.

        False when the unit has not even sent a head yet: then there is nothing to show.
        """
        if self._head is None or not self._sse:
            return False
        prefix = b"" if self.head_sent else self._head_bytes(self._head)
        self.head_sent = True
        self._send(prefix + self._frame(_COMMENT))
        return True

    def break_off(self, event: bytes) -> bool:
        """End what was begun with an error `event`, where there are events.

        True when closing the connection now is a cut that the client detects; False when it would look like
        the end of a body that close delimits.
        """
        if self._sse:
            self._send(self._frame(event))
            return True
        head = self._head
        return self._framing is Framing.CHUNKED or (head is not None and head.length is not None)

    # -- before the commit ---------------------------------------------------------------------------------

    def _held(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        head = conn.head
        if head is None:
            return
        if self._head is None and not self._begin(head):
            return
        if not self._sse:
            self._commit(data, b"".join(pieces), conn)
            return
        self._tail = held = without_comments(self._tail + b"".join(pieces))
        end = end_of_events(held)
        if end and carries_data(held[:end]):
            if is_error(held[:end]):
                self._give_up(
                    conn, Kind.FIRST_EVENT_ERROR, f"its stream began with an error: {message_of(held)}"
                )
            else:
                self._tail = b""
                self._commit(data, held, conn)
        elif conn.ended:
            self._give_up(conn, Kind.CLOSED_EARLY, "its stream ended without an event")
        elif len(held) > _HELD_BYTES:
            self._give_up(conn, Kind.GARBAGE, f"its first event is larger than {_HELD_BYTES} bytes")

    def _begin(self, head: ReplyHead) -> bool:
        if not self._owner.accepts(head):
            self.over = True
            conn, self._conn = self._conn, None
            if conn is not None:
                conn.discard()
            return False
        self._head = head
        is_events = head.content_type[:17].lower() == b"text/event-stream"
        self._sse = is_events and head.status == 200 and not head.encoded and not head.bodiless
        if self.head_sent and not self._sse:
            # The client was promised a stream, so this answer cannot be shown to it.
            assert self._conn is not None
            self._give_up(self._conn, Kind.EVICTED, f"a second unit answered {head.status} to a begun stream")
            return False
        if self._http10 or head.bodiless or (head.length is not None and not self._sse):
            self._framing = Framing.IDENTITY
        return True

    def _give_up(self, conn: UnitConnection, kind: Kind, reason: str) -> None:
        self._conn = None
        conn.drop()
        self._owner.failed(Failure(kind, reason))

    def _commit(self, data: bytes, body: bytes, conn: UnitConnection) -> None:
        head = self._head
        assert head is not None
        lease = self.lease
        lease.commit(self._now())
        self.last_at = lease.first_at
        self._write = self._client.writer()
        if self._sse:
            self.events = 1
            lease.desk.life_at = lease.first_at
        self._owner.committed(body)
        prefix = b"" if self.head_sent else self._head_bytes(head)
        self._reframe(data, body, conn, prefix)
        if conn.ended:
            self._finish()

    # -- after it ------------------------------------------------------------------------------------------

    def _count(self, events: int) -> None:
        now = self._now()
        gap_ms = int((now - self.last_at) * 1000)
        self._gaps[gap_ms if gap_ms < GAPS_MS else -1] += 1
        self.last_at = self._desk.life_at = now
        self.events += events

    def _ends_whole(self, data: bytes, conn: UnitConnection) -> bool:
        """Behind a chunk there may be a part of the next one's size, behind the last one empty lines that the
        parser forgives: then a read does not end so.
        """
        return data.endswith(_LAST_CHUNK) if conn.ended else conn.clean and data.endswith(EVENT_ENDS)

    def _note_error(self, events: bytes) -> None:
        """To be called with complete events: one that came in two reads shows only once it is whole."""
        if self._sse and is_error(events):
            self.stream_error = message_of(events)

    def _reframe(self, data: bytes, body: bytes, conn: UnitConnection, prefix: bytes = b"") -> None:
        body = self._tail + body
        if self._sse and not conn.ended:
            end = end_of_events(body)
            if len(body) - end > TAIL_BYTES:
                end = len(body)
            body, self._tail = body[:end], body[end:]
        else:
            self._tail = b""
        self._note_error(body)
        at_boundary = not conn.ended and not self._tail and self._ends_whole(data, conn)
        conn.raw = self if at_boundary and self._sse and self._framing is Framing.CHUNKED else None
        framed = self._frame(body) if body else b""
        if conn.ended and self._framing is Framing.CHUNKED:
            framed += _LAST_CHUNK
        if prefix or framed:
            self._send(prefix + framed)

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._framing is Framing.CHUNKED else data

    def _finish(self) -> None:
        self.over = True
        self._conn = None
        self._owner.done()

    def _send(self, data: bytes) -> None:
        self.sent += len(data)
        self._client.send(data)

    def _head_bytes(self, head: ReplyHead) -> bytes:
        own = self._owner.extra_lines()
        for name, value in head.fields:
            if name in (b"content-type", b"content-encoding"):
                own += b"%b: %b\r\n" % (name, value)
        if self._framing is Framing.CHUNKED:
            own += _CHUNKED
        elif head.length is not None and not self._sse:
            own += b"content-length: %b\r\n" % head.length
        lines = crossing(head.lines, head.fields)
        return client_head(head.status, lines, own=own, close=self._owner.closes_client())
