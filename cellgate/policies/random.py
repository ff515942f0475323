"""Random: an order drawn by weight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cellgate.router.nouns import Ask, Candidate


@dataclass(frozen=True, slots=True)
class Random:
    """Each unit leads with a probability proportional to its weight."""

    by_seconds: ClassVar[bool] = False
    by_cache: ClassVar[bool] = False

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates in a weighted random order."""
        return shuffled(candidates, rng)


def shuffled(candidates: Sequence[Candidate], rng: random.Random) -> list[Candidate]:
    """A weighted random order: keys u^(1/w), largest first (Efraimidis and Spirakis, 2006).

    Their logarithms, -ln(u)/w, smallest first: the powers themselves run into 0 or 1 for weights far from 1.
    """
    return sorted(candidates, key=lambda c: rng.expovariate(c.weight))
