"""The dispatcher of a worker: asks the brain for units, and tells it what becomes of them.

It never has a unit at once: the waiter is told when the brain has answered, as if it had waited in the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cellgate.proxy.request.dispatcher import Pending, PickRequest, Waiter
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.workers.protocol import Message, Say, ask_out, failure_in, failure_out
from cellgate.router.board import Board
from cellgate.router.cost_model import Bet, Usage
from cellgate.router.lease import Lease
from cellgate.router.nouns import Outcome, Refusal

if TYPE_CHECKING:
    from cellgate.proxy.workers.accounts import Accounts
    from cellgate.proxy.workers.control_client import Line
    from cellgate.router.unit_state import Desk

OUTCOMES = tuple(Outcome)
OUTCOME_INDEX = {outcome: index for index, outcome in enumerate(OUTCOMES)}
_NO_BET = Bet(0, 0, 0, 0, 0.0)
"""What is expected of attempts the brain knows."""


class RemoteLease(Lease):
    """The worker's end of a lease that is open at the brain, under the same id."""

    __slots__ = ("_accounts", "_paused", "id")

    def __init__(
        self, accounts: Accounts, number: int, desk: Desk, request: PickRequest, at: float, explanation: bytes
    ) -> None:
        # Not the base's: what it enters into the books stands in the brain's.
        self._accounts = accounts
        self._paused = False
        self.id = number
        self.desk = desk
        self.unit = desk.unit.name
        self.ask = request.ask
        self.bet = _NO_BET
        self.opened_at = at
        self.retry = request.draws
        self.committed = self.evicted = self.closed = self.was_paused = False
        self.explanation = explanation
        self.first_at = 0.0
        self.on_evict = None

    @property
    def paused(self) -> bool:
        """Whether its client reads nothing."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._accounts.paused[self.id] = paused

    def commit(self, now: float) -> None:
        """The unit has shown something."""
        self.committed = True
        self.first_at = now


class RemoteDispatcher:
    """Of one worker, whose `board` is a copy of the brain's."""

    def __init__(self, board: Board, line: Line, accounts: Accounts, now: Callable[[], float]) -> None:
        self._board = board
        self._line = line
        self._accounts = accounts
        self._now = now
        self._leases: dict[int, RemoteLease] = {}

    def __len__(self) -> int:
        """Leases that are open."""
        return len(self._leases)

    # -- units for requests --------------------------------------------------------------------------------

    def acquire(self, request: PickRequest, waiter: Waiter) -> Pending:
        """Ask the brain for a unit."""
        return self._line.ask(request, waiter)

    def acquire_other(self, request: PickRequest, waiter: Waiter) -> Refusal | Pending:
        """Ask for another unit, if there seems to be one with room."""
        now, refusal = self._now(), Refusal.NO_UNIT
        for name, desk in self._board.desks.items():
            if name not in request.tried and desk.is_usable() and desk.serves(request.ask):
                if desk.has_place(now, 0.0):
                    return self._line.ask(request, waiter)
                refusal = Refusal.FULL
        return refusal

    def paid_retries(self) -> int:
        """How many requests that are in flight here draw on the retry budget; the brain knows of all."""
        return self._board.retries_in_flight

    # -- what becomes of them ------------------------------------------------------------------------------

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        """Something is about to be shown to the client."""
        self._board.prove(lease)
        self._line.mention((Say.COMMIT, _id(lease), lease.first_at, resumed))
        if response_id:
            # At once, for its client may go on from it.
            self._line.say((Say.MADE, response_id, lease.unit))

    def completed(self, lease: Lease, events: int, usage: Usage | None) -> None:
        """A generation has ended well."""
        told = None if usage is None else tuple(usage)
        self._line.mention((Say.WORKED, _id(lease), events, told, self._now(), lease.was_paused))

    def released(self, lease: Lease, outcome: Outcome) -> None:
        """Close a lease, here and there."""
        now, number = self._now(), _id(lease)
        self._board.close(lease, now)
        self._accounts.paused.pop(number, None)
        del self._leases[number]
        self._line.mention((Say.CLOSE, number, OUTCOME_INDEX[outcome], now))

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        """The attempt has failed."""
        self._line.say((Say.BLAME, _id(lease), failure_out(failure), tokens, shown, judged))

    # -- what the brain says -------------------------------------------------------------------------------

    def greeting(self) -> list[Message]:
        """What is open, for a new brain."""
        return [
            (n, a.unit, ask_out(a.ask), a.opened_at, a.retry, a.first_at, a.paused)
            for n, a in self._leases.items()
        ]

    def granted(self, number: int, unit: str, at: float, explanation: bytes) -> None:
        """A lease is open there."""
        question = self._line.answered(number)
        if question is None:
            # The brain was told that nobody waits.
            return
        desk = self._board.desks[unit]
        lease = RemoteLease(self._accounts, number, desk, question.request, at, explanation)
        self._leases[number] = lease
        desk.leases[lease] = None
        self._board.in_flight += 1
        self._board.retries_in_flight += lease.retry
        question.settle(lease)

    def refused(self, number: int, why: Message) -> None:
        """There is no unit."""
        if (question := self._line.answered(number)) is not None:
            question.settle(failure_in(why))

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
