"""The response to one request: everything its client sees, from head to end, and its record.

Attempts on units feed it, one after the other; it outlives each of them. Rules:
1. It ends exactly once, by one of the methods that say so.
2. Once its head was sent, its status and its framing stay what they are.
3. For each chunk of a token (`on_token`): no JSON, no logging, no metric call, no task, no timer. Data is
   kept by reference.

In this order: `Response`, `refusal_lines`, `TokensWithIds`, `Doubt`, `shows_token`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from cellgate.proxy.http.errors import Failure, FailureKind, shape_of
from cellgate.proxy.http.heads import is_request_id, own_response
from cellgate.proxy.http.reply import (
    CHUNKED,
    IDENTITY,
    LAST_CHUNK,
    Framing,
    ReplyHead,
    head_of,
    last_chunk,
    without,
)
from cellgate.proxy.http.sse import WORKING, JsonSkim
from cellgate.proxy.observe.access_log import LEFT_STATUS, Finished
from cellgate.proxy.observe.counters import ResumeResult
from cellgate.proxy.request.body import BYTES_PER_TOKEN
from cellgate.proxy.request.cors import ENGINES_LINES, OWN_LINES
from cellgate.proxy.request.placement import gate_refusal, is_final
from cellgate.proxy.request.ports import Observer
from cellgate.proxy.resume.answer_reader import AnswerReader, only_add, reported_in
from cellgate.proxy.resume.replay import FOLD_BYTES, MakeTranscript, ReplayBuffer
from cellgate.proxy.resume.transcript import IDS, NO_IDS, CountLog, TokenLog
from cellgate.router.cost_model import Usage
from cellgate.router.learning import GAPS_MS
from cellgate.router.nouns import BUSY_STATUSES, Ask, Outcome
from cellgate.router.unit_state import NO_ENDS, UnitState

if TYPE_CHECKING:
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.request import Request
    from cellgate.proxy.request.services import Services
from cellgate.proxy.request.token_usage import believed, is_possible, longest_answer, read_usage, usage_of

CHUNK_FRAMING = len(b"fff\r\n\r\n")
"""What HTTP adds to an event that is a chunk."""
_new = tuple.__new__
SAME_CHUNKS, PERIOD_CHUNKS = 24, 8
"""So many events in a row that are the same, or up to so many in turn, are looked at: the text may be meant
to repeat itself."""


class Response:
    """What one client gets for one request.

    `begun`: a head was sent; `whole`: all was sent, and only the record is to come; `over`: it has ended.
    `is_events`: it is a stream of events; `in_event`: the last of them was sent in part; `passes_raw`: whole
    chunks of a unit may be passed on unchanged.
    `promised` is the head that the attempt in flight has, until it is sent.
    `last_at` is when something was last sent, or when the clock for stalls was restarted; `paused`: the
    client reads slower than its unit writes; `replay` is what was sent of a stream, in case the unit breaks
    it; `is_read`: it is one whose answer is read, by a `reader` once it has an event that does more than add
    to a text; `tokens` takes ids or counts of tokens out of its events, where the client has not asked for
    them; `lines` are header lines of the gate's own, whatever the answer; `shows_internals`: the client may
    know which unit answers.
    """

    __slots__ = (
        "_chunks",
        "_client",
        "_ends_by_close",
        "_first",
        "_fold_at",
        "_framing",
        "_gaps",
        "_gate",
        "_head_size",
        "_own_lines",
        "_request",
        "_skim",
        "_unit_state",
        "_write",
        "attempts",
        "begun",
        "closes",
        "events",
        "in_event",
        "is_events",
        "is_read",
        "last_at",
        "lines",
        "model",
        "now",
        "observers",
        "over",
        "passes_raw",
        "paused",
        "promised",
        "rank",
        "reader",
        "replay",
        "request_id",
        "resumed",
        "route",
        "sent",
        "shows_internals",
        "status",
        "tokens",
        "ttft_s",
        "unit",
        "usual_ends",
        "whole",
    )

    # From the first promise on: the last two of a body that is none of events, and of one that is.
    promised: ReplyHead | None
    _own_lines: bytes
    _framing: Framing
    _head_size: int
    _ends_by_close: bool
    passes_raw: bool
    # From the first commit on.
    _unit_state: UnitState
    _gaps: list[int]
    _write: Callable[[bytes], None]
    # A whole body, or the beginning of a stream that is read.
    _first: bytes
    _chunks: list[bytes] | deque[bytes] | None
    _fold_at: float
    usual_ends: tuple[bytes, ...]

    def __init__(
        self,
        gate: Services,
        client: ResponseClient,
        request: Request,
        route: str,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self._gate = gate
        self.observers = observers
        self.now = gate.now
        self._client = client
        self._request = request
        given = request.given_id
        self.request_id = given if given and is_request_id(given) else gate.new_id()
        self.route = route
        self.model = self.unit = ""
        self.lines = b""
        self.shows_internals = client.shows_internals and (not request.forwarded_for or gate.shows_all)
        self.rank: int | None = None
        self.status = self.attempts = self.resumed = self.sent = self.events = 0
        self.ttft_s: float | None = None
        self.last_at = request.received_at
        self.closes = not request.keep_alive or request.http10
        self.begun = self.whole = self.over = False
        self.paused = self.is_events = self.in_event = self.is_read = False
        self.replay: ReplayBuffer | None = None
        self.tokens: TokenLog | CountLog | None = None
        self.reader: AnswerReader | None = None
        self._skim: JsonSkim | None = None
        """Of a body that is none of events, if it did not come at once."""

    # -- fed by an attempt ---------------------------------------------------------------------------------

    def promise(self, head: ReplyHead, own_lines: bytes) -> bool:
        """Keep the head of a unit's reply, to be sent with the first part of the body. False: the client has
        got the head of a stream, and this reply is not one.
        """
        is_events = head.is_events
        if self.begun and not is_events:
            return False
        self.promised = head
        self._own_lines = own_lines
        self.is_events = is_events
        self._framing = framing = IDENTITY if self._request.http10 else head.framing
        if is_events:
            self.passes_raw = framing is CHUNKED
        else:
            self._ends_by_close = framing is not CHUNKED and head.length is None
        return True

    def commit(self, state: UnitState, at: float, first: bytes, *, whole: bool) -> None:
        """The attempt commits at `at` with its `first` bytes, passed on next. `whole`: these are all."""
        self.last_at = at
        # For a resumed stream, the transcript is kept where the two parts are stitched together.
        self._chunks = None
        if not self.is_events:
            self._first = first if whole else b""
            if whole:
                return
            if self.promised is not None and b"json" in self.promised.content_lines:
                self._skim = JsonSkim()
            else:
                self.read_metadata()
            return
        self.in_event, self._fold_at = False, inf
        self.usual_ends = state.usual_ends.chunks if self.is_read else ANY_ENDS
        self._unit_state, self._gaps, self._write = state, state.gaps_ms, self._client.write
        self.events += 1
        state.progress_at = at

    def read_metadata(self) -> None:
        """With an answer in bytes vLLM tells the usage in a header line."""
        fields = () if self.promised is None else self.promised.fields
        for name, value in fields:
            if name == b"metadata":
                self._skim = JsonSkim()
                self._skim.feed(value)

    def go_through(self, screen: ResponseClient) -> None:
        """From now on `screen` takes what the client would."""
        self._client, self._write = screen, screen.write

    @property
    def is_chunked(self) -> bool:
        """Whether the body is sent in chunks."""
        return self._framing is CHUNKED

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk with the event of a token, in a stream that is between two chunks and two events.

        Nearly every token takes this path, so it must call and touch as little as possible.
        """
        now = self.now()
        gap_ms = int((now - self.last_at) * 1000)
        self._gaps[gap_ms if gap_ms < GAPS_MS else -1] += 1
        self.last_at = self._unit_state.progress_at = now
        self.events += 1
        self.sent += len(chunk)
        kept = self._chunks
        if kept is not None:
            kept.append(chunk)
            if self.sent > self._fold_at:
                self._fold()
        self._write(chunk)

    def on_tokens(self, data: bytes, chunks: list[bytes]) -> None:
        """The same of several that have come in one read. Each is kept by itself: so they are compared, and
        read again, like all others.
        """
        self.count(len(chunks))
        self.sent += len(data)
        kept = self._chunks
        if kept is not None:
            kept.extend(chunks)
            if self.sent > self._fold_at:
                self._fold()
        self._write(data)

    def count(self, events: int) -> None:
        """Something has come that has so many events, or parts of them."""
        now = self.now()
        gap_ms = int((now - self.last_at) * 1000)
        self._gaps[gap_ms if gap_ms < GAPS_MS else -1] += 1
        self.last_at = self._unit_state.progress_at = now
        self.events += events

    def pass_on(self, data: bytes, body: bytes) -> None:
        """Send a read of the unit unchanged, but for token ids; `body` is its content."""
        framed = self._framed(body)
        self._send(data if self.tokens is None else framed)

    def hint(self, heads: bytes) -> None:
        """Pass on what a unit says before its answer (RFC 9110, 15.2), unless something was sent already."""
        if not self.begun and not self._request.http10:
            self._client.hint(heads)

    def show(self, body: bytes, ended: bool, trailers: bytes = b"") -> bool:
        """Send a part of the body, after the head if that was not sent yet; `ended`: it is the last part, and
        these `trailers` follow.

        False: the framing would end in the middle of an event, so the end is not sent.
        """
        out = self._framed(body) if body else b""
        if not self.begun:
            out = self._head_bytes() + out
        is_whole = not ended or self.replay is None or self._has_whole()
        if ended and is_whole and self._framing is CHUNKED:
            out += last_chunk(trailers) if trailers else LAST_CHUNK
        if out:
            self.sent += len(out)
            self._client.send(out)
        return is_whole

    def _has_whole(self) -> bool:
        """Whether nothing is missing of a stream that ends here."""
        if self.reader is not None:
            return self.reader.is_whole()
        # All that has come was a part of a text.
        return not self.is_read or not self._first

    @property
    def repeats(self) -> bool:
        """Whether a stream says the same again and again: its last chunks are a few, in turn."""
        kept = self._chunks
        if kept is None or self.events < SAME_CHUNKS or len(kept) < SAME_CHUNKS:
            return False
        last = list(islice(reversed(kept), SAME_CHUNKS))
        if last[0] not in last[1 : PERIOD_CHUNKS + 1]:
            # Nearly always.
            return False
        period = last.index(last[0], 1)
        return last[period:] == last[:-period]

    @property
    def tail(self) -> bytes:
        """A whole answer, or the last chunks of a stream that is kept: all, if it is short."""
        return b"".join(self._chunks or ()) if self.is_events else self._first

    @property
    def last_chunk(self) -> bytes:
        """What it has sent last, of a stream that is kept."""
        return self._chunks[-1] if self._chunks else b""

    @property
    def own_lines(self) -> bytes:
        """The gate's own lines of the head that is promised."""
        return self._own_lines

    def show_kept(self, head: ReplyHead, own_lines: bytes, body: bytes) -> None:
        """Send a whole answer that was kept while others were asked."""
        self.promise(head, own_lines)
        self._chunks, self._first = None, body
        self.show(body, ended=True)
        self.whole = True

    def pause(self, *, paused: bool) -> None:
        """The client reads slower than its unit writes, or reads again: clocks begin again."""
        self.paused = paused
        self.last_at = self.now()

    # -- what is kept of it --------------------------------------------------------------------------------

    def read_answer(self, *, is_typed: bool) -> None:
        """Read what is sent of a stream, from its begin on; `is_typed`: its events have types."""
        self.is_read, self._first = True, b""
        if is_typed:
            self.reader, self.usual_ends = AnswerReader(is_typed=True), ()
        else:
            self.usual_ends = self._unit_state.usual_ends.chunks

    def record_replay(self, ways: int, shape: MakeTranscript) -> None:
        """Keep what is sent of a stream, from its begin on, as these ways to resume it need it."""
        self.replay = replay = ReplayBuffer(framed=self._framing is CHUNKED, ways=ways, shape=shape)
        self._chunks = replay.chunks
        if ways:
            self._fold_at = self.sent + FOLD_BYTES
            self.tokens = replay.tokens

    def taking_tokens(self) -> Response | TokensWithIds | TokensWithCounts:
        """What takes chunks of the unit: itself, if nothing has to be taken out of them."""
        log = self.tokens
        if log is None:
            return self
        return TokensWithIds(self, log) if isinstance(log, TokenLog) else TokensWithCounts(self, log)

    def keep_tail(self) -> None:
        """The stream cannot be resumed: from now on keep only its end."""
        assert self.replay is not None
        self.replay.keep_tail()
        if self._chunks is not None:
            self._chunks, self._fold_at = self.replay.chunks, inf

    def usage(self) -> Usage | None:
        """What its engine has told of its tokens, so far."""
        if self.reader is not None:
            return usage_of(self.reader.reported)
        if self._skim is not None:
            return usage_of(reported_in(self._skim.document()))
        return read_usage(self._first) if self.whole and not self.is_events else None

    def usage_for(self, ask: Ask) -> Usage | None:
        """The same, as far as it can be for what was asked: see request/token_usage.py."""
        reported = self.usage()
        if reported is None or is_possible(reported, ask):
            return reported
        return believed(reported, ask, self._request.body, self._engine, self.tokens_shown()[0])

    def longest_answer(self, ask: Ask) -> int:
        """How long each answer may be that its engine gives; 0: any length."""
        return longest_answer(ask, self._request.body, self._engine)

    @property
    def _engine(self) -> str:
        """The engine that has answered; empty: none has, or it is not known."""
        state: UnitState | None = getattr(self, "_unit_state", None)
        return "" if state is None else state.engine

    def has_answered(self) -> bool:
        """Whether all of the answer was sent, though perhaps not all of its frame."""
        if self.is_read:
            return self.reader is not None and self.reader.has_finished
        return self.usage() is not None

    def tokens_shown(self) -> tuple[int, int]:
        """Tokens of an answer whose engine tells none: one at least for each event of a stream that shows
        something, and one for four bytes of its text.
        """
        if not self.is_events:
            return 0, (self.sent - self._head_size) // BYTES_PER_TOKEN if self.begun else 0
        if not self.is_read or not self.events:
            return self.events, 0
        framing, reader = CHUNK_FRAMING if self._framing is CHUNKED else 0, self._the_reader()
        text = reader.text_bytes(self.sent - self._head_size, self.events, framing)
        return max(self.events - reader.empty, 0), text // BYTES_PER_TOKEN

    def _framed(self, body: bytes) -> bytes:
        """A part of the body as it is sent. It is read, and the replay buffer keeps it."""
        if self.tokens is not None:
            body = self.tokens.strip(body)
        if self.is_read:
            if self.reader is not None or not only_add(body, self._unit_state.usual_ends.events):
                reader, state = self._the_reader(), self._unit_state
                known = reader.ends
                reader.feed(body)
                self.usual_ends = reader.ends.chunks
                if reader.ends is not known:
                    state.usual_ends = reader.ends
            elif not self._first:
                self._first = body
        elif self._skim is not None:
            self._skim.feed(body)
        framed = self._framing.frame(body)
        if self._chunks is not None:
            self._chunks.append(framed)
            if self.sent > self._fold_at:
                self._fold()
        return framed

    def _the_reader(self) -> AnswerReader:
        """The reader of a stream, made when it is needed."""
        if self.reader is None:
            # One that has read nothing learns for itself what is usual.
            known = self._unit_state.usual_ends if self._first else NO_ENDS
            self.reader = AnswerReader(is_typed=False, ends=known, begun=self._first)
        return self.reader

    def _fold(self) -> None:
        """The replay buffer has grown large: keep only its text, or only the end if it cannot be resumed."""
        assert self.replay is not None
        self._fold_at = self.sent + FOLD_BYTES
        if self.replay.read().why_not:
            self.keep_tail()

    def record_break(self, unit: str) -> None:
        """A unit broke the stream."""
        for observer in self.observers:
            observer.broke(unit, self.now())

    def record_result(self, result: ResumeResult) -> None:
        """The result of a break is known."""
        self.resumed += result is ResumeResult.RESUMED
        for observer in self.observers:
            observer.settled(result)

    # -- what the gate itself has to say -------------------------------------------------------------------

    def keep_warm(self, now: float, after_s: float) -> None:
        """Send the head of a held stream, or a comment after it, if nothing was sent for `after_s`."""
        if now - self.last_at <= after_s:
            return
        self.last_at = now
        if self.is_events and (self.begun or self.promised is not None):
            prefix = b"" if self.begun else self._head_bytes()
            self._send(prefix + self._framing.frame(WORKING))

    def answer(self, status: int, body: bytes, lines: bytes) -> None:
        """End the response with an answer of the gate."""
        self._write_own(status, body, lines)
        self.end(Outcome.OK if status < 400 else Outcome.GATE_ERROR)

    def refuse(self, failure: Failure, line: bytes = b"", *, reason: str = "") -> None:
        """End it with a row of the failure table. `line`: one more header line, `reason`: a better word."""
        row = failure.kind.row
        self.closes = self.closes or row.closes
        line += refusal_lines(failure, reason)
        self._write_own(row.status, shape_of(self.route).body(failure), line)
        self.end(row.outcome, failure.kind.value)

    def break_off(self, failure: Failure) -> None:
        """End a response that has begun: with an error event in a stream, never with a clean end."""
        if self.is_events:
            number = self.replay.read().next_number if self.replay is not None else 0
            event = shape_of(self.route).event(failure, number)
            # A large event may have been sent in part: it ends here.
            self._send(self._framing.frame(b"\n\n" + event if self.in_event else event))
        elif self._ends_by_close:
            # Abort at once: with TLS, a close would send a close_notify first.
            self._client.cut()
        self.closes = True
        self.end(failure.kind.row.outcome, failure.kind.value)

    def conclude(self, events: bytes) -> None:
        """End a stream whose text is complete, although its unit broke before the last events."""
        self._send((self._framed(events) if events else b"") + self._framing.end)
        self.whole = True
        self.end(Outcome.OK)

    def crash(self) -> None:
        """End the response after a defect of the gate: with 500, or an error event if something was sent."""
        known_as = self.request_id.decode("latin-1")
        failure = Failure(
            FailureKind.INTERNAL, f"the gate failed on this request; see its log, request id {known_as}"
        )
        if self.whole:
            self.closes = True
            self.end(failure.kind.row.outcome, failure.kind.value)
        elif self.sent:
            self.break_off(failure)
        else:
            self.refuse(failure)

    def left(self) -> None:
        """End the response: the client has left."""
        if not self.sent:
            self.status = LEFT_STATUS
        self.end(Outcome.CLIENT_LEFT, "client_left")

    def end(self, outcome: Outcome, code: str = "") -> None:
        """End the response: all is written; the connection serves its next request, or closes."""
        self.over = True
        request = self._request
        now = self.now()
        # In the order of its fields: with their names it takes a third longer.
        fields = (
            self.request_id.decode(),
            self._client.peer,
            request.method.decode(),
            request.path.decode("latin-1"),
            self.route,
            self.model,
            self.status,
            code,
            self.unit,
            outcome,
            self.attempts,
            self.resumed,
            self.ttft_s,
            now - request.received_at,
            self.events,
            request.body_size,
            self.sent,
            self.rank,
        )
        record = _new(Finished, fields)
        self._gate.finished(record)
        for observer in self.observers:
            observer.over(record, now)
        self._client.finish(request, keep_alive=not self.closes)

    # -- inside --------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        self.sent += len(data)
        self._client.send(data)

    def _head_bytes(self) -> bytes:
        head = self.promised
        assert head is not None
        self.promised = None
        own = b"x-request-id: %b\r\n%b%b%b" % (
            self.request_id,
            self._own_lines,
            self.lines,
            self._gate.report_lines(
                self._request, to_trusted=self.shows_internals or self._client.shows_internals
            ),
        )
        close = self.closes = self.closes or self._gate.is_leaving
        self.begun = True
        if self.lines and self.lines.startswith(OWN_LINES):
            head = without(head, ENGINES_LINES)
        begin = head_of(head, self._framing, own=own, close=close)
        self._head_size = len(begin)
        return begin

    def _write_own(self, status: int, body: bytes, line: bytes) -> None:
        self.status = status
        own = b"x-request-id: %b\r\n%b%b" % (self.request_id, self.lines, line)
        self.closes = self.closes or self._gate.is_leaving
        data = own_response(status, body, own=own, close=self.closes)
        if self._request.method == b"HEAD":
            data = data[: len(data) - len(body)]
        self._send(data)


