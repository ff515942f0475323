"""One family of metrics from rows of label values and a number; each name begins with `cellgate_`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.samples import Exemplar

MetricRow = tuple[Sequence[str], float]
"""Label values, and the number they have."""


def counter(name: str, text: str, labels: Sequence[str], rows: Iterable[MetricRow]) -> Metric:
    """A counter; `_total` is added to its name."""
    family = CounterMetricFamily(f"cellgate_{name}", text, labels=labels)
    for row, value in rows:
        family.add_metric(row, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[MetricRow]) -> Metric:
    """A gauge."""
    family = GaugeMetricFamily(f"cellgate_{name}", text, labels=labels)
    for row, value in rows:
        family.add_metric(row, float(value))
    return family


def histogram(
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[str], Sequence[Sequence[object]], float]],
) -> Metric:
    """Cumulated buckets (bound, count, and perhaps an exemplar) and a sum for each row of labels."""
    family = HistogramMetricFamily(f"cellgate_{name}", text, labels=labels)
    for row, bounds, total in rows:
        family.add_metric(row, bounds, total)  # type: ignore[arg-type]  # says pairs, and takes exemplars
    return family


def summary(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], int, float]]
) -> Metric:
    """A count and a sum for each row of labels."""
    family = SummaryMetricFamily(f"cellgate_{name}", text, labels=labels)
    for row, count, total in rows:
        family.add_metric(row, count, total)
    return family


# Histograms that need two additions for each observation: plain ints in a list, rendered only at scrape.
#
# The bounds are those of LLM serving, where the usual web buckets (5 ms to 10 s) are wrong at both ends: a
# time
# to first token runs from a cached prefill to minutes of queue, a whole answer from a second to half an
# hour,
# and what decides between good and bad inter-token latency happens between 10 and 200 ms.


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


# Exemplars: beside a bucket of a histogram stands one request that fell into it, by the id of its trace.
#
# Only requests that are traced have one, and only the OpenMetrics format can show them:
# https://github.com/OpenObservability/OpenMetrics/blob/main/specification/OpenMetrics.md#exemplars


TTFT, DURATION = "ttft_seconds", "request_duration_seconds"
_BOUNDS = {TTFT: TTFT_BOUNDS_S, DURATION: DURATION_BOUNDS_S}


class Traced(NamedTuple):
    """A request that was traced: the unit that answered it, and what was observed."""

    unit: str
    shown: Exemplar


class Exemplars:
    """The latest traced request of each bucket, by family and cell: as many as there are buckets at most."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], dict[int, Traced]] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._latest)

    def note(self, family: str, cell: str, unit: str, value_s: float, trace_id: str) -> None:
        """A traced request was observed."""
        bucket = bisect_left(_BOUNDS[family], value_s)
        shown = Exemplar({"trace_id": trace_id}, value_s, round(time.time(), 3))
        self._latest.setdefault((family, cell), {})[bucket] = Traced(unit, shown)

    def beside(
        self, family: str, cell: str, unit: str | None, buckets: Buckets
    ) -> Sequence[Sequence[object]]:
        """The buckets of one row, each with its exemplar, if it has one; `unit` None: those of all units."""
        found = self._latest.get((family, cell))
        if not found:
            return buckets
        return [
            (*bucket, traced.shown)
            if (traced := found.get(number)) is not None and unit in (None, traced.unit)
            else bucket
            for number, bucket in enumerate(buckets)
        ]
