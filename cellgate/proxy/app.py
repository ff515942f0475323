"""All the parts of a gate around its control plane: admin port, discovery, sharing, recovery, hand-over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cellgate.proxy.admin.admin_view import AdminView
from cellgate.proxy.admin.port import AdminPort
from cellgate.proxy.admin.shared_status import SharedStatus
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import RedisAccess, Reload, Settings, after_reload
from cellgate.proxy.control.plane import Plane
from cellgate.proxy.control.routing_explain import RoutingExplain
from cellgate.proxy.discovery.follow import Discovery
from cellgate.proxy.discovery.redis import Feed
from cellgate.proxy.discovery.start import discover
from cellgate.proxy.handover.inheritance import Inheritance
from cellgate.proxy.handover.open_listeners import ADMIN, AGENT_CHECK, Listeners, listening_for
from cellgate.proxy.handover.successor import HandoverError, hand_over
from cellgate.proxy.handover.view import InheritedView, drained, view_of
from cellgate.proxy.ingress.alb_weight import AlbWeight
from cellgate.proxy.ingress.haproxy_agent import HaproxyAgent
from cellgate.proxy.kv_events.start import follow_kv_events
from cellgate.proxy.logs.defects import DEFECTS, report_defect
from cellgate.proxy.logs.events import Action
from cellgate.proxy.logs.log import log_line
from cellgate.proxy.metrics.collectors import AgentCheckMetrics, AlbMetrics
from cellgate.proxy.process import descriptors, reloads
from cellgate.proxy.process.garbage import Garbage, calm_the_collector
from cellgate.proxy.process.interpreter import slow_build
from cellgate.proxy.process.signals import OnSignal, Signals
from cellgate.proxy.process.systemd import notify
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.process.watched_files import WatchedFiles
from cellgate.proxy.recovery.acting import Acting, Alone
from cellgate.proxy.recovery.run_action import action_runner
from cellgate.proxy.recovery.start import attend
from cellgate.proxy.request.model_choice import choice_of
from cellgate.proxy.rolling.shared import OwnRoll, RollStore
from cellgate.proxy.rolling.start import roll_units
from cellgate.proxy.sharing.address import gate_name
from cellgate.proxy.tracing.start import send_metrics

if TYPE_CHECKING:
    from cellgate.proxy.kv_events.followers import KvEventFollowers
    from cellgate.proxy.sharing.redis_link import RedisLink
    from cellgate.proxy.tracing.metrics_sender import MetricsSender

WARM_LOOK_S = 0.05


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


class Core(Protocol):
    """The core of the parts: a gate of one process, or the control process of several."""

    plane: Plane

    @property
    def port(self) -> int: ...
    def begin(self) -> None: ...
    def take_settings(self, settings: Settings) -> None: ...
    def announce_stop(self) -> None: ...
    async def stop(self, *, delay_s: float, drain_s: float) -> None: ...
    async def leave_to_successor(self, *, drain_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Starter:
    """The parent that gets status reports: the service manager, or the supervisor.

    `reloaded` is called when the configuration was read again.
    `on_signal` registers for signals that another process receives; `pid` is the process that receives them.
    """

    notify: Callable[..., None] = notify
    ready: Callable[[], None] = lambda: None
    reloaded: Callable[[], None] = lambda: None
    on_signal: OnSignal | None = None
    pid: int | None = None


class App:
    """All the parts of one gate. `listeners` are what it accepts on, by purpose and address.

    What /readyz shows must be published on `shared_status`; `let_clients_in` is set once clients are
    accepted.
    """

    def __init__(
        self,
        settings: Settings,
        reload: Reload,
        tls: LiveTls,
        listeners: Listeners,
        core: Core,
        shared_status: SharedStatus,
        let_clients_in: Callable[[Signals], Awaitable[bool]],
        starter: Starter = Starter(),
    ) -> None:
        self._settings = settings
        self._reload = reload
        self._reload_turn, self._reloads = asyncio.Lock(), set[asyncio.Task[str]]()
        self._secrets = WatchedFiles(settings.secret_files)
        self._tls = tls
        self._listeners = listeners
        self._core = core
        self._plane = plane = core.plane
        self._let_clients_in = let_clients_in
        self._starter = starter
        self._gate = gate_name()
        acting, rolls = _agreement(plane, self._gate)
        run_action = action_runner(tls.webhooks)
        self._roller = None
        if settings.roll is not None:
            self._roller = roll_units(plane, settings.roll, rolls, run_action)
        self._admin = AdminPort(self._view(), shared_status, tls.admin)
        self._agent = HaproxyAgent(
            plane.board, plane.now, plane.is_stopping, plane.peers.trusts, plane.balancers
        )
        self._alb: AlbWeight | None = None
        self._link: RedisLink | None = None
        self._discovery: Discovery | None = None
        garbage = Garbage(plane.now(), lambda: not plane.board.in_flight)
        plane.ticker.looks += [self._admin.tick, tls.tick, self._look_at_secrets, garbage.tick]
        self._kv_events: KvEventFollowers | None = None
        self._metrics_sender: MetricsSender | None = None
        self._recovery = attend(plane, run_action, acting)
        # Now, because an early SIGUSR2 would end a process without a handler.
        self._signals = Signals(
            core,
            settings.timeouts,
            partial(self._reload_soon, "SIGHUP"),
            self._hand_over,
            on_signal=starter.on_signal,
            pid=starter.pid,
        )

    # The life of all parts.

    async def open(self, heritage: Inheritance | None) -> None:
        """Start the probes, and accept clients: at once, or after taking over from the previous gate."""
        plane, settings, feed = self._plane, self._settings, Feed()
        self._core.begin()
        self._discovery = discover(plane, feed)
        self._kv_events = follow_kv_events(plane)
        self._metrics_sender = send_metrics(settings.otlp_metrics, plane.metrics)
        if settings.redis is not None:
            self._link = _shared(plane, lambda: self._core.port, settings.redis, feed, self._gate)
        if heritage is not None:
            self._recovery.take_over(heritage.courses)
            await self._get_warm(heritage.view)
        await self._admin.open(listening_for(self._listeners, ADMIN))
        if settings.agent_check is not None:
            await self._agent.start(listening_for(self._listeners, AGENT_CHECK))
            plane.metrics.include(AgentCheckMetrics(self._agent))
        if settings.alb is not None:
            self._alb = AlbWeight(settings.alb, plane.board, plane.now, plane.is_stopping, plane.events)
            self._alb.start()
            plane.metrics.include(AlbMetrics(self._alb))
        # Last, because the previous gate may kill this one until it knows that clients are accepted.
        if await self._let_clients_in(self._signals):
            self._announce()
            self._starter.ready()
        if heritage is None:
            self._starter.notify("READY=1")
        elif (out := await heritage.accept()) is not None:
            for unit in list(plane.board.units):
                plane.set_drain(unit, unit in out)

    async def run(self) -> None:
        """Returns when the gate has stopped."""
        await self._signals.run()

    async def close(self) -> None:
        """End every part."""
        for reload in self._reloads:
            reload.cancel()
        if self._discovery is not None:
            await self._discovery.close()
        if self._kv_events is not None:
            await self._kv_events.close()
        if self._roller is not None:
            await self._roller.close()
        if self._metrics_sender is not None:
            await self._metrics_sender.close()
        await self._recovery.close()
        if self._link is not None:
            await self._link.close()
        if self._alb is not None:
            await self._alb.close()
        self._agent.close()
        self._plane.events.close()
        await self._admin.close()

    async def _get_warm(self, view: InheritedView) -> None:
        """Wait until the inherited state is applied and there is evidence of each unit in use."""
        may_come = bool(self._settings.sources)
        view.apply(self._plane.board)
        # By then the previous gate has given up, unless it has ended and this is the only one.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.timeouts.handover_s):
                while not view.is_warm(self._plane.board, may_come=may_come):
                    await asyncio.sleep(WARM_LOOK_S)
                    view.apply(self._plane.board)

    async def _hand_over(self) -> bool:
        """Whether there is a successor now."""
        board = self._plane.board

        def known() -> dict[str, Any]:
            return {"view": view_of(board), "courses": self._recovery.hand_over()}

        log_line("info", "handing over: a successor is started")
        try:
            limit_s = self._settings.timeouts.handover_s
            pid = await hand_over(self._listeners, known, lambda: drained(board), limit_s)
        except HandoverError as error:
            self._recovery.go_on()
            self._plane.events.add(
                Action("handover_failed", "SIGUSR2", detail=f"{error}; this gate continues")
            )
            return False
        self._starter.notify(f"MAINPID={pid}", "READY=1")
        self._admin.retire()
        self._agent.retire()
        self._plane.events.add(Action("handover", "SIGUSR2", detail=f"process {pid} accepts clients"))
        return True

    def _look_at_secrets(self, _now: float) -> None:
        if self._secrets.changed():
            self._reload_soon("a new file")

    def _reload_soon(self, by: str) -> None:
        task = asyncio.get_running_loop().create_task(self._reload_settings(by))
        self._reloads.add(task)
        task.add_done_callback(self._reloaded)

    def _reloaded(self, task: asyncio.Task[str]) -> None:
        self._reloads.discard(task)
        error = None if task.cancelled() else task.exception()
        # What is wrong with the configuration is in the log.
        if isinstance(error, Exception) and not isinstance(error, ConfigError):
            report_defect(task.get_loop(), "the configuration is not read again", error)

    async def _reload_settings(self, by: str) -> str:
        """Read the configuration again, because `by` says so; returns what changed. Raises ConfigError."""
        # Side by side, what was read first might be taken last.
        async with self._reload_turn:
            try:
                settings = await asyncio.to_thread(self._reload)
            except ConfigError as error:
                reloads.refused("configuration", *error.problems)
                raise
            self._settings = after_reload(self._settings, settings)
            self._secrets = WatchedFiles(settings.secret_files)
            self._tls.take(settings.tls)
            self._core.take_settings(self._settings)
            changed = self._plane.reload(settings, by)
            self._recovery.configure(settings.remedies)
            self._starter.reloaded()
            reloads.taken("configuration")
            return changed

    def _announce(self) -> None:
        host, port = self._admin.address
        names = ", ".join(f"{state.unit.name} ({state.unit.url})" for state in self._plane.board)
        listening = f"{self._settings.listen.host}:{self._core.port}"
        log_line("info", f"listening on {listening}, admin on {host}:{port}, units: {names}")
        if line := descriptors.shortage(self._settings):
            log_line("warning", line)
        if line := slow_build():
            log_line("info", line)

    def _view(self) -> AdminView:
        plane, settings = self._plane, self._settings
        # Its own random numbers, so that an explanation changes nothing.
        choice = RoutingExplain(
            plane.router,
            plane.stored,
            settings.headers,
            settings.policy,
            plane.now,
            random.Random(),
            lambda: choice_of(self._settings.models, self._settings.fallback),
        )
        return AdminView(
            board=plane.board,
            events=plane.events,
            metrics=plane.metrics,
            now=plane.now,
            stopping=plane.is_stopping,
            set_drain=plane.set_drain,
            token=lambda: self._settings.admin_token,
            peers=plane.peers,
            due_s=lambda unit, probe: plane.prober.due_s(unit, probe, plane.now()),
            queue_size=plane.waiting,
            poison=plane.containment,
            full=plane.front.is_full,
            explain=choice.explain,
            conduct=plane.conductor.conduct,
            history=plane.history.shown,
            roller=self._roller,
            scaling=plane.scaling,
            reload=self._reload_settings,
            needs_tls=lambda: self._tls.admin() is not None,
        )


def _agreement(plane: Plane, gate: str) -> tuple[Acting, RollStore]:
    # Imported late, as below.
    if plane.settings.redis is not None:
        from cellgate.proxy.sharing.start import agree

        return agree(plane, plane.settings.redis, gate)
    if plane.settings.leases is not None:
        from cellgate.proxy.recovery.lease_start import agree_by_leases

        return agree_by_leases(plane, plane.settings.leases, gate), OwnRoll()
    return Alone(), OwnRoll()


def _shared(
    plane: Plane, port: Callable[[], int], access: RedisAccess, feed: Feed, gate: str
) -> RedisLink | None:
    # Imported late: the client takes a quarter of a second and ten megabytes, which most gates do not need.
    from cellgate.proxy.sharing.start import share

    return share(plane, port, access, feed, gate)
