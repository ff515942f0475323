"""A worker's session at the control process: answers its requests, records its reports, and closes its leases
when it ends.

1. Each lease of the worker is an ordinary lease on the Board, under the same id.
2. When the worker ends, its leases are closed and its requests dropped, exactly once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from cellgate.proxy.control.local_dispatcher import LocalDispatcher
from cellgate.proxy.control.local_reports import LocalReports
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.doors.bill import Bill
from cellgate.proxy.doors.ledger import LimitLedger
from cellgate.proxy.logs.defects import report_defect
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.continuations import ContinuationKind, ContinuationResult
from cellgate.proxy.request.dispatcher import NOT_QUEUED, Dispatcher, Pending, PickRequest
from cellgate.proxy.wire.failure import UNCHARGED, Failure, FailureKind
from cellgate.proxy.workers.protocol import (
    Message,
    ToControl,
    ToWorker,
    WorkerStatus,
    ask_in,
    failure_in,
    failure_out,
    request_in,
)
from cellgate.proxy.workers.remote_dispatcher import OUTCOMES
from cellgate.proxy.workers.socket_link import Link
from cellgate.proxy.workers.worker_metrics import WorkerTotals
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Outcome, Refusal
from cellgate.router.opinions import Refusing
from cellgate.router.retry import has_budget
from cellgate.router.split_nouns import SplitStep
from cellgate.router.unit_state import Lease

_ENOUGH_RETRIES = Failure(FailureKind.NO_UNIT, "no retry: the retry budget is used up")
_new = tuple.__new__


class Control(Protocol):
    """What all sessions of a control process share."""

    plane: Plane
    dispatcher: LocalDispatcher
    asked: Dispatcher
    """Who is asked for units: the dispatcher, perhaps behind limits."""
    ledger: LimitLedger | None
    reports: LocalReports
    version: int
    """Of the fleet."""
    knows_all: bool
    """Whether all workers have reported their open leases; before that no leases are given."""

    def learn(self, fleet: Message, view: dict[str, Any]) -> None:
        """A worker has the state of the previous control process."""

    def greeted(self) -> None:
        """A worker has reported its open leases."""

    def on_accepting(self) -> None:
        """One more worker accepts clients."""

    def reported(self, status: WorkerStatus) -> None:
        """A worker has sent its status."""


class WorkerSession:
    """The session of the worker with this number. `link` is set before the first message; `totals` outlive
    it.
    """

    link: Link

    def __init__(
        self, control: Control, number: int, totals: WorkerTotals, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.number = number
        self.totals = totals
        self.status: WorkerStatus | None = None
        """The last one."""
        self.informed = False
        """Whether it has got the fleet."""
        self.accepting = False
        self._control = control
        self._loop = loop
        self._plane = control.plane
        self._dispatcher = control.dispatcher
        self._pending: dict[int, Pending] = {}
        self._early: dict[int, Message] = {}
        """Requests that came before all open leases were known."""
        self._leases: dict[int, Lease] = {}
        self._released: tuple[int, Lease | None] = (0, None)
        self._evicted: list[int] = []
        self._charged: Counter[tuple[str, str, float]] = Counter()
        """Requests that were charged here and are not settled: key, tenant, and when each came."""
        reports = control.reports
        self._handlers: dict[int, Callable[..., None]] = {
            ToControl.HELLO: self._hello,
            ToControl.ACCEPTING: self._accepts,
            ToControl.ACQUIRE: self._acquire,
            ToControl.CANCEL: self._cancel,
            ToControl.COMMITTED: self._committed,
            ToControl.RELEASED: self._release,
            ToControl.COMPLETED: self._completed,
            ToControl.BLAME: self._blame,
            ToControl.STORED: self._plane.stored.made,
            ToControl.FINISHED: self._finished,
            ToControl.TRACED: reports.traced,
            ToControl.RETRIED: reports.retried,
            ToControl.RESUMED: self._resumed,
            ToControl.RESTART_SUSPECTED: self._restart_suspected,
            ToControl.OWN_TROUBLE: reports.gate_fault,
            ToControl.STATUS: self._take_status,
            ToControl.SPLIT: self._split,
            ToControl.SPENT: self._spent,
            ToControl.SETTLED: self._settled,
            ToControl.REFUSED: self._refused_at_door,
            ToControl.REFUSES: self._refuses,
        }

    def __len__(self) -> int:
        """Its open leases."""
        return len(self._leases)

    def hear(self, message: Message) -> None:
        """Handle its messages."""
        self._handlers[message[0]](*message[1:])

    def begin(self) -> None:
        """Answer the early requests."""
        early, self._early = self._early, {}
        for number, plain in early.items():
            self._acquire(number, plain)

    def vacate(self) -> None:
        """It is gone."""
        self._early.clear()
        pending, self._pending = self._pending, {}
        for each in pending.values():
            each.cancel()
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            self._dispatcher.released(lease, Outcome.GATE_ERROR)
        charged, self._charged = self._charged, Counter()
        if self._control.ledger is not None:
            for key, tenant, _ in charged.elements():
                self._control.ledger.abandon(key, tenant)

    # -- units for requests --------------------------------------------------------------------------------

    def _acquire(self, number: int, plain: Message) -> None:
        if not self._control.knows_all:
            self._early[number] = plain
            return
        request = request_in(plain)
        if request.draws:
            if request.must_wait:
                # A refusal of the retry budget must not be charged to the budget.
                request = request._replace(draws=False)
            elif not self._has_budget():
                self._refuse(number, _ENOUGH_RETRIES)
                return
        asker = Asker(self, number, request)
        found = self._control.asked.acquire(request, asker)
        if request.charge is not None and not (isinstance(found, Failure) and found.kind in UNCHARGED):
            self._charged[request.charge[0], request.ask.tenant, request.charge[3]] += 1
        if isinstance(found, Lease | Failure):
            self.resolve(asker, found)
        else:
            asker.pending = self._pending[number] = found

    def _has_budget(self) -> bool:
        """Whether one more retry is allowed, of all workers together."""
        board = self._plane.board
        return has_budget(board.in_flight, self._dispatcher.paid_retries(), board.rules)

    def resolve(self, asker: Asker, found: Lease | Failure) -> None:
        """Send the result of a pick request, at once or later."""
        number = asker.number
        self._pending.pop(number, None)
        if isinstance(found, Lease):
            self._hold(number, found)
            split = None if found.split is None else tuple(found.split)
            granted = (number, found.unit, found.opened_at, found.lines, found.rank, split)
            self.link.send((ToWorker.GRANTED, *granted))
        elif found is NOT_QUEUED:
            # The unit's own answer was dropped meanwhile.
            self._refuse(number, self._plane.explain(Refusal.FULL, asker.request.ask))
        else:
            self._refuse(number, found)

    def crashed(self, number: int, error: Exception) -> None:
        """A pick request could not be answered."""
        report_defect(self._loop, "a worker's request for a unit failed", error)
        self._refuse(number, Failure(FailureKind.INTERNAL, "the gate failed on this request; see its log"))

    def _hold(self, number: int, lease: Lease) -> None:
        lease.on_evict = partial(self._evict, number)
        self._leases[number] = lease

    def _refuse(self, number: int, why: Failure) -> None:
        self.link.send((ToWorker.REFUSED, number, failure_out(why)))

    def _cancel(self, number: int) -> None:
        self._early.pop(number, None)
        if (pending := self._pending.pop(number, None)) is not None:
            pending.cancel()
        elif (lease := self._leases.pop(number, None)) is not None:
            # It was given a unit at the same moment, and nothing was sent there.
            self._dispatcher.withdrawn(lease)

    # -- leases --------------------------------------------------------------------------------------------

    def _evict(self, number: int) -> None:
        if not self._evicted:
            self._loop.call_soon(self._tell_evicted)
        self._evicted.append(number)

    def _tell_evicted(self) -> None:
        numbers, self._evicted = self._evicted, []
        self.link.send((ToWorker.EVICTED, numbers))

    def _committed(self, number: int, at: float, resumed: bool) -> None:
        lease = self._leases.get(number)
        if lease is None or lease.committed:
            return
        lease.commit(at)
        if lease.ask.stream:
            lease.unit_state.life_at = max(lease.unit_state.life_at, at)
        self._dispatcher.committed(lease, resumed=resumed)

    def _release(self, number: int, outcome: int, at: float) -> None:
        lease = self._leases.pop(number, None)
        self._released = number, lease
        if lease is not None:
            self._dispatcher.released(lease, OUTCOMES[outcome], at)

    def _completed(
        self, number: int, events: int, usage: Message | None, at: float, was_paused: bool
    ) -> None:
        if (lease := self._lease(number)) is not None:
            lease.was_paused = lease.was_paused or was_paused
            used = None if usage is None else Usage(*usage)
            self._dispatcher.completed(lease, events, used, at)

    def _blame(self, number: int, failure: Message, tokens: int, shown: int, judged: bool) -> None:
        if (lease := self._lease(number)) is not None:
            self._dispatcher.blame(lease, failure_in(failure), tokens, shown, judged=judged)

    def _lease(self, number: int) -> Lease | None:
        """A lease that is open, or was released by the message before."""
        released, lease = self._released
        return lease if released == number else self._leases.get(number)

    # -- what else it tells --------------------------------------------------------------------------------

    def _hello(self, known: tuple[Message, dict[str, Any]] | None, leases: list[Message]) -> None:
        if known is not None:
            self._control.learn(*known)
        for number, unit, ask, opened_at, retry, first_at, paused in leases:
            lease = self._dispatcher.adopt(unit, ask_in(ask), opened_at, retry=retry)
            if lease is None:
                continue
            lease.paused = paused
            if first_at:
                lease.committed, lease.first_at = True, first_at
                # The end of its prefill is not known here, so the cost model does not learn from it.
                lease.unit_state.costs.show(lease, self._plane.now())
            self._hold(number, lease)
        self._control.greeted()

    def _accepts(self) -> None:
        self.accepting = True
        self._control.on_accepting()

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
        self.totals.requests += 1
        # Fields that only the worker's access log uses are left out. The fields stand in their order.
        self._control.reports.finished(
            _new(
                Finished,
                (
                    *("", "", "", "", route, "", status, "", unit, Outcome.OK, 0, 0, ttft_s, duration_s),
                    *(0, bytes_in, bytes_out, None),
                ),
            )
        )

    def _resumed(self, unit: str, kind: str, result: str, reason: str) -> None:
        self._control.reports.resumed(unit, ContinuationKind(kind), ContinuationResult(result), reason)

    def _split(self, *fields: Any) -> None:
        self._control.reports.split(SplitStep(*fields))

    def _refuses(self, unit: str, reason: str, is_out: bool, target: str, body: bytes) -> None:
        self._control.reports.refuses(Refusing(unit, reason, is_out), target, body)

    def _restart_suspected(self, unit: str, version: int) -> None:
        state = self._plane.board.units.get(unit)
        if version == self._control.version and state is not None:
            self._control.reports.restart_suspected(state)

    def _spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        if self._control.ledger is not None:
            self._control.ledger.spent(key, tenant, model, tokens)

    def _refused_at_door(self, tenant: str, limit: str) -> None:
        if self._control.ledger is not None:
            self._control.ledger.refused(tenant, limit)

    def _settled(self, *plain: Any) -> None:
        bill = _new(Bill, plain)
        # One that was cancelled before it was charged, or that the previous control process has charged, has
        # no share in what is charged here.
        who = bill.key, bill.tenant, bill.at
        left = self._charged.pop(who, 0) - 1
        if left > 0:
            self._charged[who] = left
        if (ledger := self._control.ledger) is not None:
            settle = ledger.settle if left >= 0 else ledger.settle_unknown
            settle(bill)

    def _take_status(self, *plain: Any) -> None:
        self.status = status = _new(WorkerStatus, plain)
        self.totals.take(status)
        self._control.reported(status)
        for number, paused in status.paused:
            if (lease := self._leases.get(number)) is not None:
                lease.paused = paused
                if not paused:
                    lease.unit_state.work_at = max(lease.unit_state.work_at, status.at)


class Asker:
    """The representative of an exchange at the worker that waits for a unit."""

    __slots__ = ("_session", "number", "pending", "request")

    def __init__(self, session: WorkerSession, number: int, request: PickRequest) -> None:
        self._session = session
        self.number = number
        self.pending: Pending | None = None
        self.request = request

    def on_result(self, found: Lease | Failure) -> None:
        """What came of it."""
        self._session.resolve(self, found)

    def crashed(self, error: Exception) -> None:
        """Finding a unit, or sending the result, has failed."""
        if self.pending is not None:
            self.pending.cancel()
        self._session.crashed(self.number, error)
