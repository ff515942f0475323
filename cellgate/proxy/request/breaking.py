"""What follows when a unit fails: a retry, another unit, a resumed stream. Actions of the table."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.proxy.request.asking import begin
from cellgate.proxy.request.continuation import Continuation
from cellgate.proxy.request.opening import find_unit, refuse
from cellgate.proxy.request.routes import UNLISTED
from cellgate.proxy.request.splitting import OF_LINKS, compute_here, link_failed
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.wire.failure import Failure, FailureKind, as_told
from cellgate.router.hold import is_on
from cellgate.router.nouns import Outcome, Verdict
from cellgate.router.retry import Step
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.exchange import Exchange

_IN_THE_MIDDLE = (
    FailureKind.ABORTED,
    FailureKind.CUT,
    FailureKind.STREAM_ERROR,
    FailureKind.NOT_CONTINUED,
)

_GONE = (FailureKind.REFUSED, FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT)


def try_again(exchange: Exchange, failure: Failure) -> None:
    """The unit failed before the commit: retry on another one, if the rules allow it."""
    lease = exchange.in_flight().lease
    if lease.split is not None and exchange.leg is not None and failure.kind in OF_LINKS:
        link_failed(exchange, failure.message)
        if not lease.split.together:
            compute_here(exchange)
            return
        failure = Failure(FailureKind.TRANSFER_FAILED, failure.message)
    if failure.kind is FailureKind.STALE_CONNECTION:
        if not exchange.was_stale:
            exchange.was_stale = lease if failure.taken else True
            _connect_anew(exchange, lease, failure)
            return
        failure = Failure(FailureKind.CLOSED_EARLY, failure.message)
    elif exchange.was_stale is lease and failure.kind in _GONE:
        # Its process has ended, which had the request.
        failure = Failure(FailureKind.CLOSED_EARLY, failure.message)
    if failure.kind is FailureKind.ANSWER_TIMEOUT and _is_at_work(exchange, lease):
        exchange.let_go(Outcome.GATE_ERROR)
        reason = f"{failure.message}; it was at work: ask for a stream, or raise timeouts.answer_s"
        refuse(exchange, Failure(FailureKind.ANSWER_TIMEOUT, reason))
        return
    exchange.lose(failure)
    selection, told = exchange.selection, as_told(failure, lease.unit, committed=False)
    step = selection.next_step(lease, failure, once=exchange.route.kind is UNLISTED)
    may_return = selection.failed(lease.unit, step, told)
    if not step.again:
        refuse(exchange, told)
    elif may_return and failure.kind is FailureKind.NO_RESOURCES:
        # The gate needs a moment: the next tick tries again.
        exchange.state = ExchangeState.WAITING
    else:
        find_unit(exchange, draws=step.draws)


def _is_at_work(exchange: Exchange, lease: Lease) -> bool:
    """Whether the unit is well, and computes an answer that is shown when it is whole. Any other unit would
    need as long.
    """
    return not exchange.selection.ask.stream and lease.unit_state.case.verdict is Verdict.UP


def _connect_anew(exchange: Exchange, lease: Lease, failure: Failure) -> None:
    """The unit had closed a kept connection before a byte of its reply came: try once more on a new one."""
    if failure.taken or not lease.unit_state.is_restart_suspected() or exchange.route.kind is UNLISTED:
        begin(exchange, lease, fresh=True)
        return
    # It may have restarted: it gets no requests until it has shown progress.
    exchange.let_go(Outcome.EVICTED)
    find_unit(exchange, moved=True)


def move(exchange: Exchange) -> None:
    """The unit went DOWN, or is on hold, before the commit: the request moves to another unit."""
    lease = exchange.in_flight().lease
    if is_on(lease.unit_state.hold) and not _has_others(exchange, lease):
        # It is answered here once the hold has ended.
        return
    unit = lease.unit
    failure = Failure(
        FailureKind.EVICTED,
        f"unit {unit} went down or was paused before it answered, and no other unit could take the request",
    )
    exchange.lose(failure)
    if exchange.route.kind is UNLISTED:
        refuse(exchange, failure)
        return
    exchange.selection.failed(unit, Step(True), failure)
    find_unit(exchange)


def _has_others(exchange: Exchange, lease: Lease) -> bool:
    """Whether the request may go to another unit: its client may have named this one."""
    selection = exchange.selection
    tried = (*selection.history.tried, lease.unit)
    return exchange.route.kind is not UNLISTED and exchange.gate.board.could_serve(selection.ask, tried)


def break_stream(exchange: Exchange, failure: Failure) -> None:
    """The unit broke its answer: another unit resumes it, or the response ends with an error."""
    lease, selection = exchange.in_flight().lease, exchange.selection
    if failure.kind not in _IN_THE_MIDDLE:
        failure = Failure(FailureKind.TRUNCATED, failure.message)
    exchange.lose(failure)
    told = as_told(failure, lease.unit, committed=True)
    # If it is not resumed, the next call ends it.
    exchange.state = ExchangeState.OVER
    if _continuation(exchange).broke(lease.unit, selection.ask, told):
        build = _build_needed(exchange, lease)
        # Only where nothing else is possible.
        splits = selection.ask.splits and lease.unit_state.meets
        selection.ask = selection.ask._replace(deadline_at=inf, build=build, splits=splits)
        selection.failed(lease.unit, Step(True), told)
        find_unit(exchange)


def _build_needed(exchange: Exchange, lease: Lease) -> str | None:
    """The only build that may resume the stream; None: any may. Another one might go on in other words.

    Unknown builds are the same build, and another one than each that is known.
    """
    replay = exchange.response.replay
    is_begun = replay is not None and replay.read().size > 0
    return lease.build.key if is_begun and not exchange.gate.settings.continue_across_builds else None


def conclude(exchange: Exchange, events: bytes) -> None:
    """The text is complete, and the unit has provided what the last events need."""
    exchange.let_go(Outcome.OK)
    exchange.state = ExchangeState.OVER
    _continuation(exchange).conclude(events)


def give_up(exchange: Exchange, reason: str) -> None:
    """The unit cannot resume the stream, and neither could any other."""
    failure = exchange.selection.failure
    assert failure is not None
    exchange.let_go(Outcome.GATE_ERROR)
    exchange.state = ExchangeState.OVER
    _continuation(exchange).give_up(failure, ContinuationResult.REFUSED, reason)


def _continuation(exchange: Exchange) -> Continuation:
    """The continuation of the stream, created at its first break."""
    if exchange.continuation is None:
        exchange.continuation = Continuation(exchange.gate, exchange.request, exchange.response)
    return exchange.continuation
