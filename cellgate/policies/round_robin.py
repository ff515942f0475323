"""Round robin, in proportion to the weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cellgate.router.nouns import Ask, Candidate

# Consecutive multiples of the golden ratio's fraction cover [0, 1) more evenly than any other sequence
# (Weyl, 1916), so one counter gives every unit its share without remembering who is in the list.
_ROUND_STRIDE = 0.6180339887498949


@dataclass(slots=True)
class RoundRobin:
    """Takes turns; a unit of weight 2 gets two turns for every one of a unit of weight 1."""

    by_seconds: ClassVar[bool] = False
    by_cache: ClassVar[bool] = False
    _turn: int = field(default=0, repr=False)

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, starting with the one whose turn it is."""
        total = sum(c.weight for c in candidates)
        turn, self._turn = self._turn, self._turn + 1
        if all(c.weight == candidates[0].weight for c in candidates):
            start = turn % len(candidates)
        else:
            start = _holder(candidates, (turn * _ROUND_STRIDE % 1.0) * total)
        return [*candidates[start:], *candidates[:start]]


def _holder(candidates: Sequence[Candidate], point: float) -> int:
    for index, candidate in enumerate(candidates):
        point -= candidate.weight
        if point < 0:
            return index
    return len(candidates) - 1
