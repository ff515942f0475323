"""Least load: the unit that would answer soonest, whatever its prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from cellgate.router.nouns import Ask, Candidate

TIE_S = 0.001
"""Differences up to this do not matter: such units are picked at random, so that gates do not herd."""
_cost_s = attrgetter("cost_s")


def soonest_first(_ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
    """Ordered by cost, ties at random."""
    if len(candidates) == 1:
        return candidates
    ranked = sorted(candidates, key=_cost_s)
    until_s = ranked[0].cost_s + TIE_S
    if ranked[1].cost_s > until_s:
        return ranked
    ties = 2
    while ties < len(ranked) and ranked[ties].cost_s <= until_s:
        ties += 1
    if first := int(rng.random() * ties):
        ranked.insert(0, ranked.pop(first))
    return ranked


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Ranks by predicted seconds without prefix caches, ties at random."""

    by_seconds: ClassVar[bool] = True
    by_cache: ClassVar[bool] = False

    rank = staticmethod(soonest_first)
