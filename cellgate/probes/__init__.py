"""Probes: one file each. A new one is a line in these registries; the law tests and the prober then include
it.
"""

from __future__ import annotations

from cellgate.probes.base import Probe
from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.fault_status import FaultStatus
from cellgate.probes.nodes import HttpProbe, NodeProbe, TcpProbe
from cellgate.probes.readiness import GateHealth, PauseProbe, Readiness
from cellgate.probes.served import EngineVersion, ModelList

PROBES: dict[str, type[Probe]] = {
    "readiness": Readiness,
    "models": ModelList,
    "engine_metrics": EngineMetrics,
    "quiescence": PauseProbe,
    "fault_status": FaultStatus,
    "canary": Canary,
    "version": EngineVersion,
}
"""Probes of a unit as a whole: each unit has all of them."""

GATE_PROBES: dict[str, type[Probe]] = {"canary": GateHealth}
"""Probes of a unit that is reached through another gate, which runs the ones above."""

NODE_PROBES: dict[str, type[NodeProbe]] = {"http": HttpProbe, "tcp": TcpProbe}
"""Probes of a node: those that its configuration names."""
MORE_NODE_PROBES = ("grpc", "exporter")
"""Those that an extra has."""
