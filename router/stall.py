"""Whether a unit stalls: it has requests and makes no progress. Pure.

Rules:
1. Progress is work: tokens of this gate's streams, finished generations, step and token counters of the
   engine.
2. A stall may last `stall_limit_s`: four steps of the slowest kind, but at most 1.5 times the longest recent
   stall from which the unit recovered by itself; or 1.5 times the prefill of its largest unanswered prompt.
3. Requests without visible progress prove nothing: their client does not read; an engine that does not count
   its steps may have queued them; a canary has passed while they stalled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cellgate.router.nouns import Rules

if TYPE_CHECKING:
    from cellgate.router.unit_state import Lease, UnitState

SOURCE = "progress"
STEPS = 4.0
STALLS = 1.5
PREFILLS = 1.5
COUNTERS_FRESH_S = 1.0
"""Older counters cannot show whether the engine makes progress."""
CLEARED_S = 30.0
"""A canary that passes while requests stall clears the unit of them for this long: it has lost them."""
PLAIN_S = 60.0
"""A plain answer may take this long on any engine."""


class Stall(NamedTuple):
    """The length of a stall, its limit, and the number of waiting requests."""

    stalled_s: float
    limit_s: float
    waiting: int


def stall_limit_s(state: UnitState, rules: Rules) -> float:
    """How long a unit may stall with its present work."""
    step_s = state.step_times.slowest_s(None if state.leases else state.last_lease_at)
    # One stream may stand still while others go on; what the unit came out of by itself tells more than that.
    steps_s = min(STEPS * step_s, STALLS * max(step_s, state.longest_stall_s()))
    largest = max((lease.ask.prompt_tokens for lease in state.leases if not lease.committed), default=0)
    prefill_s = state.step_times.prefill_s(largest, counts=state.counters_at > 0.0)
    # A decoder may stand still while it connects to a prefiller for the first time.
    splits = [lease.split for lease in state.leases if lease.split is not None and not lease.committed]
    connect_s = max((split.limit_s for split in splits if split.is_first), default=0.0)
    return max(rules.silent_min_s, steps_s, PREFILLS * prefill_s, connect_s)


def hides_work(state: UnitState, now: float) -> bool:
    """Whether the unit may be busy with plain answers of ours without anything to show for it.

    Of an engine that does not count its steps, until one takes twice as long as any of late.
    """
    if state.counters_at:
        return False
    hidden = [lease.opened_at for lease in state.leases if not lease.ask.stream and lease.ask.prompt_tokens]
    return bool(hidden) and now - min(hidden) < max(PLAIN_S, 2.0 * state.step_times.longest_answer_s)


def still_s(state: UnitState, now: float) -> float:
    """For how long the unit has stalled, as far as visible.

    Counters are valid as of their reading; when the engine does not answer, only tokens count.
    """
    seen_until = state.counters_at if now - state.counters_at < COUNTERS_FRESH_S else now
    return max(0.0, seen_until - state.quiet_since)


def find_stall(state: UnitState, now: float, rules: Rules) -> Stall | None:
    """The stall of a unit once it is longer than its limit, else None."""
    if now - state.quiet_since < rules.silent_min_s:
        return None
    sighted = now - state.counters_at < COUNTERS_FRESH_S
    cleared_at = state.cleared_at if now - state.cleared_at < CLEARED_S else -CLEARED_S
    counts = state.counters_at > 0.0
    waiting = sum(
        _would_show(lease, counts=counts, sighted=sighted)
        for lease in state.leases
        if lease.opened_at > cleared_at
    )
    if not waiting:
        return None
    limit_s, silent_s = stall_limit_s(state, rules), still_s(state, now)
    return Stall(silent_s, limit_s, waiting) if silent_s >= limit_s else None


def find_rank_stall(state: UnitState, now: float, rules: Rules) -> tuple[int, Stall] | None:
    """A data parallel rank that stalls while others work, whose steps hide it from the unit's clock.

    Only the engine's own counters show it, so it is as old as their last reading.
    """
    if now - state.counters_at >= COUNTERS_FRESH_S or now - state.cleared_at < CLEARED_S:
        return None
    found, limit_s = state.ranks.standstill(state.counters_at), stall_limit_s(state, rules)
    if found is None or found.still_s < limit_s:
        return None
    own = [lease for lease in state.leases if lease.rank == found.rank]
    waiting = sum(_would_show(lease, counts=True, sighted=True) for lease in own)
    return (found.rank, Stall(found.still_s, limit_s, waiting)) if waiting else None


def _would_show(lease: Lease, *, counts: bool, sighted: bool) -> bool:
    """Whether this request would show progress if the unit worked.

    `counts`: its engine counts its steps; `sighted`: and they were read just now.
    """
    if lease.paused or lease.evicted:
        return False
    if lease.ask.stream:
        return lease.committed or counts
    return sighted and lease.ask.prompt_tokens > 0
