"""The unit that would answer soonest. Every policy that ranks by seconds puts it first. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter

from cellgate.router.nouns import Candidate

TIE_S = 0.001
"""Differences up to this do not matter: such units are picked at random, so that gates do not herd."""

_cost_s = attrgetter("cost_s")


def soonest(rows: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The one that costs least, of at least one; ties at random."""
    if len(rows) == 1:
        return rows[0]
    until_s = min([row[4] for row in rows]) + TIE_S
    ties = [row for row in rows if row[4] <= until_s]
    if len(ties) == 1:
        return ties[0]
    ties.sort(key=_cost_s)
    return ties[int(rng.random() * len(ties))]


def soonest_first(rows: Sequence[Candidate], rng: random.Random) -> Sequence[Candidate]:
    """All of them by cost, ties at random."""
    best = soonest(rows, rng)
    return [best, *sorted((row for row in rows if row is not best), key=_cost_s)]
