"""The spans of one request. They never contain text of a prompt or an answer.

Names are those of OpenTelemetry's semantic conventions (HTTP spans 1.23, generative AI in development) where
they have one, else begin with `cellgate.`. Times that come in are the loop's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from opentelemetry.context import Context
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

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Outcome
from cellgate.router.unit_state import Lease

TellTraced = Callable[[str, float | None, float, str], None]
PROPAGATOR = TraceContextTextMapPropagator()
OPERATIONS = {
    "chat": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "messages": "chat",
    "responses": "chat",
}
"""Routes that are a gen_ai.operation.name."""

_GOOD = (Outcome.OK, Outcome.CLIENT_LEFT)
_NOBODYS_FAULT = (*_GOOD, Outcome.CLIENT_ERROR)


@dataclass(slots=True)
class Break:
    """A stream was broken by `unit` at `at`; another unit resumed it at `resumed_at`, or none did."""

    unit: str
    at: float
    resumed_at: float | None = None
    result: ContinuationResult | None = None


def header_lines(context: Context) -> bytes:
    """The header lines of a span for its unit: traceparent, and tracestate if there is one."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, context)
    return b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in carrier.items())


class Trace:
    """The trace of one request, an Observer. `request` is its span, `ahead_s` how far the wall clock is ahead
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
        "_span",
        "_traced",
        "_tracer",
        "unit_lines",
    )

    def __init__(self, tracer: Tracer, request: Span, ahead_s: float, traced: TellTraced) -> None:
        self._tracer = tracer
        self._traced = traced
        self._span = request
        self._context = set_span_in_context(request, Context())
        self._ahead_s = ahead_s
        self._attempt: Span | None = None
        self._breaks: list[Break] = []
        self._failing = ""
        self.unit_lines = b""

    def waited(self, since: float, until: float) -> None:
        """It was queued."""
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
        """A generation has ended, whole."""
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

    def settled(self, result: ContinuationResult) -> None:
        """The result of the first break without a result is known."""
        for broken in self._breaks:
            if broken.result is None:
                broken.result = result
                return

    # -- the end -------------------------------------------------------------------------------------------

    def over(self, record: Finished, at: float) -> None:
        """The response has ended."""
        for broken in self._breaks:
            # An answer that is not a stream cannot be continued.
            if broken.result is not None:
                about = {"cellgate.unit": broken.unit, "cellgate.outcome": broken.result.value}
                self._whole("continuation", broken.at, broken.resumed_at or at, about)
        span = self._span
        span.set_attributes(_told(record))
        if record.status >= 500 or (record.status < 400 and record.outcome not in _NOBODYS_FAULT):
            span.set_attribute("error.type", record.code or str(record.status))
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._ns(at))
        trace_id = format_trace_id(span.get_span_context().trace_id)
        self._traced(record.unit, record.ttft_s, record.duration_s, trace_id)

    def _whole(self, name: str, since: float, until: float, attributes: Mapping[str, AttributeValue]) -> None:
        span = self._tracer.start_span(
            name, self._context, SpanKind.INTERNAL, attributes, None, self._ns(since)
        )
        span.end(self._ns(until))

    def _ns(self, at: float) -> int:
        return int((at + self._ahead_s) * 1e9)


def _told(record: Finished) -> dict[str, AttributeValue]:
    """The record of the request as attributes."""
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": record.status,
        "cellgate.route": record.route,
        "cellgate.unit": record.unit,
        "cellgate.outcome": record.outcome.value,
        "cellgate.attempts": record.attempts,
        "cellgate.continued": record.continued,
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
