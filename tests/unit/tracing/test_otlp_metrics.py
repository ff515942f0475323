"""The numbers that are sent by OTLP are those of /metrics."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, HistogramDataPoint, Metric
from prometheus_client import Metric as Family

from cellgate.proxy.config.settings import OtlpMetrics
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.tracing import MetricsSender
from loadtests.kit.collector import Collector, collecting
from loadtests.kit.processes import free_port
from tests.unit.observe.test_metrics import A1, A2, DONE, make

OFTEN_S = 0.02
Key = tuple[str, tuple[tuple[str, str], ...]]
_CHANGING = ("process_", "cellgate_tasks")
"""What another moment shows otherwise."""


def exposed(metrics: Metrics) -> dict[Key, float]:
    """All samples of /metrics."""

    async def read() -> list[Family]:
        return [family async for family in metrics.families()]

    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in asyncio.run(read())
        for sample in family.samples
    }


def received(collector: Collector) -> dict[Key, float]:
    """The same of what came, named as a collector names it for Prometheus."""
    found: dict[Key, float] = {}
    for metric in collector.metrics.values():
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind or "gauge").data_points:
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            if kind == "histogram":
                _take_histogram(found, metric, point, labels)
            else:
                name = f"{metric.name}_total" if kind == "sum" else metric.name
                found[name, tuple(sorted(labels.items()))] = point.as_double or point.as_int
    return found


def _take_histogram(
    found: dict[Key, float], metric: Metric, point: HistogramDataPoint, labels: dict[str, str]
) -> None:
    own, total = tuple(sorted(labels.items())), 0
    found[f"{metric.name}_count", own], found[f"{metric.name}_sum", own] = point.count, point.sum
    bounds = [repr(bound) for bound in point.explicit_bounds] + ["+Inf"]
    if len(bounds) == 1:
        return
    for bound, count in zip(bounds, point.bucket_counts, strict=True):
        total += count
        found[f"{metric.name}_bucket", tuple(sorted({**labels, "le": bound}.items()))] = total


def test_each_number_of_the_exposition_comes_once() -> None:
    metrics, _ = make(A1, A2)
    for unit, ttft_s in (("a1", 0.2), ("a2", 400.0), ("a2", None)):
        metrics.finished(DONE._replace(unit=unit, ttft_s=ttft_s))

    async def send() -> Collector:
        async with collecting() as collector:
            sender = MetricsSender(OtlpMetrics(collector.metrics_endpoint, OFTEN_S), metrics)
            await asyncio.sleep(10 * OFTEN_S)
            await sender.close()
            return collector

    collector = asyncio.run(send())
    assert collector.batches > 1
    assert collector.resource["service.name"] == "cellgate"

    def steady(numbers: dict[Key, float]) -> dict[Key, float]:
        return {key: value for key, value in numbers.items() if not key[0].startswith(_CHANGING)}

    assert steady(received(collector)) == pytest.approx(steady(exposed(metrics)))
    assert "process_resident_memory_bytes" in collector.metrics
    ttft = collector.metrics["cellgate_ttft_seconds"].histogram
    assert ttft.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert collector.metrics["cellgate_client_requests"].sum.is_monotonic


def test_a_collector_that_is_away_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics, _ = make(A1)
    endpoint = f"http://127.0.0.1:{free_port()}/v1/metrics"

    async def send() -> None:
        sender = MetricsSender(OtlpMetrics(endpoint, OFTEN_S), metrics)
        await asyncio.sleep(1.0)
        await sender.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(send())
    lines = [line for line in caplog.messages if "otlp_metrics" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"otlp_metrics: {endpoint} does not accept metrics (")
