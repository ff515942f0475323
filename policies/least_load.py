"""Least load: the unit with the fewest requests in flight for its weight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from router.nouns import Ask, Candidate


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """Ranks by (load + 1) / weight, ties by chance.

    The `+ 1` is the request being placed: among idle units the heavier one comes first.
    """

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, least loaded first."""
        if len(candidates) == 1:
            return candidates
        chance = rng.random
        return sorted(candidates, key=lambda c: ((c.load + 1.0) / c.weight, chance()))
