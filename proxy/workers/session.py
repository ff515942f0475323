"""A worker's place at the brain: what it asks is answered, what it tells is booked, what it leaves is closed.

1. Each of its leases is one here, under the same id; the Board sees no difference to one of this process.
2. When the worker is gone its leases are closed and its asks forgotten, at once and once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import Result
from cellgate.proxy.request.dispatcher import NOT_QUEUED, Pending, PickRequest
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.workers.figures import Record
from cellgate.proxy.workers.protocol import (
    Message,
    Report,
    Say,
    Tell,
    ask_in,
    failure_in,
    failure_out,
    request_in,
)
from cellgate.proxy.workers.remote_dispatcher import OUTCOMES
from cellgate.router.cost_model import Usage
from cellgate.router.lease import Lease
from cellgate.router.nouns import Outcome, Refusal

if TYPE_CHECKING:
    from cellgate.proxy.workers.control_process import BrainGate
    from cellgate.proxy.workers.link import Link

_ENOUGH_RETRIES = Failure(Kind.NO_UNIT, "no unit may be tried again: enough retries are under way")
_new = tuple.__new__


class Seat:
    """One worker's. `link` is set before anything is heard."""

    def __init__(self, brain: BrainGate, number: int, record: Record) -> None:
        self.number = number
        self.record = record
        self.link: Link
        self.report: Report | None = None
        """The last one."""
        self.informed = False
        """Whether it has been told of the units."""
        self.accepting = False
        self._brain = brain
        self._pending: dict[int, Pending] = {}
        self._early: dict[int, Message] = {}
        """What was asked before all was known that is open."""
        self._leases: dict[int, Lease] = {}
        self._closed: tuple[int, Lease | None] = (0, None)
        self._handlers: dict[int, Callable[..., None]] = {
            Say.HELLO: self._hello,
            Say.ACCEPTING: self._accepts,
            Say.PICK: self._pick,
            Say.LEAVE: self._leave,
            Say.COMMIT: self._commit,
            Say.CLOSE: self._close,
            Say.WORKED: self._worked,
            Say.BLAME: self._blame,
            Say.FINISHED: self._finished,
            Say.RARE: self._rare,
            Say.DOUBT: self._doubt,
            Say.MADE: brain.stored.made,
            Say.TICK: self._tick,
        }

    def __len__(self) -> int:
        """Leases that it has open."""
        return len(self._leases)

    def hear(self, message: Message) -> None:
        """Act on what it says."""
        self._handlers[message[0]](*message[1:])

    def begin(self) -> None:
        """Answer what was asked early."""
        early, self._early = self._early, {}
        for number, plain in early.items():
            self._pick(number, plain)

    def vacate(self) -> None:
        """It is gone."""
        self._early.clear()
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.cancel()
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            self._brain.dispatcher.released(lease, Outcome.GATE_ERROR)

    # -- asks ----------------------------------------------------------------------------------------------

    def _pick(self, number: int, plain: Message) -> None:
        if not self._brain.knows_all:
            self._early[number] = plain
            return
        request = request_in(plain)
        if request.draws:
            if request.must_wait:
                # It is refused nothing for its retry, and so takes nothing from the budget of all workers.
                request = request._replace(draws=False)
            elif self._brain.has_enough_retries():
                self._refuse(number, _ENOUGH_RETRIES)
                return
        asker = Asker(self, number, request)
        found = self._brain.dispatcher.acquire(request, asker)
        if isinstance(found, Lease | Failure):
            self.settle(asker, found)
        else:
            asker.pending = self._pending[number] = found

    def settle(self, asker: Asker, found: Lease | Failure) -> None:
        """What came of an ask, at once or later."""
        number = asker.number
        self._pending.pop(number, None)
        if isinstance(found, Lease):
            found.on_evict = partial(self._brain.evicted, self, number)
            self._leases[number] = found
            self.link.send((Tell.GRANT, number, found.unit, found.opened_at, found.explanation))
        elif found is NOT_QUEUED:
            # The words of its unit are gone by now.
            self._refuse(number, self._brain.explain(Refusal.FULL, asker.request.ask))
        else:
            self._refuse(number, found)

    def crashed(self, number: int, error: Exception) -> None:
        """An ask could not be answered."""
        self._brain.defect("a worker's request for a unit failed", error)
        self._refuse(number, Failure(Kind.INTERNAL, "the gate failed on this request; its log says more"))

    def _refuse(self, number: int, why: Failure) -> None:
        self.link.send((Tell.REFUSE, number, failure_out(why)))

    def _leave(self, number: int) -> None:
        self._early.pop(number, None)
        if (pending := self._pending.pop(number, None)) is not None:
            pending.cancel()
        elif (lease := self._leases.pop(number, None)) is not None:
            # It was given a unit just now, and nothing was sent there.
            self._brain.withdraw(lease)

    # -- leases --------------------------------------------------------------------------------------------

    def _commit(self, number: int, at: float, resumed: bool) -> None:
        lease = self._leases.get(number)
        if lease is None or lease.committed:
            return
        lease.commit(at)
        if lease.ask.stream:
            lease.desk.life_at = max(lease.desk.life_at, at)
        self._brain.dispatcher.committed(lease, resumed=resumed)

    def _close(self, number: int, outcome: int, at: float) -> None:
        lease = self._leases.pop(number, None)
        self._closed = number, lease
        if lease is not None:
            self._brain.dispatcher.released(lease, OUTCOMES[outcome], at)

    def _worked(self, number: int, events: int, usage: Message | None, at: float, was_paused: bool) -> None:
        if (lease := self._lease(number)) is not None:
            lease.was_paused = was_paused
            used = None if usage is None else Usage(*usage)
            self._brain.dispatcher.completed(lease, events, used, at)

    def _blame(self, number: int, failure: Message, tokens: int, shown: int, judged: bool) -> None:
        if (lease := self._lease(number)) is not None:
            self._brain.dispatcher.blame(lease, failure_in(failure), tokens, shown, judged=judged)

    def _lease(self, number: int) -> Lease | None:
        """One that is open, or was closed with the last word about leases."""
        closed, lease = self._closed
        return lease if closed == number else self._leases.get(number)

    # -- what else it tells --------------------------------------------------------------------------------

    def _hello(self, known: tuple[Message, dict[str, Any]] | None, leases: list[Message]) -> None:
        if known is not None:
            self._brain.learn(*known)
        for number, unit, ask, opened_at, retry, first_at, paused in leases:
            lease = self._brain.adopt(unit, ask_in(ask), opened_at, retry=retry)
            if lease is None:
                continue
            lease.paused = paused
            if first_at:
                lease.committed, lease.first_at = True, first_at
                # When its prompt was done is not known here, so nothing is learnt of that.
                lease.desk.books.show(lease, lease.ask, lease.bet, self._brain.now())
            lease.on_evict = partial(self._brain.evicted, self, number)
            self._leases[number] = lease
        self._brain.greeted()

    def _accepts(self) -> None:
        self.accepting = True
        self._brain.on_accepting()

    def _finished(
        self,
        route: str,
        status: int,
        unit: str,
        ttft_s: float | None,
        duration_s: float,
        bytes_in: int,
        bytes_out: int,
    ) -> None:
        self.record.requests += 1
        # What only the worker's access log tells is left out. The fields stand in their order.
        self._brain.metrics.finished(
            _new(
                Finished,
                (
                    *("", "", "", "", route, "", status, "", unit, Outcome.OK, 0, ttft_s, duration_s),
                    *(0, bytes_in, bytes_out, 0),
                ),
            )
        )

    def _rare(self, name: str, what: tuple[Any, ...]) -> None:
        _RARE[name](self._brain, *what)

    def _doubt(self, unit: str, version: int) -> None:
        if version == self._brain.version:
            self._brain.doubt(unit)

    def _tick(self, *plain: Any) -> None:
        self.report = _new(Report, plain)
        self.record.take(self.report)
        self._brain.reported(self.report)
        for number, paused in self.report.paused:
            if (lease := self._leases.get(number)) is not None:
                lease.paused = paused
                if not paused:
                    lease.desk.work_at = max(lease.desk.work_at, self.report.at)


class Asker:
    """Stands for the exchange at the worker that waits for a unit."""

    __slots__ = ("_seat", "number", "pending", "request")

    def __init__(self, seat: Seat, number: int, request: PickRequest) -> None:
        self._seat = seat
        self.number = number
        self.pending: Pending | None = None
        self.request = request

    def on_result(self, found: Lease | Failure) -> None:
        """What came of it."""
        self._seat.settle(self, found)

    def crashed(self, error: Exception) -> None:
        """To find a unit for it, or to tell so, has failed."""
        if self.pending is not None:
            self.pending.cancel()
        self._seat.crashed(self.number, error)


def _continued(brain: BrainGate, unit: str, result: str, reason: str) -> None:
    brain.continuations.note(unit, Result(result), reason)


_RARE: dict[str, Callable[..., None]] = {
    "continuation": _continued,
    "balancer": lambda brain, *told: brain.balancers.told(*told),
    "trouble": lambda brain, reason: brain.own_trouble(reason),
    "retry": lambda brain, unit: brain.metrics.retry(unit),
}
