"""One request's life: from a whole request to the end of its answer.

It has no policy of its own: what a path is stands in routes.py, which unit it gets says the dispatcher (see
request/dispatcher.py), what a failure means failure.py, how a broken stream ends continuation.py. It is a
machine of synchronous callbacks, so that no cancellation can come between two of its steps. Rules:
1. Each lease is closed exactly once, before anything else follows from its end.
2. No exception leaves it: whoever calls it does so `guarded` (see defects.py), and then `crashed` is its end.
3. Once something was shown to the client (`lease.committed`), the request is not sent again: another unit
   goes on where the text ends, or the client is told that it was broken off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from cellgate.proxy.logs.defects import guarded
from cellgate.proxy.metrics.continuations import Result
from cellgate.proxy.request.ask import is_large, plain_ask, read_ask, stored_ask
from cellgate.proxy.request.continuation import Continuation
from cellgate.proxy.request.placement import may_place, not_here, not_trusted, place
from cellgate.proxy.request.relay import Relay
from cellgate.proxy.request.reply_status import failure_of, lacks_path, outcome_of, response_id
from cellgate.proxy.request.response import Answer
from cellgate.proxy.request.routes import GENERATE, OWN, STICKY, UNLISTED, find_route, why_refused
from cellgate.proxy.request.selection import Selection
from cellgate.proxy.request.usage import read_usage
from cellgate.proxy.wire.failure import Failure, Kind, as_told
from cellgate.proxy.wire.heads import crossing, forwarded_lines, unit_head
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Outcome, Refusal
from cellgate.router.retry import Step

if TYPE_CHECKING:
    from cellgate.proxy.gate import Gate
    from cellgate.proxy.resume.replay_buffer import Keep
    from cellgate.proxy.resume.stitch import Stitch
    from cellgate.proxy.wire.downstream import ClientConnection
    from cellgate.proxy.wire.request import Request
    from cellgate.proxy.wire.upstream import ReplyHead

_PROOF_S = 30.0
"""A unit may take so long to say whether it can go on with a stream."""
_OK, _CONTINUED = Outcome.OK, Result.CONTINUED
_IN_THE_MIDDLE = (Kind.CUT, Kind.STREAM_ERROR, Kind.NOT_CONTINUED)


class Exchange:
    """Answers one request of one client."""

    _ANSWER: type[Answer] = Answer
    _CONTINUATION: type[Continuation] = Continuation
    __slots__ = (
        "_answer",
        "_client",
        "_continuation",
        "_gate",
        "_lease",
        "_paused",
        "_relay",
        "_request",
        "_route",
        "_search",
        "_stop_reading",
        "_was_stale",
    )

    def __init__(self, gate: Gate, client: ClientConnection, request: Request) -> None:
        self._gate = gate
        self._client = client
        self._request = request
        self._route = find_route(request.path)
        self._answer = self._ANSWER(gate, client, request, self._route.name)
        once = self._route.kind is UNLISTED
        self._search = Selection(gate, len(request.body), once=once)
        self._continuation = self._CONTINUATION(gate, request, self._answer, self._search)
        self._lease: Lease | None = None
        self._relay: Relay | None = None
        self._paused = False
        self._stop_reading: Callable[[], None] | None = None
        self._was_stale = False

    # -- the client's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Decide what the request is, and begin."""
        route, request, gate = self._route, self._request, self._gate
        if (request.is_placed or request.is_explained) and route.kind is not OWN and not self._may_choose():
            return
        why = why_refused(route, request.method, pass_unlisted=gate.settings.pass_unlisted)
        if why is not None:
            allows = why.kind is Kind.METHOD_NOT_ALLOWED
            self._answer.refuse(why, b"allow: %b\r\n" % b", ".join(route.methods) if allows else b"")
        elif route.kind is OWN:
            gate.asked(request, self._client.peer)
            self._answer.own(*gate.own_answers.answer(request.path, stopping=gate.is_stopping()))
        elif route.kind is STICKY:
            self._asked(stored_ask(request.path))
        elif not route.json:
            self._asked(plain_ask(request.target, request.body))
        elif is_large(request.body):
            self._stop_reading = gate.read_large(request, self._read)
        else:
            self._asked(read_ask(request.body))

    def client_left(self) -> None:
        """The client is gone: its unit must stop working for it at once."""
        if self._answer.over:
            return
        self._search.cancel()
        if self._stop_reading is not None:
            self._stop_reading()
        result = Result.CLIENT_LEFT
        if self._lease is not None:
            if self._lease.committed:
                result = Result.CONTINUED
            self._let_go(self._lease, Outcome.CLIENT_LEFT)
        self._continuation.settle(result)
        self._answer.left()

    def client_paused(self, paused: bool) -> None:
        """The client reads slower than its unit writes."""
        self._paused = paused
        if self._relay is not None:
            self._relay.pause(paused=paused)

    def tick(self, now: float) -> None:
        """The clocks of this request; called a few times a second."""
        lease, relay, answer_s = self._lease, self._relay, self._gate.settings.timeouts.answer_s
        shown = self._answer.shown or relay
        if lease is None or relay is None:
            if shown is not None and not self._paused:
                self._answer.keep_warm(shown, now)
        elif relay.paused:
            if now - relay.last_at > answer_s:
                # It has read nothing for so long, and would hold its unit's place for ever.
                self._client.cut()
        elif lease.committed:
            if (failure := self._continuation.silence(lease, relay, now)) is not None:
                self.failed(failure)
        elif now - lease.opened_at > answer_s:
            reason = f"unit {lease.unit} showed nothing for {answer_s:.0f} s"
            self.failed(Failure(Kind.ANSWER_TIMEOUT, reason))
        elif self._continuation.is_proving and now - lease.opened_at > _PROOF_S:
            self.refused(f"unit {lease.unit} did not say in {_PROOF_S:.0f} s whether it can go on")
        else:
            self._answer.keep_warm(shown or relay, now)

    # -- an attempt ----------------------------------------------------------------------------------------

    def _read(self, ask: Ask | Failure) -> None:
        guarded(self, self._asked, ask)

    def _asked(self, ask: Ask | Failure) -> None:
        if self._answer.over:
            return
        if isinstance(ask, Ask):
            request = self._request
            ask = self._gate.wishes.heed(ask, request.fields, request.received_at)
        if isinstance(ask, Failure):
            self._answer.refuse(ask)
            return
        self._search.ask = ask
        self._answer.model = ask.model or ""
        self._dispatch()

    def _may_choose(self) -> bool:
        """Whether it may say which unit it goes to, or ask why: then what it says is heeded, else refused."""
        request, gate, selection = self._request, self._gate, self._search
        if not may_place(self._client.peer, request.fields, gate.peers, gate.settings.admin_token):
            gate.metrics.forged += 1
            self._answer.refuse(not_trusted(is_placed=request.is_placed))
            return False
        if request.is_explained:
            selection.explain_since = request.received_at
        if request.is_placed:
            wanted = place(request.fields, gate.board)
            selection.place(wanted)
            if not wanted.units:
                self._refuse(Failure(Kind.NO_UNIT, "this gate has no unit that the request is addressed to"))
                return False
        return True

    def _dispatch(self, *, draws: bool = False, moved: bool = False) -> None:
        found = self._search.acquire(self, draws, moved)
        if found is not None:
            self._begin(found)

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting for a unit."""
        self._search.given = found
        self._begin(self._search.settle(found))

    def _begin(self, found: Lease | Failure) -> None:
        """The next attempt, or the end."""
        if isinstance(found, Lease):
            self._attempt(found)
        else:
            self._refuse(found)

    def _attempt(self, lease: Lease, *, fresh: bool = False) -> None:
        self._lease = lease
        self._search.given = None
        lease.on_evict = self._evicted
        self._answer.attempts += not fresh
        self._relay = relay = Relay(self, self._client, lease, self._gate.now, http10=self._request.http10)
        relay.head_sent = self._answer.shown is not None
        # A kept connection may turn out to be stale and need a second try, which not every path may have.
        fresh = fresh or self._route.kind is UNLISTED
        if not self._continuation.is_under_way:
            self._send(lease, relay, self._request.body, fresh=fresh)
            return
        if self._paused:
            relay.pause(paused=True)
        lines = self._gate.pool(lease.desk).lines
        self._continuation.begin(
            self, lease.desk, lambda path, length: self._head(lines, path, length), fresh=fresh
        )

    def _send(self, lease: Lease, relay: Relay, body: bytes, *, fresh: bool = False) -> None:
        pool, request = self._gate.pool(lease.desk), self._request
        head = self._head(pool.lines, request.target, len(body))
        relay.carry(head, body, pool, to_head=request.method == b"HEAD")
        pool.take(relay, fresh=fresh)

    def _head(self, lines: bytes, target: bytes, length: int) -> bytes:
        """The head of a request to a unit, in the name of our client."""
        request, scheme = self._request, b"https" if self._client.secure else b"http"
        own = b"%b%bx-request-id: %b\r\n" % (
            lines,
            forwarded_lines(request.fields, self._client.peer.encode(), scheme),
            self._answer.request_id,
        )
        crosses = crossing(request.lines, request.fields)
        return unit_head(request.method, target, crosses, own=own, length=length)

    def _evicted(self) -> None:
        """The unit went DOWN. A stream may go on there all the same (see `tick`); anything else moves now."""
        guarded(self, self._move)

    def _move(self) -> None:
        lease = self._lease
        if lease is None or lease.committed:
            return
        self._let_go(lease, Outcome.EVICTED)
        failure = Failure(Kind.EVICTED, f"unit {lease.unit} went down before it answered, and no other could")
        self._gate.dispatcher.blame(lease, failure, self._answer.events, 0)
        if self._route.kind is UNLISTED:
            self._refuse(failure)
            return
        self._search.failed(lease.unit, Step(True), failure)
        self._dispatch()

    # -- what a relay tells --------------------------------------------------------------------------------

    def accepts(self, head: ReplyHead) -> bool:
        """Whether a unit's reply goes on to the client. Busy and broken units are tried elsewhere first."""
        lease, answer = self._lease, self._answer
        assert lease is not None
        if answer.shown is None:
            # Otherwise the client has been shown a head before, of a unit that came to nothing.
            answer.status = head.status
        if lacks_path(head) and self._route.kind is GENERATE:
            self._let_go(lease, Outcome.CLIENT_ERROR)
            path = self._request.path.decode("latin-1")
            answer.refuse(Failure(Kind.NOT_SERVED, f"the engine of unit {lease.unit} does not serve {path}"))
            return False
        failure = failure_of(head, lease.unit, self._gate.board, self._gate.now())
        if failure is not None:
            lease.on_evict = None
            self._blame(lease, failure)
            return not self._goes_elsewhere(lease, failure)
        if answer.shown is not None and head.status >= 400:
            self.refused(f"unit {lease.unit} answered {head.status} when asked to go on")
            return False
        return True

    def _goes_elsewhere(self, lease: Lease, failure: Failure) -> bool:
        """Whether there is something better than to show the client the `failure` that its unit answered."""
        search = self._search
        step = search.next_step(lease, failure)
        if not step.again:
            return False
        other = search.acquire_other(self, lease.unit, step)
        if isinstance(other, Refusal):
            if failure.kind is Kind.BUSY and other is not Refusal.UNSURE:
                # Nobody else has room: the unit's own words are the best answer there is, after some more
                # tries.
                if not search.waits_again(self):
                    return False
                self._close(lease, Outcome.BUSY)
                return True
            if other in (Refusal.NO_UNIT, Refusal.UNKNOWN_MODEL, Refusal.LATE):
                # There is nobody else.
                return False
        self._close(lease, failure.kind.row.outcome)
        search.failed(lease.unit, step, failure)
        if isinstance(other, Refusal):
            self._dispatch(draws=step.draws)
        elif other is not None:
            self._attempt(other)
        return True

    def committed(self, body: bytes) -> None:
        """Something is about to be shown; `body` is the beginning of it."""
        lease, relay = self._in_flight()
        self._answer.unit = lease.unit
        if self._continuation.is_under_way:
            self._gate.dispatcher.committed(lease, resumed=True)
            return
        self._answer.ttft_s = lease.first_at - self._request.received_at
        made = response_id(body) if self._route.name == "responses" else ""
        self._gate.dispatcher.committed(lease, response_id=made)
        self._continuation.begin_keeping(relay)

    def done(self) -> None:
        """The unit's reply has ended, whole."""
        lease, relay = self._in_flight()
        self._answer.whole = True
        self._answer.relayed(relay)
        outcome = outcome_of(self._answer.status)
        self._close(lease, outcome)
        self._continuation.settle(_CONTINUED)
        if outcome is _OK and self._route.kind is GENERATE:
            self._gate.dispatcher.completed(lease, relay.events, read_usage(relay.end()))
        self._answer.end(outcome)

    def failed(self, failure: Failure) -> None:
        """The attempt is over without a whole reply."""
        if failure.kind is Kind.INTERNAL:
            self._collapse()
            return
        lease, relay = self._in_flight()
        if failure.kind is Kind.STALE_CONNECTION and not lease.committed:
            if not self._was_stale:
                self._was_stale = True
                self._again(lease)
                return
            failure = Failure(Kind.CLOSED_EARLY, failure.message)
        if lease.committed and failure.kind not in _IN_THE_MIDDLE:
            failure = Failure(Kind.TRUNCATED, failure.message)
        self._let_go(lease, failure.kind.row.outcome)
        self._blame(lease, failure, relay.events)
        search, told = self._search, as_told(failure, lease.unit, committed=lease.committed)
        if lease.committed:
            if self._continuation.broke(lease.unit, relay, told):
                search.ask = search.ask._replace(deadline_at=inf)
                search.failed(lease.unit, Step(True), told)
                self._dispatch()
            return
        step = search.next_step(lease, failure)
        search.failed(lease.unit, step, told)
        if step.again:
            self._dispatch(draws=step.draws)
        else:
            self._refuse(told)

    # -- what a continuation tells -------------------------------------------------------------------------

    def go_on(self, body: bytes, keep: Keep, stitch: Stitch) -> None:
        """The unit has proven that it can go on with the stream."""
        lease, relay = self._in_flight()
        relay.go_on(keep, stitch)
        self._send(lease, relay, body)

    def conclude(self, events: bytes) -> None:
        """The unit has helped to tell how the stream ends."""
        assert self._lease is not None
        self._let_go(self._lease, Outcome.OK)
        self._continuation.conclude(events)

    def refused(self, reason: str) -> None:
        """The unit cannot go on, and no other could."""
        assert self._lease is not None
        assert self._search.failure is not None
        self._let_go(self._lease, Outcome.GATE_ERROR)
        self._continuation.give_up(self._search.failure, Result.REFUSED, reason)

    # -- a defect of our own -------------------------------------------------------------------------------

    def crashed(self, error: Exception) -> None:
        """A callback of this exchange has failed: the end, in whatever state that left it."""
        self._gate.defect(f"request {self._answer.request_id.decode('latin-1')} failed", error)
        self._collapse()

    def _collapse(self) -> None:
        for step in self._ending():
            try:
                step()
            except Exception as error:
                self._gate.defect("a request that failed could not be ended well", error)

    def _ending(self) -> Iterator[Callable[[], object]]:
        """Give everything back and tell the client: step by step, for any of them may fail as well."""
        answer, lease, relay = self._answer, self._lease, self._relay
        yield self._search.cancel
        if self._stop_reading is not None:
            yield self._stop_reading
        if relay is not None:
            yield partial(answer.relayed, relay)
            yield relay.abandon
        yield self._continuation.abandon
        yield partial(self._continuation.settle, Result.NOT_CONTINUABLE, "the gate failed")
        if lease is not None and not lease.closed:
            yield partial(self._close, lease, Outcome.GATE_ERROR)
        if not answer.over:
            yield partial(answer.crash, relay)
        yield partial(self._client.give_up, self, self._request)

    # -- consequences --------------------------------------------------------------------------------------

    def _again(self, lease: Lease) -> None:
        """The unit had closed the connection before it saw the request: once more, on a fresh one."""
        if not lease.desk.is_doubted() or self._route.kind is UNLISTED:
            self._attempt(lease, fresh=True)
            return
        # It may have started anew: until it has shown life, nothing goes there.
        self._let_go(lease, Outcome.EVICTED)
        self._dispatch(moved=True)

    def extra_lines(self) -> bytes:
        """The gate's own lines in the head of the answer."""
        assert self._lease is not None
        return self._answer.extra_lines(self._lease.unit) + self._lease.explanation

    def closes_client(self) -> bool:
        """Whether the answer must say that the connection ends with it."""
        return self._answer.closes_client()

    def _in_flight(self) -> tuple[Lease, Relay]:
        assert self._lease is not None
        assert self._relay is not None
        return self._lease, self._relay

    def _blame(self, lease: Lease, failure: Failure, shown: int = 0) -> None:
        """The attempt has failed, after so many events."""
        judged = self._route.kind is not UNLISTED
        self._gate.dispatcher.blame(lease, failure, self._answer.events, shown, judged=judged)

    def _let_go(self, lease: Lease, outcome: Outcome) -> None:
        """End the attempt in flight: its connection, then its lease."""
        if self._relay is not None:
            self._answer.relayed(self._relay)
            self._relay.abandon()
        self._continuation.abandon()
        self._close(lease, outcome)

    def _close(self, lease: Lease, outcome: Outcome) -> None:
        self._gate.dispatcher.released(lease, outcome)
        self._relay = self._lease = None

    def _refuse(self, failure: Failure) -> None:
        if self._answer.shown is None:
            reason = ""
            if self._request.is_placed:
                failure, reason = not_here(failure, self._gate.board, self._search.ask.unit)
            self._answer.refuse(failure, reason=reason)
        elif not self._continuation.is_under_way:
            self._answer.break_off(failure)
        else:
            self._continuation.no_unit(failure)
