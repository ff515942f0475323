"""A worker: a gateway whose control plane is in another process.

1. Everything about a lease is reported to the control process, in order. For single tokens nothing is sent:
   progress is reported once a tick.
2. Without a control process streams continue. Reports wait for the next one, and so do pick requests, for
   a second.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.stall_watch import LAG_S
from cellgate.proxy.doors.accounting import make_door
from cellgate.proxy.doors.key_follower import KeyFollower
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.ingress.orca import LoadLines
from cellgate.proxy.logs.access_log import AccessLog
from cellgate.proxy.process.garbage import Garbage
from cellgate.proxy.process.ticker import Ticker
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.request.large_reads import ReadBody
from cellgate.proxy.wire.reach import UnitPools
from cellgate.proxy.workers.accept_balance import Page, SharedEntrance
from cellgate.proxy.workers.board_replica import BoardReplica, ReplicaUnit
from cellgate.proxy.workers.control_client import ControlClient
from cellgate.proxy.workers.neighbours import Neighbours
from cellgate.proxy.workers.protocol import Message, Pulse, ToControl, ToWorker, settings_in
from cellgate.proxy.workers.remote_accounts import RemoteAccounts
from cellgate.proxy.workers.remote_dispatcher import RemoteDispatcher
from cellgate.proxy.workers.remote_reports import RemoteReports
from cellgate.proxy.workers.worker_status import StatusReporter


class Worker:
    """Worker `number` of one gate; `page` is the shared page with the number of clients of each, `neighbours`
    are where each takes clients of the others.
    """

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        access_log: AccessLog,
        read: ReadBody,
        tls: LiveTls | None = None,
        page: Page,
        number: int,
        neighbours: Neighbours,
    ) -> None:
        self.control = ControlClient(loop, self._greet, self._hear)
        self.opened = asyncio.Event()
        """Whether clients may be accepted."""
        self._now, self._neighbours = loop.time, neighbours
        self._ticker = ticker = Ticker(loop)
        self._replica = replica = BoardReplica(settings.rules)
        self._dispatcher = RemoteDispatcher(replica.board, self.control, loop.time)
        self._reports = RemoteReports(self.control, replica, loop.time)
        self._unit_pools = self._make_unit_pools(settings, loop, tls)
        self._load_lines = LoadLines()
        self.gateway = Gateway(
            settings,
            loop,
            rng,
            ticker,
            board=replica.board,
            dispatcher=self._dispatcher,
            reports=self._reports,
            unit_pools=self._unit_pools,
            load_lines=self._load_lines,
            access_log=access_log,
            read=read,
        )
        self._entrance = self.gateway.entrance = SharedEntrance(
            loop, self.gateway.connection, page, number, self._clients, self._reports.gate_fault
        )
        neighbours.introduce(self.gateway.reconnects, number)
        self._status = StatusReporter(replica, self.gateway, self._dispatcher, self._reports)
        self._tls, self._accepts = tls, False
        self._keys, self._handlers = self._ask_for_keys(settings), self._what_follows()
        garbage = Garbage(loop.time(), lambda: not replica.board.in_flight)
        ticker.looks += [self._entrance.tick, self._mark_steps, self._tell_status, garbage.tick]

    def _clients(self) -> int:
        return len(self.gateway.clients)

    def _ask_for_keys(self, settings: Settings) -> KeyFollower | None:
        if settings.keys is None:
            return None
        self._door = door = make_door(settings, RemoteAccounts(self.control))
        self.gateway.ask_for_keys(door)
        self._ticker.looks.append(door.tick)
        # The control process reports mistakes for all.
        return KeyFollower(settings.keys.file, door.take, lambda _problems: None)

    def _what_follows(self) -> dict[int, Callable[..., None]]:
        """The handlers of messages of the control process."""
        return {
            ToWorker.FLEET: self._take_fleet,
            ToWorker.UNITS: self._take_units,
            ToWorker.PULSE: self._take_pulse,
            ToWorker.OPEN: self.opened.set,
            ToWorker.GRANTED: self._dispatcher.granted,
            ToWorker.REFUSED: self._dispatcher.refused,
            ToWorker.EVICTED: self._dispatcher.evict,
            ToWorker.SETTINGS: self._take_settings,
        }

    # -- life ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Read the keys of clients, and tick; the units come from the control process."""
        if self._tls is not None:
            self._ticker.looks.append(self._tls.tick)
        if self._keys is not None:
            self._keys.read()
            self._keys.start()
            self._door.start()
        self._ticker.start()

    async def accept(self, listeners: Sequence[socket.socket] = ()) -> None:
        """Accept clients, once that is allowed. Raises OSError."""
        await self.opened.wait()
        await self.gateway.listen(None if self._tls is None else self._tls.clients(), listeners)
        await self._neighbours.accept(self.gateway.connection)
        self._accepts = True
        self.control.say((ToControl.ACCEPTING,))

    def announce_stop(self) -> None:
        """Responses say from now on that the gate stops."""
        self.gateway.announce_stop()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop gracefully."""
        await self.gateway.stop(delay_s=delay_s, drain_s=drain_s)
        await self._close()

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another gate's workers accept: let responses end."""
        await self.gateway.leave_to_successor(drain_s=drain_s)
        await self._close()

    async def _close(self) -> None:
        self._ticker.stop()
        if self._keys is not None:
            await self._keys.close()
            await self._door.close()
        self._unit_pools.close()
        self._neighbours.close()
        await self.gateway.close()
        self.control.mention((ToControl.STATUS, *self._status.take(self._now(), 0.0, is_last=True)))
        self.control.close()
        # One turn to send pending messages.
        await asyncio.sleep(0)

    # -- the control process -------------------------------------------------------------------------------

    def _greet(self) -> list[Message]:
        """The first message to a control process: the replica and the open leases."""
        greeting: list[Message] = [(ToControl.HELLO, self._replica.known(), self._dispatcher.greeting())]
        return [*greeting, (ToControl.ACCEPTING,)] if self._accepts else greeting

    def _make_unit_pools(
        self, settings: Settings, loop: asyncio.AbstractEventLoop, tls: LiveTls | None
    ) -> UnitPools:
        return UnitPools(
            loop,
            connect_timeout_s=settings.timeouts.connect_s,
            tls=None if tls is None else tls.units,
            own_keys=settings.keys is not None,
            token=lambda: self.gateway.settings.admin_token,
            on_broken=self._reports.restart_suspected,
            on_gate_fault=self._reports.gate_fault,
        )

    def _hear(self, message: Message) -> None:
        self._handlers[message[0]](*message[1:])

    def _take_fleet(self, version: int, *fleet: Any) -> None:
        for state in self._replica.take_fleet(version, fleet, self._now()):
            self._unit_pools.leave(state)
            self._status.forget(state)
        self._unit_pools.renew()

    def _take_units(self, units: list[ReplicaUnit]) -> None:
        for state in self._replica.take_units(units):
            self._unit_pools.distrust(state)

    def _take_settings(self, told: bytes) -> None:
        self.gateway.take_settings(settings := settings_in(self.gateway.settings, told))
        self._unit_pools.renew()
        if self._tls is not None:
            self._tls.take(settings.tls)

    def _take_pulse(self, *told: Any) -> None:
        pulse = Pulse(*told)
        self._replica.take_lives(pulse.lives)
        self._status.heard(pulse.lives)
        self._load_lines.usual, self._load_lines.others = pulse.load_line, pulse.load_lines
        self._replica.board.panic_at = pulse.panic_at

    # -- with each tick ------------------------------------------------------------------------------------

    def _mark_steps(self, now: float) -> None:
        for state in self._replica.board:
            if state.leases:
                state.step_times.mark(now)

    def _tell_status(self, now: float) -> None:
        lag_s = self._ticker.lag_s
        if self.control.has_control():
            self.control.say((ToControl.STATUS, *self._status.take(now, lag_s)))
        elif lag_s <= LAG_S:
            # After a blocked loop the messages of the control process have not been read yet.
            self.control.tick(now)
