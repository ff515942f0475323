"""The port between the data plane and the control plane: what an exchange asks for, and what it reports.

The data plane has clients and connections and takes no decision about units; the control plane decides and
has no client. In one process the port is a call (control/local_dispatcher.py), at a worker it is a socket
(workers/remote_dispatcher.py); an exchange cannot tell which. Rules:
1. A lease that was given is released exactly once, by who got it.
2. Whoever waits gets one result, unless it cancels; a lease that came meanwhile is then given back.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cellgate.proxy.wire.failure import Failure, FailureKind
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Ask, Outcome, Refusal
from cellgate.router.unit_state import Lease


class PickRequest(NamedTuple):
    """Everything that decides which unit a request goes to. The fields combine freely."""

    ask: Ask
    """For the unit "": for the one that made the response the ask follows."""
    size: int
    """Bytes of the body, which the queue bounds."""
    tried: tuple[str, ...] = ()
    """Units that get it no more."""
    moved: bool = False
    """It has lost its unit through no fault of its own."""
    draws: bool = False
    """It draws on the retry budget."""
    must_wait: bool = False
    """Its unit has turned it away just now: it goes to the queue, even if a unit seems to have room."""
    has_failure: bool = False
    """It has a failure to show already: why there is no other unit need not be told, nor counted."""
    units: tuple[str | None, ...] | None = None
    """The units that it was placed on, in this order; None among them: any. None: it was not placed."""
    explain_since: float = 0.0
    """When a request was received that asks why it goes where it goes; 0: it does not ask."""


NOT_QUEUED = Failure(FailureKind.FULL, "the queue takes no request back")
"""The result of `acquire` for a request that must wait and may not. It is not counted: whoever asked has the
unit's own words.
"""
FAILED_ALREADY = Failure(FailureKind.NO_UNIT, "it has a failure to show, and that is shown")
"""The result for a request that has a failure, when there is no unit for it."""


class Waiter(Protocol):
    """Who waits for a unit: the exchange, or what stands for it in the control process."""

    def on_result(self, found: Lease | Failure) -> None:
        """What came of waiting."""

    def crashed(self, error: Exception) -> None:
        """To tell it has failed, here or there; `cancel` gives back what was found. Never raises."""


class Pending(Protocol):
    """A request that waits for a unit."""

    @property
    def queued_at(self) -> float | None:
        """Since when it has a place in the queue; None: as far as can be seen, it has none."""

    def cancel(self) -> None:
        """Wait no more. A lease that has come and was not taken is given back."""


class Dispatcher(Protocol):
    """The control plane as the data plane sees it."""

    def acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        """A unit, or why there is none. Pending: the waiter is told later, once."""

    def acquire_other(self, request: PickRequest, waiter: Waiter) -> Lease | Refusal | Pending:
        """A unit for a request whose unit has answered, but not well: at once, or not at all.

        Pending: there seems to be one, and the waiter is told later.
        """

    def paid_retries(self) -> int:
        """How many requests that are in flight, or wait, draw on the retry budget."""

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        """Something is about to be shown to the client: of a stream that this unit goes on with (`resumed`),
        or of a response that is stored there.
        """

    def completed(self, lease: Lease, events: int, usage: Usage | None) -> None:
        """A generation has ended well, after so many events."""

    def released(self, lease: Lease, outcome: Outcome) -> None:
        """The attempt is over."""

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        """The attempt has failed. `tokens`: shown to its client in all; `shown`: of these by this unit.

        `judged`: the unit can be held to answer such requests; if not, no more is learnt than that it may
        have died of this one.
        """
