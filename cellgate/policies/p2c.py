"""Power of two choices: the less loaded of two units drawn by weight (Mitzenmacher, 2001)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cellgate.policies.random import shuffled
from cellgate.router.nouns import Ask, Candidate


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Draws an order by weight and puts the less loaded of the first two in front."""

    by_seconds: ClassVar[bool] = False
    by_cache: ClassVar[bool] = False

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates; among the first two drawn the one with less load for its weight leads."""
        order = shuffled(candidates, rng)
        if len(order) > 1 and order[1].load / order[1].weight < order[0].load / order[0].weight:
            order[0], order[1] = order[1], order[0]
        return order
