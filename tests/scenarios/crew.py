"""A stage whose gate is a brain and two workers: the same scenarios, the same invariants.

Their sockets are pipes in memory. Clients come to the workers in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from random import Random
from typing import Any

from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.logs.access_log import AccessLog
from cellgate.proxy.logs.events import EventLog
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.process.listeners import Entrance
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.request import Request
from cellgate.proxy.workers.accept_balance import Page
from cellgate.proxy.workers.control_process import BrainGate, LogsOfWorkers
from cellgate.proxy.workers.link import Link
from cellgate.proxy.workers.worker import WorkerGate
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Outcome
from tests.scenarios.harness import GATE_PORT, NoSink, Stage, read_large
from tests.scenarios.observed import ObservedExchange, ObservedGate
from tests.sim.client import Client
from tests.sim.loop import SimLoop
from tests.sim.world import World

WORKERS = 2
PIPE_S = 0.00005


class Pipe(asyncio.Transport):
    """One end of a pipe in memory."""

    def __init__(self, loop: SimLoop, protocol: Link) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self.other: Pipe
        self._closed = False

    def write(self, data: Any) -> None:
        if not self._closed:
            self._loop.outside(PIPE_S, self.other.arrives, bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def arrives(self, data: bytes) -> None:
        if not self._closed:
            self._protocol.data_received(data)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._loop.outside(PIPE_S, self.other.ends)
        self.ends()

    def abort(self) -> None:
        self.close()

    def ends(self) -> None:
        if not self._closed:
            self._closed = True
            self._protocol.connection_lost(None)


def connect(loop: SimLoop, one: Link, other: Link) -> Pipe:
    """Let two links be the ends of one pipe; the end of `one`."""
    here, there = Pipe(loop, one), Pipe(loop, other)
    here.other, there.other = there, here
    one.connection_made(here)
    other.connection_made(there)
    return here


class ObservedWorker(WorkerGate):
    """A worker that notes what ends."""

    def __init__(self, brain: ObservedBrain, settings: Settings, seed: int, number: int) -> None:
        loop = brain.sim
        super().__init__(
            settings,
            loop,
            Random(seed),
            events=brain.events,
            access_log=AccessLog("off", NoSink(), time.time),
            read_large=read_large,
            entrance=(Page(WORKERS), number),
        )
        self._entrance = Entrance(loop, lambda: ClientConnection(self))
        self.failures = brain.failures
        self.records = brain.records
        self.number = number

    def exchange(self, client: ClientConnection, request: Request) -> Exchange:
        return ObservedExchange(self, client, request)  # type: ignore[arg-type]

    def finished(self, record: Finished) -> None:
        self.records.append(record)
        super().finished(record)

    def leftovers(self) -> list[str]:
        """What must be nothing once every client has gone."""
        counts = {
            "asks": len(self.line),
            "leases": len(self.dispatcher),
            "in flight": self.board.in_flight,
            "client connections": len(self.clients),
            "bytes of body memory": self.memory.used,
        } | {f"in flight at {desk.unit.name}": desk.in_flight for desk in self.board}
        return [f"{count} {what} are left at worker {self.number}" for what, count in counts.items() if count]


class ObservedBrain(BrainGate, ObservedGate):
    """A brain that notes what it gives, with its workers."""

    def __init__(
        self, sim: SimLoop, settings: Settings, seed: int, workers: Sequence[ObservedWorker] = ()
    ) -> None:
        self.sim = sim
        self.most_retries = 0
        super().__init__(
            settings,
            sim,
            Random(seed),
            events=EventLog(time.time, settings.rules.passes, log=lambda level, line: None),
            logs=LogsOfWorkers("off", NoSink(), time.time),
            read_large=read_large,
            publish=lambda _ready, _body, _lines: None,
            unit_tls=None,
            listeners=(),
            is_first=not workers,
        )
        self.workers = list(workers) or [
            ObservedWorker(
                self, replace(settings, listen=Address("gate", GATE_PORT + number)), seed + number, number
            )
            for number in range(WORKERS)
        ]
        self.pipes = [self.introduce(worker) for worker in self.workers]

    def introduce(self, worker: ObservedWorker) -> Pipe:
        """Connect a worker."""
        return connect(self.sim, self.meet(worker.number), worker.line.meet())

    def adopt(self, unit: str, ask: Ask, opened_at: float, *, retry: bool) -> Lease | None:
        lease = super().adopt(unit, ask, opened_at, retry=retry)
        if lease is not None:
            self.router.leases.append(lease)
        return lease

    def has_enough_retries(self) -> bool:
        enough = super().has_enough_retries()
        self.most_retries = max(self.most_retries, self.board.retries_in_flight + (not enough))
        return enough

    async def crash(self) -> None:
        """It is gone from one moment to the next; what is left of it does nothing."""
        for pipe in self.pipes:
            pipe.close()
        await self._close()

    def withdraw(self, lease: Lease) -> None:
        self.outcomes[Outcome.EVICTED] += 1
        super().withdraw(lease)

    def finished(self, record: Finished) -> None:
        raise AssertionError("a brain has no clients")

    def leftovers(self) -> list[str]:
        at_workers = [left for worker in self.workers for left in worker.leftovers()]
        return super().leftovers() + at_workers

    async def start(self, tls: object = None) -> None:
        self.begin()
        for worker in self.workers:
            worker.begin()
            await worker.listen()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        ends = [worker.stop(delay_s=delay_s, drain_s=drain_s) for worker in self.workers]
        await asyncio.gather(super().stop(delay_s=delay_s, drain_s=drain_s), *ends)


class InTurn(Client):
    """Clients that come to one worker after the other."""

    def __init__(self, world: World) -> None:
        super().__init__(world, f"gate:{GATE_PORT}")
        self._numbers = cycle(range(WORKERS))

    async def exchange(self, *args: Any, **options: Any) -> Any:
        self._port = GATE_PORT + next(self._numbers)
        return await super().exchange(*args, **options)


class CrewStage(Stage):
    """The stage."""

    gate: ObservedBrain

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.client = InTurn(self.world)

    async def replace_brain(self, after_s: float) -> None:
        """The brain crashes, and so much later there is another one."""
        before = self.gate
        await before.crash()
        await asyncio.sleep(after_s)
        self.gate = ObservedBrain(self.world.loop, before.settings, 99, before.workers)
        for worker in before.workers:
            worker.records, worker.failures = self.gate.records, self.gate.failures
        self.gate.records += before.records
        self.gates[:] = [self.gate]
        self.gate.begin()

    def _make_gate(self, settings: Settings, seed: int) -> Any:
        return ObservedBrain(self.world.loop, replace(settings, workers=WORKERS), seed)
