"""The control process: the control plane of a gate whose clients are at its workers."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import Metric

from cellgate.extras.workers.protocol import (
    HELD_BACK,
    Link,
    Message,
    Pulse,
    ToControl,
    ToWorker,
    WorkerStatus,
    ask_in,
    failure_in,
    failure_out,
    framed,
    request_in,
    settings_out,
)
from cellgate.extras.workers.remote import OUTCOMES, BoardUpdates, fleet_in, fleet_out, resident_bytes
from cellgate.proxy.admission.limits import LimitedDispatcher, UsageRecord
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.dispatcher import LocalDispatcher, LocalReports
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.control.stall_watch import DISTRUST_S, LAG_S
from cellgate.proxy.handover import InheritedView
from cellgate.proxy.http.errors import UNCHARGED, Failure, FailureKind
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.defects import report_defect
from cellgate.proxy.observe.exposition import access_log_metrics
from cellgate.proxy.observe.families import counter, gauge, one_counter, one_gauge
from cellgate.proxy.request.ports import NOT_QUEUED, Dispatcher, Pending, PickRequest
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Fleet, Outcome, Refusal
from cellgate.router.retry import has_budget
from cellgate.router.unit_state import Lease


class ControlProcess:
    """The control process of one gate, with a plane that has not begun. `listeners` are those of the workers:
    here they are only kept open; `is_first`: there was no control process before.
    """

    def __init__(
        self,
        plane: Plane,
        loop: asyncio.AbstractEventLoop,
        *,
        listeners: Sequence[socket.socket],
        is_first: bool,
    ) -> None:
        self.plane = plane
        self.dispatcher = LocalDispatcher(plane)
        self.asked: Dispatcher = self.dispatcher
        """Who is asked for units: the dispatcher, perhaps behind limits."""
        self.ledger = None
        if plane.accounting is not None:
            self.ledger = plane.accounting.ledger
            self.asked = LimitedDispatcher(self.dispatcher, self.ledger)
        self.reports = LocalReports(plane)
        self._settings = plane.settings
        self.version = 0
        """The version of the fleet, counted up with each change."""
        self.sessions: dict[int, WorkerSession] = {}
        """By the number of the worker."""
        self.all_accept = asyncio.Event()
        self.totals: dict[int, WorkerTotals] = {}
        """Of workers by number, whether there is one now or not."""
        self.deaths = 0
        self.lost_attempts = 0
        """Those that were open at workers which ended."""
        self.knows_all = is_first
        """Whether all workers have reported their open leases; before that no leases are given."""
        self._loop = loop
        self._workers = plane.settings.workers
        self._held = listeners
        self._fleet = Fleet()
        self._updates = BoardUpdates(plane.board)
        self._pushing = False
        self._is_open = self._has_learnt = self._is_leaving = False
        self._deserted = asyncio.Event()
        self._hello_received = 0
        self._log_dropped = 0
        """Lines that workers' access logs have lost."""
        plane.front = self
        plane.on_fleet.append(self._take_fleet)
        plane.on_units = self._units_changed
        plane.metrics.include(partial(access_log_metrics, lambda: self._log_dropped))
        plane.ticker.looks += [self._push, self._tell_pulse]

    # -- life ----------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port that workers accept on; 0: none."""
        port: int = self._held[0].getsockname()[1] if self._held else 0
        return port

    def begin(self) -> None:
        """Start the probes of all units."""
        self.plane.begin()
        self.plane.ticker.start()
        if not self.knows_all:
            self._loop.call_later(GREETING_S, self._know_all)

    def take_settings(self, settings: Settings) -> None:
        """The configuration was read again: workers get what is theirs."""
        self._settings = settings
        self._broadcast((ToWorker.SETTINGS, settings_out(settings)))

    def let_clients_in(self) -> None:
        """Workers may accept, now and whenever one is started."""
        self._is_open = True
        self._broadcast((ToWorker.OPEN,))

    def announce_stop(self) -> None:
        """Report not ready from now on."""
        self.plane.announce_stop()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop once all workers have; they get the same message and times."""
        self.announce_stop()
        await self._end(delay_s + drain_s + LAG_S)

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """A successor has taken over, and its workers accept clients."""
        await self._end(drain_s)

    async def _end(self, drain_s: float) -> None:
        self._is_leaving = True
        # Clients that connect after the workers have closed their listeners must be refused.
        held, self._held = self._held, ()
        for listener in held:
            listener.close()
        if self.sessions:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s + BLIND_S):
                    await self._deserted.wait()
        await self.close()

    async def close(self) -> None:
        """Stop the timer and the plane."""
        self.plane.ticker.stop()
        await self.plane.close()

    # -- workers -------------------------------------------------------------------------------------------

    def meet(self, number: int) -> Link:
        """A worker of this number has started; returns the link to be connected to it."""
        session = WorkerSession(self, number, self.totals.setdefault(number, WorkerTotals()), self._loop)
        link = session.link = Link(self._loop, session.hear, lambda: self._lost(session))
        if (before := self.sessions.get(number)) is not None:
            self._lost(before)
        self.sessions[number] = session
        self._deserted.clear()
        if self._has_learnt or self.knows_all:
            self._inform(session)
        return link

    def _lost(self, session: WorkerSession) -> None:
        if self.sessions.get(session.number) is session:
            del self.sessions[session.number]
            session.totals.end()
            if not self._is_leaving:
                self.deaths += 1
            self.lost_attempts += len(session)
            session.vacate()
            if not self.sessions:
                self._deserted.set()

    def accepting(self) -> int:
        """How many workers accept."""
        return sum(session.accepting for session in self.sessions.values())

    def on_accepting(self) -> None:
        """One more worker accepts clients."""
        if self.accepting() >= self._workers:
            self.all_accept.set()

    def learn(self, fleet: Message, view: dict[str, Any]) -> None:
        """Take over the state of the previous control process, if nothing newer is known yet.

        Discovered units are there at once, with their drains and leases, before they are discovered again.
        """
        if not self._has_learnt:
            self._has_learnt = True
            self.plane.remember(fleet_in(fleet))
            self.plane.inherit(InheritedView(view))
            for session in self.sessions.values():
                self._inform(session)

    def hello_received(self) -> None:
        """A worker has reported its open leases."""
        self._hello_received += 1
        if self._hello_received >= self._workers:
            self._know_all()

    def _know_all(self) -> None:
        if not self.knows_all:
            self.knows_all = True
            for session in list(self.sessions.values()):
                self._inform(session)
                session.begin()

    def reported(self, status: WorkerStatus) -> None:
        """A worker has sent its status."""
        plane = self.plane
        if status.lag_s > LAG_S:
            plane.prober.trust_from(plane.now() + DISTRUST_S)
        plane.metrics.loop_lag(status.lag_s)
        plane.metrics.defects += status.defects
        for name, times in status.limits:
            plane.metrics.limits[name] += times
        plane.metrics.workers_tallies.update(dict(status.tallies))
        self._log_dropped += status.log_dropped
        if status.version != self.version:
            # Names may mean other units by now; the status is sent again.
            return
        states = plane.board.units
        for name, at in status.lives:
            states[name].progress_at = max(states[name].progress_at, at)
        for name, gaps in status.gaps:
            counts = states[name].gaps_ms
            for ms, count in gaps:
                counts[ms] += count

    # -- for the plane: see Front --------------------------------------------------------------------------

    def connections(self) -> Mapping[str, int]:
        """How many connections are open by side, at all workers, and those of probes here."""
        statuses = [session.status for session in self.sessions.values() if session.status is not None]
        return {
            "client": sum(status.clients for status in statuses),
            "unit": len(self.plane.reach) + sum(status.connections for status in statuses),
        }

    def is_full(self) -> bool:
        """Workers have room, as far as this process knows."""
        return False

    def seen_until(self, now: float) -> float:
        """As of the oldest status of a worker that is not blocked."""
        sessions = self.sessions.values()
        statuses = [each.status.at for each in sessions if each.status is not None and len(each)]
        return max(min([now, *statuses]), now - BLIND_S)

    # -- what workers are told -----------------------------------------------------------------------------

    def _inform(self, session: WorkerSession) -> None:
        """Send a worker the full state, which replaces its replica: that must have been received before."""
        if not session.informed:
            session.informed = True
            session.link.send((ToWorker.SETTINGS, settings_out(self._settings)))
            session.link.send(self._fleet_now())
            session.link.send((ToWorker.UNITS, self._updates.all(self.plane.now())))
            session.link.send((ToWorker.PULSE, *self._pulse([])))
            if self._is_open:
                session.link.send((ToWorker.OPEN,))

    def _take_fleet(self, fleet: Fleet) -> None:
        self.version += 1
        self._fleet = fleet
        self._broadcast(self._fleet_now(), (ToWorker.UNITS, self._updates.all(self.plane.now())))

    def _fleet_now(self) -> Message:
        return (ToWorker.FLEET, self.version, *fleet_out(self._fleet))

    def _units_changed(self, at_once: bool) -> None:
        if at_once:
            # A drain: workers must have it before it is acknowledged, in case this process ends.
            self._push()
        elif not self._pushing:
            self._pushing = True
            self._loop.call_soon(self._push)

    def _push(self, _now: float = 0.0) -> None:
        self._pushing = False
        if changed := self._updates.units(self.plane.now()):
            self._broadcast((ToWorker.UNITS, changed))

    def _tell_pulse(self, _now: float) -> None:
        self._broadcast((ToWorker.PULSE, *self._pulse(self._updates.lives())))

    def _pulse(self, lives: list[tuple[str, float]]) -> Pulse:
        plane = self.plane
        lines = plane.orca.lines
        return Pulse(plane.now(), lives, lines.usual, lines.others, plane.board.panic_at)

    def _broadcast(self, *messages: Message) -> None:
        frame = framed(list(messages))
        for session in self.sessions.values():
            if session.informed:
                session.link.write(frame)


class WorkerTotals:
    """The totals of the workers of one number, including those that have ended."""

    def __init__(self) -> None:
        self.requests = 0
        self.clients = 0
        self.resident_bytes = 0
        self._before_s = self._now_s = 0.0

    @property
    def cpu_s(self) -> float:
        """CPU used by all of them."""
        return self._before_s + self._now_s

    def take(self, status: WorkerStatus) -> None:
        """The present worker has sent its status."""
        self.clients, self.resident_bytes, self._now_s = status.clients, status.resident_bytes, status.cpu_s

    def end(self) -> None:
        """The worker has ended: its last totals stay added."""
        self._before_s, self._now_s = self.cpu_s, 0.0
        self.clients = self.resident_bytes = 0


class WorkerMetrics:
    """The metrics of one control process. `restarts`: the number that ended before it."""

    def __init__(self, workers: ControlProcess, restarts: int) -> None:
        self._workers = workers
        self._restarts = restarts

    def collect(self) -> Iterator[Metric]:
        yield from self._deaths()
        yield from self._clients()
        yield from self._resources()

    def _deaths(self) -> Iterator[Metric]:
        workers = self._workers
        yield one_gauge("workers", "Workers that accept clients.", workers.accepting())
        yield counter(
            "process_deaths",
            "Workers and control processes that ended by themselves; each was replaced.",
            "process",
            [("worker", workers.deaths), ("control", self._restarts)],
        )
        yield one_counter(
            "worker_attempts_lost",
            "Attempts on units that were open at workers which ended.",
            workers.lost_attempts,
        )

    def _clients(self) -> Iterator[Metric]:
        totals = self._workers.totals.items()
        yield counter(
            "worker_requests",
            "Requests answered, by worker.",
            "worker",
            ((str(number), total.requests) for number, total in totals),
        )
        yield gauge(
            "worker_clients",
            "Clients connected to a worker.",
            "worker",
            ((str(number), total.clients) for number, total in totals),
        )

    def _resources(self) -> Iterator[Metric]:
        totals = self._workers.totals.items()
        used = resource.getrusage(resource.RUSAGE_SELF)
        own_s = used.ru_utime + used.ru_stime
        yield counter(
            "process_cpu_seconds",
            "CPU used by the processes of the gate: the control process, and workers by number.",
            "process",
            [("control", own_s), *((str(number), total.cpu_s) for number, total in totals)],
        )
        yield gauge(
            "process_memory_bytes",
            "Resident memory of the processes of the gate, what they share counted in each.",
            "process",
            [
                ("control", resident_bytes(os.getpid())),
                *((str(number), total.resident_bytes) for number, total in totals),
            ],
        )


# A worker's session at the control process: answers its requests, records its reports, and closes its leases
# when it ends.
#
# 1. Each lease of the worker is an ordinary lease on the Board, under the same id.
# 2. When the worker ends, its leases are closed and its requests dropped, exactly once.


_ENOUGH_RETRIES = Failure(FailureKind.NO_UNIT, "no retry: the retry budget is used up")


class WorkerSession:
    """The session of one worker. `link` is set before the first message; `totals` outlive it."""

    link: Link

    def __init__(
        self, control: ControlProcess, number: int, totals: WorkerTotals, loop: asyncio.AbstractEventLoop
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
            ToControl.REPORT: self._report,
            ToControl.RESTART_SUSPECTED: self._restart_suspected,
            ToControl.STATUS: self._take_status,
            ToControl.SPENT: self._spent,
            ToControl.SETTLED: self._settled,
            ToControl.REFUSED: self._refused_by_keys,
        }

    def __len__(self) -> int:
        """Its open leases."""
        return len(self._leases)

    def hear(self, message: Message) -> None:
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
            lease.unit_state.progress_at = max(lease.unit_state.progress_at, at)
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
            _pause(lease, paused)
            if first_at:
                lease.committed, lease.first_at = True, first_at
                # The end of its prefill is not known here, so the cost model does not learn from it.
                lease.unit_state.costs.show(lease, self._plane.now())
            self._hold(number, lease)
        self._control.hello_received()

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
        # Fields that only the worker's access log uses are left out.
        self._control.reports.finished(
            Finished(
                request_id="",
                peer="",
                method="",
                path="",
                route=route,
                model="",
                status=status,
                code="",
                unit=unit,
                outcome=Outcome.OK,
                attempts=0,
                resumed=0,
                ttft_s=ttft_s,
                duration_s=duration_s,
                events=0,
                bytes_in=bytes_in,
                bytes_out=bytes_out,
            )
        )

    def _report(self, pickled: bytes) -> None:
        self._control.reports.send(pickle.loads(pickled))

    def _restart_suspected(self, unit: str, version: int) -> None:
        state = self._plane.board.units.get(unit)
        if version == self._control.version and state is not None:
            self._control.reports.restart_suspected(state)

    def _spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        if self._control.ledger is not None:
            self._control.ledger.spent(key, tenant, model, tokens)

    def _refused_by_keys(self, tenant: str, limit: str) -> None:
        if self._control.ledger is not None:
            self._control.ledger.refused(tenant, limit)

    def _settled(self, *plain: Any) -> None:
        usage_record = UsageRecord._make(plain)
        # One that was cancelled before it was charged, or that the previous control process has charged, has
        # no share in what is charged here.
        who = usage_record.key, usage_record.tenant, usage_record.at
        left = self._charged.pop(who, 0) - 1
        if left > 0:
            self._charged[who] = left
        if (ledger := self._control.ledger) is not None:
            settle = ledger.settle if left >= 0 else ledger.settle_unknown
            settle(usage_record)

    def _take_status(self, *plain: Any) -> None:
        self.status = status = WorkerStatus._make(plain)
        self.totals.take(status)
        self._control.reported(status)
        for number, paused in status.paused:
            if (lease := self._leases.get(number)) is not None:
                _pause(lease, paused)
                if not paused:
                    lease.unit_state.work_at = max(lease.unit_state.work_at, status.at)


def _pause(lease: Lease, how: int) -> None:
    """Its worker says that it is paused, or held back for its client, or goes on."""
    if how == HELD_BACK or lease in lease.unit_state.held_back:
        lease.make_wait(held=how == HELD_BACK)
    lease.paused = how > 0


class Asker:
    """The representative of an exchange at the worker that waits for a unit."""

    def __init__(self, session: WorkerSession, number: int, request: PickRequest) -> None:
        self._session = session
        self.number = number
        self.pending: Pending | None = None
        self.request = request

    def on_result(self, found: Lease | Failure) -> None:
        self._session.resolve(self, found)

    def crashed(self, error: Exception) -> None:
        """Finding a unit, or sending the result, has failed."""
        if self.pending is not None:
            self.pending.cancel()
        self._session.crashed(self.number, error)


# The control process: the control plane of a gate whose clients are at its workers. It has no client.


GREETING_S = 0.3
"""How long a new control process waits for all workers to report their open leases."""
BLIND_S = 1.0
"""A worker without a status for longer is blocked: the progress of units is judged without it."""
