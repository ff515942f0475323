"""Decides which requests are traced, and exports their spans.

A request is traced when its client asks for it, or, without a traceparent, at random. Others are handled as
with tracing off; their units learn that they are not sampled.

In this order: `Tracing`, `Trace`, `CollectorLink`, `Exporter`, `resource`, `metrics_data`, `MetricsSender`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from prometheus_client import Metric as Family

from cellgate import VERSION
from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.generations import OPERATIONS
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.counters import EXPORTS, Metrics, ResumeResult, tally
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.observe.gen_ai import GenAiMetrics, GenAiSeries
from cellgate.proxy.observe.helpers import LAST_WORDS
from cellgate.proxy.observe.log import Level, log_line
from cellgate.proxy.request.ports import Observer, TracedRequest
from cellgate.proxy.request.routes import RouteKind, find_route, template
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.gateway import Gateway
    from cellgate.proxy.http.client import ResponseClient
    from cellgate.proxy.http.request import Request


EXPORT_TIMEOUT_S = 5.0
EXPORT_EVERY_MS = 1000.0
QUEUE_SPANS = 8192
"""Spans that wait for the collector at most; some 20 MiB."""
CLOSE_TIMEOUT_S = 2.0
TEXT_MAX = 256
"""Characters of a text that the client chose, as in the access log."""

_TRACE_FIELDS = (b"traceparent:", b"tracestate:")
_TRACEPARENT = re.compile(rb"traceparent: [0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})")
_TRACE_SAMPLED = 1


class Tracing:
    """Of one gate."""

    def __init__(self, settings: TracingSettings) -> None:
        spans = OTLPSpanExporter(settings.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._exporter = exporter = Exporter(spans, settings.endpoint)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource(),
            span_limits=SpanLimits(max_attribute_length=TEXT_MAX),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, QUEUE_SPANS, EXPORT_EVERY_MS))
        self._ratio = settings.sample_ratio
        self._tracer = self._provider.get_tracer("cellgate")
        self._send: SendReport

    def watch(self, gateway: Gateway) -> None:
        """Trace its requests from now on."""
        self._send = gateway.services.reports.send
        gateway.observe = self.observers

    def observers(self, client: ResponseClient, request: Request, now: float) -> tuple[Observer, ...]:
        """The observers of `request`: its trace, if it has one."""
        # Most spans would be health checks.
        if find_route(request.path).kind is RouteKind.LOCAL or not self._is_sampled(request):
            return ()
        ahead_s = time.time() - now
        span = self._tracer.start_span(
            f"{request.method.decode()} {template(request.path)}".rstrip(),
            _parent(request),
            SpanKind.SERVER,
            _asked(request, client),
            start_time=int((request.received_at + ahead_s) * 1e9),
        )
        # Each attempt has its own.
        request.lines = _without_trace(request.lines)
        return (Trace(self._tracer, span, ahead_s, self._send),)

    def _is_sampled(self, request: Request) -> bool:
        """Whether the request is traced, decided without the SDK: cheaper for the many that are not."""
        reported = [line for line in request.lines if line.startswith(b"traceparent:")]
        if len(reported) == 1 and (found := _TRACEPARENT.match(reported[0])):
            return bool(int(found[1], 16) & _TRACE_SAMPLED)
        if random.random() < self._ratio:
            return True
        # Its unit must not begin a trace either.
        ids = random.getrandbits(128), random.getrandbits(64)
        request.lines = [*_without_trace(request.lines), b"traceparent: 00-%032x-%016x-00\r\n" % ids]
        return False

    def close(self) -> None:
        """Send what is left. Blocks for at most CLOSE_TIMEOUT_S; meant for the end of the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="cellgate-tracing", daemon=True)
        closing.start()
        # A collector that takes nothing is not waited for.
        closing.join(0.0 if self._exporter.is_lost else CLOSE_TIMEOUT_S)


def _without_trace(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if not line.startswith(_TRACE_FIELDS)]


def _parent(request: Request) -> Context:
    """The client's span; an invalid one is ignored (W3C Trace Context, 4.3)."""
    carrier: dict[str, str] = {}
    for line in request.lines:
        if line.startswith(_TRACE_FIELDS):
            name, _, value = line.decode("latin-1").strip().partition(": ")
            # Several lines of tracestate are one list, and of traceparent they are nothing.
            carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return PROPAGATOR.extract(carrier, Context())