# What the head of a refusal tells the client of when to try again, and why. Pure.


def refusal_lines(failure: Failure, reason: str = "") -> bytes:
    """The header lines of a row of the failure table; `reason`: a better word than the row has."""
    row, lines = failure.kind.row, failure.lines
    if row.retry_after_s is not None:
        lines += b"retry-after: %d\r\n" % (failure.retry_after_s or row.retry_after_s)
    if row.retry_after_s is not None or row.is_final:
        lines += b"x-cellgate-reason: %b\r\n" % (reason or failure.kind.value).encode()
    if row.is_final:
        # OpenAI's clients retry twice after any 5xx unless this header says no.
        lines += b"x-should-retry: false\r\n"
    return lines


# Takes the chunks of a stream whose token ids the client has not asked for.


ANY_ENDS = (b"\n\n\r\n",)
"""Of the chunks of a stream that are all read, or none."""
_LINE_END_BYTES = len(b"\r\n")
_IDS_SIZE = len(IDS)


class TokensWithIds:
    """In the place of the response, which would pass chunks on unchanged: takes the ids out of them first."""

    usual_ends = ANY_ENDS

    __slots__ = ("_log", "_response")

    def __init__(self, response: Response, log: TokenLog) -> None:
        self._response = response
        self._log = log

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk with the event of a token. In a text there would be no such quotes."""
        response, at = self._response, chunk.rfind(IDS)
        if at > 0:
            ids = chunk[at + _IDS_SIZE : (end := chunk.find(b"]", at))]
            event = chunk[chunk.find(b"\n") + 1 : at] + NO_IDS + chunk[end + 1 :]
            if ids.isdigit() and event.endswith(response.usual_ends):
                self._log.ids.append(int(ids))
                response.on_token(b"%x\r\n%b" % (len(event) - _LINE_END_BYTES, event))
                return
        response.count(1)
        response.pass_on(chunk, chunk[chunk.index(b"\n") + 1 : -_LINE_END_BYTES])

    def on_tokens(self, data: bytes, chunks: list[bytes]) -> None:
        """A read that is several such chunks."""
        pass_stripped(self._response, self._log, data, chunks)


class TokensWithCounts:
    """The same where each event has a usage that the client has not asked for."""

    usual_ends = ANY_ENDS

    __slots__ = ("_log", "_response")

    def __init__(self, response: Response, log: CountLog) -> None:
        self._response = response
        self._log = log

    def on_token(self, chunk: bytes) -> None:
        """One whole chunk with the event of a token."""
        response = self._response
        event = self._log.strip(chunk[chunk.find(b"\n") + 1 :])
        if event.endswith(response.usual_ends):
            response.on_token(b"%x\r\n%b" % (len(event) - _LINE_END_BYTES, event))
            return
        response.count(1)
        response.pass_on(chunk, event[:-_LINE_END_BYTES])

    def on_tokens(self, data: bytes, chunks: list[bytes]) -> None:
        """A read that is several such chunks."""
        pass_stripped(self._response, self._log, data, chunks)


def pass_stripped(response: Response, log: TokenLog | CountLog, data: bytes, chunks: list[bytes]) -> None:
    """Pass on a read, which is these chunks of one event each, without what `log` takes out of them."""
    events = [log.strip(chunk[chunk.find(b"\n") + 1 :]) for chunk in chunks]
    if [event for event in events if not event.endswith(response.usual_ends)]:
        response.count(len(events))
        response.pass_on(data, b"".join([event[:-_LINE_END_BYTES] for event in events]))
        return
    chunks = [b"%x\r\n%b" % (len(event) - _LINE_END_BYTES, event) for event in events]
    response.on_tokens(b"".join(chunks), chunks)


# Classifies a unit's reply by its status: an answer for the client, or a failure that is retried first.


_OK = Outcome.OK
# The body of engines on FastAPI for an unknown path; clients get OpenAI's error shape with a reason instead.
NO_SUCH_PATH = b'{"detail":"Not Found"}'
NO_PATH = "404, it does not serve this path"
"""What is wrong with that answer. Units of a mixed fleet give it: that is no fault of a unit."""


class Doubt(NamedTuple):
    """What one unit has answered, to be shown where no other has a better answer. `head` None: that was
    nothing that could be shown.
    """

    unit: str
    what: str
    head: ReplyHead | None
    own_lines: bytes
    body: bytes
    status: int


class HeldAnswer(NamedTuple):
    """A doubtful answer that is held `until` then, or until more doubts about its unit have `settled`."""

    first: Doubt
    settled: int
    until: float


def failure_of(head: ReplyHead, state: UnitState, now: float) -> Failure | None:
    """The failure of a busy or failing unit; None: the reply is for the client."""
    status = head.status
    if (status < 500 and status != 429) or is_final(status, head.fields):
        return None
    kind = gate_refusal(status, head.fields)
    if kind is None:
        kind = FailureKind.BUSY if status in BUSY_STATUSES else FailureKind.UNIT_ERROR
        if status == 503 and state.is_falsely_busy(now):
            kind = FailureKind.FALSE_BUSY
    return Failure(kind, f"unit {state.unit.name} answered {status}")


def outcome_of(status: int) -> Outcome:
    """The outcome of a complete reply."""
    if status < 400:
        return _OK
    if status in BUSY_STATUSES:
        return Outcome.BUSY
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.UNIT_ERROR


# Whether the beginning of an answer shows that anything was generated. Pure.
#
# A decoder that could not fetch the blocks of a prompt may say 200, and nothing: a role, an end, no token.


# The fields of OpenAI's API that carry what was generated, with something in them.
_SHOWN = re.compile(
    rb'"(?:content|text|refusal|reasoning|reasoning_content|arguments)"\s*:\s*"(?!")'
    rb'|"tool_calls"\s*:\s*\[\s*\{'
    rb'|"completion_tokens"\s*:\s*[1-9]'
)


def shows_token(answer: bytes) -> bool:
    """True for text, reasoning or a tool call, and for a count of tokens: the only one may be the end."""
    return _SHOWN.search(answer) is not None
