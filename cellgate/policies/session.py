"""Session: requests of one session go to the same unit, unless it is overloaded.

Rendezvous hashing (Thaler and Ravishankar, 1996) with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018):
gates with the same units agree without communication. When a unit is removed only its sessions move, each to
a next unit of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from cellgate.policies.p2c import PowerOfTwo
from cellgate.router.nouns import Ask, Candidate

_WITHOUT_SESSION = PowerOfTwo()


@dataclass(frozen=True, slots=True)
class Session:
    """Ranks a session's units by rendezvous hashing; those above `bound` (1.25) times their share come last.

    An ask without a session goes to the less loaded of two.
    """

    by_seconds: ClassVar[bool] = False
    by_cache: ClassVar[bool] = False
    bound: float = 1.25

    def rank(self, ask: Ask, candidates: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
        """All candidates, the session's own unit first."""
        if not ask.session:
            return _WITHOUT_SESSION.rank(ask, candidates, rng)
        return self.owners(ask.session, candidates)

    def owners(self, session: str, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The units of a session in their order for it: those with room, then the others."""
        if len(candidates) == 1:
            return list(candidates)
        fair = (sum(c.load for c in candidates) + 1.0) / sum(c.weight for c in candidates) * self.bound
        return sorted(candidates, key=lambda c: (c.load >= fair * c.weight, _distance(session, c)))


def _distance(session: str, candidate: Candidate) -> float:
    """How far a unit is from a session; one of twice the weight is nearest to twice as many sessions."""
    # 53 bits and a half: a number strictly between 0 and 1.
    point = ((xxh3_64_intdigest(f"{session}\0{candidate.unit}".encode()) >> 11) + 0.5) / (1 << 53)
    return -log(point) / candidate.weight
