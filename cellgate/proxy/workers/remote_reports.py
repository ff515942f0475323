"""Reports of a worker, sent to the control process, which adds them to those of the others."""

from __future__ import annotations

from collections.abc import Callable

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationKind, ContinuationResult
from cellgate.proxy.workers.board_replica import BoardReplica
from cellgate.proxy.workers.control_client import ControlClient
from cellgate.proxy.workers.protocol import Message, ToControl
from cellgate.router.opinions import Refusing
from cellgate.router.split_nouns import SplitStep
from cellgate.router.unit_state import UnitState


class RemoteReports:
    """The reports of one worker. Frequent counts are sent with the worker's status."""

    def __init__(self, control: ControlClient, replica: BoardReplica, now: Callable[[], float]) -> None:
        self._control = control
        self._replica = replica
        self._now = now
        self.forgeries = 0
        self.ignored_lines = 0

    def finished(self, record: Finished) -> None:
        """A request is over. Fields that only the access log uses are left out."""
        r = record
        message: Message = (r.route, int(r.status), r.unit, r.ttft_s, r.duration_s, r.bytes_in, r.bytes_out)
        self._control.mention((ToControl.FINISHED, *message))

    def traced(self, unit: str, ttft_s: float | None, duration_s: float, trace_id: str) -> None:
        """A request that is over was traced under this id."""
        self._control.mention((ToControl.TRACED, unit, ttft_s, duration_s, trace_id))

    def retried(self, unit: str) -> None:
        """A request is retried on another unit because this one failed."""
        self._control.mention((ToControl.RETRIED, unit))

    def resumed(
        self, unit: str, kind: ContinuationKind, result: ContinuationResult, reason: str = ""
    ) -> None:
        """The result of a stream that `unit` broke."""
        self._control.mention((ToControl.RESUMED, unit, kind.value, result.value, reason))

    def split(self, step: SplitStep) -> None:
        """A step of a request whose prompt another unit computes."""
        self._control.mention((ToControl.SPLIT, *step))

    def refuses(self, found: Refusing, target: str, body: bytes) -> None:
        """A unit refuses what others serve."""
        self._control.say((ToControl.REFUSES, *found, target, body))

    def forged(self) -> None:
        """A peer that is not trusted named a unit, or asked for an explanation."""
        self.forgeries += 1

    def ignored(self) -> None:
        """A routing header had an invalid value and was ignored."""
        self.ignored_lines += 1

    def restart_suspected(self, state: UnitState) -> None:
        """A unit closed a connection unexpectedly."""
        if not state.retired:
            state.restart_suspected_at = self._now()
            self._control.say((ToControl.RESTART_SUSPECTED, state.unit.name, self._replica.version))

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted."""
        self._control.mention((ToControl.OWN_TROUBLE, reason))
