"""Timeouts of a request, and what its client gets while it waits. Actions of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.settings import TICK_S
from cellgate.proxy.request.continuation import find_way
from cellgate.proxy.request.opening import find_unit
from cellgate.proxy.request.second_opinion import doubt, repeated
from cellgate.proxy.request.splitting import is_overdue
from cellgate.proxy.request.states import ExchangeState
from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.stall import stall_limit_s
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.attempt import Attempt
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.response import Response

# A member of an enum is a slow attribute on CPython 3.11.
WAITING, HOLDING, RELAYING = ExchangeState.WAITING, ExchangeState.HOLDING, ExchangeState.RELAYING
PROVING = ExchangeState.PROVING

_PROOF_S = 30.0
"""The timeout of a unit's proof that it can resume a stream."""
_SILENT_S = 1.0
"""A stream on a unit that went DOWN is given up once it has stalled for this long: a unit that closes its
listener for a graceful shutdown continues its streams."""
_HALTED_S = 0.1
"""So long when an agent says that a process of the unit has ended or is stopped: by then all has come that it
had computed before.
"""
_LOST_S = 30.0
"""A stream that has stalled for this long, while its unit worked on others, was most likely forgotten. If it
was only preempted, the unit has lost some work and the client nothing."""
_LIVELY_S = 1.0
_MUTE_S = 3.0
"""A kept connection without a byte for so long, of a unit that works, is asked no more."""
_HEADS_FIRST = frozenset({"vllm", "sglang"})
"""Engines that answer 200 to a stream at once, and compute then."""
_IDLE_S = 1.0
"""At least so long a stream may show events without work before another unit is asked."""
_IDLE_EVENTS = 8
"""So many events without work are more than what engines send before a request's turn has come."""


def tick(exchange: Exchange, now: float) -> None:
    """Time has passed; called a few times a second."""
    response, attempt, timeouts = exchange.response, exchange.attempt, exchange.gate.settings.timeouts
    failure: Failure | None = None
    if attempt is not None:
        if response.paused:
            if now - response.last_at > timeouts.answer_s:
                # The client reads nothing, and would occupy its unit for ever.
                exchange.client.cut()
            return
        hold = attempt.lease.unit_state.hold
        if hold is not None and not hold.ended_at:
            if exchange.state is RELAYING:
                _stand_still(response, now - hold.since, now, timeouts.head_hold_s)
        elif exchange.state is RELAYING:
            if response.repeats and not attempt.lease.evicted:
                repeated(exchange)
            failure = _silence(exchange, attempt.lease, now)
        elif is_overdue(exchange, attempt.lease, now):
            attempt.abandon()
            reason = f"the blocks did not arrive within {now - attempt.lease.opened_at:.1f} s"
            failure = Failure(FailureKind.TRANSFER_FAILED, reason)
        elif attempt.idle_at and _moves_on(exchange, attempt, now):
            return
        else:
            failure = _overdue(exchange.state, attempt.lease, now, timeouts.answer_s)
            if failure is None and _is_half_dead(exchange, attempt, now):
                attempt.abandon()
                # The others that were kept may be as dead.
                exchange.gate.pool(attempt.lease.unit_state).purge()
                reason = "nothing came on a kept connection, while its unit worked"
                failure = Failure(FailureKind.STALE_CONNECTION, reason)
    elif exchange.state is WAITING and not exchange.selection.is_queued:
        find_unit(exchange)
        return
    if failure is None:
        if exchange.state is not RELAYING and not response.paused:
            response.keep_warm(now, timeouts.head_hold_s)
    elif exchange.state is PROVING and failure.kind is FailureKind.NOT_CONTINUED:
        exchange.refused(failure.message)
    else:
        exchange.failed(failure)


def _stand_still(response: Response, held_s: float, now: float, comment_s: float) -> None:
    """The unit of a stream stands still on purpose: its clock does too, and the client's connection is kept
    warm, with a comment every `comment_s`.
    """
    if held_s % comment_s < TICK_S and not response.in_event:
        response.keep_warm(now, 0.0)
    else:
        response.last_at = now


