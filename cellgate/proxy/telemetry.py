"""Begins to trace and to send metrics, where that is configured and OpenTelemetry is installed.

A gate that cannot do it serves all the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import TYPE_CHECKING

from cellgate.extras import part_of
from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.generations import watch
from cellgate.proxy.observe.log import log_line

if TYPE_CHECKING:
    from cellgate.proxy.gateway import Gateway
    from cellgate.proxy.observe.counters import Metrics
    from cellgate.proxy.observe.gen_ai import GenAiMetrics


def trace(settings: TracingSettings | None, gateway: Gateway) -> Callable[[], object]:
    """Trace the requests of a gateway, if that is configured; returns what ends it."""
    otlp = _otlp("tracing is off") if settings is not None else None
    if otlp is None:
        return lambda: None
    tracing = otlp.Tracing(settings)
    tracing.watch(gateway)
    end: Callable[[], object] = tracing.close
    return end


def watch_generations(endpoint: str | None, gateway: Gateway) -> None:
    """Let its requests be counted by the names that OpenTelemetry has, where they are sent."""
    if endpoint is not None:
        watch(gateway)


def send_metrics(
    endpoint: str | None, metrics: Metrics, generations: GenAiMetrics
) -> Callable[[], Awaitable[object]] | None:
    """Send the metrics of a gate to a collector, if that is configured; what ends it, or None."""
    otlp = _otlp("metrics are not sent by OTLP") if endpoint is not None else None
    if otlp is None:
        return None
    end: Callable[[], Awaitable[object]] = otlp.MetricsSender(endpoint, metrics, generations).close
    return end


def _otlp(what: str) -> ModuleType | None:
    """The extra; without its packages a line says `what` that means."""
    try:
        return part_of("otlp", "send")
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed: {how_to_install('otel')}"
        log_line("error", f"{what}, though it is configured: {why}")
        return None
