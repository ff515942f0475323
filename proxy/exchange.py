"""One request's life: from a whole request to the end of its answer.

It has no policy of its own: what a path is stands in routes.py, which unit in router/, whether to try again
in router/retry.py, what a failure means in failure.py. It is a machine of synchronous callbacks, so that no
cancellation can come between two of its steps. Rules:
1. Each lease is closed exactly once, before anything else follows from its end.
2. Once something was shown to the client (`lease.committed`), the request is not sent again: another unit
   goes on where the text ends (resumption.py), or the client is told that it was broken off.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from proxy.answer import Answer
from proxy.ask import LARGE_BYTES, read_ask
from proxy.failure import Failure, Kind
from proxy.placing import told
from proxy.report.continuations import Result
from proxy.resumption import Resumption, keeps
from proxy.routes import RouteKind, find_route
from proxy.usage import read_usage
from proxy.wire.heads import crossing, forwarded_lines, unit_head
from proxy.wire.relay import Relay
from router.lease import Lease
from router.nouns import Ask, Outcome, Refusal, Verdict
from router.retry import Attempts, Step, next_step

if TYPE_CHECKING:
    from proxy.gate import Gate
    from proxy.stream.stitch import Stitch
    from proxy.wire.downstream import ClientConnection
    from proxy.wire.request import Request
    from proxy.wire.upstream import ReplyHead
    from router.waiting import Ticket

_BUSY = (429, 503)
# FastAPI's engines say so when they have no such path; clients get OpenAI's error shape and a reason instead.
_NO_SUCH_PATH = str(len('{"detail":"Not Found"}')).encode()
_SILENT_S = 1.0
"""A stream on a unit that went DOWN is given up once it has been silent for so long: a unit that closes its
listener to shut down in good order goes on with the streams it has."""
_LOST_S = 30.0
"""A stream that has been silent for so long while its unit worked on others has most likely been forgotten.
A unit that had only set it aside loses some work, and the client nothing."""
_LIVELY_S = 1.0
_IN_THE_MIDDLE = (Kind.CUT, Kind.STREAM_ERROR, Kind.NOT_CONTINUED, Kind.INTERNAL)
_PROOF_S = 30.0
"""A unit may take so long to say whether it can go on with a stream."""


class Exchange:
    """Answers one request of one client."""

    __slots__ = (
        "_answer",
        "_ask",
        "_client",
        "_failure",
        "_gate",
        "_history",
        "_lease",
        "_moved",
        "_patient_at",
        "_paused",
        "_relay",
        "_request",
        "_resumption",
        "_route",
        "_shown",
        "_ticket",
        "_turned_away",
        "_why_not",
    )

    def __init__(self, gate: Gate, client: ClientConnection, request: Request) -> None:
        self._gate = gate
        self._client = client
        self._request = request
        self._route = find_route(request.path)
        self._answer = Answer(gate, client, request, self._route.name)
        self._ask = Ask()
        self._history = Attempts()
        self._lease: Lease | None = None
        self._relay: Relay | None = None
        self._shown: Relay | None = None
        self._ticket: Ticket | None = None
        self._failure: Failure | None = None
        self._resumption: Resumption | None = None
        self._why_not = ""
        self._moved = False
        self._paused = False
        self._turned_away = 0
        self._patient_at = request.received_at

    # -- the client's side ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Decide what the request is, and begin."""
        route, request, gate = self._route, self._request, self._gate
        if route.methods and request.method not in route.methods:
            allowed = b", ".join(route.methods)
            failure = Failure(Kind.METHOD_NOT_ALLOWED, f"this path takes {allowed.decode()}")
            self._answer.refuse(failure, b"allow: " + allowed + b"\r\n")
        elif route.kind is RouteKind.DENIED:
            reason = "engine administration does not pass the gate; ask the engine itself"
            self._answer.refuse(Failure(Kind.DENIED, reason))
        elif route.kind is RouteKind.OWN:
            gate.asked(request, self._client.peer)
            self._answer.own(*gate.own_answers.answer(request.path, stopping=gate.is_stopping()))
        elif route.kind is RouteKind.UNLISTED and not gate.settings.pass_unlisted:
            reason = "the gate does not pass this path on; see pass_unlisted in its configuration"
            self._answer.refuse(Failure(Kind.UNKNOWN_PATH, reason))
        elif route.kind is RouteKind.STICKY:
            self._asked(gate.own_answers.sticky_ask(request.path))
        elif not route.json:
            self._asked(Ask())
        elif len(request.body) > LARGE_BYTES:
            gate.read_large(request.body, self._asked)
        else:
            self._asked(read_ask(request.body))

    def client_left(self) -> None:
        """The client is gone: its unit must stop working for it at once."""
        if self._answer.over:
            return
        if self._ticket is not None:
            self._gate.router.waiting.remove(self._ticket)
        if self._lease is not None:
            self._let_go(self._lease, Outcome.CLIENT_LEFT)
        self._settles(Result.CLIENT_LEFT)
        self._answer.left()

    def client_paused(self, paused: bool) -> None:
        """The client reads slower than its unit writes."""
        self._paused = paused
        if self._relay is not None:
            self._relay.pause(paused=paused)

    def tick(self, now: float) -> None:
        """The clocks of this request; called a few times a second."""
        lease, relay, timeouts = self._lease, self._relay, self._gate.settings.timeouts
        if lease is None or relay is None:
            if self._shown is not None and not self._paused:
                self._show_patience(self._shown, now)
            return
        if relay.paused:
            if now - relay.last_at > timeouts.answer_s:
                # It has read nothing for so long, and would hold its unit's place for ever.
                self._client.cut()
        elif lease.committed:
            silent_s = now - relay.last_at
            if lease.evicted and silent_s > _SILENT_S:
                self.failed(Failure(Kind.CUT, f"unit {lease.unit} went down in the middle of its answer"))
            elif silent_s > _LOST_S and self._is_lost(lease, relay, now):
                reason = f"unit {lease.unit} sent nothing of it for {silent_s:.0f} s while others went on"
                self.failed(Failure(Kind.CUT, reason))
            elif silent_s > timeouts.answer_s:
                reason = f"unit {lease.unit} sent nothing for {silent_s:.0f} s in the middle of its answer"
                self.failed(Failure(Kind.TRUNCATED, reason))
        elif now - lease.opened_at > timeouts.answer_s:
            reason = f"unit {lease.unit} showed nothing for {timeouts.answer_s:.0f} s"
            self.failed(Failure(Kind.ANSWER_TIMEOUT, reason))
        elif self._is_proving() and now - lease.opened_at > _PROOF_S:
            self.refused(f"unit {lease.unit} did not say in {_PROOF_S:.0f} s whether it can go on")
        else:
            self._show_patience(self._shown or relay, now)

    def _show_patience(self, relay: Relay, now: float) -> None:
        """Keep the client's connection warm while there is nothing to show."""
        if now - max(self._patient_at, relay.last_at) > self._gate.settings.timeouts.head_hold_s:
            self._patient_at = now
            if relay.show_patience():
                self._shown = relay

    # -- the choice of a unit ------------------------------------------------------------------------------

    def _asked(self, ask: Ask | Failure) -> None:
        if self._answer.over:
            return
        if isinstance(ask, Ask):
            request = self._request
            ask = self._gate.wishes.heed(ask, request.fields, request.received_at)
        if isinstance(ask, Failure):
            self._answer.refuse(ask)
            return
        self._ask = self._gate.own_answers.placed(ask)
        self._answer.model = ask.model or ""
        self._dispatch()

    def _dispatch(self, *, draws: bool = False) -> None:
        self._settle(self._pick(self._history.tried, evicted=self._moved, draws=draws))

    def _pick(self, tried: tuple[str, ...], *, evicted: bool, draws: bool) -> Lease | Refusal:
        return self._gate.router.pick(self._ask, self._gate.now(), tried, evicted=evicted, retry=draws)

    def _settle(self, answer: Lease | Refusal) -> None:
        """What a pick, or later the queue, has to say."""
        gate, ticket, self._ticket = self._gate, self._ticket, None
        if ticket is not None:
            gate.routing.waited(gate.now() - ticket.entered_at)
        if isinstance(answer, Lease):
            self._attempt(answer)
            return
        if ticket is None:
            answer = self._wait(answer)
        if self._ticket is None:
            self._refuse(self._failure or gate.explain(answer, self._ask))

    def _wait(self, answer: Refusal) -> Refusal:
        """Queue the ask, where waiting may help; why not, if it does not."""
        gate, tried = self._gate, frozenset(self._history.tried)
        # It has lost its unit through no fault of its own, or the one there is answers in a moment.
        moved = self._moved or answer is Refusal.UNSURE
        may_wait = answer is Refusal.FULL or (moved and gate.board.could_serve(self._ask, tried))
        if not may_wait:
            return answer
        place = gate.router.wait(
            self._ask, gate.now(), tried, self._settle, size=len(self._request.body), moved=moved
        )
        if isinstance(place, Refusal):
            return place
        self._ticket = place
        gate.room()
        return answer

    def _waits_on(self, lease: Lease) -> bool:
        """Whether an ask that its unit has no room for goes back to the queue until it may have."""
        if self._turned_away >= self._gate.board.rules.attempts - 1:
            return False
        self._wait(Refusal.FULL)
        if self._ticket is None:
            return False
        self._turned_away += 1
        self._gate.close(lease, Outcome.BUSY)
        self._relay = self._lease = None
        return True

    def _attempt(self, lease: Lease, *, fresh: bool = False) -> None:
        self._lease = lease
        lease.on_evict = self._evicted
        self._answer.attempts += not fresh
        self._relay = relay = Relay(self, self._client, lease, self._gate.now, http10=self._request.http10)
        relay.head_sent = self._shown is not None
        # A kept connection may turn out to be stale and need a second try, which not every path may have.
        fresh = fresh or self._route.kind is RouteKind.UNLISTED
        if self._resumption is None:
            self._send(lease, relay, self._request.body, fresh=fresh)
            return
        if self._paused:
            relay.pause(paused=True)
        pool = self._gate.pool(lease.desk)
        self._resumption.begin(
            pool,
            lease.desk.engine,
            lambda path, length: self._head(pool.lines, path, length),
            fresh=fresh,
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
        lease = self._lease
        if lease is None or lease.committed:
            return
        self._let_go(lease, Outcome.EVICTED)
        failure = Failure(Kind.EVICTED, f"unit {lease.unit} went down before it answered, and no other could")
        if self._route.kind is RouteKind.UNLISTED:
            self._refuse(failure)
            return
        self._moves(lease, Step(True), failure)
        self._dispatch()

    # -- what a relay tells --------------------------------------------------------------------------------

    def accepts(self, head: ReplyHead) -> bool:
        """Whether a unit's reply goes on to the client. Busy and broken units are tried elsewhere first."""
        status = head.status
        if self._shown is None:
            # Otherwise the client has been shown a head before, of a unit that came to nothing.
            self._answer.status = status
        lease = self._lease
        assert lease is not None
        if status == 404 and head.length == _NO_SUCH_PATH and self._route.kind is RouteKind.GENERATE:
            self._let_go(lease, Outcome.CLIENT_ERROR)
            path = self._request.path.decode("latin-1")
            self._answer.refuse(
                Failure(Kind.NOT_SERVED, f"the engine of unit {lease.unit} does not serve {path}")
            )
            return False
        if self._shown is not None and 400 <= status < 500 and status != 429:
            self.refused(f"unit {lease.unit} answered {status} when asked to go on")
            return False
        if status < 500 and status != 429:
            return True
        kind = told(status, head.fields) or self._kind_of(status, lease)
        failure = Failure(kind, f"unit {lease.unit} answered {status}")
        lease.on_evict = None
        self._blame(lease, failure)
        step = self._next_step(lease, failure)
        if not step.again:
            return True
        other = self._pick((*self._history.tried, lease.unit), evicted=not step.draws, draws=step.draws)
        if isinstance(other, Refusal) and other is not Refusal.UNSURE:
            # Nobody else has room: the unit's own words are the best answer there is, after some more tries.
            return not (failure.kind is Kind.BUSY and self._waits_on(lease))
        self._gate.close(lease, failure.kind.row.outcome)
        self._relay = self._lease = None
        self._moves(lease, step, failure)
        self._settle(other)
        return False

    def committed(self, body: bytes) -> None:
        """Something is about to be shown; `body` is the beginning of it."""
        lease, relay = self._lease, self._relay
        assert lease is not None
        assert relay is not None
        self._answer.unit = lease.unit
        if self._resumption is not None:
            self._settles(Result.CONTINUED)
            return
        self._answer.ttft_s = lease.first_at - self._request.received_at
        if self._ask.stream:
            self._gate.routing.shown(lease)
            # One prompt less to compute.
            self._gate.room()
        self._why_not = keeps(self._route, self._request, self._ask, self._gate.settings.no_continuation)
        if not self._why_not:
            relay.begin_keeping()
        if self._route.name == "responses":
            self._gate.own_answers.remember_response(body, lease.unit)

    def done(self) -> None:
        """The unit's reply has ended, whole."""
        relay, lease = self._relay, self._lease
        assert relay is not None
        assert lease is not None
        self._relay = self._lease = None
        self._answer.relayed(relay)
        outcome = _outcome_of(self._answer.status)
        self._gate.close(lease, outcome)
        if outcome is Outcome.OK and self._route.kind is RouteKind.GENERATE:
            self._gate.worked(lease, relay.events, read_usage(relay.end()))
        self._answer.end(outcome)

    def failed(self, failure: Failure) -> None:
        """The attempt is over without a whole reply."""
        lease, relay = self._lease, self._relay
        assert lease is not None
        assert relay is not None
        if failure.kind is Kind.STALE_CONNECTION and not lease.committed:
            self._again(lease)
            return
        if lease.committed and failure.kind not in _IN_THE_MIDDLE:
            failure = Failure(Kind.TRUNCATED, failure.message)
        self._let_go(lease, failure.kind.row.outcome)
        self._blame(lease, failure)
        told = _as_told(lease, failure)
        if lease.committed:
            self._resume(lease, relay, told)
            return
        step = self._next_step(lease, failure)
        self._moves(lease, step, told)
        if step.again:
            self._dispatch(draws=step.draws)
        else:
            self._refuse(told)

    # -- a stream that was broken --------------------------------------------------------------------------

    def _resume(self, lease: Lease, relay: Relay, told: Failure) -> None:
        """A unit broke what its client has seen the beginning of: another one is to go on."""
        self._shown = self._shown or relay
        self._failure = told
        resumption = self._resumption = self._resumption or self._resumption_of(relay)
        why_not = self._why_not if resumption is None else resumption.why_not()
        if resumption is None or why_not or told.kind is Kind.INTERNAL:
            if self._ask.stream:
                self._gate.continuations.note(lease.unit, Result.NOT_CONTINUABLE, why_not)
            self._break_off(why_not if self._ask.stream else "")
            return
        resumption.broke = lease.unit
        if (events := resumption.last_events()) is not None:
            self._settles(Result.COMPLETED)
            self._answer.conclude(self._shown, events)
        else:
            self._ask = self._ask._replace(deadline_at=inf)
            self._moves(lease, Step(True), told)
            self._dispatch()

    def _resumption_of(self, relay: Relay) -> Resumption | None:
        """How the stream would go on; None when nothing of it was kept."""
        if relay.keep is None:
            return None
        return Resumption(self, self._request, relay.keep, chat=self._route.name == "chat")

    def _is_lost(self, lease: Lease, relay: Relay, now: float) -> bool:
        """Whether the unit has forgotten this stream, and another one can go on with it."""
        gate, desk = self._gate, lease.desk
        limit_s = max(_LOST_S, 4.0 * desk.silent_limit_s(gate.board.rules))
        if now - relay.last_at < limit_s or now - desk.life_at > _LIVELY_S or relay.keep is None:
            return False
        resumption = self._resumption or self._resumption_of(relay)
        if resumption is not None and (why_not := resumption.why_not()):
            self._why_not = why_not
            relay.stop_keeping()
            return False
        return gate.board.could_serve(self._ask, (*self._history.tried, lease.unit))

    def go_on(self, body: bytes, stitch: Stitch) -> None:
        """The unit has proven that it can go on with the stream."""
        lease, relay = self._lease, self._relay
        assert lease is not None
        assert relay is not None
        assert self._resumption is not None
        relay.keep, relay.stitch = self._resumption.keep, stitch
        self._send(lease, relay, body)

    def conclude(self, events: bytes) -> None:
        """The unit has helped to tell how the stream ends."""
        assert self._lease is not None
        assert self._shown is not None
        self._let_go(self._lease, Outcome.OK)
        self._settles(Result.COMPLETED)
        self._answer.conclude(self._shown, events)

    def refused(self, reason: str) -> None:
        """The unit cannot go on, and no other could."""
        assert self._lease is not None
        self._let_go(self._lease, Outcome.GATE_ERROR)
        self._settles(Result.REFUSED, reason)
        self._break_off(reason)

    def _settles(self, result: Result, reason: str = "") -> None:
        """What came of the last break, if there is one of which that is open."""
        resumption = self._resumption
        if resumption is not None and resumption.broke:
            self._gate.continuations.note(resumption.broke, result, reason)
            self._answer.continued += result is Result.CONTINUED
            resumption.broke = ""

    def _break_off(self, reason: str) -> None:
        """The end of a stream that nobody goes on with."""
        assert self._shown is not None
        assert self._failure is not None
        message = self._failure.message + (f"; it could not be continued: {reason}" if reason else "")
        self._answer.break_off(self._shown, Failure(self._failure.kind, message))

    def _is_proving(self) -> bool:
        return self._resumption is not None and self._resumption.is_proving

    # -- consequences --------------------------------------------------------------------------------------

    def _again(self, lease: Lease) -> None:
        """The unit had closed the connection before it saw the request: once more, on a fresh one."""
        if not lease.desk.is_doubted() or self._route.kind is RouteKind.UNLISTED:
            self._attempt(lease, fresh=True)
            return
        # It may have started anew: until it has shown life, nothing goes there.
        self._let_go(lease, Outcome.EVICTED)
        self._moved = True
        self._dispatch()

    def extra_lines(self) -> bytes:
        """The gate's own lines in the head of the answer."""
        assert self._lease is not None
        return self._answer.extra_lines(self._lease.unit)

    def closes_client(self) -> bool:
        """Whether the answer must say that the connection ends with it."""
        return self._answer.closes_client()

    def _kind_of(self, status: int, lease: Lease) -> Kind:
        if status == 503 and self._gate.board.is_falsely_busy(lease.unit, self._gate.now()):
            return Kind.FALSE_BUSY
        return Kind.BUSY if status in _BUSY else Kind.UNIT_ERROR

    def _next_step(self, lease: Lease, failure: Failure) -> Step:
        row, board = failure.kind.row, self._gate.board
        return next_step(
            self._history,
            retryable=row.retryable and self._route.kind is not RouteKind.UNLISTED,
            by_response=row.by_response and lease.desk.case.verdict is Verdict.UP,
            live=board.in_flight,
            paid_live=board.retries_in_flight,
            rules=board.rules,
        )

    def _moves(self, lease: Lease, step: Step, failure: Failure) -> None:
        self._history = self._history.after(lease.unit, paid=step.draws)
        self._failure = failure
        if step.again:
            self._moved = self._moved or not step.draws
            self._gate.metrics.retry(lease.unit)

    def _blame(self, lease: Lease, failure: Failure) -> None:
        if self._route.kind is not RouteKind.UNLISTED:
            self._gate.blame(lease, failure)

    def _let_go(self, lease: Lease, outcome: Outcome) -> None:
        """End the attempt in flight: its connection, then its lease."""
        relay, self._relay, self._lease = self._relay, None, None
        if relay is not None:
            self._answer.relayed(relay)
            relay.abandon()
        if self._resumption is not None:
            self._resumption.abandon()
        self._gate.close(lease, outcome)

    def _refuse(self, failure: Failure) -> None:
        if self._shown is None:
            self._answer.refuse(failure)
        elif self._resumption is None:
            self._answer.break_off(self._shown, failure)
        else:
            self._settles(Result.NO_UNIT)
            self._break_off("no other unit could take it")


def _as_told(lease: Lease, failure: Failure) -> Failure:
    """A failure as its client is told: which unit, in which phase, who knows more; not where the unit is."""
    phase = "in the middle of its answer" if lease.committed else "before it showed anything"
    message = (
        f"unit {lease.unit} failed {phase} ({failure.kind.value}); the gate's /units and /events say why"
    )
    return Failure(failure.kind, message)


def _outcome_of(status: int) -> Outcome:
    if status < 400:
        return Outcome.OK
    if status in _BUSY:
        return Outcome.BUSY
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.UNIT_ERROR
