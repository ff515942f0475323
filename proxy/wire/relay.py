"""The relay: carries one unit's reply to the client, transport to transport.

Rules:
1. Nothing is shown before the commit: the first complete event that carries data, or the head of a plain
   body. Engines answer 200 before prefill, so the head of a stream proves nothing and is held until then.
2. Bytes go on raw only from one point to another where both an HTTP chunk and an SSE event end: an announced
   chunk size cannot be taken back. Any other read is framed anew, up to its last complete event; a tail of
   more than 16 KiB goes on unfinished.
3. An error that an engine reports in its stream is never shown: it is a failure of the attempt, as a
   connection that breaks is.
4. Per read: no JSON, no logging, no metric call, no task, no timer. What is kept is kept by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from proxy.failure import Failure, Kind
from proxy.stream.keep import FOLD_BYTES, Keep
from proxy.stream.said import DONE
from proxy.stream.sse import (
    before_error,
    carries_data,
    end_of_events,
    message_of,
    without_comments,
)
from proxy.stream.stitch import Stitch, UnlikeError
from proxy.wire.downstream import ClientConnection
from proxy.wire.framing import Framing
from proxy.wire.heads import client_head, crossing
from proxy.wire.hold import judge_beginning
from proxy.wire.pool import Pool
from proxy.wire.upstream import EVENT_ENDS, ReplyHead, UnitConnection
from router.lease import Lease
from router.pace import GAPS_MS

TAIL_BYTES = 16 * 1024
END_CHUNKS = 3
"""The last token, what was used, and the end."""
_CHUNKED = b"transfer-encoding: chunked\r\n"
_COMMENT = b": the unit is still working\n\n"


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
    """One attempt's way back. Also the taker of its connection.

    `keep` holds what is shown from now on, in case the unit breaks; `stitch` rewrites what a unit sends that
    goes on for another.
    """

    __slots__ = (
        "_client",
        "_conn",
        "_desk",
        "_first",
        "_fold_at",
        "_framing",
        "_gaps",
        "_head",
        "_http10",
        "_in_event",
        "_kept",
        "_now",
        "_owner",
        "_pool",
        "_request",
        "_sse",
        "_tail",
        "_write",
        "events",
        "head_sent",
        "keep",
        "last_at",
        "lease",
        "over",
        "paused",
        "sent",
        "stitch",
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
        self._first = b""
        self._in_event = False
        self._kept: list[bytes] | None = None
        self._fold_at = 0
        self._pool: Pool | None = None
        self._request: tuple[bytes, bytes, bool] = (b"", b"", False)
        self.lease = lease
        self.head_sent = False
        self.over = False
        self.paused = False
        self.events = 0
        self.last_at = 0.0
        self.sent = 0
        self.keep: Keep | None = None
        self.stitch: Stitch | None = None

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
        if self.paused:
            conn.pause()

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
        self.lease.was_paused = True
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
        is_whole = conn.raw is not None and not conn.ended and self._ends_whole(data, conn)
        if is_whole and not (self._sse and len(before_error(body)) < len(body)):
            self._keep(self._framing.frame(body))
            self._send(data)
        else:
            self._reframe(data, body, conn)

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
        kept = self._kept
        if kept is not None:
            kept.append(chunk)
            if self.sent > self._fold_at:
                self._fold()
        self._write(chunk)

    def begin_keeping(self) -> None:
        """Keep what is shown from now on. To be called before anything of a stream is."""
        if self._sse:
            self.keep = Keep(framed=self._framing is Framing.CHUNKED)
            self._kept = self.keep.chunks
            self._fold_at = self.sent + FOLD_BYTES

    def end(self) -> bytes:
        """What was shown last, as far as it is kept; of a plain body what came with its head."""
        return b"".join(self._kept[-END_CHUNKS:]) if self._kept is not None else self._first

    def stop_keeping(self) -> None:
        """What was kept turned out to be of no use."""
        self.keep = self._kept = None

    def show_patience(self) -> bool:
        """Send the head of a held stream, or a comment after it, to keep the client's connection warm.

        False when the unit has not even sent a head yet: then there is nothing to show.
        """
        if self._head is None or not self._sse:
            return False
        prefix = b"" if self.head_sent else self._head_bytes(self._head)
        self.head_sent = True
        self._send(prefix + self._framing.frame(_COMMENT))
        return True

    def conclude(self, events: bytes) -> None:
        """End a stream well whose unit did not: the last `events`, and the end of the body."""
        framed = self._framing.frame(events) if events else b""
        self._send(framed + self._framing.end)

    def break_off(self, event: bytes) -> bool:
        """End what was begun with an error `event`, where there are events.

        True when closing the connection now is a cut that the client detects; False when it would look like
        the end of a body that close delimits.
        """
        if self._sse:
            # A large event may have been shown in part: it ends here.
            self._send(self._framing.frame(b"\n\n" + event if self._in_event else event))
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
        judged = judge_beginning(held, ended=conn.ended)
        if isinstance(judged, Failure):
            self._give_up(conn, judged)
        elif judged:
            self._tail = b""
            self._commit(data, held, conn)

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
            reason = f"a second unit answered {head.status} to a begun stream"
            self._give_up(self._conn, Failure(Kind.EVICTED, reason))
            return False
        if self._http10 or head.bodiless or (head.length is not None and not self._sse):
            self._framing = Framing.IDENTITY
        return True

    def _give_up(self, conn: UnitConnection, failure: Failure) -> None:
        self.over = True
        self._conn = None
        conn.drop()
        self._owner.failed(failure)

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
        if not self._sse:
            self._first = body
        self._owner.committed(body)
        prefix = b"" if self.head_sent else self._head_bytes(head)
        self.head_sent = True
        self._reframe(data, body, conn, prefix)

    # -- after it ------------------------------------------------------------------------------------------

    def _count(self, events: int) -> None:
        now = self._now()
        gap_ms = int((now - self.last_at) * 1000)
        self._gaps[gap_ms if gap_ms < GAPS_MS else -1] += 1
        self.last_at = self._desk.life_at = now
        self.events += events

    def _ends_whole(self, data: bytes, conn: UnitConnection) -> bool:
        """Behind a chunk there may be a part of the next one's size: then a read does not end so."""
        return conn.clean and data.endswith(EVENT_ENDS)

    def _reframe(self, data: bytes, body: bytes, conn: UnitConnection, prefix: bytes = b"") -> None:
        """Show what is complete of `body`, in a chunk of our own, and end as the unit does."""
        failure = None
        if self._sse:
            body, failure = self._examined(self._tail + body, conn)
        framed = self._framing.frame(body) if body else b""
        if framed:
            self._keep(framed)
        ended = conn.ended or (self.stitch is not None and self.stitch.is_over)
        if ended and failure is None:
            failure = self._lacks_end(body)
        if ended and failure is None:
            framed += self._framing.end
        at_boundary = not ended and not self._tail and self._ends_whole(data, conn)
        conn.raw = self if at_boundary and self._may_go_raw() else None
        if prefix or framed:
            self._send(prefix + framed)
        if failure is not None:
            self._give_up(conn, failure)
        elif ended:
            conn.discard()
            self._finish()

    def _may_go_raw(self) -> bool:
        return self._sse and self._framing is Framing.CHUNKED and self.stitch is None

    def _examined(self, events: bytes, conn: UnitConnection) -> tuple[bytes, Failure | None]:
        """What of these events may be shown, and what is wrong with what follows."""
        end = len(events) if conn.ended else end_of_events(events)
        if len(events) - end > TAIL_BYTES:
            end = len(events)
            self._in_event = True
        elif end:
            self._in_event = False
        events, self._tail = events[:end], events[end:]
        failure = None
        good = before_error(events)
        if len(good) < len(events):
            reason = message_of(events[len(good) :])
            failure = Failure(Kind.STREAM_ERROR, f"it failed in its stream: {reason}")
            events = good
        if events and self.stitch is not None:
            try:
                events = self.stitch.feed(events)
            except UnlikeError as error:
                return b"", Failure(Kind.NOT_CONTINUED, f"it went on with {error}")
        return events, failure

    def _lacks_end(self, last: bytes) -> Failure | None:
        """What is wrong with a stream that HTTP ends well, though the answer in it has not come to an end."""
        kept = self._kept
        if self.keep is None or (kept is None and self.stitch is None) or DONE in last:
            return None
        if kept and DONE in kept[-1]:
            return None
        said = self.keep.read()
        is_an_answer = said.has_role or bool(said.text)
        if not is_an_answer or said.is_done or said.finish:
            return None
        return Failure(Kind.TRUNCATED, "it ended its stream in the middle of an answer")

    def _keep(self, framed: bytes) -> None:
        if self._kept is not None:
            self._kept.append(framed)
            if self.sent > self._fold_at:
                self._fold()

    def _fold(self) -> None:
        """What was kept has grown large: only what it says is kept, or nothing if that is of no use."""
        assert self.keep is not None
        self._fold_at = self.sent + FOLD_BYTES
        if self.keep.read().why_not:
            self._kept = None

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
