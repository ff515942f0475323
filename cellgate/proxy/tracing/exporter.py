"""Sends spans to the collector.

All of it runs in the thread of the SDK's batch processor. What cannot be sent is dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cellgate.proxy.logs.log import Level, log_line
from cellgate.proxy.tracing.collector_link import CollectorLink


class Exporter(SpanExporter):
    """`inner`, which sends to `endpoint`, watched."""

    def __init__(
        self, inner: SpanExporter, endpoint: str, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._inner = inner
        self._link = CollectorLink("tracing", "spans", endpoint, log)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        accepted = self._link.send(lambda: self._inner.export(spans) is SpanExportResult.SUCCESS, len(spans))
        return SpanExportResult.SUCCESS if accepted else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing more is sent."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._inner.force_flush(timeout_millis)
