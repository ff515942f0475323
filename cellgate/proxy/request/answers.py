"""What follows when a unit answers: from the head of its reply to the end. Actions of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.reply import with_own_origin
from cellgate.proxy.observe.counters import ContinuationResult
from cellgate.proxy.request import failures, second_opinion, start
from cellgate.proxy.request.doubts import outcome_of_doubt
from cellgate.proxy.request.exchange import ExchangeEvent, ExchangeState, Table, Transition
from cellgate.proxy.request.failures import give_up, try_again
from cellgate.proxy.request.response import failure_of, outcome_of, response_id
from cellgate.proxy.request.routes import GENERATE, UNLISTED
from cellgate.proxy.request.second_opinion import served
from cellgate.proxy.request.start import OF_LINKS, arrived, find_unit
from cellgate.proxy.resume.eligible import TOKENS, why_not_resumed
from cellgate.proxy.resume.streams import PLAIN_ROUTES, STREAMS
from cellgate.router.nouns import Outcome, Refusal
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.reply import ReplyHead
    from cellgate.proxy.request.exchange import Exchange


WAITING, RELAYING, OVER = ExchangeState.WAITING, ExchangeState.RELAYING, ExchangeState.OVER
_OK = Outcome.OK


def judge_head(exchange: Exchange, head: ReplyHead) -> bool:
    """Whether the reply is sent to the client. A busy or failing unit means a retry elsewhere first."""
    response, status = exchange.response, head.status
    for observer in response.observers:
        observer.replied(status)
    if not response.begun:
        # Otherwise the client has been shown a head before, of a unit that came to nothing.
        response.status = status
    if status == 200:
        return True
    if status < 400:
        # What was created has a place as well.
        with_own_origin(head, urlsplit(exchange.in_flight().lease.unit_state.unit.url).netloc.encode())
        return True
    return not _is_turned_down(exchange, head)


def _is_turned_down(exchange: Exchange, head: ReplyHead) -> bool:
    """Whether an error that a unit answered is not sent to the client."""
    attempt, gate = exchange.in_flight(), exchange.gate
    unit = attempt.lease.unit
    now = gate.now()
    failure = failure_of(head, attempt.lease.unit_state, now)
    if failure is not None and failure.kind in OF_LINKS and attempt.lease.split is not None:
        try_again(exchange, failure)
        return True
    if failure is not None:
        attempt.lease.on_evict = None
        attempt.blame(failure, judged=exchange.route.kind is not UNLISTED)
        return _goes_elsewhere(exchange, attempt.lease, failure, head, now)
    if exchange.response.begun:
        give_up(exchange, f"unit {unit} answered {head.status} to the request to resume the stream")
        return True
    return False


def _says_when(exchange: Exchange, lease: Lease, head: ReplyHead) -> bool:
    """Whether the only unit there is has said when another try makes sense."""
    says = any(line.startswith(b"retry-after:") for line in head.lines)
    return says and not exchange.gate.board.could_serve(exchange.selection.ask, (lease.unit,))


def _goes_elsewhere(
    exchange: Exchange, lease: Lease, failure: Failure, head: ReplyHead, failed_at: float
) -> bool:
    """Whether the request moves on, instead of showing the client the `failure` that its unit answered.

    The next unit is acquired before this one is released, because without another unit the client gets this
    answer. For observers the attempt still ends at `failed_at`, before the next one begins.
    """
    selection = exchange.selection
    step = selection.next_step(lease, failure, once=exchange.route.kind is UNLISTED)
    if not step.again:
        return False
    other = selection.acquire_other(exchange, lease.unit, step)
    if isinstance(other, Refusal):
        if failure.kind is FailureKind.BUSY and other is not Refusal.UNSURE:
            # Nobody else has room: the unit's own words are the best answer there is, after some more tries,
            # unless it is the only one and says when to come again.
            if _says_when(exchange, lease, head) or not selection.waits_again(exchange):
                return False
            exchange.release(Outcome.BUSY, failed_at)
            exchange.state = WAITING
            return True
        if other in (Refusal.NO_UNIT, Refusal.UNKNOWN_MODEL, Refusal.LATE, Refusal.ON_HOLD):
            # There is nobody else.
            return False
    exchange.release(failure.kind.row.outcome, failed_at)
    selection.failed(lease.unit, step, failure)
    exchange.state = WAITING
    if isinstance(other, Refusal):
        find_unit(exchange, draws=step.draws)
    elif other is not None:
        exchange.resolve(other)
    return True


def commit(exchange: Exchange, first: bytes, at: float) -> None:
    """Something is about to be shown."""
    attempt, response, gate = exchange.attempt, exchange.response, exchange.gate
    assert attempt is not None
    lease = attempt.lease
    exchange.state = RELAYING
    response.unit = lease.unit
    if lease.split is not None:
        arrived(exchange, lease)
    if gate.opinions.watching and not attempt.doubt:
        served(exchange, lease)
    if exchange.continuation is not None:
        gate.dispatcher.committed(lease, resumed=True)
        return
    if gate.guard is not None:
        gate.guard.screen_answer(exchange)
    if attempt.doubt:
        return
    request, route = exchange.request, response.route
    response.ttft_s = at - request.received_at
    gate.dispatcher.committed(lease, response_id=response_id(first) if route == "responses" else "")
    if not response.is_events or exchange.route.kind is not GENERATE:
        return
    stream = STREAMS.get(route)
    response.read_answer(is_typed=stream is not None and route not in PLAIN_ROUTES)
    if stream is not None and (ask := exchange.selection.ask).stream:
        ways = 0 if why_not_resumed(gate.settings.no_continuation, request, ask) else ask.continuable
        response.record_replay(ways if attempt.has_ids else ways & ~TOKENS, stream.shape)


def finish(exchange: Exchange) -> None:
    """The unit's reply has ended, whole."""
    attempt, response = exchange.attempt, exchange.response
    assert attempt is not None
    response.whole = True
    outcome = _OK if response.status < 400 else outcome_of(response.status)
    if attempt.doubt:
        outcome = outcome_of_doubt(attempt.doubt, attempt.is_clients, response.status)
    attempt.release(outcome)
    exchange.attempt = None
    if exchange.continuation is not None:
        exchange.continuation.record_result(ContinuationResult.CONTINUED)
    if outcome is _OK and exchange.route.kind is GENERATE:
        usage = response.usage()
        for observer in response.observers:
            observer.completed(usage)
        if not attempt.doubt:
            shown = response.events - attempt.events_before
            exchange.gate.dispatcher.completed(attempt.lease, shown, usage)
    exchange.state = OVER
    response.end(outcome)


