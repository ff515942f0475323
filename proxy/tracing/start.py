"""Begins to trace, where that is configured and OpenTelemetry is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.settings import TracingSettings
from cellgate.proxy.logs.log import log_line

if TYPE_CHECKING:
    from cellgate.proxy.tracing.tracing import Tracing


def trace(settings: TracingSettings | None) -> Tracing | None:
    """The tracing of a gate; None: it has none. A gate that cannot trace serves all the same."""
    if settings is None:
        return None
    try:
        from cellgate.proxy.tracing.tracing import (
            Tracing,  # Late, because it is an extra, and takes its time.
        )
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed: pip install 'cellgate[otel]'"
        log_line("error", f"tracing is off, though it is configured: {why}")
        return None
    return Tracing(settings)
