"""The dispatcher of a worker: acquires units from the control process, and reports the results of leases.

It never has a unit at once: the waiter gets the result later, as if it had waited in the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.request.dispatcher import Pending, PickRequest, Waiter
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.workers.protocol import Message, ToControl, ask_out, failure_in, failure_out
from cellgate.router.backlog import Job
from cellgate.router.board import Board
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Outcome, Refusal
from cellgate.router.split_nouns import SplitPlan
from cellgate.router.unit_state import Lease

if TYPE_CHECKING:
    from cellgate.proxy.workers.control_client import ControlClient
    from cellgate.router.unit_state import UnitState

OUTCOMES = tuple(Outcome)
OUTCOME_INDEX = {outcome: index for index, outcome in enumerate(OUTCOMES)}
_NO_JOB = Job(0, 0)
"""The prediction of an attempt is kept at the control process."""


class RemoteLease(Lease):
    """The worker's side of a lease that is open at the control process, under the same id."""

    __slots__ = ("id", "told_paused")

    def __init__(
        self, number: int, state: UnitState, request: PickRequest, at: float, lines: bytes, rank: int
    ) -> None:
        # Not the base's: the cost model is kept in the control process.
        self.id = number
        self.unit_state = state
        self.unit = state.unit.name
        self.build = state.build
        self.ask = request.ask
        self.job = _NO_JOB
        self.opened_at = at
        self.retry = request.draws
        self.committed = self.evicted = self.closed = self.paused = self.was_paused = False
        self.told_paused = False
        self.lines = lines
        self.rank = rank
        self.first_at = 0.0
        self.split = None
        self.on_evict = None

    def commit(self, now: float) -> None:
        """The attempt commits."""
        self.committed = True
        self.first_at = now


class RemoteDispatcher:
    """The dispatcher of one worker, whose `board` is a replica."""

    def __init__(self, board: Board, control: ControlClient, now: Callable[[], float]) -> None:
        self._board = board
        self._control = control
        self._now = now
        self._leases: dict[int, RemoteLease] = {}

    def __len__(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    # -- units for requests --------------------------------------------------------------------------------

    def acquire(self, request: PickRequest, waiter: Waiter) -> Pending:
        """Ask for a unit."""
        return self._control.ask(request, waiter)

    def acquire_other(self, request: PickRequest, waiter: Waiter) -> Refusal | Pending:
        """Ask for another unit, if there seems to be one with room."""
        now, refusal = self._now(), Refusal.NO_UNIT
        for name, state in self._board.pairs.decoders.items():
            if name not in request.tried and state.is_usable() and state.serves(request.ask):
                if state.has_room(now, 0.0):
                    return self._control.ask(request, waiter)
                refusal = Refusal.FULL
        return refusal

    def paid_retries(self) -> int:
        """How many requests of this worker draw on the retry budget; the control process counts all."""
        return self._board.retries_in_flight

    # -- what becomes of them ------------------------------------------------------------------------------

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        """The attempt commits."""
        self._board.prove(lease)
        self._control.mention((ToControl.COMMITTED, _id(lease), lease.first_at, resumed))
        if response_id:
            # At once, because the client may refer to the response in its next request.
            self._control.say((ToControl.STORED, response_id, lease.unit))

    def completed(self, lease: Lease, events: int, usage: Usage | None) -> None:
        """A generation ended without a failure."""
        told = None if usage is None else tuple(usage)
        self._control.mention((ToControl.COMPLETED, _id(lease), events, told, self._now(), lease.was_paused))

    def released(self, lease: Lease, outcome: Outcome) -> None:
        """Close a lease, here and there."""
        now, number = self._now(), _id(lease)
        self._board.close(lease, now)
        del self._leases[number]
        self._control.mention((ToControl.RELEASED, number, OUTCOME_INDEX[outcome], now))

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        """The attempt has failed."""
        self._control.say((ToControl.BLAME, _id(lease), failure_out(failure), tokens, shown, judged))

    # -- what the control process says ----------------------------------------------------------------------

    def greeting(self) -> list[Message]:
        """The open leases, for a new control process."""
        self.pauses()
        return [
            (n, a.unit, ask_out(a.ask), a.opened_at, a.retry, a.first_at, a.paused)
            for n, a in self._leases.items()
        ]

    def pauses(self) -> list[tuple[int, bool]]:
        """Leases whose clients were paused, or read again, since the last call."""
        changed = [lease for lease in self._leases.values() if lease.paused is not lease.told_paused]
        for lease in changed:
            lease.told_paused = lease.paused
        return [(lease.id, lease.paused) for lease in changed]

    def granted(
        self, number: int, unit: str, at: float, lines: bytes, rank: int, split: Message | None
    ) -> None:
        """A lease was granted."""
        question = self._control.answered(number)
        if question is None:
            # The cancellation was sent meanwhile.
            return
        state = self._board.units[unit]
        lease = RemoteLease(number, state, question.request, at, lines, rank)
        lease.split = None if split is None else SplitPlan(*split)
        self._leases[number] = lease
        state.leases[lease] = None
        self._board.in_flight += 1
        self._board.retries_in_flight += lease.retry
        question.resolve(lease)

    def refused(self, number: int, why: Message) -> None:
        """The request was refused."""
        if (question := self._control.answered(number)) is not None:
            question.resolve(failure_in(why))

    def evict(self, numbers: list[int]) -> None:
        """Units went down."""
        for number in numbers:
            if (lease := self._leases.get(number)) is not None:
                lease.evicted = True
                if lease.on_evict is not None:
                    lease.on_evict()


def _id(lease: Lease) -> int:
    assert isinstance(lease, RemoteLease)
    return lease.id
