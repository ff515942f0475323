"""Sends what /metrics shows to a collector, every few seconds.

Numbers are read on the loop, in slices, as for a scrape; a thread sends them. One batch is under way at a
time: a slow collector gets fewer, and nothing accumulates.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import MetricExportResult
from prometheus_client import Metric as Family

from cellgate.proxy.config.settings import OtlpMetrics
from cellgate.proxy.logs.defects import report_defect
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.tracing.collector_link import CollectorLink
from cellgate.proxy.tracing.otlp_metrics import metrics_data
from cellgate.proxy.tracing.resource import resource

EXPORT_TIMEOUT_S = 5.0


class MetricsSender:
    """Of one gate. It has begun."""

    def __init__(self, settings: OtlpMetrics, metrics: Metrics) -> None:
        self._metrics = metrics
        self._every_s = settings.every_s
        self._resource = resource()
        self._start_ns = time.time_ns()
        self._exporter = OTLPMetricExporter(settings.endpoint, timeout=EXPORT_TIMEOUT_S)
        self._link = CollectorLink("otlp_metrics", "metrics", settings.endpoint)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Send the last numbers, and end. Takes EXPORT_TIMEOUT_S at most."""
        self._task.cancel()
        await asyncio.wait([self._task])
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
        await asyncio.to_thread(self._link.send, lambda: self._export(families), 1)

    def _export(self, families: list[Family]) -> bool:
        data = metrics_data(families, self._resource, self._start_ns, time.time_ns())
        return self._exporter.export(data) is MetricExportResult.SUCCESS
