"""The gate with a diary: every pick, lease and finished request is noted; what may not be is a violation.

Nothing is raised inside the gate, for that would change what it does; the stage reads `violations` later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

from cellgate.proxy.control.local_dispatcher import LocalDispatcher
from cellgate.proxy.gate import Gate
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.table import TABLE
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.request import Request
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Outcome, Refusal, Verdict
from cellgate.router.router import Best, Router
from cellgate.router.unit_state import Desk
from tests.scenarios.visit import Visit


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
        super().__init__(inner.board, inner.policy, rng, inner.waiting)
        self.picks: list[Pick] = []
        self.leases: list[Lease] = []
        self._violations = violations
        self._asked: tuple[bool, tuple[str, ...]] = False, ()

    def pick(
        self, ask: Ask, now: float, tried: Iterable[str] = (), *, evicted: bool = False, retry: bool = False
    ) -> Lease | Refusal:
        tried = tuple(tried)
        room = [desk for desk in self.board if self._could_take(desk, ask, tried, evicted)]
        self._asked = evicted, tried
        answer = super().pick(ask, now, tried, evicted=evicted, retry=retry)
        self._asked = False, ()
        if isinstance(answer, Refusal):
            idle = [desk for desk in room if not desk.leases and desk.cool_until <= now]
            # Behind others, and for a unit that answers sooner, one may wait; but not while a unit is idle.
            if (
                idle
                if answer is Refusal.FULL and not len(self.waiting)
                else room and answer is not Refusal.FULL
            ):
                self._violations.append(f"{now:.3f}: {answer} while {room} had room for {ask}")
            return answer
        self._examine(answer, room, now, tried)
        return answer

    def _open(self, best: Best, ask: Ask, now: float, *, retry: bool = False) -> Lease:
        lease = super()._open(best, ask, now, retry=retry)
        self.picks.append(Pick(now, lease.unit, lease.desk.unit.url, *self._asked))
        self.leases.append(lease)
        return lease

    def _could_take(self, desk: Desk, ask: Ask, tried: tuple[str, ...], evicted: bool) -> bool:
        """Written from the design, not from the Board: usable, not tried, of the model, not full."""
        over = 1.0 + (self.board.rules.evict_overcommit if evicted else 0.0)
        return (
            desk.case.verdict in (Verdict.UP, Verdict.SUSPECT)
            and not (desk.drained or desk.retired)
            and desk.unit.name not in tried
            and (ask.unit is None or ask.unit == desk.unit.name)
            and (ask.model is None or not desk.models or ask.model in desk.models)
            and not desk.is_doubted()
            and len(desk.leases) < desk.unit.max_in_flight * over
        )

    def _examine(self, lease: Lease, room: list[Desk], now: float, tried: tuple[str, ...]) -> None:
        desk = lease.desk
        if desk not in room:
            self._violations.append(f"{now:.3f}: picked {desk} (drained={desk.drained}), tried {tried}")
        elif desk.case.verdict is Verdict.SUSPECT and any(
            # One that has turned others away as busy is full, whatever was configured.
            other.case.verdict is Verdict.UP and other.has_place(now, 0.0)
            for other in room
        ):
            self._violations.append(f"{now:.3f}: picked the suspect {desk} while one that is up had room")


class ObservedExchange(Exchange):
    """An exchange that notes why its attempts fail."""

    def __init__(self, gate: ObservedGate, client: ClientConnection, request: Request) -> None:
        super().__init__(TABLE, gate, client, request)
        self._failures = gate.failures

    def failed(self, failure: Failure) -> None:
        self._failures[failure.kind] += 1
        super().failed(failure)


class ObservedDispatcher(LocalDispatcher):
    """A dispatcher that counts what attempts come to."""

    def __init__(self, gate: ObservedGate) -> None:
        super().__init__(gate)
        self._outcomes = gate.outcomes

    def released(self, lease: Lease, outcome: Outcome, at: float | None = None) -> None:
        self._outcomes[outcome] += 1
        super().released(lease, outcome, at)


class ObservedGate(Gate):
    """A gate that notes what ends. `failures` are those of attempts, whatever became of their requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.violations: list[str] = []
        self.router: ObservedRouter = ObservedRouter(self.router, self._rng, self.violations)
        self.records: list[Finished] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.dispatcher = ObservedDispatcher(self)
        self.failures: Counter[Kind] = Counter()

    def exchange(self, client: ClientConnection, request: Request) -> Exchange:
        return ObservedExchange(self, client, request)

    def finished(self, record: Finished) -> None:
        self.records.append(record)
        super().finished(record)

    def leftovers(self) -> list[str]:
        """What must be nothing once every client has gone."""
        board = self.board
        counts = {
            "open leases": sum(not lease.closed for lease in self.router.leases),
            "in flight at the gate": board.in_flight,
            "retries in flight": board.retries_in_flight,
            "desks that wait to leave": len(board.leaving),
            "requests that wait": len(self.router.waiting),
            "client connections": len(self.clients),
            "bytes of body memory": self.memory.used,
        }
        counts |= {f"in flight at {desk.unit.name}": desk.in_flight for desk in board}
        closed, given = self.outcomes.total(), len(self.router.leases)
        counts["leases not closed exactly once"] = given - closed
        return [f"{count} {what} are left" for what, count in counts.items() if count]


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
