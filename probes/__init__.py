"""Probes: one file each. A new one is a line in these registries; the law suites and the watch pick it up."""

from __future__ import annotations

from probes.base import Probe
from probes.canary import Canary
from probes.engine_metrics import EngineMetrics
from probes.exporter import ExporterProbe
from probes.gate_word import GateWord
from probes.grpc_health import GrpcProbe
from probes.http_status import HttpProbe
from probes.models import ModelList
from probes.node import NodeProbe
from probes.readiness import Readiness
from probes.tcp_accept import TcpProbe

PROBES: dict[str, type[Probe]] = {
    "readiness": Readiness,
    "models": ModelList,
    "engine_metrics": EngineMetrics,
    "canary": Canary,
}
"""Those of a unit as a whole: each unit has all of them."""

GATE_PROBES: dict[str, type[Probe]] = {
    "canary": GateWord,
}
"""Those of a unit that is reached by way of another gate, which has the ones above."""

NODE_PROBES: dict[str, type[NodeProbe]] = {
    "http": HttpProbe,
    "tcp": TcpProbe,
    "grpc": GrpcProbe,
    "exporter": ExporterProbe,
}
"""Those of a node: it has the ones that its configuration names."""
