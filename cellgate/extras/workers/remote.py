"""A worker's client of the control process: sends messages, and keeps requests until they are answered.

1. Without a control process, messages wait for the next one. Requests wait as well, for a second, and are
   then sent again.
2. Each request gets one answer: a lease, or why there is none.

In this order: `ControlClient`, `RemoteDispatcher`, `BoardReplica`, `RemoteReports`, `RemoteAccounts`,
`StatusReporter`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import inf
from typing import Any, TypeVar

from cellgate.extras.workers.protocol import (
    HELD_BACK,
    Link,
    Message,
    ToControl,
    WorkerStatus,
    ask_out,
    failure_in,
    failure_out,
    request_out,
)
from cellgate.proxy.admission.limits import UsageRecord
from cellgate.proxy.config.limits import REACHED
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.handover import known_of, take_over, view_of
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.observe.access_log import Finished
from cellgate.proxy.observe.counters import TALLIES
from cellgate.proxy.observe.defects import DEFECTS, guarded
from cellgate.proxy.request.ports import Pending, PickRequest, Report, Waiter
from cellgate.router.backlog import Job
from cellgate.router.board import Board
from cellgate.router.cost_model import Usage
from cellgate.router.learning import GAPS_MS
from cellgate.router.nouns import Case, Cell, Fleet, Load, Outcome, Refusal, Rules, SplitPlan, Unit, Verdict
from cellgate.router.outliers import Outlier
from cellgate.router.unit_state import Lease, UnitState

QUEUED_S = 0.01
"""A request without an answer for this long waits in the queue."""
WITHOUT_CONTROL_S = 1.0
"""How long a request waits for a control process; a new one is ready after a fifth of it."""
SILENT_S = 1.0
"""A control process that has sent nothing for this long counts as lost; it sends four times a second."""
UNSAID_MAX = 65_536


class RemoteRequest:
    """A request for a unit that has not been answered yet."""

    __slots__ = ("_client", "_waiter", "asked_at", "number", "request")

    def __init__(
        self, client: ControlClient, number: int, request: PickRequest, waiter: Waiter, now: float
    ) -> None:
        self._client = client
        self._waiter = waiter
        self.asked_at = now
        self.number = number
        self.request = request

    @property
    def queued_at(self) -> float | None:
        """Since when it has been queued, as far as this process knows; None: it is not."""
        return self.asked_at if self._client.now() - self.asked_at > QUEUED_S else None

    def resolve(self, found: Lease | Failure) -> None:
        """The answer of the control process, or a failure without one."""
        guarded(self._waiter, self._waiter.on_result, found)

    def cancel(self) -> None:
        self._client.leave(self.number)


class ControlClient:
    """The client of one worker. `greet` makes the first message to a control process; `received` gets its."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        greet: Callable[[], list[Message]],
        received: Callable[[Message], None],
    ) -> None:
        self._loop = loop
        self.now = loop.time
        self._greet = greet
        self._received = received
        self._link: Link | None = None
        self._unsaid: deque[Message] = deque(maxlen=UNSAID_MAX)
        self._received_at = loop.time()
        self._number = 0
        self._asks: dict[int, RemoteRequest] = {}

    def __len__(self) -> int:
        """Requests without an answer yet."""
        return len(self._asks)

    def meet(self) -> Link:
        """A control process has started; returns the link to be connected to it."""
        before = self._link
        link = Link(self._loop, self._hear, lambda: self._lost(link))
        self._link, self._received_at = link, self._loop.time()
        if before is not None:
            before.close()
        for message in self._greet():
            link.send(message)
        while self._unsaid:
            link.send(self._unsaid.popleft())
        for number, question in self._asks.items():
            link.send((ToControl.ACQUIRE, number, request_out(question.request)))
        return link

    def has_control(self) -> bool:
        return self._link is not None and self._loop.time() - self._received_at <= SILENT_S

    def close(self) -> None:
        """Send pending messages, and end."""
        if self._link is not None:
            self._link.close()

    # -- saying --------------------------------------------------------------------------------------------

    def say(self, message: Message) -> None:
        """Send a message at once."""
        if self._link is not None:
            self._link.send(message)
        else:
            self._unsaid.append(message)

    def mention(self, message: Message) -> None:
        """Send a message that is not urgent."""
        if self._link is not None:
            self._link.later(message)
        else:
            self._unsaid.append(message)

    # -- asking --------------------------------------------------------------------------------------------

    def ask(self, request: PickRequest, waiter: Waiter) -> RemoteRequest:
        """Acquire a unit for `waiter`. The lease will have the id of the request."""
        self._number = number = self._number + 1
        self._asks[number] = question = RemoteRequest(self, number, request, waiter, self.now())
        if self._link is not None:
            self._link.send((ToControl.ACQUIRE, number, request_out(request)))
        if not self.has_control():
            self._loop.call_later(WITHOUT_CONTROL_S, self._abort, number)
        return question

    def leave(self, number: int) -> None:
        """Cancel a request."""
        if self.answered(number) is not None:
            self.mention((ToControl.CANCEL, number))

    def answered(self, number: int) -> RemoteRequest | None:
        """Remove and return the request with this id; None: it was cancelled."""
        return self._asks.pop(number, None)

    def tick(self, now: float) -> None:
        """Give up requests that a blocked control process has not answered."""
        if self._link is not None and not self.has_control():
            for number, question in list(self._asks.items()):
                if now - question.asked_at > WITHOUT_CONTROL_S:
                    self._abort(number)

    def _hear(self, message: Message) -> None:
        self._received_at = self._loop.time()
        self._received(message)

    def _lost(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        for number in self._asks:
            self._loop.call_later(WITHOUT_CONTROL_S, self._abort, number)

    def _abort(self, number: int) -> None:
        if self.has_control() or (question := self.answered(number)) is None:
            return
        self.mention((ToControl.CANCEL, number))
        reason = "the control process of the gate has ended or is blocked, and is being replaced; retry"
        question.resolve(Failure(FailureKind.NO_CONTROL_PROCESS, reason))


# The dispatcher of a worker: acquires units from the control process, and reports the results of leases.
#
# It never has a unit at once: the waiter gets the result later, as if it had waited in the queue.


OUTCOMES = tuple(Outcome)
OUTCOME_INDEX = {outcome: index for index, outcome in enumerate(OUTCOMES)}
_NO_JOB = Job(0, 0)
"""The prediction of an attempt is kept at the control process."""


class RemoteLease(Lease):
    """The worker's side of a lease that is open at the control process, under the same id."""

    __slots__ = ("id", "reported_paused")

    def __init__(
        self, number: int, state: UnitState, request: PickRequest, at: float, lines: bytes, rank: int
    ) -> None:
        super().__init__(state, request.ask, at, request.draws)
        self.id = number
        # The cost model is kept in the control process.
        self.job = _NO_JOB
        self.reported_paused = 0
        self.lines = lines
        self.rank = rank

    def commit(self, now: float) -> None:
        self.committed = True
        self.first_at = now

    def commit_in_doubt(self, now: float) -> None:
        """The control process learns nothing of it."""
        self.commit(now)


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
        return self._control.ask(request, waiter)

    def acquire_other(self, request: PickRequest, waiter: Waiter) -> Refusal | Pending:
        """Ask for another unit, if there seems to be one with room."""
        now, refusal = self._now(), Refusal.NO_UNIT
        for state in self._board.able(request.ask, request.tried):
            if state.has_room(now, 0.0):
                return self._control.ask(request, waiter)
            refusal = Refusal.FULL
        return refusal

    def paid_retries(self) -> int:
        """How many requests of this worker draw on the retry budget; the control process counts all."""
        return self._board.retries_in_flight

    # -- what becomes of them ------------------------------------------------------------------------------

    def committed(self, lease: Lease, *, resumed: bool = False, response_id: str = "") -> None:
        self._board.prove(lease)
        self._control.mention((ToControl.COMMITTED, _id(lease), lease.first_at, resumed))
        if response_id:
            # At once, because the client may refer to the response in its next request.
            self._control.say((ToControl.STORED, response_id, lease.unit, lease.ask.payer))

    def completed(self, lease: Lease, events: int, usage: Usage | None) -> None:
        reported = None if usage is None else tuple(usage)
        self._control.mention(
            (ToControl.COMPLETED, _id(lease), events, reported, self._now(), lease.was_paused)
        )

    def released(self, lease: Lease, outcome: Outcome) -> None:
        now, number = self._now(), _id(lease)
        self._board.close(lease, now)
        del self._leases[number]
        self._control.mention((ToControl.RELEASED, number, OUTCOME_INDEX[outcome], now))

    def blame(self, lease: Lease, failure: Failure, tokens: int, shown: int, *, judged: bool = True) -> None:
        self._control.say((ToControl.BLAME, _id(lease), failure_out(failure), tokens, shown, judged))

    # -- what the control process says ----------------------------------------------------------------------

    def greeting(self) -> list[Message]:
        """The open leases, for a new control process."""
        self.pauses()
        return [
            (n, a.unit, ask_out(a.ask), a.opened_at, a.retry, a.first_at, _pause_of(a))
            for n, a in self._leases.items()
        ]

    def pauses(self) -> list[tuple[int, int]]:
        """Leases that were paused, or go on, since the last call: how."""
        changed = [lease for lease in self._leases.values() if _pause_of(lease) != lease.reported_paused]
        for lease in changed:
            lease.reported_paused = _pause_of(lease)
        return [(lease.id, lease.reported_paused) for lease in changed]

    def granted(
        self, number: int, unit: str, at: float, lines: bytes, rank: int, split: Message | None
    ) -> None:
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
        if (question := self._control.answered(number)) is not None:
            question.resolve(failure_in(why))

    def evict(self, numbers: list[int]) -> None:
        """Units went down."""
        for number in numbers:
            if (lease := self._leases.get(number)) is not None:
                lease.evicted = True
                if lease.on_evict is not None:
                    lease.on_evict()


def _pause_of(lease: Lease) -> int:
    return HELD_BACK if lease in lease.unit_state.held_back else int(lease.paused)


def _id(lease: Lease) -> int:
    assert isinstance(lease, RemoteLease)
    return lease.id


# The replica of the Board that each worker has: what is sent of the fleet and its units, and taken over.
#
# It serves what needs no decision: responses of the gate's own, the list of units and their models. It never
# decides which unit a request gets. A new control process takes over the state of the previous one from it.


ReplicaUnit = dict[str, Any]
"""The state of one unit, as it is sent."""

_WORKER_CONTROL = frozenset({"nodes", "kv_events"})
"""What only the control process needs: probes and events are its own."""
_WORKER_FIELDS = tuple(field.name for field in fields(Unit) if field.name not in _WORKER_CONTROL)
_FALLEN = (Verdict.DOWN, Verdict.STARTING)


def fleet_out(fleet: Fleet) -> Message:
    """A fleet as it is sent: plain values, without what only the control process needs."""
    cells = [(cell.name, cell.weight, cell.spill_s, cell.transfer) for cell in fleet.cells]
    return cells, [tuple(getattr(unit, name) for name in _WORKER_FIELDS) for unit in fleet.units]


def fleet_in(plain: Message) -> Fleet:
    """A fleet that was sent."""
    cells, units = plain
    found = (Unit(**dict(zip(_WORKER_FIELDS, unit, strict=True))) for unit in units)
    return Fleet(tuple(Cell(*cell) for cell in cells), tuple(found))


class BoardUpdates:
    """Finds what has changed of the units of a board since the last message."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._reported: dict[str, tuple[UnitState, ReplicaUnit]] = {}
        self._lives: dict[str, float] = {}

    def units(self, now: float) -> list[ReplicaUnit]:
        """The units that have changed, apart from the time of their last progress."""
        reported, self._reported, changed = self._reported, {}, []
        for name, state in self._board.units.items():
            known = _known(self._board, state, now)
            self._reported[name] = state, known
            if reported.get(name) != (state, known):
                changed.append(known)
        return changed

    def lives(self) -> list[tuple[str, float]]:
        """Which units have made progress, and when."""
        before, self._lives = (
            self._lives,
            {name: state.progress_at for name, state in self._board.units.items()},
        )
        return [(name, at) for name, at in self._lives.items() if before.get(name) != at]

    def all(self, now: float) -> list[ReplicaUnit]:
        """The full state of all units."""
        return [_known(self._board, state, now) | {"progress_at": state.progress_at} for state in self._board]


class BoardReplica:
    """One worker's."""

    def __init__(self, rules: Rules) -> None:
        self.board = Board(rules)
        self.version = 0
        """The version of the fleet, as counted by the control process."""
        self._fleet: Message = ()

    def take_fleet(self, version: int, fleet: Message, now: float) -> list[UnitState]:
        """Apply a fleet; returns the units that were removed."""
        self.version, self._fleet = version, fleet
        old = dict(self.board.units)
        return [old[unit.name] for unit in self.board.configure(fleet_in(fleet), now).removed]

    def take_units(self, units: list[ReplicaUnit]) -> list[UnitState]:
        """Apply changes of units; returns those that went down or restarted."""
        fallen = []
        for known in units:
            state = self.board.units.get(known["name"])
            if state is not None:
                before = state.case
                take(state, known)
                if state.case.verdict in _FALLEN and _is_other(before, state.case):
                    fallen.append(state)
        return fallen

    def take_lives(self, lives: list[tuple[str, float]]) -> None:
        """Units have made progress."""
        for name, at in lives:
            if (state := self.board.units.get(name)) is not None:
                state.progress_at = max(state.progress_at, at)

    def known(self) -> tuple[Message, dict[str, Any]] | None:
        """Fleet and state for a new control process; None: nothing was received yet."""
        return (self._fleet, view_of(self.board)) if self.version else None


def take(state: UnitState, known: ReplicaUnit) -> None:
    """Apply the received state of a unit."""
    progress_at = state.progress_at
    take_over(state, {"progress_at": progress_at, **known})
    state.progress_at = max(progress_at, state.progress_at)
    state.models, state.engine = frozenset(known["models"]), known["engine"]
    state.cards = known.get("cards", {})
    state.restart_suspected_at = known["restart_suspected_at"]
    state.held_until = known["held_until"]
    state.outlier = Outlier(known["degraded"])
    # The load of all workers is not known here, only whether the unit has room.
    state.limit = inf if known["has_place"] else 0.0
    state.is_awaited = known["is_awaited"]
    load = known["load"]
    state.load = None if load is None else Load(state.unit.name, *load)


def _is_other(before: Case, after: Case) -> bool:
    return (before.verdict, before.since) != (after.verdict, after.since)


def _known(board: Board, state: UnitState, now: float) -> ReplicaUnit:
    known, load = known_of(state), state.load
    del known["progress_at"]
    known["restart_suspected_at"] = state.restart_suspected_at
    known["held_until"] = state.held_until
    known["degraded"] = state.outlier.degraded
    known["has_place"] = state.has_room(now, 0.0)
    known["is_awaited"] = board.is_awaited(state)
    known["load"] = None if load is None else (load.at, load.running, load.waiting, load.kv_use)
    return known


class RemoteReports:
    """Sends reports of a worker to the control process, which adds them to those of the others."""

    def __init__(self, control: ControlClient, replica: BoardReplica, now: Callable[[], float]) -> None:
        self._control = control
        self._replica = replica
        self._now = now

    def finished(self, record: Finished) -> None:
        """A request is over. Fields that only the access log uses are left out."""
        r = record
        message: Message = (r.route, int(r.status), r.unit, r.ttft_s, r.duration_s, r.bytes_in, r.bytes_out)
        self._control.mention((ToControl.FINISHED, *message))

    def send(self, report: Report) -> None:
        self._control.mention((ToControl.REPORT, pickle.dumps(report, pickle.HIGHEST_PROTOCOL)))

    def restart_suspected(self, state: UnitState) -> None:
        if not state.retired:
            state.restart_suspected_at = self._now()
            self._control.say((ToControl.RESTART_SUSPECTED, state.unit.name, self._replica.version))


class RemoteAccounts:
    """Sends what the requests of a worker use to the ledger at the control process."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control

    def spent(self, key: str, tenant: str, model: str, tokens: int) -> None:
        """The answer of a request in flight has so many tokens more than it was charged with."""
        self._control.mention((ToControl.SPENT, key, tenant, model, tokens))

    def settle(self, usage_record: UsageRecord) -> None:
        """A request that was charged is over."""
        self._control.mention((ToControl.SETTLED, *usage_record))

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused at its key: of this limit nothing is left."""
        self._control.mention((ToControl.REFUSED, tenant, limit))


K = TypeVar("K")

GAPS_EVERY = 4
"""Gaps between tokens are sent with every fourth tick, because they are used over the last ten seconds."""
_STRETCH = 64
_WORKER_PAGE_BYTES = resource.getpagesize()


class StatusReporter:
    """The status of a worker since its last one: collected while it works, sent once a tick."""

    def __init__(self, replica: BoardReplica, gateway: Gateway, dispatcher: RemoteDispatcher) -> None:
        self._replica = replica
        self._board = replica.board
        self._gateway = gateway
        self._dispatcher = dispatcher
        self._lives: dict[str, float] = {}
        self._gaps: dict[UnitState, list[int]] = {}
        self._ticks = 0
        self._log_dropped = 0
        self._limits, self._tallies = dict(REACHED), dict(TALLIES)
        self._defects = 0

    def forget(self, state: UnitState) -> None:
        self._gaps.pop(state, None)

    def received(self, lives: list[tuple[str, float]]) -> None:
        """The control process has got these."""
        self._lives.update(lives)

    def take(self, now: float, lag_s: float, *, is_last: bool = False) -> WorkerStatus:
        """All that has come since the one before."""
        self._ticks += 1
        connections, log_dropped = self._gateway.connections(), self._gateway.log_dropped()
        cpu_s, resident = _used()
        status = WorkerStatus(
            version=self._replica.version,
            at=now,
            lag_s=lag_s,
            lives=self._new_lives(),
            gaps=self._new_gaps() if is_last or self._ticks % GAPS_EVERY == 0 else [],
            paused=self._dispatcher.pauses(),
            clients=connections["client"],
            connections=connections["unit"],
            cpu_s=cpu_s,
            resident_bytes=resident,
            log_dropped=log_dropped - self._log_dropped,
            limits=new_counts(REACHED, self._limits),
            tallies=new_counts(TALLIES, self._tallies),
            defects=DEFECTS.count - self._defects,
        )
        self._defects = DEFECTS.count
        self._log_dropped = log_dropped
        return status

    def _new_lives(self) -> list[tuple[str, float]]:
        known = self._lives
        lives = [
            (d.unit.name, d.progress_at) for d in self._board if d.progress_at > known.get(d.unit.name, 0.0)
        ]
        known.update(lives)
        return lives

    def _new_gaps(self) -> list[tuple[str, list[tuple[int, int]]]]:
        found = []
        for state in self._board:
            counts = state.gaps_ms
            before = self._gaps.get(state)
            if before is None:
                before = self._gaps[state] = [0] * GAPS_MS
            if new := _grown(counts, before):
                found.append((state.unit.name, new))
        return found


def new_counts(counts: Mapping[K, int], before: dict[K, int]) -> list[tuple[K, int]]:
    """What was counted since `before`, which is brought up to `counts`."""
    grown = [(name, count - before.get(name, 0)) for name, count in counts.items()]
    before.update(counts)
    return [(name, count) for name, count in grown if count]


def _grown(counts: list[int], before: list[int]) -> list[tuple[int, int]]:
    """Where `counts` have grown since `before`, which is brought up to them. Most have not."""
    grown = []
    for start in range(0, GAPS_MS, _STRETCH):
        stretch = slice(start, start + _STRETCH)
        if counts[stretch] != before[stretch]:
            grown += [
                (ms, counts[ms] - before[ms])
                for ms in range(start, start + _STRETCH)
                if counts[ms] != before[ms]
            ]
            before[stretch] = counts[stretch]
    return grown


def _used() -> tuple[float, int]:
    """CPU seconds and resident bytes of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, resident_bytes(os.getpid())


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _WORKER_PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
