"""Ties the Leases of Kubernetes to a control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellgate.proxy.config.remedy import LeasePlace
from cellgate.proxy.logs.events import Action
from cellgate.proxy.recovery.acting import Acting
from cellgate.proxy.recovery.kubernetes_leases import KubernetesLeases
from cellgate.proxy.recovery.metrics import ActingMetrics

if TYPE_CHECKING:
    from cellgate.proxy.control.plane import Plane


def agree_by_leases(plane: Plane, place: LeasePlace, gate: str) -> Acting:
    """Begin to agree with other gates, as the gate of this name."""

    def on_acting(cell: str, token: int) -> None:
        detail = f"no other gate recovers units of it from now on (fencing token {token})"
        plane.events.add(Action("acting", "gate", detail=detail, cell=cell))

    leases = KubernetesLeases(place, gate, plane.now, on_acting)
    leases.start()
    plane.metrics.include(ActingMetrics(leases.cells, leases.acts_for))
    return leases