# The life of an exchange as a table: in which state which event does what, and which state may follow.
#
# A test in tests/laws checks that each pair of a state and an event has a row, or a reason why it cannot
# occur.


_S, _E = ExchangeState, ExchangeEvent
_SENT = (_S.BUFFERING, _S.PROVING, _S.RESUMED)
_LEASED = (_S.PREFILLING, *_SENT)
# Starting an attempt may fail before it returns; then the exchange has already moved on.
_ANY = tuple(ExchangeState)[1:]
_ENDS = (_S.OVER,)


def _ignore(*_: object) -> None:
    """It changes nothing in this state."""


def _in_every_state() -> Table:
    """The rows that are the same wherever the request is: it can be ended, and time passes."""
    table: Table = {}
    for state in _S:
        table[state, _E.LEFT] = Transition(start.leave, _ENDS)
        table[state, _E.STOPPED] = Transition(start.stop, _ENDS)
        table[state, _E.TICKED] = Transition(failures.tick, _ANY)
        table[state, _E.CRASHED] = Transition(start.collapse, _ENDS)
    # A connection reports its close even after the response has ended, and a body may be parsed off the loop
    # after its client has left.
    for event in (_E.LEFT, _E.STOPPED, _E.TICKED, _E.ASKED, _E.SCREENED):
        table[_S.OVER, event] = Transition(_ignore, _ENDS)
    return table