def _is_half_dead(exchange: Exchange, attempt: Attempt, now: float) -> bool:
    """Whether the kept connection of an attempt has lost its packets, while its unit works for others: once
    for a request. The kernel says so, or the head of a stream is missing that its engine sends at once.
    """
    lease = attempt.lease
    state, open_s = lease.unit_state, now - lease.opened_at
    if exchange.state is not HOLDING or exchange.was_stale or open_s < _MUTE_S or not attempt.is_mute():
        return False
    if lease.evicted or now - state.life_at > _MUTE_S or state.life_at <= lease.opened_at + _LIVELY_S:
        return False
    shows_head = lease.ask.stream and state.engine in _HEADS_FIRST
    return shows_head or attempt.is_unacked()


def _moves_on(exchange: Exchange, attempt: Attempt, now: float) -> bool:
    """Whether another unit is asked, because a stream shows events or comments for longer than a stall may
    last, and no work. An engine may send a few while the request waits for its turn.
    """
    state, events = attempt.lease.unit_state, attempt.idle_events
    limit_s = max(_IDLE_S, stall_limit_s(state, exchange.gate.board.rules))
    load = state.load
    waits = load is None or load.at < attempt.idle_at or load.running + load.waiting > 0
    if events < _IDLE_EVENTS and waits:
        limit_s = max(_LOST_S, limit_s)
    if now - attempt.idle_at < limit_s:
        return False
    attempt.idle_at = now
    return doubt(exchange, "events without a token" if events else "comments without a token", None)


def _overdue(state: ExchangeState, lease: Lease, now: float, answer_s: float) -> Failure | None:
    """The failure of an attempt that has sent no answer for too long; None while it has time."""
    open_s = now - max(lease.opened_at, lease.unit_state.held_until)
    if open_s > answer_s:
        return Failure(
            FailureKind.ANSWER_TIMEOUT, f"unit {lease.unit} did not begin to answer within {answer_s:.0f} s"
        )
    if state is PROVING and open_s > _PROOF_S:
        reason = f"unit {lease.unit} did not prove within {_PROOF_S:.0f} s that it can resume the stream"
        return Failure(FailureKind.NOT_CONTINUED, reason)
    return None


def _silence(exchange: Exchange, lease: Lease, now: float) -> Failure | None:
    """The failure of a stream that has stalled for too long; None while it has time."""
    unit, silent_s = lease.unit, now - exchange.response.last_at
    if lease.evicted and silent_s > (_HALTED_S if lease.unit_state.is_halted() else _SILENT_S):
        return Failure(FailureKind.CUT, f"unit {unit} went down in the middle of its answer")
    if silent_s > _LOST_S and _is_lost(exchange, lease, silent_s, now):
        reason = (
            f"unit {unit} sent nothing of this stream for {silent_s:.0f} s, while its other streams continued"
        )
        return Failure(FailureKind.CUT, reason)
    if silent_s > exchange.gate.settings.timeouts.answer_s:
        reason = f"unit {unit} sent nothing for {silent_s:.0f} s in the middle of its answer"
        return Failure(FailureKind.TRUNCATED, reason)
    return None


def _is_lost(exchange: Exchange, lease: Lease, silent_s: float, now: float) -> bool:
    """Whether the unit has forgotten this stream, and another one can resume it."""
    gate, response, selection = exchange.gate, exchange.response, exchange.selection
    limit_s = max(_LOST_S, 4.0 * stall_limit_s(lease.unit_state, gate.board.rules))
    if silent_s < limit_s or now - lease.unit_state.life_at > _LIVELY_S:
        return False
    if response.replay is None or not response.replay.ways:
        return False
    if isinstance(find_way(gate, exchange.request, selection.ask, response), str):
        response.keep_tail()
        return False
    return gate.board.could_serve(selection.ask, (*selection.history.tried, lease.unit))
