"""Outlier, or fail-slow: a unit that works, only slower than the others of its cell. Pure.

What is compared is the median gap between tokens. It grows with the batch and with the KV cache in use, so
the gap that another unit would have with this one's batch and cache is taken as proportional to the worse of
the two: a unit that is slow because it is busy is not degraded. A weight is throughput, often more places and
not shorter steps: a unit of less weight may be as much slower, and of one of more weight no shorter step is
expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from cellgate.router.nouns import DEGRADED_TIMES, PANIC_SHARE, PANIC_UNITS

COMPARE_S = 5.0
FADE, LEAST = 0.8, 0.05
"""What is left of it after a comparison that could not be made; below LEAST it is over."""
STREAK = 3
"""This many comparisons in a row decide, in both directions."""


class Outlier(NamedTuple):
    """What is held of one unit: `degraded` (0: as fast as the others; 0.5: half as fast), and the streak of
    comparisons that speak against it.
    """

    degraded: float = 0.0
    streak: int = 0


class Speed(NamedTuple):
    """How fast one unit is, at what load: its recent median gap, and the mean of the requests there."""

    gap_s: float
    batch: float
    kv_use: float
    weight: float


def slowdown(unit: Speed, others: Sequence[Speed]) -> float:
    """How many times longer the gaps of `unit` are than those of the others would be at its load."""
    return unit.gap_s / median(_expected(unit, other) for other in others)


def compare(before: Outlier, unit: Speed, others: Sequence[Speed]) -> Outlier:
    """How slow `unit` is after one more comparison with the others of its cell (at least one)."""
    times = slowdown(unit, others)
    if not before.degraded:
        streak = before.streak + 1 if times >= DEGRADED_TIMES else 0
        return Outlier(1.0 - 1.0 / times) if streak >= STREAK else Outlier(streak=streak)
    # It has to come half the way back: a unit at the edge must not flap.
    if times >= (1.0 + DEGRADED_TIMES) / 2.0:
        return Outlier((before.degraded + 1.0 - 1.0 / times) / 2.0)
    streak = before.streak + 1
    return Outlier() if streak >= STREAK else Outlier(before.degraded, streak)


def fade(before: Outlier) -> Outlier:
    """How slow a unit is that could not be compared: what is not confirmed is believed less and less."""
    degraded = before.degraded * FADE
    return Outlier(degraded) if degraded >= LEAST else Outlier()


def _expected(unit: Speed, other: Speed) -> float:
    # The added amounts keep nearly idle units from standing in any ratio to each other.
    batch = (unit.batch + 1.0) / (other.batch + 1.0)
    kv = (unit.kv_use + 0.1) / (other.kv_use + 0.1)
    return other.gap_s * max(1.0, batch, kv) * max(1.0, other.weight / unit.weight)


# Panic: when most units do not answer at all, the gate is probably cut off, and the fleet is not dead.
#
# Pure. The last good rotation is then kept for a while: dropping it would turn a lost network of the gate
# into an outage of everything. A unit whose leader, or any node, answers anything is reachable, even if it
# hangs.


UNREACHABLE_S = 1.5
"""Longer than a period of the probes, and shorter than any way to DOWN without an answer."""
UNANSWERED_S = 0.5
"""What is asked once a second, and is silent for so long as above, had so long to answer. One that is asked
more rarely must have had it, too."""


def is_unreachable(answered_at: float, asked_at: float, now: float) -> bool:
    """Whether a unit, last heard at `answered_at`, has not answered at all for too long. `asked_at`: when it
    was first asked something since; inf: it was not.
    """
    return now - answered_at > UNREACHABLE_S and now - asked_at >= UNANSWERED_S


def is_cut_off(unreachable: int, rotation: int) -> bool:
    """Whether the gate takes itself to be cut off, when `unreachable` of `rotation` units are unreachable."""
    return unreachable >= PANIC_UNITS and unreachable > PANIC_SHARE * rotation
