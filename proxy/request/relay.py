"""The relay: carries one unit's reply to the client, transport to transport.

Rules:
1. Nothing is shown before the commit: the first complete event that carries data, or the head of a plain
   body. Engines answer 200 before prefill, so the head of a stream proves nothing and is held until then.
2. Bytes go on raw only from one point to another where both an HTTP chunk and an SSE event end: an announced
   chunk size cannot be taken back. Any other read is framed anew, up to its last complete event; a tail of
   more than 16 KiB goes on unfinished, but where it is rewritten.
3. An error that an engine reports in its stream is never shown: it is a failure of the attempt, as a
   connection that breaks is.
4. Per read: no JSON, no logging, no metric call, no task, no timer. What is kept is kept by reference.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol

from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.resume.passage import Passage
from cellgate.proxy.resume.replay_buffer import FOLD_BYTES, Keep
from cellgate.proxy.resume.stitch import Stitch
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.framing import CHUNKED, framing_of, head_of, is_event_stream
from cellgate.proxy.wire.pool import Pool
from cellgate.proxy.wire.sse import before_error, carries_data
from cellgate.proxy.wire.upstream import EVENT_ENDS, ReplyHead, UnitConnection
from cellgate.router.lease import Lease
from cellgate.router.step_times import GAPS_MS

_COMMENT = b": the unit is still working\n\n"


class Owner(Protocol):
    """The exchange behind a relay."""

    def accepts(self, head: ReplyHead) -> bool:
        """Whether this reply goes on to the client; False: the owner has turned elsewhere."""

    def extra_lines(self) -> bytes: ...
    def closes_client(self) -> bool: ...
    def crashed(self, error: Exception) -> None: ...
    def committed(self, body: bytes) -> None: ...
    def done(self) -> None: ...
    def failed(self, failure: Failure) -> None: ...


class Relay:
    """One attempt's way back. Also the taker of its connection.

    `keep` is what its client has been shown of a stream, in case the unit breaks.
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
        "_kept",
        "_now",
        "_owner",
        "_passage",
        "_pool",
        "_request",
        "_sse",
        "_write",
        "events",
        "head_sent",
        "keep",
        "last_at",
        "lease",
        "over",
        "paused",
        "sent",
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
        self._framing = CHUNKED
        self._first = b""
        self._passage = Passage()
        self._kept: list[bytes] | deque[bytes] | None = None
        self._fold_at = inf
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
        """The connection did not come about, or is gone; or the gate itself failed, at whatever point."""
        is_ours = failure.kind is Kind.INTERNAL
        if not is_ours:
            self._conn = None
        if is_ours or not self.over:
            guarded(self._owner, self._owner.failed, failure)

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

    # -- what is kept of it --------------------------------------------------------------------------------

    def begin_keeping(self, *, whole: bool) -> None:
        """Keep what is shown from now on, or the end of it. To be called before anything of a stream is."""
        if self._sse:
            self.keep = Keep(framed=self._framing is CHUNKED, whole=whole)
            self._kept = self.keep.chunks
            self._fold_at = self.sent + FOLD_BYTES if whole else inf

    def go_on(self, keep: Keep, stitch: Stitch) -> None:
        """The unit goes on for another, of which `keep` was shown; `stitch` makes one stream of both."""
        self.keep = keep
        self._passage.stitch = stitch

    def keep_end(self) -> None:
        """What was kept turned out to be of no use: from now on keep the end alone."""
        assert self.keep is not None
        self.keep.keep_end()
        if self._kept is not None:
            self._kept, self._fold_at = self.keep.chunks, inf

    def end(self) -> bytes:
        """What was shown last, as far as it is kept; of a plain body what came with its head."""
        return self.keep.end() if self.keep is not None else self._first

    def _keep(self, framed: bytes) -> None:
        if self._kept is not None:
            self._kept.append(framed)
            if self.sent > self._fold_at:
                self._fold()

    def _fold(self) -> None:
        """What was kept has grown large: only what it says is kept, or the end if that is of no use."""
        assert self.keep is not None
        self._fold_at = self.sent + FOLD_BYTES
        if self.keep.read().why_not:
            self.keep_end()

    # -- what the gate itself has to say -------------------------------------------------------------------

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
            self._send(self._framing.frame(b"\n\n" + event if self._passage.in_event else event))
            return True
        head = self._head
        return self._framing is CHUNKED or (head is not None and head.length is not None)

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
        if not pieces and not conn.ended:
            # Most engines send the head of a stream by itself.
            return
        begun = self._passage.begin(b"".join(pieces), ended=conn.ended)
        if isinstance(begun, Failure):
            self._give_up(conn, begun)
        elif begun is not None:
            self._commit(data, begun, conn)

    def _begin(self, head: ReplyHead) -> bool:
        if not self._owner.accepts(head):
            self.over = True
            conn, self._conn = self._conn, None
            if conn is not None:
                conn.discard()
            return False
        self._head = head
        self._sse = is_event_stream(head)
        self._framing = framing_of(head, http10=self._http10, is_events=self._sse)
        if self.head_sent and not self._sse:
            # The client was promised a stream, so this answer cannot be shown to it.
            assert self._conn is not None
            reason = f"a second unit answered {head.status} to a begun stream"
            self._give_up(self._conn, Failure(Kind.EVICTED, reason))
            return False
        return True

    def _give_up(self, conn: UnitConnection, failure: Failure) -> None:
        self.over = True
        self._conn = None
        conn.drop()
        guarded(self._owner, self._owner.failed, failure)

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
        else:
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
            body, failure = self._passage.feed(body, ended=conn.ended)
        framed = self._framing.frame(body) if body else b""
        if framed:
            self._keep(framed)
        ended = conn.ended or self._passage.is_over
        if ended and failure is None:
            failure = self._lacks_end()
        if ended and failure is None:
            framed += self._framing.end
        at_boundary = not ended and self._passage.is_empty and self._ends_whole(data, conn)
        conn.raw = self if at_boundary and self._may_go_raw() else None
        if prefix or framed:
            self._send(prefix + framed)
        if failure is not None:
            self._give_up(conn, failure)
        elif ended:
            conn.discard()
            self._finish()

    def _may_go_raw(self) -> bool:
        return self._sse and self._framing is CHUNKED and self._passage.stitch is None

    def _lacks_end(self) -> Failure | None:
        """What is wrong with a stream that HTTP ends well, though the answer in it has not come to an end."""
        if self.keep is None or not self.keep.lacks_end():
            return None
        return Failure(Kind.TRUNCATED, "it ended its stream in the middle of an answer")

    def _finish(self) -> None:
        self.over = True
        self._conn = None
        guarded(self._owner, self._owner.done)

    def _send(self, data: bytes) -> None:
        self.sent += len(data)
        self._client.send(data)

    def _head_bytes(self, head: ReplyHead) -> bytes:
        own, close = self._owner.extra_lines(), self._owner.closes_client()
        return head_of(head, self._framing, is_events=self._sse, own=own, close=close)
