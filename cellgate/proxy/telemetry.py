"""Begins to trace and to send metrics, where that is configured and OpenTelemetry is installed.

A gate that cannot do it serves all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.extras import how_to_install
from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.generations import watch
from cellgate.proxy.observe.log import log_line

if TYPE_CHECKING:
    from cellgate.proxy.gateway import Gateway
    from cellgate.proxy.observe.counters import Metrics
    from cellgate.proxy.observe.gen_ai import GenAiMetrics
    from cellgate.proxy.tracing import MetricsSender, Tracing


def trace(settings: TracingSettings | None) -> Tracing | None:
    """The tracing of a gate; None: it has none."""
    if settings is None:
        return None
    try:
        from cellgate.proxy.tracing import Tracing
    except ModuleNotFoundError as error:
        _missing("tracing is off", error)
        return None
    return Tracing(settings)


def watch_generations(endpoint: str | None, gateway: Gateway) -> None:
    """Let its requests be counted by the names that OpenTelemetry has, where they are sent."""
    if endpoint is not None:
        watch(gateway)


def send_metrics(endpoint: str | None, metrics: Metrics, generations: GenAiMetrics) -> MetricsSender | None:
    """What sends the metrics of a gate to a collector; None: nothing does."""
    if endpoint is None:
        return None
    try:
        from cellgate.proxy.tracing import MetricsSender
    except ModuleNotFoundError as error:
        _missing("metrics are not sent by OTLP", error)
        return None
    return MetricsSender(endpoint, metrics, generations)


def _missing(what: str, error: ModuleNotFoundError) -> None:
    why = f"{error.name} is not installed: {how_to_install('otel')}"
    log_line("error", f"{what}, though it is configured: {why}")
