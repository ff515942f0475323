"""The port between the data plane and the control plane: what an exchange asks for, and what it reports.

The data plane has clients and connections and takes no decision about units; the control plane decides and
has no client. In one process the port is a call (control/local_dispatcher.py), at a worker it is a socket
(workers/remote_dispatcher.py); the exchange sees no difference. Rules:
1. A lease is released exactly once, by the exchange that got it.
2. A waiter gets exactly one result, unless it cancels; a lease that was found meanwhile is then given back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Ask, Outcome, Refusal
from cellgate.router.unit_state import Lease

Charge = tuple[str, int, int, float]
"""The name of a key; tokens that a request is expected to take: of its prompt, and of its answer; when it
came, in seconds since 1970. The tenant and the model are those of the ask.
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
