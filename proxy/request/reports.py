"""What the data plane reports that belongs to no lease: counts, and what it has noticed.

In one process it is counted at once (control/local_reports.py); a worker passes it on
(workers/remote_reports.py).
"""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationResult
from cellgate.router.unit_state import UnitState


class Reports(Protocol):
    """To the control plane."""

    def finished(self, record: Finished) -> None:
        """A request is over."""

    def retried(self, unit: str) -> None:
        """A request goes on to another unit because this one failed it."""

    def resumed(self, unit: str, result: ContinuationResult, reason: str = "") -> None:
        """What became of a stream that `unit` broke, and why no more than that."""

    def forged(self) -> None:
        """A stranger named a unit, or asked why a request goes to one."""

    def ignored(self) -> None:
        """A header line of another system made no sense, and changed nothing."""

    def health_checked(self, about: str, state: str) -> None:
        """A load balancer that says who it is has asked about a unit, or about the gate."""

    def restart_suspected(self, state: UnitState) -> None:
        """A unit has ended a connection out of turn: it may have started anew."""

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted, through no fault of a unit."""
