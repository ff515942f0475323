"""What configured weights mean for units whose speed is learnt. Pure.

A weight says how much a unit may be given beside others, usually because it is so many times as fast. As
far as it is, the learnt rates say so already, and nothing is left for the weight to say. What it says
beyond them (a new unit is to get a tenth) makes all that the unit does count as so much slower.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(units: Sequence[tuple[float, float | None]]) -> list[float]:
    """The share (0 to 1) of its own speed at which each unit is reckoned with, from weights and learnt
    speeds.

    A speed is None as long as it is a guess: then the weight stands for it.
    """
    if not units or all(weight == units[0][0] for weight, _ in units):
        return [1.0] * len(units)
    most, fastest = max(units, key=lambda unit: unit[0])
    return [_share(weight / most, speed, fastest) for weight, speed in units]


def _share(weight: float, speed: float | None, fastest: float | None) -> float:
    if speed is None or fastest is None:
        return weight
    return min(1.0, weight * fastest / speed)
