"""What other gates have at a unit: the mean of what they told of late. Pure.

What they tell is 0.25 s old on average, and all gates act on it at once, unseen by each other. If the last
word counted, all would choose the unit that was idle, and where requests are short it no longer is. The mean
keeps what lasts: a fast unit has more than a slow one.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

MEAN_S = 5.0
"""The mean follows within about this time. Chosen in the gym (docs/evidence/gym.md)."""
_NONE = 0.05
"""So few requests on average are none."""


class OthersWork(NamedTuple):
    """Requests of others at a unit, and tokens of their prompts to be computed."""

    in_flight: float
    uncached_tokens: float


class OtherGates:
    """Of one unit."""

    __slots__ = ("_heard_at", "_mean")

    def __init__(self) -> None:
        self._mean = OthersWork(0.0, 0.0)
        self._heard_at: float | None = None

    def hear(self, told: OthersWork | None, now: float) -> OthersWork | None:
        """The mean, with what is told now; None: they have had nothing there for a while.

        `told` is None while they tell of nothing.
        """
        if told is None:
            if self._mean.in_flight < _NONE:
                self._heard_at = None
                return None
            told = OthersWork(0.0, 0.0)
        share = 1.0 if self._heard_at is None else 1.0 - exp((self._heard_at - now) / MEAN_S)
        self._heard_at, mean = now, self._mean
        self._mean = OthersWork(
            mean.in_flight + share * (told.in_flight - mean.in_flight),
            mean.uncached_tokens + share * (told.uncached_tokens - mean.uncached_tokens),
        )
        return self._mean
