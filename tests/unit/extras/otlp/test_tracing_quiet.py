"""Tracing where it must not be noticed, and metrics by OTLP: the same numbers, whatever is wrong with one."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, HistogramDataPoint
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from cellgate.extras import otlp
from cellgate.extras.otlp import Exporter, MetricsSender, in_short
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.observe import gen_ai
from cellgate.proxy.observe.counters import Metrics
from cellgate.proxy.observe.gen_ai import GenAiMetrics
from cellgate.proxy.observe.log import Level
from cellgate.proxy.telemetry import send_metrics, trace
from cellgate.router.board import Board
from cellgate.router.nouns import Rules
from loadtests.kit.collector import Collector, collecting
from loadtests.kit.processes import free_port
from tests.unit.observe.test_metrics import A1, A2, DONE, make, samples

ENDPOINT = "http://collector:4318/v1/traces"


_POOL = "HTTPConnectionPool(host='c', port=9): "
_TRIED = f"Transient error {_POOL}Max retries exceeded with url: /v1/traces (Caused by "


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            f'{_TRIED}NewConnectionError("HTTPConnection: [Errno 111] Connection refused")), retrying',
            "Connection refused",
        ),
        (f"{_TRIED}SSLError(1, '[SSL: NO_CIPHER] verify failed (_ssl.c:1)'))", "verify failed"),
        (f"{_POOL}Read timed out. (read timeout=10)", "Read timed out"),
        (
            "Failed to export spans batch code: 503, reason: full",
            "Failed to export spans batch code: 503, reason: full",
        ),
    ],
)
def test_the_cause_is_told_and_not_the_path_to_it(said: str, cause: str) -> None:
    assert in_short(said) == cause


class Away(SpanExporter):
    """An exporter whose collector is there or not."""

    def __init__(self) -> None:
        self.is_there = False
        self.crashes = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """As the real one: it logs at each try."""
        assert self.may_go_on.wait(10.0)
        if self.crashes:
            raise RuntimeError("broken")
        if self.is_there:
            return SpanExportResult.SUCCESS
        logging.getLogger("opentelemetry.exporter.otlp").warning("refused, retrying")
        logging.getLogger("opentelemetry.exporter.otlp").error("given up")
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing to close."""


def test_each_change_of_the_collectors_state_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    away, lines, spans = Away(), list[tuple[Level, str]](), [ReadableSpan("request")] * 10
    exporter = Exporter(away, ENDPOINT, lambda level, text: lines.append((level, text)))
    for _ in range(5):
        assert exporter.export(spans) is SpanExportResult.FAILURE
    away.crashes = True
    exporter.export(spans)
    away.is_there, away.crashes = True, False
    for _ in range(5):
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    away.crashes = True
    assert exporter.export(spans) is SpanExportResult.FAILURE
    refused = f"tracing: {ENDPOINT} does not accept spans"
    lost = "spans are dropped until it does; requests are not affected"
    assert lines == [
        ("warning", f"{refused} (refused, retrying): {lost}"),
        ("info", f"tracing: {ENDPOINT} accepts spans again; at least 60 were lost"),
        ("warning", f"{refused} (RuntimeError('broken')): {lost}"),
    ]
    assert capfd.readouterr() == ("", "")


def test_spans_that_nobody_takes_are_bounded_and_silent(capfd: pytest.CaptureFixture[str]) -> None:
    away, provider = Away(), TracerProvider(shutdown_on_exit=False)
    processor = BatchSpanProcessor(Exporter(away, ENDPOINT, lambda *_: None), 64, 1.0, 16)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    away.may_go_on.clear()
    for _ in range(1000):
        tracer.start_span("request").end()
    assert len(processor._batch_processor._queue) <= 64
    away.is_there = True
    away.may_go_on.set()
    provider.shutdown()
    assert capfd.readouterr() == ("", "")


def test_a_gate_without_the_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = "opentelemetry.exporter.otlp"
    monkeypatch.delitem(sys.modules, "cellgate.extras.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.setitem(sys.modules, f"{exporter}.proto.http.metric_exporter", None)
    with caplog.at_level(logging.INFO):
        trace(TracingSettings(ENDPOINT), cast(Gateway, None))()
        monkeypatch.undo()
        monkeypatch.setitem(sys.modules, f"{exporter}.proto.http.metric_exporter", None)
        monkeypatch.delitem(sys.modules, "cellgate.extras.otlp", raising=False)
        assert (
            send_metrics("http://collector:4318/v1/metrics", Metrics(Board(Rules())), GenAiMetrics()) is None
        )
    spans, metrics = caplog.messages
    assert f"opentelemetry.context is not installed: {how_to_install('otel')}" in spans
    assert metrics.startswith(f"metrics are not sent by OTLP, though it is configured: {exporter}")


# The numbers that are sent by OTLP are those of /metrics.

OFTEN_S = 0.02
_CHANGING = ("process_", "cellgate_tasks")
"""What another moment shows otherwise."""


def received(collector: Collector) -> dict[str, float]:
    """What came, named as a collector names it for Prometheus."""
    found: list[Sample] = []
    for metric in collector.metrics.values():
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind or "gauge").data_points:
            labels = {pair.key: pair.value.string_value for pair in point.attributes}
            if kind == "histogram":
                found += _of_histogram(metric.name, point, labels)
            else:
                name = f"{metric.name}_total" if kind == "sum" else metric.name
                found.append(Sample(name, labels, point.as_double or point.as_int))
    return samples([SimpleNamespace(samples=found)])


