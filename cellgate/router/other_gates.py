"""What other gates have at units. Pure.

What they tell is 0.25 s old on average, and all gates act on it at once, unseen by each other. If the last
word counted, all would choose the unit that was idle, and where requests are short it no longer is.

Of prompts to be computed, their next ones count as well: meanwhile units compute, and as much work comes
anew, to where the least is left, as water fills a vessel from its bottom. So units that were idle look alike,
and those with a long line stay apart. (Dahlin, Interpreting Stale Load Information, 1999.)

Of sequences being decoded the mean counts. It keeps what lasts: a fast unit has more than a slow one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

UNSEEN_S = 0.5
"""What others send within this time is not known: what they tell is up to a heartbeat old, and used until the
next. From 0.4 to 0.8 s it makes no difference (docs/evidence/gym.md).
"""
MEAN_S = 5.0
"""The mean follows within about this time. Chosen in the gym (docs/evidence/gym.md)."""
_NONE = 0.05
"""So few sequences on average are none."""


class Elsewhere(NamedTuple):
    """What other gates report of a unit: attempts, those of them whose prompts are to be computed, and the
    tokens of these; and the worst that one of them has seen: the recent share of attempts that failed, how
    much slower than its cell it is, and the usual gap between its tokens (0: unknown); `drained`: an operator
    has drained it at one of them.
    """

    in_flight: int = 0
    prefilling: int = 0
    uncached_tokens: int = 0
    errors: float = 0.0
    degraded: float = 0.0
    itl_s: float = 0.0
    drained: bool = False


NOTHING_ELSEWHERE = Elsewhere()


class Line(NamedTuple):
    """Seconds that a unit needs for prompts: this gate's, and those that others told of."""

    own_s: float
    told_s: float


def expected_s(lines: Sequence[Line]) -> list[float]:
    """Seconds of others' prompts at each unit, where all these serve the same requests."""
    told_s = sum(line.told_s for line in lines)
    if not told_s:
        return [0.0] * len(lines)
    there = [line.own_s + line.told_s for line in lines]
    computed = [min(each, UNSEEN_S) for each in there]
    left = [each - gone for each, gone in zip(there, computed, strict=True)]
    level = _level(left, sum(computed) * told_s / sum(there))
    return [
        max(line.told_s - gone, 0.0) + max(level - rest, 0.0)
        for line, gone, rest in zip(lines, computed, left, strict=True)
    ]


class OtherGates:
    """Sequences of others that one unit decodes."""

    __slots__ = ("_heard_at", "_mean")

    def __init__(self) -> None:
        self._mean = 0.0
        self._heard_at: float | None = None

    def hear(self, told: float | None, now: float) -> float | None:
        """The mean, with what is told now; None: they have had nothing there for a while.

        `told` is None while they tell of nothing.
        """
        if told is None:
            if self._mean < _NONE:
                self._heard_at = None
                return None
            told = 0.0
        share = 1.0 if self._heard_at is None else 1.0 - exp((self._heard_at - now) / MEAN_S)
        self._heard_at = now
        self._mean += share * (told - self._mean)
        return self._mean


def _level(bottom: Sequence[float], amount: float) -> float:
    """How high so much fills a vessel of which each part has the same width and a bottom of its own."""
    level = below = 0.0
    for count, height in enumerate(sorted(bottom), 1):
        if height * (count - 1) - below >= amount:
            break
        below += height
        level = (amount + below) / count
    return level
