"""One attempt on one unit: sends the request, holds the answer, feeds the response from the commit on.

It owns its lease and its connection. Rules:
1. Nothing is shown before the commit: the first complete event that carries data, or the end of a plain body
   (of one that is large, or of unknown length, its head). Engines answer 200 before prefill, so the head of a
   stream proves nothing and is held until then.
2. Bytes are passed on raw only between two points where both an HTTP chunk and an SSE event end, because an
   announced chunk size cannot be taken back. Any other read is framed again, up to its last complete event;
   an incomplete event above 16 KiB is passed on, unless it must be rewritten.
3. An error that an engine reports in its stream is never shown: it is a failure of the attempt, like a
   broken connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.reply import ReplyHead
from cellgate.proxy.http.sse import ABORT, before_error, carries_data, is_aborted, is_error
from cellgate.proxy.http.unit import EVENT_ENDS, Pool, UnitConnection
from cellgate.proxy.observe.defects import guarded
from cellgate.proxy.process.tcp_info import has_unacked
from cellgate.proxy.request.answer_shape import NO_TOKEN, AnswerShape, are_idle, status_in
from cellgate.proxy.request.ports import Dispatcher
from cellgate.proxy.request.response import NO_PATH, NO_SUCH_PATH, Response, shows_token
from cellgate.proxy.resume.replay import EventFilter, EventRewriter, ReplayBuffer, are_whole, edges
from cellgate.proxy.resume.streams import STREAMS
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.life import RequestLife

PLAIN_BYTES = 64 << 10
"""A plain body of no more bytes is held until it is whole. Engines compute all of it before its head."""


class Attempt:
    """The attempt that `lease` allows. The lease is released to `dispatcher`. `tells`: what of tokens the
    gate has asked for, and not the client. `needs_token`: an answer without any is a failed transfer of its
    prompt's blocks. `shape` is what a good answer is (None: any is); `doubt` says what is wrong with one that
    is shown all the same, and `is_clients` that the request is at fault.
    """

    __slots__ = (
        "_conn",
        "_dispatcher",
        "_event_filter",
        "_has_head",
        "_life",
        "_plain",
        "_pool",
        "_request",
        "_response",
        "doubt",
        "events_before",
        "is_clients",
        "lease",
        "needs_token",
        "over",
        "shape",
        "tells",
    )

    # From `send` on.
    _request: tuple[bytes, bytes, bool]
    # From the first doubt on.
    is_clients: bool

    def __init__(self, life: RequestLife, dispatcher: Dispatcher, response: Response, lease: Lease) -> None:
        self._life = life
        self._dispatcher = dispatcher
        self._response = response
        self._conn: UnitConnection | None = None
        self._has_head = False
        # Made when a part of a stream has to be held: most reads are whole events.
        self._event_filter: EventFilter | None = None
        self._plain = b""
        self._pool: Pool | None = None
        self.events_before = response.events
        self.lease = lease
        self.over = self.needs_token = False
        self.tells = 0
        self.shape: AnswerShape | None = None
        self.doubt = ""
        if response.paused:
            self.pause(paused=True)

    @property
    def events(self) -> int:
        """How many events of this unit the client was shown."""
        return self._response.events - self.events_before

    @property
    def idle_at(self) -> float:
        """Since when its stream has shown events without work; 0: it has not."""
        return 0.0 if self._event_filter is None else self._event_filter.idle_at

    @property
    def idle_events(self) -> int:
        """How many events its stream has shown, of which none shows work."""
        return 0 if self._event_filter is None else self._event_filter.idle_events

    def wait_again(self, now: float) -> None:
        """From now on its events without work are looked at again."""
        if self._event_filter is not None:
            self._event_filter.idle_at = now

    # -- towards the unit ----------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, pool: Pool, *, to_head: bool, fresh: bool) -> None:
        """Send the request as soon as `pool` gives a connection: a new one, if `fresh`."""
        self._pool = pool
        self._request = (head, body, to_head)
        pool.take(self, fresh=fresh)

    def on_connected(self, conn: UnitConnection) -> None:
        """The pool gives a connection: send the request."""
        self._conn = conn
        head, body, to_head = self._request
        # A stream takes long, and it is not sent again.
        del self._request
        conn.send(head, body, self, to_head=to_head)
        if self._response.paused:
            conn.pause()

    def on_failed(self, failure: Failure) -> None:
        """There is no connection, or it is lost; or the gate itself failed, at any point."""
        is_ours = failure.kind is FailureKind.INTERNAL
        if not is_ours:
            self._conn = None
        if is_ours or not self.over:
            guarded(self._life, self._life.failed, failure)

    def abandon(self) -> None:
        """Stop: the client left, or the request moves elsewhere. The unit's connection closes at once."""
        self.over = True
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.drop()
        elif self._pool is not None:
            self._pool.cancel(self)

    def pause(self, *, paused: bool) -> None:
        """Mirror the client's backpressure."""
        lease = self.lease
        lease.make_wait(held=paused)
        if not paused:
            lease.unit_state.work_at = self._response.last_at
        if self._conn is None:
            return
        if paused:
            self._conn.pause()
        else:
            self._conn.resume()

    def resume_with(self, replay: ReplayBuffer, joiner: EventRewriter) -> None:
        """The unit resumes a stream of which `replay` was shown; `joiner` joins both parts."""
        self._response.replay = replay
        event_filter = self._event_filter = self._event_filter or EventFilter(
            is_idle=are_idle, may_hold=self._life.may_hold
        )
        event_filter.joiner = joiner

    def is_mute(self) -> bool:
        """Whether it was sent on a kept connection that has brought no byte since."""
        conn = self._conn
        return conn is not None and conn.reused and not conn.reply.begun

    def is_unacked(self) -> bool:
        """Whether the unit's machine has yet to acknowledge bytes of it."""
        conn = self._conn
        return conn is not None and conn.transport is not None and has_unacked(conn.transport)

    # -- its end -------------------------------------------------------------------------------------------

    def release(self, outcome: Outcome, at: float | None = None) -> None:
        """Give the lease back; the rest of the reply is still sent. `at`: when it was over, if not now."""
        lease, response = self.lease, self._response
        for observer in response.observers:
            observer.attempt_over(lease, outcome, response.now() if at is None else at)
        self._dispatcher.released(lease, outcome)
        response.promised = None

    def abort(self, outcome: Outcome) -> None:
        """End it: close its connection, then release its lease."""
        self.abandon()
        self.release(outcome)

    def fail(self, failure: Failure, *, judged: bool) -> None:
        """It has failed: end it and report the failure. `judged`: such requests count as evidence."""
        self._record(failure)
        self.abort(failure.kind.row.outcome)
        self._answer_for(failure, judged=judged)

    def blame(self, failure: Failure, *, judged: bool) -> None:
        """Report the unit's answer as a failure."""
        self._record(failure)
        self._answer_for(failure, judged=judged)

    def _record(self, failure: Failure) -> None:
        for observer in self._response.observers:
            observer.failing(failure.kind.value)

    def _answer_for(self, failure: Failure, *, judged: bool) -> None:
        """Report the failure to the control plane."""
        self._dispatcher.blame(self.lease, failure, self._response.events, self.events, judged=judged)

    # -- from the unit -------------------------------------------------------------------------------------

    def on_read(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        if not self.lease.committed:
            self._hold(data, pieces, conn)
            return
        response, reply, body = self._response, conn.reply, b"".join(pieces)
        is_events = response.is_events
        if is_events and carries_data(body):
            response.count(len(pieces))
        is_whole = conn.raw is not None and not reply.ended and reply.clean and data.endswith(EVENT_ENDS)
        if is_whole and not (is_events and len(before_error(body)) < len(body)):
            response.pass_on(data, body)
        else:
            self._reframe(data, body, conn)

    def _hold(self, data: bytes, pieces: list[bytes], conn: UnitConnection) -> None:
        """Before the commit."""
        reply = conn.reply
        if not self._has_head:
            if reply.hints:
                self._response.hint(reply.hints)
                reply.hints = b""
            if reply.head is None or not self._begin(reply.head, pieces, conn):
                return
        is_events = self._response.is_events
        if is_events and not pieces and not reply.ended:
            # Most engines send the head of a stream by itself.
            return
        body = b"".join(pieces)
        if self.needs_token:
            body, self._plain = self._plain + body, b""
            if self._lacks_token(body, conn):
                return
        shape = self.shape
        if not is_events:
            whole = self._whole(body, conn)
        elif self._event_filter is None and body.startswith(b"data:") and are_whole(body):
            if shape is None or shape.shown.search(body) is not None:
                self._commit(data, body, conn, is_whole=True)
                return
            whole = self._first_events(body, conn)
        else:
            whole = self._first_events(body, conn)
        if whole is None or (shape is not None and not self._is_well(shape, whole, conn)):
            return
        self._commit(data, whole, conn)

    def _is_well(self, shape: AnswerShape, body: bytes, conn: UnitConnection) -> bool:
        """Whether this is to be shown; False: it is in doubt, and another unit is asked."""
        response, ended = self._response, conn.reply.ended
        is_json = response.status == 200 and not response.is_events and not self.lease.ask.stream
        if is_json and shape.is_plain(body):
            # Most are.
            return True
        what = self._wrong_with(shape, body, ended=ended)
        if not what or not self._life.doubts(what, body):
            return True
        self.over, self._conn = True, None
        if not ended:
            conn.drop()
        return False

    def _wrong_with(self, shape: AnswerShape, body: bytes, *, ended: bool) -> str:
        """What is wrong with an answer; empty: nothing, or it cannot be said."""
        response, head = self._response, self._response.promised
        if response.status >= 300:
            return what_status(response.status, body)
        if response.is_events:
            # A stream that goes on has shown work, or what nobody understands.
            body = edges(body)
            is_over = ended or status_in(body) > 0 or b'"error"' in body
            return shape.why_doubtful(body, is_events=True, streams=True) if is_over else ""
        if not ended or head is None or b"content-encoding" in head.content_lines:
            return ""
        streams = self.lease.ask.stream
        return shape.why_doubtful(body, is_events=False, streams=streams, content_type=head.content_lines)

    def _first_events(self, body: bytes, conn: UnitConnection) -> bytes | None:
        """What to commit with of a stream of which this has come; None: nothing yet, or ever."""
        if (event_filter := self._event_filter) is None:
            is_idle = None if self.shape is None else are_idle
            event_filter = self._event_filter = EventFilter(
                strips=self.tells > 0, is_idle=is_idle, may_hold=self._life.may_hold
            )
        begun = event_filter.begin(body, ended=conn.reply.ended)
        if isinstance(begun, Failure):
            if (
                self.shape is not None
                and begun.kind is FailureKind.FIRST_EVENT_ERROR
                and status_in(body) < 500
            ):
                # It may be the client's mistake.
                return event_filter.begun_with(ended=conn.reply.ended)
            if begun.kind is FailureKind.CLOSED_EARLY and conn.reply.marks_its_end():
                self._ends_empty(begun.message, conn)
            else:
                if begun.kind is FailureKind.ABORTED:
                    self._plain = event_filter.begun_with(ended=conn.reply.ended)
                self._abort(conn, begun)
            return None
        if begun is None and body:
            event_filter.note_idle(self._response.now())
        if begun is not None and event_filter.joiner is not None and conn.reply.ended and are_idle(begun):
            return None if self._life.doubts(NO_TOKEN, begun) else begun
        return begun

    def _ends_empty(self, reason: str, conn: UnitConnection) -> None:
        """A stream has ended in good order without an event: nobody died, and others may say the same."""
        if self.shape is not None and self._life.doubts(NO_TOKEN, b""):
            self.over, self._conn = True, None
        else:
            self._abort(conn, Failure(FailureKind.GARBAGE, reason))

    def _lacks_token(self, body: bytes, conn: UnitConnection) -> bool:
        """Whether all that was received shows nothing yet: it is held, and at its end it has failed."""
        is_other = self._response.status != 200 or is_error(body) or len(body) > PLAIN_BYTES
        if is_other or shows_token(body):
            self.needs_token = False
            return False
        if conn.reply.ended:
            self._abort(conn, Failure(FailureKind.TRANSFER_FAILED, "its answer has no token"))
        else:
            self._plain = body
        return True

    def _whole(self, part: bytes, conn: UnitConnection) -> bytes | None:
        """What to commit with of a plain body, of which `part` has come; None: nothing yet, or ever."""
        reply, body = conn.reply, self._plain + part
        if not reply.ended and self._may_be_held(reply.length, len(body)):
            self._plain = body
            return None
        if ABORT in body and self._response.route in STREAMS and is_aborted(body):
            self._plain = body
            self._abort(conn, Failure(FailureKind.ABORTED, "its engine aborted the answer"))
            return None
        return body

    def _may_be_held(self, length: bytes | None, size: int) -> bool:
        """Whether a plain body is held until it is whole: a small one, and of unknown length an error, or
        JSON, which is of use only when it is whole.
        """
        if length is not None:
            return int(length) <= PLAIN_BYTES
        head = self._response.promised
        if self.shape is None or head is None or size > PLAIN_BYTES:
            return False
        return self._response.status >= 300 or b"application/json" in head.content_lines

    def _begin(self, head: ReplyHead, pieces: list[bytes], conn: UnitConnection) -> bool:
        """Whether the reply that begins with `head` is one for the client."""
        if not self._life.accepts(head, pieces):
            self.over = True
            self._conn = None
            conn.discard()
            return False
        self._has_head = True
        lease = self.lease
        own_lines = (
            b"x-cellgate-unit: %b\r\n%b" % (lease.unit.encode(), lease.lines)
            if self._response.shows_internals
            else lease.lines
        )
        if not self._response.promise(head, own_lines):
            reason = f"another unit answered {head.status} to the resumed stream"
            self._abort(conn, Failure(FailureKind.EVICTED, reason))
            return False
        # It is sent once, and is not kept as long as the stream lasts.
        conn.reply.head = None
        return True

    def _commit(self, data: bytes, body: bytes, conn: UnitConnection, *, is_whole: bool = False) -> None:
        """Begin to show the answer; `is_whole`: these are whole events that report no error."""
        response, lease = self._response, self.lease
        at = response.now()
        if self.doubt:
            lease.commit_in_doubt(at)
        else:
            lease.commit(at)
        response.commit(lease.unit_state, at, body, whole=conn.reply.ended)
        self._life.committed(body, at)
        event_filter = self._event_filter
        if (is_whole and event_filter is None) or not response.is_events:
            self._show(data, body, None, conn)
        elif (
            conn.reply.ended
            or not body.endswith(b"\n\n")
            or (event_filter is not None and event_filter.joiner is not None)
        ):
            if self.doubt:
                # Nobody says anything better: it is shown as it is.
                response.replay = None
                self._show(data, body, None, conn)
            else:
                self._reframe(data, body, conn)
        else:
            # It was checked already.
            self._show(data, body, None, conn)

    def _reframe(self, data: bytes, body: bytes, conn: UnitConnection) -> None:
        """Send the complete part of `body` in a chunk of our own, and end the response if the unit does."""
        response, event_filter, failure = self._response, self._event_filter, None
        if response.is_events and not (event_filter is None and are_whole(body)):
            event_filter = self._event_filter = event_filter or EventFilter(
                strips=self.tells > 0, may_hold=self._life.may_hold
            )
            body, failure = event_filter.feed(body, ended=conn.reply.ended)
            response.in_event = event_filter.in_event
        self._show(data, body, failure, conn)

    def _show(self, data: bytes, body: bytes, failure: Failure | None, conn: UnitConnection) -> None:
        """Send `body`, the complete part of a read; then `failure`, or the end of the unit's reply."""
        response, event_filter, reply = self._response, self._event_filter, conn.reply
        ended = reply.ended or (event_filter is not None and event_filter.is_over)
        # A part of the next chunk's size may follow a chunk: then the read does not end with a chunk.
        may_pass_raw = (
            not ended
            and response.is_events
            and response.passes_raw
            and reply.clean
            and data.endswith(EVENT_ENDS)
            and (event_filter is None or event_filter.is_empty)
        )
        conn.raw = response.taking_tokens() if may_pass_raw else None
        if not response.show(body, ended and failure is None, reply.trailers):
            failure = Failure(FailureKind.TRUNCATED, "it ended its stream before the answer was complete")
        if failure is not None:
            self._abort(conn, failure)
        elif ended:
            if not reply.ended:
                conn.drop()
            self.over = True
            self._conn = None
            guarded(self._life, self._life.done)

    @property
    def aborted(self) -> bytes:
        """What an engine said that has aborted its answer."""
        return self._plain

    def _abort(self, conn: UnitConnection, failure: Failure) -> None:
        self.over = True
        self._conn = None
        conn.drop()
        guarded(self._life, self._life.failed, failure)


def what_status(status: int, body: bytes) -> str:
    """An error in a few words. Engines on FastAPI say with this body that they do not know the path."""
    return NO_PATH if status == 404 and body == NO_SUCH_PATH else str(status)
