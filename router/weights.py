"""The effect of configured weights on units with measured speed. Pure.

A weight is the share of a unit relative to others, usually because it is that many times as fast. Measured
rates already include a real difference in speed, so that part of the weight has no further effect. The rest
of it (such as a tenth for a new unit) makes all work of the unit count as that much slower.

Prefill and decoding are compared apart, and the larger difference counts: a load of short prompts or of short
answers shows only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ALIKE = 0.8
"""From this share on, weight and speed count as equal: both are rough."""

Speeds = tuple[float | None, float | None]
"""Tokens a second of prefill, and steps a second of decoding; None until it was measured."""


def shares(units: Sequence[tuple[float, Speeds]]) -> list[float]:
    """The share (0 to 1) of its own speed that each unit counts with, from weights and measured speeds.

    Until a speed was measured, the weight is used for it.
    """
    if not units or all(weight == units[0][0] for weight, _ in units):
        return [1.0] * len(units)
    most = max(weight for weight, _ in units)
    best = [speeds for weight, speeds in units if weight == most]
    fastest = (_most(prefill for prefill, _ in best), _most(decoding for _, decoding in best))
    return [_share(weight / most, speeds, fastest) for weight, speeds in units]


def _most(speeds: Iterable[float | None]) -> float | None:
    return max((speed for speed in speeds if speed is not None), default=None)


def _share(weight: float, speeds: Speeds, fastest: Speeds) -> float:
    """`fastest` are the speeds of the fastest of those with the largest weight."""
    pairs = zip(fastest, speeds, strict=True)
    times = [most / own for most, own in pairs if most is not None and own is not None]
    if weight == 1.0 or not times:
        return weight
    share = weight * max(times)
    return share if share < ALIKE else 1.0
