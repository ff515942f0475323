"""Varying answers: a name server may give only a part of its addresses each time. Pure.

1. A unit that an answer leaves out stays while it passes its probes, and was named in one of the last few
   answers. How many these are is learnt from how the answers vary.
2. Three while nothing has ever come back; none if others are named in its place: it has been replaced. Once
   some has, so many that a unit which is there is hardly ever left out of all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from math import ceil, log

from cellgate.proxy.discovery.base import Found
from cellgate.router.nouns import Unit

LEAST, MOST = 3, 120
"""So many answers at least, and at most: 15 s and 10 minutes at 5 s."""
CHANCE = 0.001
"""How likely it may be that an answer takes out a unit that is still there."""
REMEMBERED = 240
"""Who has not varied in so many answers does not vary."""


class VaryingAnswers:
    """All answers of one source."""

    def __init__(self) -> None:
        self._units: dict[str, Unit] = {}
        self._named_at: dict[str, int] = {}
        """By unit: the last answer that named it."""
        self._shares: deque[float] = deque(maxlen=REMEMBERED)
        """Of the last answers: which part of the known units they named."""
        self._answers = 0
        self._varied_at = -REMEMBERED
        self._renewed_at = 0
        """The last answer that named a unit for the first time."""

    def take(self, found: Found, lost: Collection[str]) -> Found:
        """An answer, with the units that it leaves out and that stay; `lost` do not pass their probes."""
        self._answers += 1
        for unit in found.units:
            if self._named_at.get(unit.name, self._answers) < self._answers - 1:
                self._varied_at = self._answers
            if unit.name not in self._units:
                self._renewed_at = self._answers
            self._units[unit.name], self._named_at[unit.name] = unit, self._answers
        self._shares.append(len(found.units) / max(len(self._units), 1))
        oldest = self._answers - self.patience()
        if not self._varies():
            oldest = max(oldest, self._renewed_at - 1)
        named = {unit.name for unit in found.units}
        for name in self._units.keys() - named:
            # One that comes back soon after shows that answers vary, though it was given up.
            if self._named_at[name] < self._answers - MOST:
                del self._units[name], self._named_at[name]
        stays = [
            unit
            for name, unit in self._units.items()
            if name in named or (self._named_at[name] > oldest and name not in lost)
        ]
        return replace(found, units=tuple(sorted(stays, key=lambda unit: unit.name)))

    def patience(self) -> int:
        """In how many answers in a row a unit must be left out to be gone."""
        if not self._varies() or not self._shares:
            return LEAST
        share = sum(self._shares) / len(self._shares)
        if share >= 1.0:
            return LEAST
        count = log(CHANCE / max(len(self._units), 1)) / log(1.0 - share) if share > 0.0 else MOST
        return min(max(ceil(count), LEAST), MOST)

    def _varies(self) -> bool:
        return self._answers - self._varied_at < REMEMBERED
