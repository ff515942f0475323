"""Least load: the unit that would answer soonest, whatever its prefix cache holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cellgate.router.nouns import Ask, Candidate
from cellgate.router.soonest import soonest_first

@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Ranks by predicted seconds without prefix caches, ties at random."""

    by_seconds: ClassVar[bool] = True
    by_cache: ClassVar[bool] = False

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, least loaded first."""
        return soonest_first(candidates, rng)
