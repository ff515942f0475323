"""The control process: the control plane of a gate whose clients are at its workers. It has no client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.local_dispatcher import LocalDispatcher
from cellgate.proxy.control.local_reports import LocalReports
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.control.stall_watch import DISTRUST_S, LAG_S
from cellgate.proxy.doors.limited_dispatcher import LimitedDispatcher
from cellgate.proxy.handover.view import InheritedView
from cellgate.proxy.metrics.collectors import AccessLogMetrics
from cellgate.proxy.request.dispatcher import Dispatcher
from cellgate.proxy.workers.board_replica import BoardUpdates, fleet_in, fleet_out
from cellgate.proxy.workers.protocol import Message, Pulse, ToWorker, WorkerStatus, framed, settings_out
from cellgate.proxy.workers.session import WorkerSession
from cellgate.proxy.workers.socket_link import Link
from cellgate.proxy.workers.worker_metrics import WorkerTotals
from cellgate.router.nouns import Fleet

GREETING_S = 0.3
"""How long a new control process waits for all workers to report their open leases."""
BLIND_S = 1.0
"""A worker without a status for longer is blocked: the progress of units is judged without it."""


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
        self._greeted = 0
        self._log_dropped = 0
        """Lines that workers' access logs have lost."""
        plane.front = self
        plane.on_fleet.append(self._take_fleet)
        plane.on_units = self._units_changed
        plane.metrics.include(AccessLogMetrics(lambda: self._log_dropped))
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
            InheritedView(view).apply(self.plane.board)
            self._units_changed(False)
            for session in self.sessions.values():
                self._inform(session)

    def greeted(self) -> None:
        """A worker has reported its open leases."""
        self._greeted += 1
        if self._greeted >= self._workers:
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
        plane.metrics.forged += status.forged
        plane.routing.ignored += status.ignored
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
            states[name].life_at = max(states[name].life_at, at)
        for name, gaps in status.gaps:
            counts = states[name].gaps_ms
            for ms, count in gaps:
                counts[ms] += count

    # -- for the plane: see Front --------------------------------------------------------------------------

    def connections(self) -> Mapping[str, int]:
        """How many connections are open by side, at all workers, and those of probes here."""
        told = [session.status for session in self.sessions.values() if session.status is not None]
        return {
            "client": sum(status.clients for status in told),
            "unit": len(self.plane.reach) + sum(status.connections for status in told),
        }

    def is_full(self) -> bool:
        """Workers have room, as far as this process knows."""
        return False

    def seen_until(self, now: float) -> float:
        """As of the oldest status of a worker that is not blocked."""
        sessions = self.sessions.values()
        told = [each.status.at for each in sessions if each.status is not None and len(each)]
        return max(min([now, *told]), now - BLIND_S)

    # -- what workers are told -----------------------------------------------------------------------------

    def _inform(self, session: WorkerSession) -> None:
        """Send a worker the full state. It replaces the worker's replica, so that must have been received
        before.
        """
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
