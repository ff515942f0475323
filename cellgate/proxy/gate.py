"""A gate of one process: both planes on one loop, with one timer for both."""

from __future__ import annotations

import asyncio
import random
import ssl

from cellgate.proxy.admission.limits import LimitedDispatcher
from cellgate.proxy.admission.usage import make_door
from cellgate.proxy.config.settings import Settings
from cellgate.proxy.control.dispatcher import LocalDispatcher, LocalReports
from cellgate.proxy.control.plane import Plane, Publish
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.http.unit import MakeTls
from cellgate.proxy.observe.events import EventLog
from cellgate.proxy.observe.exposition import AccessLogMetrics
from cellgate.proxy.observe.log import AccessLog
from cellgate.proxy.process.signals import Ticker
from cellgate.proxy.request.large_bodies import ReadBody
from cellgate.proxy.request.ports import Dispatcher


class Gate:
    """One gate, with a plane that has not begun and a gateway that uses it."""

    def __init__(self, plane: Plane, gateway: Gateway) -> None:
        self.plane = plane
        self.gateway = plane.front = gateway
        plane.metrics.include(AccessLogMetrics(gateway.log_dropped))

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen and start the probes. Raises OSError when the address is not available."""
        await self.gateway.listen(tls)
        self.begin()

    def begin(self) -> None:
        """Start the probes of all units."""
        self.plane.begin()
        self.plane.ticker.start()

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        return self.gateway.port

    def take_settings(self, settings: Settings) -> None:
        """The configuration was read again."""
        self.gateway.take_settings(settings)

    def announce_stop(self) -> None:
        """Not ready from now on; responses close their connections."""
        self.plane.announce_stop()
        self.gateway.announce_stop()

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop gracefully: not ready, accept for `delay_s` more, let responses end for up to `drain_s`."""
        self.announce_stop()
        await self.gateway.stop(delay_s=delay_s, drain_s=drain_s)
        await self._close()

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another process accepts from the same queue: let responses end for up to `drain_s`, then end."""
        await self.gateway.leave_to_successor(drain_s=drain_s)
        await self._close()

    async def _close(self) -> None:
        self.plane.ticker.stop()
        await self.plane.close()
        await self.gateway.close()


def local_gateway(
    plane: Plane,
    loop: asyncio.AbstractEventLoop,
    rng: random.Random,
    access_log: AccessLog,
    read: ReadBody,
) -> Gateway:
    """A gateway with a control plane in the same process."""
    dispatcher: Dispatcher = LocalDispatcher(plane)
    if plane.accounting is not None:
        dispatcher = LimitedDispatcher(dispatcher, plane.accounting.ledger)
    gateway = Gateway(
        plane.settings,
        loop,
        rng,
        plane.ticker,
        board=plane.board,
        dispatcher=dispatcher,
        reports=LocalReports(plane),
        unit_pools=plane.reach,
        load_lines=plane.orca.lines,
        access_log=access_log,
        read=read,
    )
    if plane.accounting is not None:
        plane.accounting.door = make_door(plane.settings, plane.accounting.ledger)
        gateway.ask_for_keys(plane.accounting.door)
    return gateway


def make_gate(
    settings: Settings,
    loop: asyncio.AbstractEventLoop,
    rng: random.Random,
    *,
    events: EventLog,
    access_log: AccessLog,
    read: ReadBody,
    publish: Publish = lambda _ready, _body, _lines: None,
    unit_tls: MakeTls | None = None,
) -> Gate:
    """A gate with these settings; the arguments are described at Plane and Gateway."""
    ticker = Ticker(loop)
    plane = Plane(settings, loop, rng, ticker, events=events, publish=publish, unit_tls=unit_tls)
    return Gate(plane, local_gateway(plane, loop, rng, access_log, read))
