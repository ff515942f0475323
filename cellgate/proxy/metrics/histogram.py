"""Histograms that need two additions for each observation: plain ints in a list, rendered only at scrape.

The bounds are those of LLM serving, where the usual web buckets (5 ms to 10 s) are wrong at both ends: a time
to first token runs from a cached prefill to minutes of queue, a whole answer from a second to half an hour,
and what decides between good and bad inter-token latency happens between 10 and 200 ms.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

TTFT_BOUNDS_S = (
    *(0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),  # cached or short prompts: where objectives are set
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0),  # long prompts
    *(20.0, 30.0, 60.0, 120.0, 300.0),  # queues, warm-up, and what is lost
)
DURATION_BOUNDS_S = (
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    15.0,
    20.0,
    30.0,
    45.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
LOOP_LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
GAP_BOUNDS_MS = (5, 10, 15, 20, 25, 30, 40, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 4000)
"""Around the steps of engines (10 to 50 ms), reading speed (about 200 ms a token) and stalls."""


Buckets = list[tuple[str, float]]
"""What Prometheus wants to see: (upper bound, observations up to it), the last bound being +Inf."""


class Histogram:
    """Counts of observations by upper bound (inclusive); the last count takes what is above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def read(self) -> tuple[Buckets, float]:
        """The cumulated buckets and the sum."""
        return _named(self.bounds, list(accumulate(self.counts))), self.total


def gap_buckets(gaps_ms: Sequence[int]) -> tuple[Buckets, float]:
    """The cumulated buckets and the sum, in seconds, of gaps counted per whole millisecond.

    `gaps_ms[i]` counts the gaps of i to i + 1 ms, so that a bound in milliseconds falls between two counts
    and the buckets are exact. The sum takes the middle of each millisecond, and the end of the list for all
    that is longer.
    """
    bounds = tuple(bound for bound in GAP_BOUNDS_MS if bound < len(gaps_ms))
    edges = (0, *bounds, len(gaps_ms))
    counts = [sum(gaps_ms[start:end]) for start, end in pairwise(edges)]
    total_ms = sum(map(mul, gaps_ms, range(len(gaps_ms)))) + 0.5 * sum(counts)
    return _named([bound / 1000 for bound in bounds], list(accumulate(counts))), total_ms / 1000


def _named(bounds: Sequence[float], cumulated: Sequence[int]) -> Buckets:
    return list(zip([*(repr(float(bound)) for bound in bounds), "+Inf"], cumulated, strict=True))