def _asked(request: Request, client: ResponseClient) -> dict[str, AttributeValue]:
    """The request as attributes, without its query, which may hold secrets."""
    attributes: dict[str, AttributeValue] = {
        "http.request.method": request.method.decode("latin-1"),
        "http.request.body.size": request.body_size,
        "url.path": request.path.decode("latin-1"),
        "url.scheme": "https" if client.secure else "http",
        "network.peer.address": client.peer,
    }
    if route := template(request.path):
        attributes["http.route"] = route
    return attributes


# The spans of one request. They never contain text of a prompt or an answer.
#
# Names are those of OpenTelemetry's semantic conventions (HTTP spans 1.23, generative AI in development)
# where they have one, else begin with `cellgate.`. Times that come in are the loop's.


SendReport = Callable[[TracedRequest], None]
PROPAGATOR = TraceContextTextMapPropagator()

_GOOD = (Outcome.OK, Outcome.CLIENT_LEFT)
_NOBODYS_FAULT = (*_GOOD, Outcome.CLIENT_ERROR)


@dataclass(slots=True)
class Break:
    """A stream was broken by `unit` at `at`; another unit resumed it at `resumed_at`, or none did."""

    unit: str
    at: float
    resumed_at: float | None = None
    result: ResumeResult | None = None


def header_lines(context: Context) -> bytes:
    """The header lines of a span for its unit: traceparent, and tracestate if there is one."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, context)
    return b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in carrier.items())


class Trace(Observer):
    """The trace of one request. `request` is its span, `ahead_s` how far the wall clock is ahead
    of the loop's.

    `unit_lines` are header lines for the unit of the attempt in flight. `traced` is told of it once it is
    over: unit, TTFT, duration, trace id.
    """

    __slots__ = (
        "_ahead_s",
        "_attempt",
        "_breaks",
        "_context",
        "_failing",
        "_send",
        "_span",
        "_tracer",
        "unit_lines",
    )

    def __init__(self, tracer: Tracer, request: Span, ahead_s: float, send: SendReport) -> None:
        self._tracer = tracer
        self._send = send
        self._span = request
        self._context = set_span_in_context(request, Context())
        self._ahead_s = ahead_s
        self._attempt: Span | None = None
        self._breaks: list[Break] = []
        self._failing = ""
        self.unit_lines = b""

    def waited(self, since: float, until: float) -> None:
        self._whole("queue", since, until, {})

    # -- attempts ------------------------------------------------------------------------------------------

    def attempted(self, lease: Lease, before: int) -> None:
        """An attempt on a unit begins, after `before` others."""
        unit = lease.unit_state.unit
        attributes = {**_server(unit.url), "cellgate.unit": unit.name, "cellgate.cell": unit.cell}
        if before:
            attributes["http.request.resend_count"] = before
        else:
            self._span.set_attribute("gen_ai.request.stream", lease.ask.stream)
        if lease.unit_state.engine:
            attributes["gen_ai.provider.name"] = lease.unit_state.engine
        start = self._ns(lease.opened_at)
        self._attempt = self._tracer.start_span(
            "attempt", self._context, SpanKind.CLIENT, attributes, None, start
        )
        self.unit_lines = header_lines(set_span_in_context(self._attempt, Context()))
        self._failing = ""

    def replied(self, status: int) -> None:
        """The unit has sent the head of its reply."""
        if self._attempt is not None:
            self._attempt.set_attribute("http.response.status_code", status)

    def failing(self, code: str) -> None:
        """The attempt in flight fails, for this reason."""
        self._failing = code

    def attempt_over(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """The attempt in flight is over."""
        span, self._attempt = self._attempt, None
        if span is None:
            return
        span.set_attribute("cellgate.outcome", outcome.value)
        if lease.committed:
            span.add_event("first token", timestamp=self._ns(lease.first_at))
            for broken in self._breaks:
                broken.resumed_at = broken.resumed_at or lease.first_at
        if outcome not in _GOOD:
            span.set_attribute("error.type", self._failing or outcome.value)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(at))

    def completed(self, usage: Usage | None) -> None:
        if usage is None:
            return
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.answer_tokens)
        if usage.cached_tokens is not None:
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)

    # -- continuations -------------------------------------------------------------------------------------

    def broke(self, unit: str, at: float) -> None:
        """A unit broke its answer after the commit."""
        self._breaks.append(Break(unit, at))

    def settled(self, result: ResumeResult) -> None:
        """The result of the first break without a result is known."""
        for broken in self._breaks:
            if broken.result is None:
                broken.result = result
                return

    # -- the end -------------------------------------------------------------------------------------------

    def over(self, record: Finished, at: float) -> None:
        for broken in self._breaks:
            # An answer that is not a stream cannot be continued.
            if broken.result is not None:
                about = {"cellgate.unit": broken.unit, "cellgate.outcome": broken.result.value}
                self._whole("continuation", broken.at, broken.resumed_at or at, about)
        span = self._span
        span.set_attributes(_reported(record))
        if record.status >= 500 or (record.status < 400 and record.outcome not in _NOBODYS_FAULT):
            span.set_attribute("error.type", record.code or str(record.status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(at))
        trace_id = format_trace_id(span.get_span_context().trace_id)
        self._send(TracedRequest(record.unit, record.ttft_s, record.duration_s, trace_id))

    def _whole(self, name: str, since: float, until: float, attributes: Mapping[str, AttributeValue]) -> None:
        span = self._tracer.start_span(
            name, self._context, SpanKind.INTERNAL, attributes, None, self._ns(since)
        )
        span.end(self._ns(until))

    def _ns(self, at: float) -> int:
        return int((at + self._ahead_s) * 1e9)


def _reported(record: Finished) -> dict[str, AttributeValue]:
    """The record of the request as attributes."""
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": record.status,
        "cellgate.route": record.route,
        "cellgate.unit": record.unit,
        "cellgate.outcome": record.outcome.value,
        "cellgate.attempts": record.attempts,
        "cellgate.continued": record.resumed,
        "cellgate.request_id": record.request_id,
    }
    if operation := OPERATIONS.get(record.route):
        attributes["gen_ai.operation.name"] = operation
    if record.model:
        attributes["gen_ai.request.model"] = record.model
    if record.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    return attributes


@lru_cache(4096)
def _server(url: str) -> dict[str, AttributeValue]:
    """The address of a unit as attributes."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}


