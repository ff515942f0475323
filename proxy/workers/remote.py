"""An exchange at a worker: its units are found by the brain, everything else is as at a gate of one process.

A search here never has an answer at once: it asks, and the exchange goes on when it is told, as if it had
waited in the queue. What an answer follows from stands in request/selection.py, which the brain uses for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.explained import ExplainedExchange
from cellgate.proxy.request.placed import PlacedExchange, PlacedSearch
from cellgate.proxy.request.selection import Search, Tell
from cellgate.proxy.wire.failure import Failure
from cellgate.proxy.workers.protocol import Message, ask_out
from cellgate.router.cost_model import Bet
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Refusal
from cellgate.router.retry import Step

if TYPE_CHECKING:
    from cellgate.proxy.workers.worker import WorkerGate
    from cellgate.router.unit_state import Desk

QUEUED_S = 0.01
"""A question that takes longer is about one that waits."""
_NO_BET = Bet(0, 0, 0, 0, 0.0)
"""What is expected of attempts the brain knows."""


class RemoteLease(Lease):
    """The worker's end of a lease that is open at the brain, under the same id."""

    __slots__ = ("_gate", "_paused", "id", "line")

    def __init__(
        self, gate: WorkerGate, number: int, desk: Desk, ask: Ask, at: float, *, retry: bool, line: bytes
    ) -> None:
        # Not the base's: what it enters into the books stands in the brain's.
        self._gate = gate
        self._paused = False
        self.id = number
        self.line = line
        self.desk = desk
        self.unit = desk.unit.name
        self.ask = ask
        self.bet = _NO_BET
        self.opened_at = at
        self.retry = retry
        self.committed = self.evicted = self.closed = self.was_paused = False
        self.first_at = 0.0
        self.on_evict = None

    @property
    def paused(self) -> bool:
        """Whether its client reads nothing."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._gate.accounts.paused[self.id] = paused

    def commit(self, now: float) -> None:
        """The unit has shown something."""
        self.committed = True
        self.first_at = now
        self._gate.committed(self, now)


class RemoteSearch(Search):
    """Puts its asks to the brain."""

    __slots__ = ("_asked_at", "_said", "_tell", "_wanted", "asked", "draws", "received_at")
    _gate: WorkerGate

    def __init__(self, gate: WorkerGate, size: int, *, once: bool = False) -> None:
        super().__init__(gate, size, once=once)
        self._wanted: Message | None = None
        self._tell: Tell | None = None
        self._said: Failure | None = None
        self._asked_at: float | None = None
        self.asked = 0
        """The id of what the brain is being asked; 0: nothing."""
        self.draws = False
        self.received_at = 0.0

    @property
    def queued_at(self) -> float | None:
        """Since when it has a place in the queue, as far as can be seen from here; None: it has none."""
        asked_at = self._asked_at
        return asked_at if asked_at is not None and self._gate.now() - asked_at > QUEUED_S else None

    def heed(self, answer: Lease | Refusal, tell: Tell) -> Lease | Failure | None:
        """Put the question, or take what came of it."""
        if self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._ask(wanted, tell)
            return None
        self._asked_at = None
        if isinstance(answer, Lease):
            return answer
        said = self._said
        return said if said is not None and said.kind.row.is_final else self.failure or said

    def pick_besides(self, unit: str, step: Step) -> Lease | Refusal:
        """Another one than `unit`, if there seems to be one with room."""
        now, tried = self._gate.now(), (*self.history.tried, unit)
        if any(
            name not in tried and desk.is_usable() and desk.serves(self.ask) and desk.has_place(now, 0.0)
            for name, desk in self._gate.board.desks.items()
        ):
            return super().pick_besides(unit, step)
        return Refusal.FULL

    def waits_again(self, tell: Tell) -> bool:
        """Whether an ask that its unit has no room for goes back to the queue until it may have."""
        if self._turned_away >= self._gate.board.rules.attempts - 1:
            return False
        self._turned_away += 1
        self._ask(self._want(self.history.tried, moved=self._moved, draws=False, queued=True), tell)
        return True

    def leave(self) -> None:
        """Nobody waits for a unit any more."""
        if self.asked:
            self._gate.line.leave(self.asked)
            self.asked = 0
        self._give_back()

    def told(self, answer: Lease | Refusal, why: Failure | None = None) -> None:
        """The brain's answer, or that there will be none."""
        tell, self._tell, self._said, self.asked = self._tell, None, why, 0
        assert tell is not None
        tell(answer)

    def _ask(self, wanted: Message, tell: Tell) -> None:
        self._tell = tell
        self._asked_at = self._gate.now()
        self.asked = self._gate.line.ask(self, wanted)

    def _want(self, tried: tuple[str, ...], *, moved: bool, draws: bool, queued: bool = False) -> Message:
        """The fields of a `Wanted`."""
        self.draws = draws
        failed = self.failure is not None
        return (
            *(ask_out(self.ask), self._size, tried, moved, draws),
            *(queued, failed, self.received_at, self._units()),
        )

    def _units(self) -> tuple[str | None, ...] | None:
        return None

    def _pick(self, tried: tuple[str, ...], *, evicted: bool, draws: bool) -> Lease | Refusal:
        self._wanted = self._want(tried, moved=evicted, draws=draws)
        # A unit is being asked for.
        return Refusal.UNSURE


class RemotePlacedSearch(RemoteSearch):
    """The same for a request that names its units (see PlacedSearch)."""

    __slots__ = ("units",)

    def __init__(self, gate: WorkerGate, size: int, *, once: bool = False) -> None:
        super().__init__(gate, size, once=once)
        self.units: tuple[str | None, ...] = (None,)

    def told(self, answer: Lease | Refusal, why: Failure | None = None) -> None:
        """The brain's answer: from here on the ask is one for that unit."""
        if self.units[-1] is not None:
            unit = answer.unit if isinstance(answer, Lease) else self.units[-1]
            self.ask = self.ask._replace(unit=unit)
        super().told(answer, why)

    def _units(self) -> tuple[str | None, ...] | None:
        return self.units


class RemoteExchange(Exchange):
    """Answers one request at a worker."""

    __slots__ = ()
    _SEARCH = RemoteSearch


class RemotePlacedExchange(PlacedExchange):
    """One that names its unit."""

    __slots__ = ()
    # It has all that is asked of one.
    _SEARCH = cast("type[PlacedSearch]", RemotePlacedSearch)


class RemoteExplainedExchange(ExplainedExchange):
    """One that asks why it goes where it goes: the brain knows."""

    __slots__ = ()
    _SEARCH = RemoteSearch

    def start(self) -> None:
        """As for any request, if it may know."""
        cast(RemoteSearch, self._search).received_at = self._request.received_at
        super().start()

    def explanation(self, lease: Lease) -> bytes:
        """The brain's."""
        return cast(RemoteLease, lease).line
