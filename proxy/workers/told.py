"""The parts of a worker's gate that count or tell: what they take note of is the brain's to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.stall_watch import Vigil
from cellgate.proxy.ingress.balancers import Balancers
from cellgate.proxy.ingress.orca import Orca
from cellgate.proxy.metrics.continuations import Continuations, Result
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.metrics.routing import Routing
from cellgate.proxy.request.local_endpoints import OwnAnswers, response_of
from cellgate.proxy.wire.failure import Kind
from cellgate.proxy.workers.protocol import Say
from cellgate.proxy.workers.remote import RemoteLease
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask

if TYPE_CHECKING:
    from cellgate.proxy.wire.failure import Failure
    from cellgate.proxy.workers.worker import WorkerGate


class FarParts(NamedTuple):
    """Of one worker."""

    own_answers: FarAnswers
    continuations: FarContinuations
    routing: FarRouting
    balancers: FarBalancers
    vigil: FarVigil
    containment: FarContainment
    orca: ToldOrca
    metrics: FarMetrics


class FarAnswers(OwnAnswers):
    """Answers from the copy of the Board. Who made which response the brain knows, and says with the pick."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.board)
        self._gate = gate

    def made(self, response: str, unit: str) -> None:
        """Have the brain note who made a response; at once, for its client may go on from it."""
        self._gate.line.say((Say.MADE, response, unit))

    def placed(self, ask: Ask) -> Ask:
        """As it is."""
        return ask

    def sticky_ask(self, path: bytes) -> Ask | Failure:
        """An ask for the unit, whichever it is, that made the response."""
        return Ask(unit="", follows=response_of(path))


class FarContinuations(Continuations):
    """Passes on what became of broken streams."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.metrics, gate.events)
        self._gate = gate

    def note(self, unit: str, result: Result, reason: str = "") -> None:
        """What became of one."""
        self._gate.line.rare("continuation", unit, result.value, reason)


class FarRouting(Routing):
    """Counts nothing: the brain sees the same by its own leases."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(gate.board, gate.router.waiting)

    def shown(self, _lease: Lease) -> None:
        """Known by the commit."""


class FarBalancers(Balancers):
    """Passes on what load balancers say of themselves."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__()
        self._gate = gate

    def told(self, about: str, state: str, now: float) -> None:
        """A health check came that says whose it is."""
        self._gate.line.rare("balancer", about, state, now)


class FarContainment(Containment):
    """Contains nothing: the brain is told of what fails, and refuses."""

    def __init__(self, gate: WorkerGate) -> None:
        super().__init__(
            gate.board,
            gate.router.pick,
            gate.events,
            gate.now,
            lambda _: None,
            answered=lambda _: 0,
            ban_s=0.0,
        )
        self._gate = gate

    def broke(self, lease: Lease, kind: Kind, tokens: int, shown: int) -> None:
        """An attempt has failed."""
        assert isinstance(lease, RemoteLease)
        self._gate.line.say((Say.BROKE, lease.id, kind.value, tokens, shown))


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
        FarAnswers(gate),
        FarContinuations(gate),
        FarRouting(gate),
        FarBalancers(gate),
        FarVigil(gate),
        FarContainment(gate),
        ToldOrca(gate),
        FarMetrics(gate),
    )