# Sends something to a collector, and logs once when it begins to fail and once when it works again.


class _FirstWords(logging.Handler):
    """Keeps what the SDK would log at each try: the first of it is the reason, and then it only gives up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = threading.local()
        """Spans and metrics are sent by a thread each."""

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of a line."""
        self.said.text = getattr(self.said, "text", "") or in_short(record.getMessage())


_FIRST_WORDS_OF_PATHS = _FirstWords()
_CAUSES = (
    re.compile(r"""\[(?:Errno -?\d+|SSL: \w+)\] ([^"'()]+)"""),
    re.compile(r"HTTPS?ConnectionPool\([^)]*\): ([\w ]+)"),
)


def in_short(words: str) -> str:
    """The cause in what the SDK says: `Connection refused`, of three hundred characters around it."""
    found = next(filter(None, (cause.search(words) for cause in _CAUSES)), None)
    return words if found is None else found[1].strip()


class CollectorLink:
    """Sends `what` (spans, metrics) to `endpoint`, for the section `section` of the configuration."""

    def __init__(
        self, section: str, what: str, endpoint: str, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._section = section
        self._what = what
        self._endpoint = endpoint
        self._log = log
        self._lost = 0
        # Of the rest of the SDK, which has a word for each span that its full queue drops, nothing.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.setLevel(logging.WARNING)
        exporters.propagate = False
        exporters.handlers[:] = [_FIRST_WORDS_OF_PATHS]

    @property
    def is_lost(self) -> bool:
        """Whether the last batch was not accepted."""
        return self._lost > 0

    def send(self, send: Callable[[], bool], count: int) -> bool:
        """Send `count` of them by calling `send`, which tells whether they were accepted."""
        _FIRST_WORDS_OF_PATHS.said.text = ""
        try:
            accepted = send()
        except Exception as error:
            _FIRST_WORDS_OF_PATHS.said.text = in_short(repr(error))
            accepted = False
        tally(EXPORTS, self._what, "sent" if accepted else "dropped")
        if self._section in LAST_WORDS:
            if not accepted:
                LAST_WORDS[self._section] = _FIRST_WORDS_OF_PATHS.said.text
        elif accepted:
            if self._lost:
                again = f"accepts {self._what} again; at least {self._lost} were lost"
                self._log("info", f"{self._section}: {self._endpoint} {again}")
        elif not self._lost:
            reason = _FIRST_WORDS_OF_PATHS.said.text or "it gave no reason"
            lost = f"{self._what} are dropped until it does; requests are not affected"
            refuses = f"does not accept {self._what} ({reason})"
            self._log("warning", f"{self._section}: {self._endpoint} {refuses}: {lost}")
        self._lost = 0 if accepted else self._lost + count
        return accepted


# Sends spans to the collector.
#
# All of it runs in the thread of the SDK's batch processor. What cannot be sent is dropped there.


class Exporter(SpanExporter):
    """`inner`, which sends to `endpoint`, watched."""

    def __init__(
        self, inner: SpanExporter, endpoint: str, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._inner = inner
        self._link = CollectorLink("tracing", "spans", endpoint, log)

    @property
    def is_lost(self) -> bool:
        """Whether the last batch was not accepted."""
        return self._link.is_lost

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        accepted = self._link.send(lambda: self._inner.export(spans) is SpanExportResult.SUCCESS, len(spans))
        return SpanExportResult.SUCCESS if accepted else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._inner.force_flush(timeout_millis)


def resource() -> Resource:
    """Who sends spans and metrics. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may say more."""
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "cellgate"),
            "service.version": VERSION,
            "host.name": socket.gethostname(),
        }
    )


