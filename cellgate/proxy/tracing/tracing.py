"""Decides which requests are traced, and exports their spans.

A request is traced when its client asks for it, or, without a traceparent, at random. Others are handled as
with tracing off; their units learn that they are not sampled.
"""

from __future__ import annotations

import random
import re
import threading
import time
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.request.routes import RouteKind, find_route, template
from cellgate.proxy.tracing.exporter import Exporter
from cellgate.proxy.tracing.resource import resource
from cellgate.proxy.tracing.trace import PROPAGATOR, TellTraced, Trace

if TYPE_CHECKING:
    from cellgate.proxy.gateway import Gateway
    from cellgate.proxy.request.observer import Observer
    from cellgate.proxy.wire.client import ResponseClient
    from cellgate.proxy.wire.request import Request

EXPORT_TIMEOUT_S = 5.0
EXPORT_EVERY_MS = 1000.0
QUEUE_SPANS = 8192
"""Spans that wait for the collector at most; some 20 MiB."""
CLOSE_TIMEOUT_S = 2.0
TEXT_MAX = 256
"""Characters of a text that the client chose, as in the access log."""

_FIELDS = (b"traceparent:", b"tracestate:")
_TRACEPARENT = re.compile(rb"traceparent: [0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})")
_SAMPLED = 1


class Tracing:
    """Of one gate."""

    def __init__(self, settings: TracingSettings) -> None:
        exporter = Exporter(OTLPSpanExporter(settings.endpoint, timeout=EXPORT_TIMEOUT_S), settings.endpoint)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=resource(),
            span_limits=SpanLimits(max_attribute_length=TEXT_MAX),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, QUEUE_SPANS, EXPORT_EVERY_MS))
        self._ratio = settings.sample_ratio
        self._tracer = self._provider.get_tracer("cellgate")
        self._traced: TellTraced

    def watch(self, gateway: Gateway) -> None:
        """Trace its requests from now on."""
        self._traced = gateway.reports.traced
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
        return (Trace(self._tracer, span, ahead_s, self._traced),)

    def _is_sampled(self, request: Request) -> bool:
        """Whether the request is traced. Decided without the SDK, which is cheaper for the many that are
        not.
        """
        told = [line for line in request.lines if line.startswith(b"traceparent:")]
        if len(told) == 1 and (found := _TRACEPARENT.match(told[0])):
            return bool(int(found[1], 16) & _SAMPLED)
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
        closing.join(CLOSE_TIMEOUT_S)


def _without_trace(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if not line.startswith(_FIELDS)]


def _parent(request: Request) -> Context:
    """The client's span; an invalid one is ignored (W3C Trace Context, 4.3)."""
    carrier: dict[str, str] = {}
    for line in request.lines:
        if line.startswith(_FIELDS):
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
