"""Leavers: what becomes of the requests of a unit that leaves rotation. Pure.

1. What nobody does better is left alone. Only where it is proven that nothing comes of what a unit has (a
   process that it needs is gone, it has restarted, its answers are wrong) do all its requests leave at once.
2. A unit that takes nothing new (its address refuses, it answers each request with an error) may be
   finishing what it has: its requests leave it once they have been silent for longer than work explains.
3. One that a time-out of ours has taken out has been silent for too long already.
4. In both cases a request leaves only if another unit can take it now. What has begun to be shown is looked
   at by whoever shows it (proxy/request/failures.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cellgate.router.health import COUNTERS_FRESH_S, STALLS, answer_s, stall_limit_s
from cellgate.router.nouns import Case, Rules, Strength, Verdict

if TYPE_CHECKING:
    from cellgate.router.unit_state import Lease, UnitState

LASTS_S = 120.0
"""An answer that shows nothing before its end, at a unit that takes nothing new, is waited for no longer
where another unit could give it."""


def leavers(
    state: UnitState, now: float, rules: Rules, can_take: Callable[[Lease, float], bool]
) -> Iterator[Lease]:
    """Requests without a token that a unit which is out loses. `can_take`: another one could take it."""
    is_lost = is_gone(state.case)
    if not is_lost and is_closed(state.case) and not is_silent_too_long(state, now, rules):
        return
    for lease in state.leases:
        if not (lease.committed or lease.evicted) and (is_lost or can_take(lease, now)):
            yield lease


def is_gone(case: Case) -> bool:
    """Whether nothing comes of the requests that the unit had."""
    return case.verdict is Verdict.STARTING or bool(case.faults)


def is_closed(case: Case) -> bool:
    """Whether it is out because of what it answers to new requests: that says nothing of those it has."""
    because = case.because
    if case.verdict is not Verdict.DOWN or because is None or case.faults:
        return False
    return because.strength is Strength.FATAL or because.is_reply


def is_stalled(state: UnitState) -> bool:
    """Whether a unit is out because of a time-out of ours alone, or was, and may go on with what it has."""
    case = state.case
    if is_gone(case) or is_closed(case):
        return False
    return case.verdict is Verdict.PROBATION or bool(state.leases) or state.progress_at > case.since


def is_draining(state: UnitState) -> bool:
    """Whether a unit takes nothing new, and may be finishing what it has."""
    return bool(state.leases) and is_closed(state.case)


def is_silent_too_long(state: UnitState, now: float, rules: Rules) -> bool:
    """Whether a unit that takes nothing new has been silent for longer than work explains."""
    silent_s = now - state.quiet_since
    if silent_s < rules.silent_min_s:
        return False
    counts = now - state.counters_at < COUNTERS_FRESH_S
    plain = [lease for lease in state.leases if not lease.ask.stream]
    answers_s = 0.0 if counts else max((answer_s(state, lease) for lease in plain), default=0.0)
    return silent_s >= max(stall_limit_s(state, rules), min(answers_s, LASTS_S))


def take_over_s(state: UnitState, rules: Rules, least_s: float) -> float:
    """A stream on a unit that is out is taken over once it has been silent for so long."""
    if is_gone(state.case):
        return least_s
    if is_closed(state.case):
        return max(least_s, stall_limit_s(state, rules))
    return max(least_s, STALLS * state.pauses.longest_s(state.case.since))