def _of_histogram(name: str, point: HistogramDataPoint, labels: dict[str, str]) -> Iterator[Sample]:
    yield Sample(f"{name}_count", labels, point.count)
    yield Sample(f"{name}_sum", labels, point.sum)
    bounds = [*map(repr, point.explicit_bounds), "+Inf"] if point.explicit_bounds else []
    for bound, total in zip(bounds, accumulate(point.bucket_counts), strict=False):
        yield Sample(f"{name}_bucket", labels | {"le": bound}, total)


async def test_each_number_of_the_exposition_comes_once() -> None:
    metrics, _ = make(A1, A2)
    for unit, ttft_s in (("a1", 0.2), ("a2", 400.0), ("a2", None)):
        metrics.finished(DONE._replace(unit=unit, ttft_s=ttft_s))
    async with collecting() as collector:
        sender = MetricsSender(collector.metrics_endpoint, metrics, GenAiMetrics(), OFTEN_S)
        while collector.batches < 2:  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(OFTEN_S)
        await sender.close()
    assert collector.resource["service.name"] == "cellgate"

    def steady(numbers: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in numbers.items() if not name.startswith(_CHANGING)}

    exposed = samples([family async for family in metrics.families()])
    assert steady(received(collector)) == pytest.approx(steady(exposed))
    assert "process_resident_memory_bytes" in collector.metrics
    ttft = collector.metrics["cellgate_ttft_seconds"].histogram
    assert ttft.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert collector.metrics["cellgate_client_requests"].sum.is_monotonic


async def test_generations_have_the_names_attributes_and_bounds_of_the_convention() -> None:
    metrics, generations = make(A1)[0], GenAiMetrics()
    generations.answered("chat", "vllm", "tiny", "", 3.0, 0.3, 0.03)
    generations.answered("chat", "vllm", "tiny", "", 2.0, 0.3, None)
    generations.answered("embeddings", "cellgate", "", "no_unit", 0.001, 0.5, 0.5)
    async with collecting() as collector:
        sender = MetricsSender(collector.metrics_endpoint, metrics, generations, OFTEN_S)
        while not collector.batches:  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(OFTEN_S)
        await sender.close()
    found = {}
    for metric in (gen_ai.DURATION, gen_ai.FIRST_TOKEN, gen_ai.OUTPUT_TOKEN):
        sent = collector.metrics[metric.name]
        assert (sent.unit, sent.description) == ("s", metric.text)
        for point in sent.histogram.data_points:
            assert list(point.explicit_bounds) == list(metric.bounds)
            assert sum(point.bucket_counts) == point.count
            about = {pair.key.rpartition("gen_ai.")[2]: pair.value.string_value for pair in point.attributes}
            found[metric.name.rpartition(".")[2], *about.items()] = (point.count, point.sum)
    tiny = (("operation.name", "chat"), ("provider.name", "vllm"), ("request.model", "tiny"))
    refused = (("operation.name", "embeddings"), ("provider.name", "cellgate"), ("error.type", "no_unit"))
    assert found == {
        ("duration", *tiny): (2, 5.0),
        ("duration", *refused): (1, 0.001),
        ("time_to_first_token", *tiny): (2, 0.6),
        ("time_per_output_token", *tiny): (1, 0.03),
    }


def test_of_more_models_than_anybody_has_there_are_no_more_histograms() -> None:
    generations = GenAiMetrics()
    for number in range(2 * gen_ai.SERIES_MOST):
        generations.answered("chat", "vllm", f"m{number}", "", 1.0, None, None)
    assert len(generations.read()) == gen_ai.SERIES_MOST


class Watched:
    """An exporter that counts, and metrics that cannot be read the first time."""

    def __init__(self, export: Callable[..., MetricExportResult]) -> None:
        self.reads, self.sent, self._export = 0, 0, export

    def shutdown(self) -> None: ...

    def export(self, batch: object) -> MetricExportResult:
        self.sent += 1
        return self._export(batch)

    async def families(self) -> AsyncIterator[Family]:
        self.reads += 1
        if self.reads == 1:
            raise KeyError("gone")
        yield Family("a", "a", "gauge")


async def test_a_collector_that_is_away_costs_one_line_and_metrics_that_cannot_be_read_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "EXPORT_TIMEOUT_S", 0.01)
    endpoint, said = f"http://127.0.0.1:{free_port()}/v1/metrics", list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["exception"]))
    metrics: Any = Watched(OTLPMetricExporter(endpoint, timeout=0.01).export)
    with caplog.at_level(logging.INFO):
        sender = MetricsSender(endpoint, metrics, GenAiMetrics(), OFTEN_S)
        sender._exporter = metrics
        while metrics.sent < 3:  # noqa: ASYNC110 - nobody tells.
            await asyncio.sleep(OFTEN_S)
        await sender.close()
    [error] = said
    assert isinstance(error, KeyError)
    [line] = [line for line in caplog.messages if "otlp_metrics" in line]
    assert line.startswith(f"otlp_metrics: {endpoint} does not accept metrics (")
