"""The parts of a worker's gate that count or tell: what they take note of is the brain's to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cellgate.proxy.control.stall_watch import Vigil
from cellgate.proxy.ingress.balancers import Balancers
from cellgate.proxy.ingress.orca import Orca
from cellgate.proxy.metrics.continuations import Continuations, Result
from cellgate.proxy.metrics.metrics import Metrics

if TYPE_CHECKING:
    from cellgate.proxy.workers.worker import WorkerGate


class FarParts(NamedTuple):
    """Of one worker."""

    continuations: FarContinuations
    balancers: FarBalancers
    vigil: FarVigil
    orca: ToldOrca
    metrics: FarMetrics


class FarContinuations(Continuations):
    """Passes on what became of broken streams."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.metrics, gate.events)
        self._gate = gate

    def note(self, unit: str, result: Result, reason: str = "") -> None:
        """What became of one."""
        self._gate.line.rare("continuation", unit, result.value, reason)


class FarBalancers(Balancers):
    """Passes on what load balancers say of themselves."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__()
        self._gate = gate

    def told(self, about: str, state: str, now: float) -> None:
        """A health check came that says whose it is."""
        self._gate.line.rare("balancer", about, state, now)


class FarVigil(Vigil):
    """Judges nothing."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.board, gate.watch, gate.events, gate.now)
        self._gate = gate

    def own_trouble(self, reason: str) -> None:
        """No connection could be opened, through no fault of a unit."""
        self._gate.line.rare("trouble", reason)


class ToldOrca(Orca):
    """The brain's report."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.board, {}, int)

    def take(self, line: bytes, others: dict[bytes, bytes]) -> None:
        """Take over what it says now."""
        self._bin, self._lines = line, others


class FarMetrics(Metrics):
    """Passes on what is counted one by one."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.board, gate.now, waiting=int, connections=dict)
        self._gate = gate

    def retry(self, unit: str) -> None:
        """A request goes on to another unit because this one failed it."""
        self._gate.line.rare("retry", unit)


def far_parts(gate: WorkerGate) -> FarParts:
    """Those of a worker's gate."""
    return FarParts(
        FarContinuations(gate),
        FarBalancers(gate),
        FarVigil(gate),
        ToldOrca(gate),
        FarMetrics(gate),
    )