TABLE: Table = {
    **_in_every_state(),
    (_S.PARSING, _E.STARTED): Transition(start.start, tuple(ExchangeState)),
    (_S.PARSING, _E.ASKED): Transition(start.read_late, _ANY),
    (_S.PARSING, _E.SCREENED): Transition(start.screened, _ANY),
    (_S.PARSING, _E.TICKED): Transition(failures.tick, (_S.PARSING,)),
    (_S.WAITING, _E.GRANTED): Transition(start.grant, _ANY),
    # Another model may serve it.
    (_S.WAITING, _E.REFUSED): Transition(start.refuse, _ANY),
    (_S.BUFFERING, _E.REPLIED): Transition(judge_head, _ANY),
    (_S.BUFFERING, _E.COMMITTED): Transition(commit, (_S.RELAYING,)),
    (_S.BUFFERING, _E.DOUBTED): Transition(second_opinion.doubt, _ANY),
    (_S.BUFFERING, _E.FAILED): Transition(failures.try_again, _ANY),
    (_S.BUFFERING, _E.EVICTED): Transition(failures.move, _ANY),
    (_S.RELAYING, _E.DONE): Transition(finish, _ENDS),
    (_S.RELAYING, _E.FAILED): Transition(failures.break_stream, _ANY),
    # A unit that shuts down gracefully continues its streams; a stall shows when it does not.
    (_S.RELAYING, _E.EVICTED): Transition(_ignore, (_S.RELAYING,)),
    (_S.PREFILLING, _E.PREFILLED): Transition(start.prefilled, _ANY),
    # A decoder that needs the other unit cannot go on without it.
    (_S.PREFILLING, _E.FAILED): Transition(failures.try_again, _ANY),
    (_S.PREFILLING, _E.EVICTED): Transition(failures.move, _ANY),
    (_S.PREFILLING, _E.TICKED): Transition(start.tick, _ANY),
    (_S.PROVING, _E.PROVEN): Transition(start.resume, _ANY),
    (_S.PROVING, _E.CONCLUDED): Transition(failures.conclude, _ENDS),
    (_S.PROVING, _E.UNPROVEN): Transition(failures.give_up, _ENDS),
    (_S.PROVING, _E.FAILED): Transition(failures.try_again, _ANY),
    (_S.PROVING, _E.EVICTED): Transition(failures.move, _ANY),
    (_S.RESUMED, _E.REPLIED): Transition(judge_head, _ANY),
    (_S.RESUMED, _E.COMMITTED): Transition(commit, (_S.RELAYING,)),
    (_S.RESUMED, _E.DOUBTED): Transition(failures.doubt_end, _ANY),
    (_S.RESUMED, _E.FAILED): Transition(failures.try_again, _ANY),
    (_S.RESUMED, _E.EVICTED): Transition(failures.move, _ANY),
}

_STARTED_ONCE = "a request starts once"
_NOT_ASKED = "no unit is acquired before the request is parsed"
_ASKED_ONCE = "a request is parsed once, in PARSING"
_NO_LEASE = "there is no open lease"
_HAS_LEASE = "there is a lease already: the next unit is acquired after it is closed"
_NOT_SENT = "the request is sent after the unit has proven that it can resume the stream"
_NOT_COMMITTED = "a reply ends after its commit"
_HEAD_ONCE = "an attempt has one head, before the commit"
_NO_PROOF = "no unit is asked for a proof"
_NO_LEG = "no other unit computes its prompt"
_PROMPT_FIRST = "the unit of the lease gets the request once the prompt is computed"
_CLOSED = "everything was released, so nothing can report this any more"

_OF_PROOFS = (_E.PROVEN, _E.CONCLUDED, _E.UNPROVEN)
_OF_REPLIES = (_E.REPLIED, _E.COMMITTED, _E.DONE, _E.FAILED, _E.DOUBTED)
_OF_UNITS = (*_OF_REPLIES, _E.EVICTED, _E.PREFILLED, *_OF_PROOFS)
_OF_PICKS = (_E.GRANTED, _E.REFUSED)

IMPOSSIBLE: dict[tuple[ExchangeState, ExchangeEvent], str] = {
    **{(state, _E.STARTED): _STARTED_ONCE for state in tuple(ExchangeState)[1:]},
    **{(_S.PARSING, event): _NOT_ASKED for event in (*_OF_PICKS, *_OF_UNITS)},
    **{(_S.WAITING, event): _NO_LEASE for event in _OF_UNITS},
    **{(state, event): _HAS_LEASE for state in (*_LEASED, _S.RELAYING) for event in _OF_PICKS},
    **{(state, _E.ASKED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, _E.SCREENED): _ASKED_ONCE for state in (_S.WAITING, *_LEASED, _S.RELAYING)},
    **{(state, event): _NO_PROOF for state in (_S.BUFFERING, _S.RELAYING) for event in _OF_PROOFS},
    **{(_S.RESUMED, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _NO_PROOF for event in _OF_PROOFS},
    **{(_S.PREFILLING, event): _PROMPT_FIRST for event in _OF_REPLIES[:3]},
    **{(state, _E.PREFILLED): _NO_LEG for state in (*_SENT, _S.RELAYING)},
    **{(state, _E.DONE): _NOT_COMMITTED for state in _SENT},
    **{(_S.PROVING, event): _NOT_SENT for event in (_E.REPLIED, _E.COMMITTED)},
    (_S.PREFILLING, _E.DOUBTED): _PROMPT_FIRST,
    (_S.PROVING, _E.DOUBTED): _NOT_SENT,
    (_S.RELAYING, _E.DOUBTED): _HEAD_ONCE,
    **{(_S.RELAYING, event): _HEAD_ONCE for event in (_E.REPLIED, _E.COMMITTED)},
    **{(_S.OVER, event): _CLOSED for event in (*_OF_PICKS, *_OF_UNITS)},
}
"""All other pairs, each with the reason why it does not occur."""
