"""A worker's gate: has clients, relays and stitches; the brain has the Board, and everything is asked there.

1. What happens to a lease here is told there, in its order. Per token nothing is said: what tokens show is
   told once a tick.
2. Without a brain streams go on. What is to be told waits for the next one, and so do asks, for a second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.stall_watch import LAG_S
from cellgate.proxy.gate import Gate, ReadLarge
from cellgate.proxy.handover.view import view_of
from cellgate.proxy.logs.access_log import AccessLog
from cellgate.proxy.logs.events import EventLog
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.wire.body_memory import BodyMemory
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.pool import MakeTls
from cellgate.proxy.workers.accept_balance import Page, SharedEntrance
from cellgate.proxy.workers.accounts import Accounts
from cellgate.proxy.workers.board_replica import fleet_in, take
from cellgate.proxy.workers.control_client import Line
from cellgate.proxy.workers.protocol import Message, Pulse, Say, Tell
from cellgate.proxy.workers.remote_dispatcher import RemoteDispatcher
from cellgate.proxy.workers.told import far_parts
from cellgate.router.nouns import Fleet, Verdict
from cellgate.router.unit_state import Desk


class WorkerGate(Gate):
    """A gate whose Board is a copy of the brain's. It neither judges nor picks."""

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        events: EventLog,
        access_log: AccessLog,
        read_large: ReadLarge,
        unit_tls: MakeTls | None = None,
        entrance: tuple[Page, int],
    ) -> None:
        super().__init__(
            settings,
            loop,
            rng,
            events=events,
            access_log=access_log,
            read_large=read_large,
            unit_tls=unit_tls,
        )
        self.line = Line(loop, self._greet, self._hear)
        page, number = entrance
        share = max(settings.limits.bodies_bytes // settings.workers, settings.limits.body_bytes)
        self.memory = BodyMemory(share, settings.limits.body_bytes)
        self._shared = SharedEntrance(
            loop,
            lambda: ClientConnection(self),
            page,
            number,
            clients=lambda: len(self.clients),
            trouble=lambda reason: self.line.rare("trouble", reason),
        )
        self._entrance = self._shared
        self.version = 0
        """Of the fleet, as the brain counts."""
        self._fleet: Message = ()
        """As the brain told it."""
        self.accounts = Accounts(self)
        self.opened = asyncio.Event()
        """The brain lets clients in."""
        self._accepts = False
        self.dispatcher: RemoteDispatcher = RemoteDispatcher(self.board, self.line, self.accounts, self.now)
        self._handlers: dict[int, Callable[..., None]] = {
            Tell.FLEET: self._take_fleet,
            Tell.UNITS: self._take_units,
            Tell.PULSE: self._take_pulse,
            Tell.OPEN: self.opened.set,
            Tell.GRANT: self.dispatcher.granted,
            Tell.REFUSE: self.dispatcher.refused,
            Tell.EVICT: self.dispatcher.evict,
        }
        far = far_parts(self)
        self.continuations = far.continuations
        self.balancers, self._vigil, self.metrics = far.balancers, far.vigil, far.metrics
        self.orca = self._orca_told = far.orca

    # -- the brain -----------------------------------------------------------------------------------------

    def accepts(self) -> None:
        """Clients are let in."""
        self._accepts = True
        self.line.say((Say.ACCEPTING,))

    def _greet(self) -> list[Message]:
        """What a brain is told first: what is known, and what is open."""
        known = (self._fleet, view_of(self.board)) if self.version else None
        greeting: list[Message] = [(Say.HELLO, known, self.dispatcher.greeting())]
        return [*greeting, (Say.ACCEPTING,)] if self._accepts else greeting

    def _hear(self, message: Message) -> None:
        self._handlers[message[0]](*message[1:])

    # -- what the brain tells ------------------------------------------------------------------------------

    def _take_fleet(self, version: int, *fleet: Any) -> None:
        self.version, self._fleet = version, fleet
        self.configure(fleet_in(fleet))

    def _take_units(self, units: list[dict[str, Any]]) -> None:
        for known in units:
            before = take(self.board, known)
            desk = self.board.desks.get(known["name"])
            if before is None or desk is None:
                continue
            fell = desk.case.verdict in (Verdict.DOWN, Verdict.STARTING)
            if fell and (desk.case.verdict is not before.verdict or desk.case.since != before.since):
                self._reach.distrust(desk)

    def _take_pulse(self, *told: Any) -> None:
        pulse = Pulse(*told)
        for name, at in pulse.lives:
            if (desk := self.board.desks.get(name)) is not None:
                desk.life_at = max(desk.life_at, at)
        self.accounts.heard(pulse.lives)
        self._orca_told.take(*pulse.orca)
        self.board.panic_at = pulse.panic_at

    # -- what a gate does ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tick; the units come from the brain."""
        self._schedule_tick()

    def configure(self, fleet: Fleet) -> str:
        """Take over the brain's fleet."""
        old = dict(self.board.desks)
        changes = self.board.configure(fleet, self.now())
        for unit in changes.removed:
            self._reach.leave(old[unit.name])
            self.accounts.forget(old[unit.name])
        return ""

    def finished(self, record: Finished) -> None:
        """A request is over."""
        r = record
        self.line.mention(
            (Say.FINISHED, r.route, int(r.status), r.unit, r.ttft_s, r.duration_s, r.bytes_in, r.bytes_out)
        )
        self._access_log.write(record)

    def room(self) -> None:
        """It is the brain who serves those that wait."""

    def connections(self) -> int:
        """How many there are to units."""
        return len(self._reach)

    def log_dropped(self) -> int:
        """Lines that the access log has lost."""
        return self._access_log.dropped

    async def _close(self) -> None:
        await super()._close()
        self.line.mention((Say.TICK, *self.accounts.report(self.now(), 0.0, is_last=True)))
        self.line.close()
        # One turn for what was said to go out.
        await asyncio.sleep(0)

    def _doubt(self, desk: Desk) -> None:
        if not desk.retired:
            desk.doubted_at = self.now()
            self.line.say((Say.DOUBT, desk.unit.name, self.version))

    def _looks(self, now: float, lag_s: float) -> Iterable[Callable[[], object]]:
        """At every deadline that is a worker's."""
        yield partial(self._tick_clients, now)
        yield partial(self._mark, now)
        yield self._shed
        yield partial(self._reach.tick, now)
        yield self._shared.tick
        yield self._end_if_empty
        yield self._access_log.flush
        yield partial(self._tick_line, now, lag_s)

    def _mark(self, now: float) -> None:
        for desk in self.board:
            if desk.leases:
                desk.pace.mark(now)

    def _tick_line(self, now: float, lag_s: float) -> None:
        if self.line.has_brain():
            self.line.say((Say.TICK, *self.accounts.report(now, lag_s)))
        elif lag_s <= LAG_S:
            # If the worker itself stood still, what the brain said is yet to be read.
            self.line.tick(now)
