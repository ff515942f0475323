"""A collector of spans and metrics that speaks OTLP over HTTP, as far as gates and engines can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATIENCE_S = 10.0


@dataclass(frozen=True)
class Seen:
    """One span, read."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    is_error: bool
    about: dict[str, str | int | float | bool]
    events: dict[str, int]
    state: str

    @property
    def is_during(self) -> tuple[int, int]:
        """From when to when, in nanoseconds since 1970."""
        return self.start_ns, self.end_ns


def _value(value: AnyValue) -> str | int | float | bool:
    found: str | int | float | bool = getattr(value, value.WhichOneof("value") or "string_value")
    return found


def _about(attributes: list[KeyValue]) -> dict[str, str | int | float | bool]:
    return {each.key: _value(each.value) for each in attributes}


def _seen(span: Span) -> Seen:
    return Seen(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        about=_about(list(span.attributes)),
        events={event.name: event.time_unix_nano for event in span.events},
        state=span.trace_state,
    )


class Collector:
    """`spans` are those that came, `raw` the bytes they came in, `resource` who sent the last of them.
    `metrics` are the latest by name, `batches` how often some came.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.batches = 0
        self.spans: list[Seen] = []
        self.raw = b""
        self.resource: dict[str, str | int | float | bool] = {}
        self.port = 0

    @property
    def endpoint(self) -> str:
        """What a gate is configured with."""
        return f"http://127.0.0.1:{self.port}/v1/traces"

    @property
    def metrics_endpoint(self) -> str:
        """The same for metrics."""
        return f"http://127.0.0.1:{self.port}/v1/metrics"

    def named(self, name: str) -> list[Seen]:
        """Spans by their name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    async def until(self, count: int) -> None:
        """Wait until so many spans have come."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.spans) < count:  # noqa: ASYNC110 - nobody tells the test, so it has to look.
                await asyncio.sleep(0.01)

    async def take(self, request: web.Request) -> web.Response:
        """Take a batch."""
        assert request.content_type == "application/x-protobuf"
        data = await request.read()
        batch = ExportTraceServiceRequest.FromString(data)
        self.raw += data
        for resource in batch.resource_spans:
            self.resource = _about(list(resource.resource.attributes))
            self.spans += [_seen(span) for scope in resource.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    async def take_metrics(self, request: web.Request) -> web.Response:
        """Take the numbers as they stand."""
        assert request.content_type == "application/x-protobuf"
        [resource] = ExportMetricsServiceRequest.FromString(await request.read()).resource_metrics
        self.resource = _about(list(resource.resource.attributes))
        self.metrics = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
        self.batches += 1
        answer = ExportMetricsServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    """A collector that listens."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    app.router.add_post("/v1/metrics", collector.take_metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    collector.port = runner.addresses[0][1]
    try:
        yield collector
    finally:
        await runner.cleanup()
