"""What configured weights mean for units whose speed is learnt. Pure.

A weight says how much a unit may be given beside others, usually because it is so many times as fast. As
far as it is, the learnt rates say so already, and nothing is left for the weight to say. What it says
beyond them (a new unit is to get a tenth) makes all that the unit does count as so much slower.
"""

from __future__ import annotations

from collections.abc import Sequence

ALIKE = 0.8
"""From this share on, weight and speed say the same: both are rough."""


def shares(units: Sequence[tuple[float, float | None]]) -> list[float]:
    """The share (0 to 1) of its own speed at which each unit is reckoned with, from weights and learnt
    speeds.

    A speed is None as long as it is a guess: then the weight stands for it.
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
