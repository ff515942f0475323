"""A stage whose gate is a control process and two workers: the same scenarios, the same invariants.

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

from cellgate.extras.workers.control_process import ControlProcess
from cellgate.extras.workers.protocol import Link
from cellgate.extras.workers.worker import Page, Worker
from cellgate.proxy.config.settings import Address, Settings
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.process.listeners import Entrance
from cellgate.proxy.process.signals import Ticker
from cellgate.router.nouns import Ask, Outcome
from cellgate.router.unit_state import Lease
from tests.scenarios.harness import GATE_PORT, Stage
from tests.scenarios.observed import (
    Diary,
    KeptRecords,
    Observed,
    ObservedDispatcher,
    ObservedPlane,
    read_large,
)
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


class ObservedWorker:
    """A worker, and what it notes in the diary of its gate."""

    def __init__(self, control: ObservedControl, settings: Settings, seed: int, number: int) -> None:
        loop = control.loop
        self.log = KeptRecords(control.diary)
        self.worker = Worker(
            settings,
            loop,
            Random(seed),
            access_log=self.log,
            read=read_large,
            page=Page(WORKERS),
            number=number,
        )
        self.gateway, self.control = self.worker.gateway, self.worker.control
        self.gateway.entrance = Entrance(loop, self.gateway.connection)
        self.clients = self.gateway.clients
        self.number = number
        self.tell(control.diary)

    def tell(self, diary: Diary) -> None:
        """From now on it is noted there."""
        self.log.diary = diary
        diary.read(self.gateway)

    def leftovers(self) -> list[str]:
        """What must be nothing once every client has gone."""
        board = self.gateway.services.board
        counts = {
            "asks": len(self.control),
            "leases": len(self.worker._dispatcher),
            "in flight": board.in_flight,
            "client connections": len(self.clients),
            "bytes of body memory": self.gateway.memory.used,
        } | {f"in flight at {state.unit.name}": state.in_flight for state in board}
        return [f"{count} {what} are left at worker {self.number}" for what, count in counts.items() if count]


class SessionsDispatcher(ObservedDispatcher):
    """A dispatcher of sessions: leases come from elsewhere as well, and some are not used."""

    def adopt(self, unit: str, ask: Ask, at: float, *, retry: bool) -> Lease | None:
        lease = super().adopt(unit, ask, at, retry=retry)
        if lease is not None:
            self._plane.router.leases.append(lease)  # type: ignore[attr-defined]
        return lease

    def withdrawn(self, lease: Lease) -> None:
        self._diary.outcomes[Outcome.EVICTED] += 1
        super().withdrawn(lease)


class ObservedControl(Observed):
    """A control process, with its workers."""

    def __init__(
        self, loop: SimLoop, settings: Settings, seed: int, workers: Sequence[ObservedWorker] = ()
    ) -> None:
        diary, rng, ticker = Diary(), Random(seed), Ticker(loop)
        events = EventLog(time.time, settings.rules.passes, log=lambda level, line: None)
        self.is_ready = False
        """What /readyz says."""
        plane = ObservedPlane(rng, diary, settings, loop, rng, ticker, events=events, publish=self._published)
        super().__init__(plane, diary)
        self.loop = loop
        self.process = ControlProcess(plane, loop, listeners=(), is_first=not workers)
        self.dispatcher = self.process.dispatcher = self.process.asked = SessionsDispatcher(plane, diary)
        self.workers = list(workers) or [
            ObservedWorker(
                self, replace(settings, listen=Address("gate", GATE_PORT + number)), seed + number, number
            )
            for number in range(WORKERS)
        ]
        self.pipes = [self.introduce(worker) for worker in self.workers]

    def _published(self, ready: bool, _body: bytes, _lines: bytes) -> None:
        self.is_ready = ready

    def introduce(self, worker: ObservedWorker) -> Pipe:
        """Connect a worker."""
        return connect(self.loop, self.process.meet(worker.number), worker.control.meet())

    @property
    def most_retries(self) -> int:
        """So many were in flight at once, at all workers together."""
        return self.dispatcher.most_retries

    async def crash(self) -> None:
        """It is gone from one moment to the next; what is left of it does nothing."""
        for pipe in self.pipes:
            pipe.close()
        await self.process.close()

    def leftovers(self) -> list[str]:
        at_workers = [left for worker in self.workers for left in worker.leftovers()]
        return super().leftovers() + at_workers

    async def start(self, tls: object = None) -> None:
        self.process.begin()
        for worker in self.workers:
            worker.worker.begin()
            await worker.gateway.listen()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        ends = [each.worker.stop(delay_s=delay_s, drain_s=drain_s) for each in self.workers]
        await asyncio.gather(self.process.stop(delay_s=delay_s, drain_s=drain_s), *ends)


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

    gate: ObservedControl  # type: ignore[assignment]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.client = InTurn(self.world)

    async def replace_control(self, after_s: float) -> None:
        """The control process crashes, and so much later there is another one."""
        before = self.gate
        await before.crash()
        await asyncio.sleep(after_s)
        self.gate = ObservedControl(self.world.loop, before.settings, 99, before.workers)
        for worker in before.workers:
            worker.tell(self.gate.diary)
        self.gate.records += before.records
        self.gates[:] = [self.gate]  # type: ignore[list-item]
        self.gate.process.begin()

    def _make_gate(self, settings: Settings, seed: int) -> Any:
        return ObservedControl(self.world.loop, replace(settings, workers=WORKERS), seed)
