"""What the data plane reports beside its leases: counts and observations.

In one process it is counted at once (control/local_reports.py); a worker passes it on
(workers/remote_reports.py).
"""

from __future__ import annotations

from typing import Protocol

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationKind, ContinuationResult
from cellgate.router.opinions import Refusing
from cellgate.router.split_nouns import SplitStep
from cellgate.router.unit_state import UnitState


class Reports(Protocol):
    """To the control plane."""

    def finished(self, record: Finished) -> None:
        """A request is over."""

    def traced(self, unit: str, ttft_s: float | None, duration_s: float, trace_id: str) -> None:
        """A request that is over was traced under this id (32 hexadecimal digits)."""

    def retried(self, unit: str) -> None:
        """A request is retried on another unit because this one failed."""

    def resumed(
        self, unit: str, kind: ContinuationKind, result: ContinuationResult, reason: str = ""
    ) -> None:
        """The result of a stream that `unit` broke, and why it was not resumed."""

    def split(self, step: SplitStep) -> None:
        """A step of a request whose prompt another unit computes."""

    def refuses(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve. `body` is such a request, to `target`; empty: it is not kept."""

    def forged(self) -> None:
        """A peer that is not trusted named a unit, or asked for an explanation."""

    def ignored(self) -> None:
        """A routing header had an invalid value and was ignored."""

    def restart_suspected(self, state: UnitState) -> None:
        """A unit closed a connection unexpectedly: it may have restarted."""

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted, through no fault of a unit."""
