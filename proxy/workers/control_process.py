"""The brain's gate: has the Board, queue, probes and judge for all workers, and not one client."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.local_dispatcher import LocalDispatcher
from cellgate.proxy.control.stall_watch import DISTRUST_S, LAG_S
from cellgate.proxy.gate import Gate, Publish, ReadLarge
from cellgate.proxy.handover.view import View
from cellgate.proxy.logs.access_log import AccessLog
from cellgate.proxy.logs.events import EventLog
from cellgate.proxy.wire.pool import MakeTls
from cellgate.proxy.workers.board_replica import News, fleet_in, fleet_out
from cellgate.proxy.workers.figures import Record
from cellgate.proxy.workers.link import Link
from cellgate.proxy.workers.protocol import Message, Pulse, Report, Tell, framed
from cellgate.proxy.workers.session import Seat
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Fleet

GREETING_S = 0.3
"""So long a brain that takes the place of another waits for all workers to tell what they have open."""
BLIND_S = 1.0
"""A worker that has told nothing for longer is stuck: what units show is judged without it."""


class LogsOfWorkers(AccessLog):
    """Workers write their own access logs; here is what they lost."""

    lost = 0
    """What they told of."""

    @property
    def dropped(self) -> int:
        """Lines that no worker has written."""
        return self.lost


class BrainGate(Gate):
    """A gate whose clients are at its workers, which accept on `listeners`: here they are only held."""

    dispatcher: LocalDispatcher

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        events: EventLog,
        logs: LogsOfWorkers,
        read_large: ReadLarge,
        publish: Publish,
        unit_tls: MakeTls | None,
        listeners: Sequence[socket.socket],
        is_first: bool,
    ) -> None:
        super().__init__(
            settings,
            loop,
            rng,
            events=events,
            access_log=logs,
            read_large=read_large,
            publish=publish,
            unit_tls=unit_tls,
        )
        self.version = 0
        """Of the fleet: with each that is taken over there is one more."""
        self.seats: dict[int, Seat] = {}
        """By the number of the worker."""
        self.all_accept = asyncio.Event()
        self.worker_records: dict[int, Record] = {}
        """Of workers by number, whether there is one now or not."""
        self.deaths = 0
        self.lost_attempts = 0
        """Those that were open at workers which ended."""
        self._held = listeners
        self._logs = logs
        self._is_open = False
        self._fleet = Fleet()
        self._news = News(self.board)
        self._pushing = False
        self._evictions: dict[Seat, list[int]] = {}
        self._has_learnt = False
        self._deserted = asyncio.Event()
        self.knows_all = is_first
        """Whether it has heard what is open at workers: before, no unit is given to anybody."""
        self._greeted = 0

    @property
    def port(self) -> int:
        """The port that workers accept on."""
        port: int = self._held[0].getsockname()[1] if self._held else 0
        return port

    # -- workers -------------------------------------------------------------------------------------------

    def meet(self, number: int) -> Link:
        """There is a worker of this number, to be connected by what is returned."""
        seat = Seat(self, number, self.worker_records.setdefault(number, Record()))
        link = seat.link = Link(self._loop, seat.hear, lambda: self._lost(seat))
        if (before := self.seats.get(number)) is not None:
            self._lost(before)
        self.seats[number] = seat
        self._deserted.clear()
        if self._has_learnt or self.knows_all:
            self._inform(seat)
        return link

    def _inform(self, seat: Seat) -> None:
        """Tell a worker all. It forgets what it knows by this, so that must have been heard before."""
        if not seat.informed:
            seat.informed = True
            seat.link.send(self._fleet_now())
            seat.link.send((Tell.UNITS, self._news.all(self.now())))
            seat.link.send((Tell.PULSE, *self._pulse([])))
            if self._is_open:
                seat.link.send((Tell.OPEN,))

    def let_clients_in(self) -> None:
        """Workers may accept, now and whenever one is started."""
        self._is_open = True
        self._broadcast((Tell.OPEN,))

    def accepting(self) -> int:
        """How many workers accept."""
        return sum(seat.accepting for seat in self.seats.values())

    def on_accepting(self) -> None:
        """One more accepts."""
        if self.accepting() >= self.settings.workers:
            self.all_accept.set()

    def evicted(self, seat: Seat, number: int) -> None:
        """A lease of a worker is evicted."""
        if seat not in self._evictions:
            self._evictions[seat] = []
            self._loop.call_soon(self._tell_evicted, seat)
        self._evictions[seat].append(number)

    def has_enough_retries(self) -> bool:
        """Whether as many are under way as are allowed, at all workers together (see router/retry.py)."""
        board, rules = self.board, self.board.rules
        under_way = board.retries_in_flight + self.router.waiting.retries
        return under_way >= max(float(rules.retry_min), rules.retry_budget * board.in_flight)

    def greeted(self) -> None:
        """A worker has told what it has open."""
        self._greeted += 1
        if self._greeted >= self.settings.workers:
            self._know_all()

    def _know_all(self) -> None:
        if not self.knows_all:
            self.knows_all = True
            for seat in list(self.seats.values()):
                self._inform(seat)
                seat.begin()

    def learn(self, fleet: Message, view: dict[str, Any]) -> None:
        """Take over what the brain before this one believed, if nothing else was learnt yet.

        Units that it had found are there before they are found anew, with their drains and leases.
        """
        if not self._has_learnt:
            self._has_learnt = True
            self.remember(fleet_in(fleet))
            View(view).apply(self.board)
            self._push_soon()
            for seat in self.seats.values():
                self._inform(seat)

    def adopt(self, unit: str, ask: Ask, opened_at: float, *, retry: bool) -> Lease | None:
        """Open a lease that a worker had before this brain was there; None: the unit is not known."""
        return self.board.open(unit, ask, opened_at, retry=retry) if unit in self.board.desks else None

    def withdraw(self, lease: Lease) -> None:
        """Close a lease of which no attempt came."""
        self.board.close(lease, self.now())
        self.room()

    def doubt(self, unit: str) -> None:
        """A unit has ended a connection out of turn."""
        if (desk := self.board.desks.get(unit)) is not None:
            self._doubt(desk)

    def own_trouble(self, reason: str) -> None:
        """A worker could not open a connection, or accept one."""
        self._vigil.own_trouble(reason)

    def reported(self, report: Report) -> None:
        """A worker has told what it has seen."""
        if report.lag_s > LAG_S:
            self.watch.trust_from(self.now() + DISTRUST_S)
        self.metrics.loop_lag(report.lag_s)
        self.metrics.forged += report.forged
        self.wishes.ignored += report.ignored
        self.metrics.defects += report.defects
        for name, times in report.limits:
            self.metrics.limits[name] += times
        self._logs.lost += report.log_dropped
        if report.version != self.version:
            # Names may mean other units by now; what there is comes again.
            return
        desks = self.board.desks
        for name, at in report.lives:
            desks[name].life_at = max(desks[name].life_at, at)
        for name, gaps in report.gaps:
            counts = desks[name].gaps_ms
            for ms, count in gaps:
                counts[ms] += count

    def _lost(self, seat: Seat) -> None:
        if self.seats.get(seat.number) is seat:
            del self.seats[seat.number]
            seat.record.end()
            if not self.is_leaving():
                self.deaths += 1
            self.lost_attempts += len(seat)
            seat.vacate()
            if not self.seats:
                self._deserted.set()

    # -- what a gate does ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Watch the units."""
        super().begin()
        if not self.knows_all:
            self._loop.call_later(GREETING_S, self._know_all)

    def configure(self, fleet: Fleet) -> str:
        """Take over a fleet, and tell the workers."""
        changed = super().configure(fleet)
        self.version += 1
        self._fleet = fleet
        self._broadcast(self._fleet_now(), (Tell.UNITS, self._news.all(self.now())))
        return changed

    def set_drain(self, unit: str, drained: bool) -> bool:
        """The operator's will: workers have it before it is acknowledged, should this brain end."""
        known = super().set_drain(unit, drained)
        self._push()
        return known

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop when all workers have; they are told as well, and by the same clock."""
        self._stopping = True
        self._tell()
        self._let_go()
        await self._end(delay_s + drain_s + LAG_S)

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another brain has been told all, and its workers accept."""
        self._handed_over = True
        self._let_go()
        await self._end(drain_s)

    def _let_go(self) -> None:
        """Whoever connects once the workers have closed theirs is to be refused."""
        held, self._held = self._held, ()
        for listener in held:
            listener.close()

    async def _end(self, drain_s: float) -> None:
        if self.seats:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_s + BLIND_S):
                    await self._deserted.wait()
        await self._close()

    def _tell_soon(self) -> None:
        super()._tell_soon()
        self._push_soon()

    def _seen_until(self, now: float) -> float:
        """Judge by what the slowest worker has told, unless it is stuck."""
        reports = [seat.report.at for seat in self.seats.values() if seat.report is not None and len(seat)]
        return max(min([now, *reports]), now - BLIND_S)

    def _tick(self) -> None:
        super()._tick()
        self._push()
        self._broadcast((Tell.PULSE, *self._pulse(self._news.lives())))

    def _connections(self) -> dict[str, int]:
        reports = [seat.report for seat in self.seats.values() if seat.report is not None]
        return {
            "client": sum(report.clients for report in reports),
            "unit": len(self._reach) + sum(report.connections for report in reports),
        }

    # -- what workers are told -----------------------------------------------------------------------------

    def _fleet_now(self) -> Message:
        return (Tell.FLEET, self.version, *fleet_out(self._fleet))

    def _pulse(self, lives: list[tuple[str, float]]) -> Pulse:
        return Pulse(self.now(), lives, self.orca.lines(), self.board.panic_at)

    def _push_soon(self) -> None:
        if not self._pushing:
            self._pushing = True
            self._loop.call_soon(self._push)

    def _push(self) -> None:
        self._pushing = False
        if changed := self._news.units(self.now()):
            self._broadcast((Tell.UNITS, changed))

    def _broadcast(self, *messages: Message) -> None:
        frame = framed(list(messages))
        for seat in self.seats.values():
            if seat.informed:
                seat.link.write(frame)

    def _tell_evicted(self, seat: Seat) -> None:
        seat.link.send((Tell.EVICT, self._evictions.pop(seat)))
