"""Whether a unit is silent: requests are there, and nothing moves. Pure.

Rules:
1. What moves is work: tokens of our streams, finished generations, step and token counters of the engine.
2. A unit may be silent for `silent_limit_s`: four steps of the slowest kind, but no longer than half as long
   again as it has been of late and came out of it by itself; or the prefill of the largest prompt that it has
   yet to answer and half of that again.
3. Requests that could not show it if the unit worked prove nothing: their client reads nothing; an engine
   that does not count its steps may have put them behind others; a canary has passed while they stood still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cellgate.router.nouns import Rules

if TYPE_CHECKING:
    from cellgate.router.unit_state import Desk, Lease

SOURCE = "progress"
STEPS = 4.0
SPELLS = 1.5
PREFILLS = 1.5
COUNTERS_FRESH_S = 1.0
"""Counters read longer ago cannot tell whether the engine moves."""
CLEARED_S = 30.0
"""A canary that passes while requests stand still clears the unit of them for so long: it has lost them."""
PLAIN_S = 60.0
"""A plain answer may take so long of any engine."""


class Silence(NamedTuple):
    """How long nothing has moved, of how long that may be, and how many requests wait for something."""

    silent_s: float
    limit_s: float
    waiting: int


def silent_limit_s(desk: Desk, rules: Rules) -> float:
    """How long the unit may be silent with what it has to do now."""
    step_s = desk.pace.gap_s(0.99) or 0.0
    # One stream may stand still while others go on; what the unit came out of by itself tells more than that.
    steps_s = min(STEPS * step_s, SPELLS * max(step_s, desk.longest_spell_s()))
    largest = max((lease.ask.prompt_tokens for lease in desk.leases if not lease.committed), default=0)
    prefill_s = desk.pace.prefill_s(largest, counts=desk.counters_at > 0.0)
    return max(rules.silent_min_s, steps_s, PREFILLS * prefill_s)


def hides_work(desk: Desk, now: float) -> bool:
    """Whether the unit may be busy with plain answers of ours without anything to show for it.

    Of an engine that does not count its steps, until one takes twice as long as any of late.
    """
    if desk.counters_at:
        return False
    hidden = [lease.opened_at for lease in desk.leases if not lease.ask.stream and lease.ask.prompt_tokens]
    return bool(hidden) and now - min(hidden) < max(PLAIN_S, 2.0 * desk.pace.longest_answer_s)


def still_s(desk: Desk, now: float) -> float:
    """For how long nothing has moved, as far as can be seen.

    Counters are as good as the moment they were read at; when nobody answers any more, ours alone count.
    """
    seen_until = desk.counters_at if now - desk.counters_at < COUNTERS_FRESH_S else now
    return max(0.0, seen_until - desk.quiet_since)


def silence(desk: Desk, now: float, rules: Rules) -> Silence | None:
    """The silence of a unit when it has become too long, else None."""
    if now - desk.quiet_since < rules.silent_min_s:
        return None
    sighted = now - desk.counters_at < COUNTERS_FRESH_S
    cleared_at = desk.cleared_at if now - desk.cleared_at < CLEARED_S else -CLEARED_S
    counts = desk.counters_at > 0.0
    waiting = sum(
        _would_show(lease, counts=counts, sighted=sighted)
        for lease in desk.leases
        if lease.opened_at > cleared_at
    )
    if not waiting:
        return None
    limit_s, silent_s = silent_limit_s(desk, rules), still_s(desk, now)
    return Silence(silent_s, limit_s, waiting) if silent_s >= limit_s else None


def _would_show(lease: Lease, *, counts: bool, sighted: bool) -> bool:
    """Whether something would move for this request if the unit worked.

    `counts`: its engine counts its steps; `sighted`: and they were read just now.
    """
    if lease.paused or lease.evicted:
        return False
    if lease.ask.stream:
        return lease.committed or counts
    return sighted and lease.ask.prompt_tokens > 0
