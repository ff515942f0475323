"""Which requests are traced, and the way of their spans to the collector.

A request is traced when its client says so, or says nothing and chance does. One that is not goes the way of
all requests when tracing is off; its unit is told as well that it is not.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from proxy.routes import RouteKind, find_route, template
from proxy.settings import TracingSettings
from proxy.tracing.exchange import TRACED
from proxy.tracing.exporter import Exporter
from proxy.tracing.trace import PROPAGATOR, Trace, header_lines

if TYPE_CHECKING:
    from proxy.exchange import Exchange
    from proxy.gate import Gate
    from proxy.wire.downstream import ClientConnection
    from proxy.wire.request import Request

EXPORT_TIMEOUT_S = 5.0
EXPORT_EVERY_MS = 1000.0
QUEUE_SPANS = 8192
"""Spans that wait for the collector at most; some 20 MiB."""
CLOSE_TIMEOUT_S = 2.0
TEXT_MAX = 256
"""Characters of a text that the client chose, as in the access log."""

_FIELDS = (b"traceparent:", b"tracestate:")


class Tracing:
    """Of one gate."""

    def __init__(self, settings: TracingSettings) -> None:
        exporter = Exporter(OTLPSpanExporter(settings.endpoint, timeout=EXPORT_TIMEOUT_S), settings.endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            resource=Resource.create(_self()),
            span_limits=SpanLimits(max_attribute_length=TEXT_MAX),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, QUEUE_SPANS, EXPORT_EVERY_MS))
        self._tracer = self._provider.get_tracer("cellgate")

    def exchange(
        self, kind: type[Exchange], gate: Gate, client: ClientConnection, request: Request
    ) -> Exchange:
        """The exchange of this kind that answers `request`, traced or not."""
        route = find_route(request.path)
        if route.kind is RouteKind.OWN:
            # Health checks would be most of what there is to see.
            return kind(gate, client, request)
        ahead_s = time.time() - gate.now()
        span = self._tracer.start_span(
            f"{request.method.decode()} {template(request.path)}".rstrip(),
            _parent(request),
            SpanKind.SERVER,
            _asked(request, client),
            None,
            int((request.received_at + ahead_s) * 1e9),
        )
        request.lines = [line for line in request.lines if not line.startswith(_FIELDS)]
        if not span.is_recording():
            request.lines.append(header_lines(set_span_in_context(span, Context())))
            return kind(gate, client, request)
        traced: Exchange = TRACED[kind](gate, client, request).trace_by(Trace(self._tracer, span, ahead_s))
        return traced

    def close(self) -> None:
        """Send what is left. Blocks for at most CLOSE_TIMEOUT_S; meant for the end of the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="cellgate-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


def _self() -> dict[str, AttributeValue]:
    """Who speaks; OTEL_RESOURCE_ATTRIBUTES may add to it."""
    return {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "cellgate"),
        "host.name": socket.gethostname(),
    }


def _parent(request: Request) -> Context:
    """What the client says its span is. What makes no sense is none (W3C Trace Context, 4.3)."""
    carrier: dict[str, str] = {}
    for line in request.lines:
        if line.startswith(_FIELDS):
            name, _, value = line.decode("latin-1").strip().partition(": ")
            # Several lines of tracestate are one list, and of traceparent they are nothing.
            carrier[name] = f"{carrier[name]},{value}" if name in carrier else value
    return PROPAGATOR.extract(carrier, Context())


def _asked(request: Request, client: ClientConnection) -> dict[str, AttributeValue]:
    """What a request is, as attributes. Its query is left out, for whatever may stand there."""
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
