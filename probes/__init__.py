"""Probes: one file each. A new one is a line in this registry; the law suite and the watch pick it up."""

from __future__ import annotations

from probes.base import Probe
from probes.canary import Canary
from probes.engine_metrics import EngineMetrics
from probes.models import ModelList
from probes.readiness import Readiness

PROBES: dict[str, type[Probe]] = {
    "readiness": Readiness,
    "models": ModelList,
    "engine_metrics": EngineMetrics,
    "canary": Canary,
}
