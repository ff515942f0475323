"""What follows when a unit fails: it is tried again, on another unit, or its stream is resumed. Actions of
the table.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cellgate.proxy.config.settings import TICK_S
from cellgate.proxy.http.errors import Failure, FailureKind, for_client
from cellgate.proxy.observe.counters import ResumeResult
from cellgate.proxy.request.answer_shape import COMMENTS_ONLY, EVENTS_ONLY, are_idle
from cellgate.proxy.request.continuation import StreamResume, find_way
from cellgate.proxy.request.departed import follow
from cellgate.proxy.request.doubts import able, keep_aborted, unsure
from cellgate.proxy.request.life import ExchangeState
from cellgate.proxy.request.response import SAME_CHUNKS
from cellgate.proxy.request.routes import UNLISTED
from cellgate.proxy.request.second_opinion import doubt, look_again, repeated
from cellgate.proxy.request.start import (
    OF_LINKS,
    begin,
    compute_here,
    find_unit,
    is_overdue,
    link_failed,
    refuse,
)
from cellgate.router.departures import is_gone, take_over_s
from cellgate.router.health import STALLS, is_on, stall_limit_s
from cellgate.router.nouns import USABLE, Outcome, Verdict
from cellgate.router.retry import NOT_CONNECTED
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.request.attempt import Attempt
    from cellgate.proxy.request.exchange import Exchange
    from cellgate.proxy.request.response import Response


_IN_THE_MIDDLE = (FailureKind.ABORTED, FailureKind.CUT, FailureKind.STREAM_ERROR, FailureKind.NOT_RESUMED)

_STREAM_GONE = (FailureKind.REFUSED, FailureKind.UNREACHABLE, FailureKind.CONNECT_TIMEOUT)


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
        # One that had the request, of a unit that others have seen fail: its process has probably ended.
        is_over = failure.taken and lease.unit_state.case.verdict is not Verdict.UP
        if not exchange.was_stale and not is_over:
            exchange.was_stale = lease if failure.taken else True
            _connect_anew(exchange, lease, failure)
            return
        failure = Failure(FailureKind.CLOSED_EARLY, failure.message)
    elif exchange.was_stale is lease and failure.kind in _STREAM_GONE:
        # Its process has ended, which had the request.
        failure = Failure(FailureKind.CLOSED_EARLY, failure.message)
    if failure.kind is FailureKind.ANSWER_TIMEOUT and _is_at_work(exchange, lease):
        exchange.abort(Outcome.GATE_ERROR)
        reason = f"{failure.message}; it was at work: ask for a stream, or raise timeouts.answer_s"
        refuse(exchange, Failure(FailureKind.ANSWER_TIMEOUT, reason))
        return
    if failure.kind is FailureKind.ABORTED:
        keep_aborted(exchange)
    exchange.fail(failure)
    selection, for_the_client = exchange.selection, for_client(failure, lease.unit, committed=False)
    step = selection.next_step(lease, failure, once=exchange.route.kind is UNLISTED)
    selection.failed(lease.unit, for_the_client, step)
    if not step.again:
        refuse(exchange, for_the_client)
    elif step.returns and failure.kind.row.retry is NOT_CONNECTED:
        # The gate needs a moment: the next tick tries again.
        exchange.state = ExchangeState.WAITING
    else:
        find_unit(exchange, draws=step.draws)


def _is_at_work(exchange: Exchange, lease: Lease) -> bool:
    """Whether the unit is well and computes an answer that comes whole: any other would need as long."""
    return not exchange.selection.ask.stream and lease.unit_state.case.verdict is Verdict.UP


def _connect_anew(exchange: Exchange, lease: Lease, failure: Failure) -> None:
    """The unit had closed a kept connection before a byte of its reply came: try once more on a new one."""
    if failure.taken or not lease.unit_state.is_restart_suspected() or exchange.route.kind is UNLISTED:
        begin(exchange, lease, fresh=True)
        return
    # It may have restarted: it gets no requests until it has shown progress.
    exchange.abort(Outcome.EVICTED)
    find_unit(exchange, moved=True)


def move(exchange: Exchange) -> None:
    """The unit is out, or on hold, before the commit: the request moves to another unit, if one can take it,
    or nothing comes of it here. One of an unlisted path is sent once: it ends, and its client may ask again.
    """
    follow(exchange)
    lease = exchange.in_flight().lease
    if is_on(lease.unit_state.hold) and not _has_others(exchange, lease):
        # It is answered here once the hold has ended.
        return
    if not (is_gone(lease.unit_state.case) or is_on(lease.unit_state.hold) or _can_move(exchange, lease)):
        lease.evicted = False
        return
    unit = lease.unit
    failure = Failure(
        FailureKind.EVICTED,
        f"unit {unit} went down or was paused before it answered, and no other unit could take the request",
    )
    exchange.fail(failure)
    if exchange.route.kind is UNLISTED:
        refuse(exchange, failure)
        return
    exchange.selection.failed(unit, failure)
    find_unit(exchange)


def doubt_end(exchange: Exchange, what: str, _body: bytes) -> bool:
    """A unit resumes a stream with nothing, which may be right: whether another one is asked, once."""
    lease = exchange.in_flight().lease
    if not _asks_one_more(exchange, lease):
        return False
    failure = Failure(FailureKind.NOT_RESUMED, f"unit {lease.unit} resumed the stream with {what}")
    exchange.fail(failure)
    exchange.selection.failed(lease.unit, failure)
    find_unit(exchange)
    return True


def _asks_one_more(exchange: Exchange, lease: Lease) -> bool:
    """Whether another unit is asked, once for a request, where a unit did not resume a stream: that may be
    right, or a fault of this unit alone.
    """
    is_asked = getattr(exchange, "is_doubted", False) or not _has_others(exchange, lease)
    exchange.is_doubted = True
    return not is_asked


def _has_others(exchange: Exchange, lease: Lease) -> bool:
    """Whether the request may go to another unit: its client may have named this one."""
    selection = exchange.selection
    tried = (*selection.history.tried, lease.unit)
    return exchange.route.kind is not UNLISTED and exchange.gate.board.could_serve(selection.ask, tried)


def _can_move(exchange: Exchange, lease: Lease) -> bool:
    """Whether another unit could take the request now, from the gate or from its client."""
    return exchange.gate.board.can_take(lease, exchange.gate.now(), exchange.selection.history.tried)


def break_stream(exchange: Exchange, failure: Failure) -> None:
    """The unit broke its answer: another unit resumes it, or the response ends with an error."""
    lease, selection = exchange.in_flight().lease, exchange.selection
    if failure.kind not in _IN_THE_MIDDLE:
        failure = Failure(FailureKind.TRUNCATED, failure.message)
    exchange.fail(failure)
    for_the_client = for_client(failure, lease.unit, committed=True)
    # If it is not resumed, the next call ends it.
    exchange.state = ExchangeState.OVER
    if _stream_resume(exchange).broke(lease.unit, selection.ask, for_the_client):
        build = _build_needed(exchange, lease)
        # Only where nothing else is possible.
        splits = selection.ask.splits and lease.unit_state.meets
        selection.ask = selection.ask._replace(deadline_at=inf, build=build, splits=splits)
        selection.avoid = unsure(exchange)
        selection.failed(lease.unit, for_the_client)
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
    exchange.abort(Outcome.OK)
    exchange.state = ExchangeState.OVER
    _stream_resume(exchange).conclude(events)


def not_resumed(exchange: Exchange, reason: str) -> None:
    """The unit does not resume the stream. What two of them say, the others would say as well."""
    lease, selection = exchange.in_flight().lease, exchange.selection
    failure, is_refused = selection.failure, not _asks_one_more(exchange, lease)
    assert failure is not None
    exchange.abort(Outcome.GATE_ERROR)
    if not is_refused:
        selection.history = selection.history.after(lease.unit)
        find_unit(exchange, moved=True)
        return
    exchange.state = ExchangeState.OVER
    _stream_resume(exchange).end_unresumed(failure, ResumeResult.REFUSED, reason)


def _stream_resume(exchange: Exchange) -> StreamResume:
    """The continuation of the stream, created at its first break."""
    if exchange.stream_resume is None:
        exchange.stream_resume = StreamResume(exchange.gate, exchange.request, exchange.response)
    return exchange.stream_resume


# Timeouts of a request, and what its client gets while it waits. Actions of the table.


WAITING, BUFFERING, RELAYING = ExchangeState.WAITING, ExchangeState.BUFFERING, ExchangeState.RELAYING
PROVING = ExchangeState.PROVING

_STREAM_PROOF_S = 30.0
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
_FLOWS_S = 0.7
"""How often a stream is looked at that has begun: before its unit is out, nothing is due sooner. While it is
young it could end before it is seen to repeat itself.
"""
_YOUNG_S = 3.0
_STREAM_IDLE_S = 1.0
"""At least so long a stream may show events without work before another unit is asked."""
_FLOOD = 4.0
"""So many in a second are no way to say that a request waits."""
_EQUALS_S = 60.0
"""So long it may where no other does better."""
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
            failure = _silence(exchange, attempt.lease, now)
            if failure is None and not attempt.lease.evicted:
                failure = _idles(exchange, attempt, now)
                if response.events >= SAME_CHUNKS or now - attempt.lease.first_at > _YOUNG_S:
                    exchange.client.look_at = now + _FLOWS_S
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
        held = getattr(exchange, "held", None)
        if held is None:
            find_unit(exchange)
        else:
            look_again(exchange, held, now)
        return
    if failure is None:
        if exchange.state is not RELAYING and not response.paused:
            response.keep_warm(now, timeouts.head_hold_s)
    elif exchange.state is PROVING and failure.kind is FailureKind.NOT_RESUMED:
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
    if exchange.state is not BUFFERING or exchange.was_stale or open_s < _MUTE_S or not attempt.is_mute():
        return False
    if lease.evicted or now - state.progress_at > _MUTE_S or state.progress_at <= lease.opened_at + _LIVELY_S:
        return False
    # Something before it may hold its heads back until there is a token: then they come as late as that.
    is_late = open_s >= STALLS * state.overtaken.at(now)
    shows_head = lease.ask.stream and state.engine in _HEADS_FIRST and is_late
    return shows_head or attempt.is_unacked()


def _moves_on(exchange: Exchange, attempt: Attempt, now: float) -> bool:
    """Whether another unit is asked, because a stream shows events or comments for too long, and no work. An
    engine may send a few while the request waits for its turn; one that says that it has none lies.
    """
    state, events = attempt.lease.unit_state, attempt.idle_events
    load, limit_s = state.load, _STREAM_IDLE_S
    is_read = load is not None and load.at >= attempt.idle_at
    if events < _IDLE_EVENTS and not (is_read and load is not None and load.at_engine == 0):
        # Nothing but comments may be all that it can say while it computes.
        limit_s = max(limit_s, stall_limit_s(state, exchange.gate.board.rules))
        limit_s = limit_s if load is None else max(_LOST_S, limit_s)
    since_s = now - attempt.idle_at
    if since_s < limit_s:
        return False
    is_flood = events >= max(_IDLE_EVENTS, _FLOOD * since_s)
    is_outdone = since_s >= _EQUALS_S or _is_outdone(exchange, attempt.lease, now)
    if not (is_flood or is_outdone):
        return False
    attempt.wait_again(now)
    if exchange.stream_resume is not None:
        return doubt_end(exchange, EVENTS_ONLY if events else COMMENTS_ONLY, b"")
    return doubt(exchange, EVENTS_ONLY if events else COMMENTS_ONLY, None, is_outdone=is_outdone)


def _is_outdone(exchange: Exchange, lease: Lease, now: float) -> bool:
    """Whether others do better than a unit that shows events without work: one has begun to answer a request
    that came later, and this unit has not shown lately that some take longer, or that it pauses.
    """
    state = lease.unit_state
    usual_s = max(state.step_times.longest_wait_s, state.pauses.longest_s(now), state.overtaken.at(now))
    if now - lease.opened_at < STALLS * usual_s:
        return False
    return any(
        other.unread.until > lease.opened_at for other in able(exchange) if other.unit.name != lease.unit
    )


def _overdue(state: ExchangeState, lease: Lease, now: float, answer_s: float) -> Failure | None:
    """The failure of an attempt that has sent no answer for too long; None while it has time."""
    open_s = now - max(lease.opened_at, lease.unit_state.held_until)
    if open_s > answer_s:
        return Failure(
            FailureKind.ANSWER_TIMEOUT, f"unit {lease.unit} did not begin to answer within {answer_s:.0f} s"
        )
    if state is PROVING and open_s > _STREAM_PROOF_S:
        reason = (
            f"unit {lease.unit} did not prove within {_STREAM_PROOF_S:.0f} s that it can resume the stream"
        )
        return Failure(FailureKind.NOT_RESUMED, reason)
    return None


def _silence(exchange: Exchange, lease: Lease, now: float) -> Failure | None:
    """The failure of a stream that has stalled for too long; None while it has time."""
    unit, silent_s = lease.unit, now - exchange.response.last_at
    if lease.evicted and silent_s > _HALTED_S and _is_given_up(exchange, lease, silent_s):
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


def _is_given_up(exchange: Exchange, lease: Lease, silent_s: float) -> bool:
    """Whether a stream of a unit that is out has been silent for long enough; where nothing proves that it is
    lost, another unit must be able to resume it.
    """
    state, gate = lease.unit_state, exchange.gate
    if state.is_halted():
        return True
    if state.case.verdict in USABLE or silent_s <= take_over_s(state, gate.board.rules, _SILENT_S):
        return False
    return is_gone(state.case) or _may_resume(exchange, lease)


def _idles(exchange: Exchange, attempt: Attempt, now: float) -> Failure | None:
    """The failure of a stream that has begun well, and shows events without work for longer than a stall may
    last, if another unit can resume it. One that says the same again and again is counted.
    """
    lease, shape, shown = attempt.lease, exchange.route.shape, exchange.response.last_chunk
    if shape is None or not shown or shape.shown.search(shown) is not None or not _is_idle(shown):
        if exchange.response.repeats:
            repeated(exchange)
        return None
    since, last = getattr(exchange, "idle", (now, now))
    since = since if now - last < _STREAM_IDLE_S else now
    exchange.idle = since, now
    if now - since < max(_STREAM_IDLE_S, stall_limit_s(lease.unit_state, exchange.gate.board.rules)):
        return None
    if not _may_resume(exchange, lease):
        repeated(exchange)
        return None
    reason = (
        f"unit {lease.unit} sent events without a token for {now - since:.1f} s in the middle of its answer"
    )
    return Failure(FailureKind.CUT, reason)


def _is_idle(chunk: bytes) -> bool:
    """Whether a chunk of a stream, with its frame, shows an event without work."""
    begin = chunk.find(b"data:")
    return begin >= 0 and are_idle(chunk[begin:].rstrip() + b"\n\n")


def _is_lost(exchange: Exchange, lease: Lease, silent_s: float, now: float) -> bool:
    """Whether the unit has forgotten this stream, and another one can resume it."""
    limit_s = max(_LOST_S, 4.0 * stall_limit_s(lease.unit_state, exchange.gate.board.rules))
    if silent_s < limit_s or now - lease.unit_state.progress_at > _LIVELY_S:
        return False
    return _may_resume(exchange, lease)


def _may_resume(exchange: Exchange, lease: Lease) -> bool:
    """Whether another unit can resume the stream."""
    gate, response, selection = exchange.gate, exchange.response, exchange.selection
    if response.replay is None or not response.replay.ways:
        return False
    if isinstance(find_way(gate, exchange.request, selection.ask, response), str):
        response.keep_tail()
        return False
    return gate.board.can_take(lease, gate.now(), selection.history.tried)
