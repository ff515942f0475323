"""One family of metrics from rows of label values and a number; each name begins with `cellgate_`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

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


def renamed(old: str, family: Metric) -> Iterator[Metric]:
    """A family, and a copy under its `old` name of the last release, of what has been counted."""
    copy = Metric(f"cellgate_{old}", f"Deprecated, now {family.name}.", family.type)
    for sample in family.samples:
        if sample.value == 0 and family.type == "counter" and len(family.samples) > 1:
            continue
        copy.add_sample(copy.name + sample.name.removeprefix(family.name), sample.labels, sample.value)
    yield family
    yield copy
