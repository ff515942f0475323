"""The gate with a diary: every pick, lease and finished request is noted; what may not be is a violation.

Nothing is raised inside the gate, for that would change what it does; the stage reads `violations` later.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

from cellgate.proxy.app import Gate, local_gateway
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.dispatcher import LocalDispatcher
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.http.client import ClientExchange, ResponseClient
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.http.request import Request
from cellgate.proxy.observe.access_log import AccessLog, Finished
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.process.signals import Ticker
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.ports import Pending, PickRequest, Waiter
from cellgate.proxy.request.table import EXCHANGE_TABLE
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.pick import Best, Router
from cellgate.router.unit_state import Lease, UnitState
from tests.scenarios.visit import Visit

PARSING_S = 0.05
"""How long a body over 1 MiB is being parsed elsewhere."""


class Pick(NamedTuple):
    """A lease was given on `unit`, which is at `url`."""

    at: float
    unit: str
    url: str
    evicted: bool
    tried: tuple[str, ...]


class ObservedRouter(Router):
    """A router that notes what it picks."""

    def __init__(self, inner: Router, rng: Random, violations: list[str]) -> None:
        super().__init__(inner.board, inner.policy, rng, inner.queue)
        self.picks: list[Pick] = []
        self.leases: list[Lease] = []
        self._violations = violations
        self._asked: tuple[bool, tuple[str, ...]] = False, ()

    def pick(
        self, ask: Ask, now: float, tried: Iterable[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        tried = tuple(tried)
        room = [state for state in self.board if self._could_take(state, ask, tried, evicted, now)]
        self._asked = evicted, tried
        answer = super().pick(ask, now, tried, evicted=evicted, retry=retry)
        self._asked = False, ()
        if isinstance(answer, Refusal):
            # One that is SUSPECT gets only what no other has a free place for.
            sure = [state for state in room if state.case.verdict is Verdict.UP] or room
            idle = [state for state in sure if not state.leases and state.cool_until <= now]
            # Behind others, and for a unit that answers sooner, one may wait; but not while a unit is idle.
            if (
                idle
                if answer is Refusal.FULL and not len(self.queue)
                else room and answer is not Refusal.FULL
            ):
                self._violations.append(f"{now:.3f}: {answer} while {room} had room for {ask}")
            return answer
        self._examine(answer, room, now, tried)
        return answer

    def _open(self, best: Best, ask: Ask, now: float, *, retry: bool = False) -> Lease:
        lease = super()._open(best, ask, now, retry=retry)
        self.picks.append(Pick(now, lease.unit, lease.unit_state.unit.url, *self._asked))
        self.leases.append(lease)
        return lease

    def _could_take(
        self, state: UnitState, ask: Ask, tried: tuple[str, ...], evicted: bool, now: float
    ) -> bool:
        """Written from the design, not from the Board: usable, not tried, of the model, not full."""
        over = 1.0 + (self.board.rules.evict_overcommit if evicted else 0.0)
        return (
            state.case.verdict in (Verdict.UP, Verdict.SUSPECT)
            and not (state.drained or state.retired or state.hold is not None)
            and state.unit.name not in tried
            and (not state.needs_prefiller or self._has_prefiller(ask, now))
            and (state.unit.role != "prefill" if ask.unit is None else ask.unit == state.unit.name)
            and (ask.model is None or not state.models or ask.model in state.models)
            and ask.build in (None, state.build.key)
            and not state.is_restart_suspected()
            and state.in_flight < state.unit.max_in_flight * over
        )

    def _has_prefiller(self, ask: Ask, now: float) -> bool:
        """Whether somebody could compute a prompt for a decoder that needs it."""
        return ask.splits and any(
            state.unit.role == "prefill"
            and state.is_usable()
            and not state.is_restart_suspected()
            and state.has_room(now, 0.0)
            and state.cool_until <= now
            for state in self.board
        )

    def _examine(self, lease: Lease, room: list[UnitState], now: float, tried: tuple[str, ...]) -> None:
        state = lease.unit_state
        if state not in room:
            self._violations.append(f"{now:.3f}: picked {state} (drained={state.drained}), tried {tried}")
        elif state.case.verdict is Verdict.SUSPECT and any(
            # One that has turned others away as busy is full, whatever was configured.
            other.case.verdict is Verdict.UP and other.has_room(now, 0.0)
            for other in room
        ):
            self._violations.append(f"{now:.3f}: picked the suspect {state} while one that is up had room")


class ObservedExchange(Exchange):
    """An exchange that notes why its attempts fail."""

    def __init__(
        self, gateway: Gateway, client: ResponseClient, request: Request, failures: Counter[FailureKind]
    ) -> None:
        super().__init__(EXCHANGE_TABLE, gateway.services, client, request)
        self._failures = failures

    def failed(self, failure: Failure) -> None:
        self._failures[failure.kind] += 1
        super().failed(failure)


class Diary:
    """What ends. `failures` are those of attempts, whatever became of their requests."""

    def __init__(self) -> None:
        self.records: list[Finished] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.failures: Counter[FailureKind] = Counter()
        self.violations: list[str] = []

    def read(self, gateway: Gateway) -> None:
        """Note what happens to the requests of a gateway."""

        def exchange(client: ResponseClient, request: Request) -> ClientExchange:
            return ObservedExchange(gateway, client, request, self.failures)

        gateway.exchange = exchange  # type: ignore[method-assign]


class KeptRecords(AccessLog):
    """An access log that is a page of a diary."""

    def __init__(self, diary: Diary) -> None:
        super().__init__("off", NoSink(), time.time)
        self.diary = diary

    def write(self, record: Finished) -> None:
        self.diary.records.append(record)


class NoSink:
    def write(self, data: memoryview, /) -> int | None:
        raise AssertionError("the access log is off")


class ObservedDispatcher(LocalDispatcher):
    """A dispatcher that counts what attempts come to."""

    def __init__(self, plane: Plane, diary: Diary) -> None:
        super().__init__(plane)
        self._diary = diary
        self.most_retries = 0
        """So many were in flight at once."""

    def acquire(self, request: PickRequest, waiter: Waiter) -> Lease | Failure | Pending:
        found = super().acquire(request, waiter)
        self.most_retries = max(self.most_retries, self._board.retries_in_flight)
        return found

    def released(self, lease: Lease, outcome: Outcome, at: float | None = None) -> None:
        self._diary.outcomes[outcome] += 1
        super().released(lease, outcome, at)


class ObservedPlane(Plane):
    """A control plane that notes what it picks."""

    router: ObservedRouter

    def __init__(self, rng: Random, diary: Diary, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.router = ObservedRouter(self.router, rng, diary.violations)


class Observed:
    """What can be seen of a gate, of one process or of several."""

    def __init__(self, plane: ObservedPlane, diary: Diary) -> None:
        self.plane = plane
        self.diary = diary
        self.board, self.router, self.events = plane.board, plane.router, plane.events
        self.metrics, self.containment, self.prober = plane.metrics, plane.containment, plane.prober
        self.settings, self.now = plane.settings, plane.now
        self.is_stopping, self.set_drain, self.reload = plane.is_stopping, plane.set_drain, plane.reload
        self.violations, self.records = diary.violations, diary.records
        self.outcomes, self.failures = diary.outcomes, diary.failures

    def leftovers(self) -> list[str]:
        """What must be nothing once every client has gone."""
        board = self.board
        counts = {
            "open leases": sum(not lease.closed for lease in self.router.leases),
            "in flight at the gate": board.in_flight,
            "retries in flight": board.retries_in_flight,
            "desks that wait to leave": len(board.leaving),
            "requests that wait": len(self.router.queue),
        }
        counts |= {f"in flight at {state.unit.name}": state.in_flight for state in board}
        closed, given = self.outcomes.total(), len(self.router.leases)
        counts["leases not closed exactly once"] = given - closed
        return [f"{count} {what} are left" for what, count in counts.items() if count]


class ObservedGate(Observed):
    """A gate of one process."""

    def __init__(self, settings: Settings, loop: AbstractEventLoop, rng: Random, events: EventLog) -> None:
        diary = Diary()
        plane = ObservedPlane(rng, diary, settings, loop, rng, Ticker(loop), events=events)
        super().__init__(plane, diary)
        self.gateway = local_gateway(plane, loop, rng, KeptRecords(diary), read_large)
        self.gateway.services.dispatcher = ObservedDispatcher(plane, diary)
        diary.read(self.gateway)
        self.clients, self.memory = self.gateway.clients, self.gateway.memory
        self._gate = Gate(plane, self.gateway)
        self.start, self.stop = self._gate.start, self._gate.stop

    def leftovers(self) -> list[str]:
        """What must be nothing once every client has gone."""
        counts = {"client connections": len(self.clients), "bytes of body memory": self.memory.used}
        left = [f"{count} {what} are left" for what, count in counts.items() if count]
        return super().leftovers() + left


async def read_large(body: bytes, _payer: str, _why_not: object, route: str) -> Ask | Failure:
    await asyncio.sleep(PARSING_S)
    return read_ask(body, route)


def wrong_records(records: list[Finished], visits: list[Visit]) -> list[str]:
    """Each request that reached a gate has one record, which tells what the client saw."""
    told: dict[str, list[int]] = {}
    for record in records:
        told.setdefault(record.request_id, []).append(record.status)
    wrong = []
    for visit in visits:
        statuses, status = told.get(visit.request_id, []), visit.reply.status
        if len(statuses) > 1:
            wrong.append(f"{visit.request_id} has {len(statuses)} records")
        elif status is not None and statuses != [status]:
            wrong.append(f"{visit.request_id} saw {status}, its record says {statuses}")
    return wrong
