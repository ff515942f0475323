"""Least load: the unit that would answer soonest, whatever its prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from router.nouns import Ask, Candidate

TIE_S = 0.001
"""Nobody notices a millisecond: units that are so near to each other are picked by chance, not in a herd."""


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Ranks by the predicted seconds of an ask of which nothing is cached, ties by chance."""

    by_seconds: ClassVar[bool] = True

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, least loaded first."""
        if len(candidates) == 1:
            return candidates
        chance = rng.random
        return sorted(candidates, key=lambda c: c.blind_s + TIE_S * chance())
