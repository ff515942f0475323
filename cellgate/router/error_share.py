"""Errors of a unit: how many attempts fail, and whether that tells it from its peers. Pure.

Equals fail alike, each in its turn, and whose turn it was is chance. Whoever avoids the one that has just
failed leaves it idle beside the others until that is forgotten. So where peers fail as well, a failure counts
only if one of them fails less often, and chance hardly explains that. Where no peer fails it counts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from cellgate.router.equals import chance_of

ALSO_OF_OTHERS_S = 30.0
"""What another unit has done so lately is no suspicion of this one."""
_COMPARED_S = 1.0
"""So long it counts how others fail: that is looked at on each tick."""
_ATTEMPTS = 32
"""So many attempts on each of two units are compared. More would hide a unit that has just begun to fail."""
_FULL_RECORD = 1 << _ATTEMPTS
_HARDLY = 0.002
"""So seldom one of several equals differs so much from another one by chance."""


class Errors:
    """The recent share of failed attempts on a unit: each failure halves the distance to 1."""

    HALF_LIFE_S = 10.0
    MAX = 0.99

    def __init__(self) -> None:
        self.last_share = 0.0
        """After the last attempt that has changed it; 0: none has failed."""
        self.counts = False
        """Attempts that succeed are counted, for this unit or a peer has failed."""
        self.failed_at = -inf
        self._at = 0.0
        self._recent = 1
        """The last attempts, one bit each behind a 1, the last one at the end: 1 has failed."""
        self._others = Others()

    def share(self, now: float) -> float:
        """0 to MAX. It fades, so that a unit with old failures is tried again."""
        if not self.last_share:
            return 0.0
        return self.last_share * float(0.5 ** (max(now - self._at, 0.0) / self.HALF_LIFE_S))

    def excess(self, now: float) -> float:
        """The same where it tells the unit from its peers, else 0."""
        return 0.0 if not self.last_share or self.is_by_chance(now) else self.share(now)

    def failed(self, now: float) -> None:
        """An attempt failed by the unit's fault."""
        share = self.share(now)
        self.last_share, self._at = min(share + (1.0 - share) / 2.0, self.MAX), now
        self.failed_at = now
        if self.counts:
            self._count(1)
        # The failure that begins the count is none of those that are counted.
        self.counts = True

    def worked(self, now: float) -> None:
        """An attempt succeeded. To be called while it `counts`."""
        self.last_share, self._at = self.share(now) / 2.0, now
        self._count(0)

    def _count(self, failed: int) -> None:
        recent = self._recent << 1 | failed
        self._recent = recent & (_FULL_RECORD - 1) | _FULL_RECORD if recent >= 2 * _FULL_RECORD else recent

    def counted(self, in_flight: int) -> tuple[int, int]:
        """How many of the last attempts have failed, and how many there were. Those in flight have not failed
        so far: failures come at once, and long answers end late.
        """
        tried = self._recent.bit_length() - 1
        return self._recent.bit_count() - 1, min(tried + in_flight, _ATTEMPTS)

    def compare(self, others: Others) -> None:
        """Set what it is compared with."""
        self._others = others

    def is_by_chance(self, now: float) -> bool:
        """Whether peers fail as well, and none so much less that it hardly is chance."""
        others = self._others
        if not others.fail or now - others.at > _COMPARED_S:
            return False
        failed, tried = self.counted(others.in_flight)
        return others.peers * chance_of(failed, tried, others.failed, others.tried) > _HARDLY


class Others(NamedTuple):
    """What a unit is compared with, and its own attempts `in_flight`: so many peers, and of the attempts on
    the best one of these so many have failed. Not `fail`: none of them fails.
    """

    peers: int = 0
    failed: int = 0
    tried: int = 0
    in_flight: int = 0
    fail: bool = False
    at: float = -inf


def compare_errors(units: Sequence[tuple[Errors, int]], now: float) -> None:
    """Compare units that serve the same, of which some have failed; with the attempts in flight at each."""
    counts = [errors.counted(in_flight) for errors, in_flight in units]
    failing = sum(now - errors.failed_at <= ALSO_OF_OTHERS_S for errors, _ in units)
    # Few attempts tell little.
    best = sorted(counts, key=lambda one: (one[0] + 1) / (one[1] + 2))[:2]
    for (errors, in_flight), own in zip(units, counts, strict=True):
        errors.counts = True
        others = failing - (now - errors.failed_at <= ALSO_OF_OTHERS_S)
        peer = best[-1] if own is best[0] else best[0]
        errors.compare(Others(len(units) - 1, *peer, in_flight, others > 0, now))
