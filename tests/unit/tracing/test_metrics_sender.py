"""Metrics go on being sent, whatever is wrong with one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.sdk.metrics.export import MetricExportResult
from prometheus_client import Metric as Family

from cellgate.proxy.config.settings import OtlpMetrics
from cellgate.proxy.tracing import MetricsSender


class Broken:
    """Metrics that cannot be read the first time."""

    def __init__(self) -> None:
        self.reads = 0

    async def families(self) -> AsyncIterator[Family]:
        self.reads += 1
        if self.reads == 1:
            raise KeyError("gone")
        yield Family("a", "a", "gauge")


def test_metrics_that_cannot_be_read_are_said_and_the_next_ones_sent() -> None:
    sent: list[object] = []

    def export(batch: object) -> MetricExportResult:
        sent.append(batch)
        return MetricExportResult.SUCCESS

    async def scenario() -> list[Any]:
        said: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["exception"]))
        metrics: Any = Broken()
        sender = MetricsSender(OtlpMetrics("http://127.0.0.1:9/v1/metrics", every_s=0.01), metrics)
        sender._exporter.export = export  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(10.0):
            while not sent:  # noqa: ASYNC110 - nobody tells.
                await asyncio.sleep(0.01)
        await sender.close()
        return said

    [error] = asyncio.run(scenario())
    assert isinstance(error, KeyError)
