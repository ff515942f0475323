"""Reports to a control plane of this process: counted at once."""

from __future__ import annotations

from cellgate.proxy.control.plane import Plane
from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.router.unit_state import UnitState


class LocalReports:
    """To one plane."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._metrics = plane.metrics
        self.finished = plane.metrics.finished
        """A request is over. It is counted with one call."""

    def retried(self, unit: str) -> None:
        """A request goes on to another unit because this one failed it."""
        self._metrics.retry(unit)

    def resumed(self, unit: str, result: ContinuationResult, reason: str = "") -> None:
        """What became of a stream that `unit` broke."""
        self._plane.continuations.record(unit, result, reason)

    def forged(self) -> None:
        """A stranger named a unit, or asked why a request goes to one."""
        self._metrics.forged += 1

    def ignored(self) -> None:
        """A header line of another system made no sense."""
        self._plane.routing.ignored += 1

    def health_checked(self, about: str, state: str) -> None:
        """A load balancer that says who it is has asked."""
        self._plane.balancers.on_check(about, state, self._plane.now())

    def restart_suspected(self, state: UnitState) -> None:
        """A unit has ended a connection out of turn."""
        self._plane.suspect_restart(state)

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted."""
        self._plane.gate_fault(reason)
