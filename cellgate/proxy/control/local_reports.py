"""Reports to a control plane of this process: counted at once."""

from __future__ import annotations

from cellgate.proxy.control.plane import Plane
from cellgate.proxy.metrics.continuations import ContinuationKind, ContinuationResult
from cellgate.router.opinions import Refusing
from cellgate.router.split_nouns import SplitStep
from cellgate.router.unit_state import UnitState


class LocalReports:
    """To one plane."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._metrics = plane.metrics
        self.finished = plane.metrics.finished
        """A request is over. It is counted with one call."""

    def traced(self, unit: str, ttft_s: float | None, duration_s: float, trace_id: str) -> None:
        """A request that is over was traced under this id."""
        self._metrics.traced(unit, ttft_s, duration_s, trace_id)

    def retried(self, unit: str) -> None:
        """A request is retried on another unit because this one failed."""
        self._metrics.retry(unit)

    def resumed(
        self, unit: str, kind: ContinuationKind, result: ContinuationResult, reason: str = ""
    ) -> None:
        """The result of a stream that `unit` broke."""
        self._plane.continuations.record(unit, kind, result, reason)

    def split(self, step: SplitStep) -> None:
        """A step of a request whose prompt another unit computes."""
        self._plane.link_watch.apply(step)

    def refuses(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve."""
        self._plane.refused_watch.take(found, target, body)

    def forged(self) -> None:
        """A peer that is not trusted named a unit, or asked for an explanation."""
        self._metrics.forged += 1

    def ignored(self) -> None:
        """A routing header had an invalid value and was ignored."""
        self._plane.routing.ignored += 1

    def restart_suspected(self, state: UnitState) -> None:
        """A unit closed a connection unexpectedly."""
        self._plane.suspect_restart(state)

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted."""
        self._plane.gate_fault(reason)
