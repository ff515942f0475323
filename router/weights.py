"""The effect of configured weights on units with measured speed. Pure.

A weight is the share of a unit relative to others, usually because it is that many times as fast. Measured
rates already include a real difference in speed, so that part of the weight has no further effect. The rest
of it (such as a tenth for a new unit) makes all work of the unit count as that much slower.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIKE = 0.8
"""From this share on, weight and speed count as equal: both are rough."""


def shares(units: Sequence[tuple[float, float | None]]) -> list[float]:
    """The share (0 to 1) of its own speed that each unit counts with, from weights and measured speeds.

    A speed is None until it was measured: then the weight is used for it.
    """
    if not units or all(weight == units[0][0] for weight, _ in units):
        return [1.0] * len(units)
    most = max(weight for weight, _ in units)
    fastest = max((speed for weight, speed in units if weight == most and speed is not None), default=None)
    return [_share(weight / most, speed, fastest) for weight, speed in units]


def _share(weight: float, speed: float | None, fastest: float | None) -> float:
    """`fastest` is the speed of the fastest of those with the largest weight."""
    if weight == 1.0 or speed is None or fastest is None:
        return weight
    share = weight * fastest / speed
    return share if share < ALIKE else 1.0
