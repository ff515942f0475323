"""Who sends spans and metrics: the resource of OpenTelemetry."""

from __future__ import annotations

import os
import socket

from opentelemetry.sdk.resources import Resource

from cellgate import VERSION


def resource() -> Resource:
    """This gate; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES may say more."""
    return Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "cellgate"),
            "service.version": VERSION,
            "host.name": socket.gethostname(),
        }
    )
