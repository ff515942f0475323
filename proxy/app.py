"""The composition root: builds a gate from its settings and runs it until a signal. Knows every folder."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.port import AdminPort
from cellgate.proxy.admin.shared_status import Bulletin
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import Address, RedisAccess, Settings
from cellgate.proxy.discovery.follow import Discovery
from cellgate.proxy.discovery.redis import Feed
from cellgate.proxy.discovery.start import discover, preload
from cellgate.proxy.gate import BACKLOG, Gate
from cellgate.proxy.handover.inheritance import Inheritance, inherit
from cellgate.proxy.handover.successor import HandoverError, Listeners, hand_over
from cellgate.proxy.handover.view import View, drained, view_of
from cellgate.proxy.ingress.haproxy_agent import HaproxyAgent
from cellgate.proxy.logs.access_log import AccessLog, stdout_sink
from cellgate.proxy.logs.defects import DEFECTS
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.logs.log import configure, log_line
from cellgate.proxy.metrics.collectors import AgentCheckMetrics
from cellgate.proxy.process import descriptors
from cellgate.proxy.process.listeners import listen
from cellgate.proxy.process.malloc import return_large_blocks
from cellgate.proxy.process.signals import Life
from cellgate.proxy.process.systemd import notify
from cellgate.proxy.process.tls import client_context, unit_context, webhook_context
from cellgate.proxy.recovery.start import attend
from cellgate.proxy.request.large_bodies import LargeBodies
from cellgate.proxy.request.routing_explain import Choice
from cellgate.proxy.tracing.start import trace

if TYPE_CHECKING:
    from cellgate.proxy.sharing.link import RedisLink

WARM_LOOK_S = 0.05
LISTEN, ADMIN, AGENT_CHECK = "listen", "admin", "agent_check"

Reload = Callable[[], Settings]


def serve(settings: Settings, reload: Reload) -> int:
    """Run a gate until it is told to stop; returns the exit code. What signals mean: process/signals.py.

    Raises ConfigError when descriptors are too few, OSError when it cannot listen, NoInheritanceError when
    what a gate before it promised did not come.
    """
    descriptors.check(settings.workers)
    configure("json" if settings.access_log == "json" else "console")
    return_large_blocks()
    preload(settings)
    if settings.workers > 1:
        from cellgate.proxy.workers.supervisor import supervise  # Late, for one process needs none of it.

        return supervise(settings, reload, inherit())
    return uvloop.run(_serve(settings, reload, inherit()))


async def _serve(settings: Settings, reload: Reload, heritage: Inheritance | None) -> int:
    listeners = await listeners_of(settings, heritage)
    return await live(App(settings, reload, listeners), heritage)


async def live(app: App, heritage: Inheritance | None) -> int:
    """The whole life of a gate that has what it accepts on; returns the exit code."""
    asyncio.get_running_loop().set_exception_handler(DEFECTS.handle)
    try:
        await app.open(heritage)
        calm_the_collector()
        await app.run()
    finally:
        await app.close()
    return 0


class App:
    """All the parts of one gate. `listeners` are what it accepts on, by purpose and address."""

    def __init__(self, settings: Settings, reload: Reload, listeners: Listeners) -> None:
        self._settings = settings
        self._reload = reload
        self._reload_turn, self._reloads = asyncio.Lock(), set[asyncio.Task[None]]()
        self._listeners = listeners
        self._large = LargeBodies()
        self._events = EventLog(time.time, settings.rules.passes)
        bulletin = Bulletin()
        gate = self._gate = self._make_gate(bulletin)
        self._admin = AdminPort(_view(gate, settings), bulletin)
        self._agent = HaproxyAgent(gate.board, gate.now, gate.is_stopping, gate.peers.trusts, gate.balancers)
        self._link: RedisLink | None = None
        self._discovery: Discovery | None = None
        gate.on_tick.append(self._admin.tick)
        self._recovery = attend(gate, partial(webhook_context, settings.tls))
        # Now, since an untimely SIGUSR2 would end a process that does not know it.
        self._life = self._make_life()

    # What is otherwise where the clients are at workers (proxy/workers/control_app.py).

    def _make_gate(self, bulletin: Bulletin) -> Gate:
        settings = self._settings
        gate = Gate(
            settings,
            asyncio.get_running_loop(),
            random.Random(),
            events=self._events,
            access_log=AccessLog(settings.access_log, stdout_sink(), time.time),
            read_large=self._large.read,
            publish=bulletin.publish,
            unit_tls=partial(unit_context, settings.tls),
        )
        gate.tracing = trace(settings.tracing)
        return gate

    def _make_life(self) -> Life:
        return Life(self._gate, self._settings.timeouts, self._take_settings, self._hand_over)

    async def _let_clients_in(self) -> None:
        await self._gate.listen(client_context(self._settings.tls), self._listening_for(LISTEN))

    def _notify(self, *words: str) -> None:
        notify(*words)

    # The life of all parts.

    async def open(self, heritage: Inheritance | None) -> None:
        """Watch the units, and accept clients: at once, or once it knows what was known before it."""
        gate, settings = self._gate, self._settings
        gate.begin()
        feed = Feed()
        self._discovery = discover(gate, feed)
        self._link = _shared(gate, settings.redis, feed) if settings.redis is not None else None
        if heritage is not None:
            self._recovery.take_over(heritage.courses)
            await self._get_warm(heritage.view)
        await self._admin.open(self._listening_for(ADMIN))
        if settings.agent_check is not None:
            await self._agent.start(self._listening_for(AGENT_CHECK))
            gate.metrics.include(AgentCheckMetrics(self._agent))
        # Last, for a gate before this one may end it until it hears that clients are accepted.
        await self._let_clients_in()
        self._announce()
        if heritage is None:
            self._notify("READY=1")
        elif (out := await heritage.accept()) is not None:
            for unit in list(gate.board.desks):
                gate.set_drain(unit, unit in out)

    async def run(self) -> None:
        """Returns when the gate has stopped."""
        await self._life.run()

    async def close(self) -> None:
        """End every part."""
        for reload in self._reloads:
            reload.cancel()
        if self._discovery is not None:
            await self._discovery.close()
        await self._recovery.close()
        if self._link is not None:
            await self._link.close()
        self._agent.close()
        self._events.close()
        await self._admin.close()
        await self._large.close()
        if self._gate.tracing is not None:
            self._gate.tracing.close()

    async def _get_warm(self, view: View) -> None:
        """Know of each unit what was known before, and have heard of each that is used."""
        may_come = bool(self._settings.sources)
        view.apply(self._gate.board)
        # By then the gate before it has given it up; unless that is gone, and there is nobody but this one.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timeouts.handover_s):
                while not view.is_warm(self._gate.board, may_come=may_come):
                    await asyncio.sleep(WARM_LOOK_S)
                    view.apply(self._gate.board)

    async def _hand_over(self) -> bool:
        """Whether there is a successor now."""
        board = self._gate.board

        def known() -> dict[str, Any]:
            return {"view": view_of(board), "courses": self._recovery.hand_over()}

        log_line("info", "handing over: a successor is started")
        try:
            limit_s = self._settings.timeouts.handover_s
            pid = await hand_over(self._listeners, known, lambda: drained(board), limit_s)
        except HandoverError as error:
            self._recovery.go_on()
            self._events.add(Action("handover_failed", "SIGUSR2", detail=f"{error}; this gate goes on"))
            return False
        self._notify(f"MAINPID={pid}", "READY=1")
        self._admin.retire()
        self._agent.retire()
        self._events.add(Action("handover", "SIGUSR2", detail=f"process {pid} accepts clients"))
        return True

    def _take_settings(self) -> None:
        task = asyncio.get_running_loop().create_task(self._take_settings_in_turn())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _take_settings_in_turn(self) -> None:
        # Side by side, what was read first might be taken last.
        async with self._reload_turn:
            try:
                settings = await asyncio.to_thread(self._reload)
            except ConfigError as error:
                problems = "; ".join(error.problems)
                log_line("error", f"reload refused, the units stay as they were: {problems}")
                return
            self._gate.reload(settings)
            self._recovery.configure(settings.remedies)

    def _listening_for(self, purpose: str) -> Sequence[socket.socket]:
        return next(found for name, found in self._listeners.items() if name.startswith(purpose))

    def _announce(self) -> None:
        host, port = self._admin.address
        names = ", ".join(f"{desk.unit.name} ({desk.unit.url})" for desk in self._gate.board)
        listening = f"{self._settings.listen.host}:{self._gate.port}"
        log_line("info", f"listening on {listening}, admin on {host}:{port}, units: {names}")
        if line := descriptors.shortage(self._settings):
            log_line("warning", line)


def _shared(gate: Gate, access: RedisAccess, feed: Feed) -> RedisLink | None:
    # Its client takes a quarter of a second and ten megabytes, which most gates have no use for.
    from cellgate.proxy.sharing.start import share

    return share(gate, access, feed)


def _view(gate: Gate, settings: Settings) -> AdminView:
    # Chance of its own: to look must change nothing.
    choice = Choice(gate.router, gate.stored, settings.headers, settings.policy, gate.now, random.Random())
    return AdminView(
        board=gate.board,
        events=gate.events,
        metrics=gate.metrics,
        now=gate.now,
        stopping=gate.is_stopping,
        set_drain=gate.set_drain,
        token=settings.admin_token,
        peers=gate.peers,
        due_s=lambda unit, probe: gate.watch.due_s(unit, probe, gate.now()),
        waiting=lambda: len(gate.router.waiting),
        poison=gate.containment,
        full=gate.is_full,
        explain=choice.explain,
    )


async def listeners_of(settings: Settings, heritage: Inheritance | None) -> Listeners:
    """What to accept on: inherited, where the address is the same, or new. Raises OSError."""
    wanted = {LISTEN: settings.listen, ADMIN: settings.admin, AGENT_CHECK: settings.agent_check}
    found: dict[str, Sequence[socket.socket]] = {}
    for purpose, address in wanted.items():
        if address is not None:
            name = f"{purpose} {address}"
            inherited = heritage.take(name) if heritage is not None else []
            with _binding(address):
                found[name] = inherited or await listen(address, BACKLOG)
    return found


@contextmanager
def _binding(address: Address) -> Iterator[None]:
    """Have an OSError say which address could not be had, and why in the system's own words."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise OSError(error.errno, reason, str(address)) from error


def calm_the_collector() -> None:
    """Let the collector of garbage find little to do."""
    # What is alive now lives as long as the process, so collections need not look at it again; and requests
    # leave few cycles behind, so that young collections may be rare.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
