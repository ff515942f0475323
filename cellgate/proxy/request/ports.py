"""The dispatcher, as a port between the data plane and the control plane: what an exchange asks for, and what
it reports.

The data plane has clients and connections and takes no decision about units; the control plane decides and
has no client. In one process the port is a call (control/dispatcher.py), at a worker it is a socket
(extras/workers/remote.py); the exchange sees no difference. Rules:
1. A lease is released exactly once, by the exchange that got it.
2. A waiter gets exactly one result, unless it cancels; a lease that was found meanwhile is then given back.

In this order: `Dispatcher`, `Observer`, `Reports`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.counters import ResumeKind, ResumeResult
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Ask, Outcome, Refusal, SplitStep, Use
from cellgate.router.opinions import Refusing
from cellgate.router.unit_state import Lease, UnitState

Charge = tuple[str, int, int, float]
"""The name of a key; tokens that a request is expected to take: of its prompt, and of its answer; when it
came, in seconds since 1970. The tenant and the model are those of the ask.
"""


class Dispatcher(Protocol):
    """The control plane as the data plane sees it."""

    def acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        """A lease, or why there is none. Pending: the waiter gets the result later, once."""

    def acquire_other(self, request: PickRequest, waiter: Waiter) -> Lease | Refusal | Pending:
        """Another unit for a request whose unit answered with a failure: at once, or not at all.

        Pending: there seems to be one, and the waiter gets it later.
        """

    def paid_retries(self) -> int:
        """How many requests, in flight or waiting, draw on the retry budget."""

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        """The attempt commits. `resumed`: the unit resumes a stream; `response_id`: of a response stored at
        the unit.
        """

    def completed(self, lease: Lease, events: int, usage: Usage | None) -> None:
        """A generation ended without a failure, after `events` events."""

    def released(self, lease: Lease, outcome: Outcome) -> None:
        """The attempt is over."""

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        """The attempt failed. `tokens`: sent to its client in all; `shown`: of these by this unit.

        `judged`: the failure counts as evidence against the unit; if not, only the containment of poison uses
        it.
        """


class PickRequest(NamedTuple):
    """Everything that decides which unit a request goes to. The fields combine freely."""

    ask: Ask
    """Its unit may be "": the unit that made the response which the ask follows."""
    size: int
    """Bytes of the body: the queue has a limit of bytes."""
    tried: tuple[str, ...] = ()
    """Units that must not get it again."""
    moved: bool = False
    """It lost its unit through no fault of its own."""
    draws: bool = False
    """It draws on the retry budget."""
    must_wait: bool = False
    """Its unit has just refused it as full: it must wait in the queue, even if a unit seems to have room."""
    has_failure: bool = False
    """It already has a failure for its client: a refusal is neither explained nor counted."""
    units: tuple[str | None, ...] | None = None
    """The units that the client named, in this order; None among them means any. None: no unit was named."""
    explain_since: float = 0.0
    """When the request was received, if it wants an explanation of the choice; else 0."""
    charge: Charge | None = None
    """What the limits of its key are charged with, before anything else is done for it; None: nothing."""
    loan: int = 0
    """How far above the limits of units it may go (see router/pick.py)."""
    waited_s: float = 0.0
    """How long it has waited in the queue before its last unit."""


NOT_QUEUED = Failure(FailureKind.FULL, "the queue takes no request back")
"""The result of `acquire` for a request that must wait, but cannot be queued. It is not counted, because the
client gets the unit's own answer.
"""
FAILED_ALREADY = Failure(FailureKind.NO_UNIT, "it has a failure to show, and that is shown")
"""The result for a request that has a failure, when there is no unit for it."""


class Waiter(Protocol):
    """A waiter for a unit: the exchange, or its representative in the control process."""

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting."""

    def crashed(self, error: Exception) -> None:
        """Passing the result on has failed; `cancel` gives back what was found. Never raises."""


class Pending(Protocol):
    """A request that waits for a unit."""

    @property
    def queued_at(self) -> float | None:
        """Since when it has been queued; None: not queued, as far as this process knows."""

    def cancel(self) -> None:
        """Stop waiting. A lease that was found and not taken is given back."""


# Observers of the steps of a request, which change nothing. Most requests have none.
#
# Times are the loop's. An observer must not raise: an exception counts as a defect of the request.


class Observer:
    """An observer of one request; this one does nothing. `unit_lines` are header lines for the unit of the
    attempt in flight.
    """

    __slots__ = ()

    unit_lines = b""

    def waited(self, since: float, until: float) -> None:
        """It was queued."""

    def attempted(self, lease: Lease, before: int) -> None:
        """An attempt on a unit begins, after `before` others."""

    def replied(self, status: int) -> None:
        """The unit has sent the head of its reply."""

    def failing(self, code: str) -> None:
        """The attempt in flight fails, for this reason."""

    def attempt_over(self, lease: Lease, outcome: Outcome, at: float) -> None:
        """The attempt in flight is over."""

    def completed(self, usage: Usage | None) -> None:
        """A generation has ended, whole; `usage` is what its unit told of its tokens."""

    def broke(self, unit: str, at: float) -> None:
        """A unit broke its answer after the commit."""

    def settled(self, result: ResumeResult) -> None:
        """The result of the first break without a result is known."""

    def over(self, record: Finished, at: float) -> None:
        """The response has ended."""


# What the data plane reports beside its leases. To report one thing more: a class here, and a row of the
# table in control/dispatcher.py. In one process a report is taken at once; a worker passes it on, pickled.


class TracedRequest(NamedTuple):
    """A request that is over was traced. `trace_id`: 32 hexadecimal digits."""

    unit: str
    ttft_s: float | None
    duration_s: float
    trace_id: str


class Generated(NamedTuple):
    """A request for a generation is over: see `GenAiMetrics.answered`, proxy/observe/gen_ai.py."""

    operation: str
    provider: str
    model: str
    error: str
    duration_s: float
    first_token_s: float | None
    output_token_s: float | None


class Retried(NamedTuple):
    """A request is retried on another unit because this one failed."""

    unit: str


class Resumed(NamedTuple):
    """The result of a stream that `unit` broke, and why it was not resumed."""

    unit: str
    kind: ResumeKind
    result: ResumeResult
    reason: str = ""


class Left(NamedTuple):
    """What became of a request of a unit that is out."""

    unit: str
    became: str


class Refuses(NamedTuple):
    """A unit refuses what others serve, of this use."""

    found: Refusing
    use: Use


class ImpossibleUsage(NamedTuple):
    """A unit has told more tokens for an answer than it can have: what it told, and what of it counts."""

    unit: str
    reported: str


class Forged(NamedTuple):
    """A peer that is not trusted named a unit, or asked for an explanation."""


class GateFault(NamedTuple):
    """A connection could not be opened, or accepted, through no fault of a unit."""

    reason: str


Report = (
    TracedRequest
    | Generated
    | Retried
    | Resumed
    | Left
    | SplitStep
    | Refuses
    | ImpossibleUsage
    | Forged
    | GateFault
)
"""SplitStep: a step of a request whose prompt another unit computes."""


class Reports(Protocol):
    """To the control plane."""

    def finished(self, record: Finished) -> None:
        """A request is over."""

    def send(self, report: Report) -> None:
        """Anything else."""

    def restart_suspected(self, state: UnitState) -> None:
        """A unit closed a connection unexpectedly: it may have restarted."""
