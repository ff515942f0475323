"""What follows when a unit answers: from the head of its reply to the end. Actions of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cellgate.probes.base import words_in
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.reply import with_own_origin
from cellgate.proxy.observe.counters import ResumeResult
from cellgate.proxy.request.answer_limits import ANSWER_TOKENS_MAX
from cellgate.proxy.request.doubts import outcome_of_doubt, possible_usage
from cellgate.proxy.request.failures import not_resumed, try_again
from cellgate.proxy.request.life import ExchangeState
from cellgate.proxy.request.response import failure_of, outcome_of
from cellgate.proxy.request.routes import GENERATE, UNLISTED
from cellgate.proxy.request.second_opinion import served, shown_whole
from cellgate.proxy.request.start import OF_LINKS, arrived, find_unit
from cellgate.proxy.request.stored_objects import object_id, response_id
from cellgate.proxy.request.token_usage import TEMPLATE_TOKENS
from cellgate.proxy.resume.eligible import TOKENS, why_not_resumed
from cellgate.proxy.resume.streams import PLAIN_ROUTES, STREAMS
from cellgate.router.nouns import Outcome, Refusal
from cellgate.router.retry import Unplaced, without_room
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.http.reply import ReplyHead
    from cellgate.proxy.request.exchange import Exchange


WAITING, RELAYING, OVER = ExchangeState.WAITING, ExchangeState.RELAYING, ExchangeState.OVER
_OK = Outcome.OK


def judge_head(exchange: Exchange, head: ReplyHead, pieces: list[bytes]) -> bool:
    """Whether the reply is sent to the client. A busy or failing unit means a retry elsewhere first.
    `pieces` are what has come of its body.
    """
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
    return not _is_turned_down(exchange, head, pieces)


def _is_turned_down(exchange: Exchange, head: ReplyHead, pieces: list[bytes]) -> bool:
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
        # What the engine says of it is for operators, not for clients.
        words = words_in(b"".join(pieces))
        said = Failure(failure.kind, f"{failure.message}: {words}") if words else failure
        attempt.blame(said, judged=exchange.route.kind is not UNLISTED)
        return _moves_away(exchange, attempt.lease, failure, head, now)
    if exchange.response.begun:
        not_resumed(exchange, f"unit {unit} answered {head.status} to the request to resume the stream")
        return True
    return False


def _says_when(exchange: Exchange, lease: Lease, head: ReplyHead) -> bool:
    """Whether the only unit there is has said when another try makes sense."""
    says = any(line.startswith(b"retry-after:") for line in head.lines)
    return says and not exchange.gate.board.could_serve(exchange.selection.ask, (lease.unit,))


def _moves_away(
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
        follows = without_room(selection.history, failure.kind.row.retry, other, exchange.gate.board.rules)
        if follows is Unplaced.WAITS_AGAIN:
            # The unit's own words are the best answer there is if it is the only one, and says when to come.
            if _says_when(exchange, lease, head) or not selection.waits_again(exchange):
                return False
            exchange.release(failure.kind.row.outcome, failed_at)
            exchange.state = WAITING
            return True
        if follows is Unplaced.SHOWN:
            return False
    exchange.release(failure.kind.row.outcome, failed_at)
    selection.failed(lease.unit, failure, step)
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
    if exchange.stream_resume is not None:
        gate.dispatcher.committed(lease, resumed=True)
        return
    if gate.screen_answer is not None:
        gate.screen_answer(exchange)
    request, route, stored = exchange.request, response.route, ""
    if route == "responses":
        stored = response_id(first)
    elif exchange.route.kind is UNLISTED and request.method == b"POST" and response.status < 300:
        stored = object_id(request.path, first)
    if attempt.doubt:
        if stored and outcome_of_doubt(attempt.doubt, False, response.status) is _OK:
            gate.dispatcher.committed(lease, response_id=stored)
        return
    response.ttft_s = at - request.received_at
    gate.dispatcher.committed(lease, response_id=stored)
    if not response.is_events or exchange.route.kind is not GENERATE:
        return
    stream = STREAMS.get(route)
    response.read_answer(is_typed=stream is not None and route not in PLAIN_ROUTES)
    if stream is not None and (ask := exchange.selection.ask).stream:
        ways = 0 if why_not_resumed(gate.settings.no_continuation, request, ask) else ask.continuable
        response.record_replay(ways and ways & ~TOKENS | attempt.tells, stream.shape)


def finish(exchange: Exchange) -> None:
    """The unit's reply has ended, whole."""
    attempt, response = exchange.attempt, exchange.response
    assert attempt is not None
    response.whole = True
    outcome = _OK if response.status < 400 else outcome_of(response.status)
    if attempt.doubt:
        outcome = outcome_of_doubt(attempt.doubt, attempt.is_clients, response.status)
    elif exchange.gate.opinions.watching:
        shown_whole(exchange)
    attempt.release(outcome)
    exchange.attempt = None
    if exchange.stream_resume is not None:
        exchange.stream_resume.record_result(ResumeResult.RESUMED)
    if outcome is _OK and exchange.route.kind is GENERATE:
        usage, ask = response.usage(), attempt.lease.ask
        # As `is_possible`, without a call.
        if usage is not None and (
            usage[0] - TEMPLATE_TOKENS > ask.prompt_bytes
            or usage[1] > (ask.max_tokens or ANSWER_TOKENS_MAX) * ask.answers
        ):
            usage = possible_usage(exchange, attempt.lease.unit)
        for observer in response.observers:
            observer.completed(usage)
        if not attempt.doubt:
            shown = response.events - attempt.events_before
            exchange.gate.dispatcher.completed(attempt.lease, shown, usage)
    exchange.state = OVER
    response.end(outcome)
