"""Least load: the unit that would answer soonest, whatever its prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from cellgate.router.nouns import Ask, Candidate

TIE_S = 0.001
"""Nobody notices a millisecond: units that are so near to each other are picked by chance, not in a herd."""


_cost_s = attrgetter("cost_s")


def soonest_first(candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
    """By cost; which of those that are a tie comes first is left to chance."""
    if len(candidates) == 1:
        return candidates
    ranked = sorted(candidates, key=_cost_s)
    ties, until_s = 1, ranked[0].cost_s + TIE_S
    while ties < len(ranked) and ranked[ties].cost_s <= until_s:
        ties += 1
    if ties > 1:
        ranked.insert(0, ranked.pop(int(rng.random() * ties)))
    return ranked


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Ranks by predicted seconds that take nothing to be cached, ties by chance."""

    by_seconds: ClassVar[bool] = True
    by_cache: ClassVar[bool] = False

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, least loaded first."""
        return soonest_first(candidates, rng)