# The families of /metrics in OTLP's data model, number by number: what is counted is decided there alone.
#
# https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/: a counter is a monotonic
# sum without `_total` in its name, which collectors add again for Prometheus. The SDK has no summaries: count
# and sum are a histogram without bounds.


CUMULATIVE = AggregationTemporality.CUMULATIVE
_METRIC = attrgetter("metric")


@dataclass(slots=True)
class _Row:
    """The samples of one histogram or summary. `buckets`: cumulated counts by upper bound."""

    buckets: list[tuple[float, float]] = field(default_factory=list)
    count: float = 0.0
    total: float = 0.0


def metrics_data(
    families: Iterable[Family], series: Iterable[GenAiSeries], resource: Resource, start_ns: int, now_ns: int
) -> MetricsData:
    """All families, and series of generations, as they stand at `now_ns`; counters began at `start_ns`
    (nanoseconds since 1970).
    """
    metrics = [
        Metric(family.name, family.documentation, "", _data(family, start_ns, now_ns))
        for family in families
        if family.samples
    ]
    metrics += [
        Metric(
            metric.name,
            metric.text,
            "s",
            Histogram([_generations(each, start_ns, now_ns) for each in group], CUMULATIVE),
        )
        for metric, group in groupby(sorted(series, key=_METRIC), _METRIC)
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
    for labels, row in _rows(family).items():
        bounds = [bound for bound, _ in row.buckets[:-1]]
        counts = [later - before for before, later in pairwise([0.0, *(n for _, n in row.buckets)])]
        whole = [int(each) for each in counts] or [int(row.count)]
        yield _point(dict(labels), whole, bounds, row.total, start_ns, now_ns)


def _generations(series: GenAiSeries, start_ns: int, now_ns: int) -> HistogramDataPoint:
    return _point(series.attributes, series.counts, series.metric.bounds, series.total, start_ns, now_ns)


def _point(
    attributes: Mapping[str, str],
    counts: Sequence[int],
    bounds: Sequence[float],
    total: float,
    start_ns: int,
    now_ns: int,
) -> HistogramDataPoint:
    unknown: Any = None
    return HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start_ns,
        time_unix_nano=now_ns,
        count=sum(counts),
        sum=total,
        bucket_counts=counts,
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


# Sends what /metrics shows to a collector, every few seconds.
#
# Numbers are read on the loop, in slices, as for a scrape; a thread sends them. One batch is under way at a
# time: a slow collector gets fewer, and nothing accumulates.


METRICS_S = 15.0
"""How often they are sent."""


class MetricsSender:
    """Of one gate, to `endpoint`. It has begun."""

    def __init__(
        self, endpoint: str, metrics: Metrics, generations: GenAiMetrics, every_s: float = METRICS_S
    ) -> None:
        self._metrics = metrics
        self._series = generations.read
        self._every_s = every_s
        self._resource = resource()
        self._start_ns = time.time_ns()
        self._exporter = OTLPMetricExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
        self._link = CollectorLink("otlp_metrics", "metrics", endpoint)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Send the last numbers, and end. Takes EXPORT_TIMEOUT_S at most."""
        self._task.cancel()
        # Ends a batch under way that waits to be tried again.
        if self._link.is_lost:
            self._exporter.shutdown()
        await asyncio.wait([self._task])
        if self._link.is_lost:
            return
        # What is wrong was said before.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(EXPORT_TIMEOUT_S):
                await self._send()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._send()
            except Exception as error:  # No number that cannot be read may end this task.
                report_defect(asyncio.get_running_loop(), "the metrics for a collector", error)

    async def _send(self) -> None:
        families = [family async for family in self._metrics.families()]
        series = self._series()
        await asyncio.to_thread(self._link.send, lambda: self._export(families, series), 1)

    def _export(self, families: list[Family], series: list[GenAiSeries]) -> bool:
        data = metrics_data(families, series, self._resource, self._start_ns, time.time_ns())
        return self._exporter.export(data) is MetricExportResult.SUCCESS
