"""Sends spans to the collector, and logs once when that begins to fail and once when it works again.

All of it runs in the thread of the SDK's batch processor. What cannot be sent is dropped there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cellgate.proxy.logs.log import Level, log_line


class _FirstWords(logging.Handler):
    """Keeps what the SDK would log at each try: the first of it is the reason, and then it only gives up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of a line."""
        self.text = self.text or record.getMessage()


class Exporter(SpanExporter):
    """`inner`, which sends to `endpoint`, watched."""

    def __init__(
        self, inner: SpanExporter, endpoint: str, log: Callable[[Level, str], None] = log_line
    ) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._log = log
        self._lost = 0
        self._words = _FirstWords()
        # Of the rest of the SDK, which has a word for each span that its full queue drops, nothing.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.setLevel(logging.WARNING)
        exporters.propagate = False
        exporters.handlers[:] = [self._words]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        self._words.text = ""
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._words.text = repr(error)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                self._log(
                    "info", f"tracing: {self._endpoint} accepts spans again; at least {self._lost} were lost"
                )
            self._lost = 0
        else:
            if not self._lost:
                reason = self._words.text or "it gave no reason"
                lost = "spans are dropped until it does; requests are not affected"
                self._log("warning", f"tracing: {self._endpoint} does not accept spans ({reason}): {lost}")
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Nothing more is sent."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is kept here."""
        return self._inner.force_flush(timeout_millis)
