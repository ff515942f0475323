"""The families of /metrics in OTLP's data model, number by number: what is counted is decided there alone.

https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/: a counter is a monotonic
sum without `_total` in its name, which collectors add again for Prometheus. The SDK has no summaries: count
and sum are a histogram without bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import Metric as Family

CUMULATIVE = AggregationTemporality.CUMULATIVE


@dataclass(slots=True)
class _Row:
    """The samples of one histogram or summary. `buckets`: cumulated counts by upper bound."""

    buckets: list[tuple[float, float]] = field(default_factory=list)
    count: float = 0.0
    total: float = 0.0


def metrics_data(families: Iterable[Family], resource: Resource, start_ns: int, now_ns: int) -> MetricsData:
    """All families, as they stand at `now_ns`; counters began at `start_ns` (nanoseconds since 1970)."""
    metrics = [
        Metric(family.name, family.documentation, "", _data(family, start_ns, now_ns))
        for family in families
        if family.samples
    ]
    scope = ScopeMetrics(InstrumentationScope("cellgate"), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _data(family: Family, start_ns: int, now_ns: int) -> Sum | Gauge | Histogram:
    if family.type in ("histogram", "summary"):
        return Histogram(list(_distributions(family, start_ns, now_ns)), CUMULATIVE)
    points = [
        NumberDataPoint(dict(sample.labels), start_ns, now_ns, float(sample.value))
        for sample in family.samples
    ]
    return Sum(points, CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)


def _distributions(family: Family, start_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    unknown: Any = None
    for labels, row in _rows(family).items():
        bounds = [bound for bound, _ in row.buckets[:-1]]
        counts = [later - before for before, later in pairwise([0.0, *(n for _, n in row.buckets)])]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start_ns,
            time_unix_nano=now_ns,
            count=int(row.count),
            sum=row.total,
            bucket_counts=[int(each) for each in counts] or [int(row.count)],
            explicit_bounds=bounds,
            min=unknown,
            max=unknown,
        )


def _rows(family: Family) -> dict[tuple[tuple[str, str], ...], _Row]:
    rows = defaultdict[tuple[tuple[str, str], ...], _Row](_Row)
    for sample in family.samples:
        row = rows[tuple(pair for pair in sample.labels.items() if pair[0] != "le")]
        if sample.name.endswith("_bucket"):
            row.buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            row.count = sample.value
        else:
            row.total = sample.value
    return rows
