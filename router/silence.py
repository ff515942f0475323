"""Whether a unit is silent: requests are there, and nothing moves. Pure.

Rules:
1. What moves is work: tokens of our streams, finished generations, step and token counters of the engine.
2. A unit may be silent for `silent_limit_s`: four steps of the slowest kind, or the prefill of the largest
   prompt that it has yet to answer and half of that again.
3. Requests that could not show it if the unit worked (their client reads nothing; a plain answer of an engine
   without counters) prove nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from router.nouns import Rules

if TYPE_CHECKING:
    from router.desk import Desk
    from router.lease import Lease

STEPS = 4.0
PREFILLS = 1.5
COUNTERS_FRESH_S = 1.0
"""Counters read longer ago cannot tell whether the engine moves."""


class Silence(NamedTuple):
    """How long nothing has moved, of how long that may be, and how many requests wait for something."""

    silent_s: float
    limit_s: float
    waiting: int


def silent_limit_s(desk: Desk, rules: Rules) -> float:
    """How long the unit may be silent with what it has to do now."""
    step_s = desk.pace.gap_s(0.99) or 0.0
    largest = max((lease.ask.prompt_tokens for lease in desk.leases if not lease.committed), default=0)
    return max(rules.silent_min_s, STEPS * step_s, PREFILLS * desk.pace.prefill_s(largest))


def silence(desk: Desk, now: float, rules: Rules) -> Silence | None:
    """The silence of a unit when it has become too long, else None."""
    since = max(desk.life_at, desk.work_at)
    if now - since < rules.silent_min_s:
        return None
    # Counters are as good as the moment they were read at; when nobody answers any more, ours alone count.
    sighted = now - desk.counters_at < COUNTERS_FRESH_S
    waiting = sum(_would_show(lease, sighted=sighted) for lease in desk.leases)
    if not waiting:
        return None
    seen_until = desk.counters_at if sighted else now
    limit_s = silent_limit_s(desk, rules)
    silent_s = seen_until - since
    return Silence(silent_s, limit_s, waiting) if silent_s >= limit_s else None


def _would_show(lease: Lease, *, sighted: bool) -> bool:
    """Whether something would move for this request if the unit worked."""
    if lease.paused or lease.evicted:
        return False
    return lease.ask.stream or (sighted and lease.ask.prompt_tokens > 0)
