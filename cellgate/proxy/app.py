"""An app: all the parts of a gate around its control plane, such as admin port, discovery and hand-over.

In this order: `App`, `Gate`, `serve`.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import uvloop

from cellgate.extras import EXTRAS, part_of
from cellgate.proxy.admin.health_process import SharedStatus
from cellgate.proxy.admin.pages import AdminPort, AdminView, PageHandler
from cellgate.proxy.admission.limits import LimitedDispatcher
from cellgate.proxy.admission.usage import make_key_check
from cellgate.proxy.config.load_process import ConfigError
from cellgate.proxy.config.settings import (
    KV_EVENTS_ENGINES,
    KV_EVENTS_PACKAGES,
    Reload,
    Settings,
    after_reload,
    changes_of_reload,
)
from cellgate.proxy.control.dispatcher import LocalDispatcher, LocalReports
from cellgate.proxy.control.explain import RoutingExplain
from cellgate.proxy.control.plane import Part, Plane, Publish
from cellgate.proxy.control.stored_responses import StoredResponse
from cellgate.proxy.discovery.base import Feed
from cellgate.proxy.discovery.follow import discover, preload
from cellgate.proxy.gateway import Gateway
from cellgate.proxy.handover import (
    ADMIN,
    AGENT_CHECK,
    LISTEN,
    HandoverError,
    Inheritance,
    InheritedView,
    Listeners,
    drained,
    hand_over,
    inherit,
    listeners_of,
    listening_for,
    view_of,
)
from cellgate.proxy.http.unit import MakeTls
from cellgate.proxy.ingress.haproxy import HaproxyAgent
from cellgate.proxy.observe.access_log import AccessLog, stdout_sink
from cellgate.proxy.observe.defects import DEFECTS, report_defect
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.exposition import access_log_metrics, agent_check_metrics
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.proxy.observe.log import configure, log_line
from cellgate.proxy.observe.text import unsaid_ports
from cellgate.proxy.process import listeners as descriptors
from cellgate.proxy.process import signals
from cellgate.proxy.process.certificates import Expiry, certificate_metrics, shown_by_helpers, trouble_of
from cellgate.proxy.process.listeners import gate_name
from cellgate.proxy.process.memory import (
    CLIENT_BLOCKS,
    Garbage,
    calm_the_collector,
    keep_from_others,
    return_large_blocks,
    slow_build,
)
from cellgate.proxy.process.signals import OnSignal, Signals, Ticker, WatchedFiles, notify
from cellgate.proxy.process.tls import LiveTls
from cellgate.proxy.process.warnings import cannot_be_meant
from cellgate.proxy.request.large_bodies import LargeBodies, ReadBody
from cellgate.proxy.request.models import choice_of
from cellgate.proxy.request.ports import Dispatcher
from cellgate.proxy.request.services import Services
from cellgate.proxy.telemetry import send_metrics, trace, watch_generations
from cellgate.router.shares import ADDRESS
from cellgate.router.unit_state import UnitState

HANDOVER_S = 30.0
"""How long a successor may take until it accepts clients."""
WARM_LOOK_S = 0.05


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
        self._parts: list[Part] = []
        self._operator = self._make_operator() if settings.has_operator else None
        self._refused: tuple[str, ...] = ()
        plane.helpers.watch(self._tls_and_configuration)
        plane.metrics.include(partial(certificate_metrics, self._expiries))
        self._admin = AdminPort(self._view(), shared_status, tls.admin)
        self._agent = HaproxyAgent(
            plane.board, plane.now, plane.is_stopping, plane.peers.trusts, plane.balancers
        )
        garbage = Garbage(plane.now(), lambda: not plane.board.in_flight, self._held_memory)
        plane.ticker.looks += [tls.tick, self._look_at_secrets, garbage.tick]
        self._kv_events_begin: asyncio.Task[None] | None = None
        if "kv_events" in EXTRAS and all(map(find_spec, KV_EVENTS_PACKAGES)):
            plane.ticker.looks.append(self._look_for_kv_events)
        # Now, because an early SIGUSR2 would end a process without a handler.
        self._signals = Signals(
            core,
            settings.timeouts,
            partial(self._reload_soon, "SIGHUP"),
            self._hand_over,
            on_signal=starter.on_signal,
            pid=starter.pid,
        )

    def _held_memory(self) -> int:
        clients = self._plane.front.connections().get("client", 0)
        return CLIENT_BLOCKS * clients + self._plane.board.known_objects()

    # The life of all parts.

    async def open(self, heritage: Inheritance | None) -> None:
        """Start the probes, and accept clients: at once, or after taking over from the previous gate."""
        plane, settings, feed = self._plane, self._settings, Feed()
        self._core.begin()
        await self._add(discover(plane, feed))
        if (end := send_metrics(settings.otlp_metrics, plane.metrics, plane.generations)) is not None:
            await self._add(Part(end))
        if settings.redis is not None:
            # Imported late: the client takes a quarter of a second and ten megabytes.
            share = part_of("redis", "link").share
            await self._add(share(plane, lambda: self._core.port, settings.redis, feed, self._gate))
        if self._operator is not None:
            self._operator.start(heritage.courses if heritage is not None else None)
        if heritage is not None:
            plane.stored.inherit(heritage.stored)
            await self._get_warm(heritage.view)
        listeners = partial(listening_for, self._listeners)
        await self._add(Part(self._admin.close, lambda: self._admin.open(listeners(ADMIN)), self._admin.tick))
        if settings.agent_check is not None:
            agent, counts = self._agent, partial(agent_check_metrics, self._agent)
            await self._add(Part(agent.close, lambda: agent.start(listeners(AGENT_CHECK)), metrics=counts))
        # Last, because the previous gate may kill this one until it knows that clients are accepted.
        if await self._let_clients_in(self._signals):
            self._announce()
            self._starter.ready()
        if heritage is None:
            self._starter.notify("READY=1")
        elif (last := await heritage.accept()) is not None:
            plane.stored.inherit(last["stored"])
            for unit in list(plane.board.units):
                plane.set_drain(unit, unit in last["drained"])

    async def run(self) -> None:
        """Returns when the gate has stopped."""
        await self._signals.run()

    async def close(self) -> None:
        for reload in self._reloads:
            reload.cancel()
        if self._kv_events_begin is not None:
            self._kv_events_begin.cancel()
        for part in self._parts:
            await part.close()
        self._plane.events.close()

    async def _add(self, part: Part) -> None:
        self._parts.append(part)
        if part.tick is not None:
            self._plane.ticker.looks.append(part.tick)
        if part.metrics is not None:
            self._plane.metrics.include(part.metrics)
        await part.start()

    def _make_operator(self) -> OperatorPart:
        operator: OperatorPart = part_of("operator", "start").operate(
            self._plane, self._gate, self._tls.webhooks
        )
        self._parts.append(Part(operator.close))
        return operator

    async def _get_warm(self, view: InheritedView) -> None:
        """Wait until the inherited state is applied and there is evidence of each unit in use."""
        may_come = bool(self._settings.sources)
        self._plane.inherit(view)
        # By then the previous gate has given up, unless it has ended and this is the only one.
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDOVER_S):
                while not view.is_warm(self._plane.board, may_come=may_come):
                    await asyncio.sleep(WARM_LOOK_S)
                    self._plane.inherit(view)

    async def _hand_over(self) -> bool:
        """Whether there is a successor now."""
        board, stored, since = self._plane.board, self._plane.stored, list[StoredResponse]()

        def known() -> dict[str, Any]:
            courses = self._operator.hand_over() if self._operator is not None else {}
            stored.on_made.append(since.append)
            return {"view": view_of(board), "courses": courses, "stored": list(stored)}

        def known_last() -> dict[str, Any]:
            return {"drained": drained(board), "stored": since}

        log_line("info", "handing over: a successor is started")
        try:
            pid = await hand_over(self._listeners, known, known_last, HANDOVER_S)
        except HandoverError as error:
            stored.on_made[:] = [reported for reported in stored.on_made if reported != since.append]
            if self._operator is not None:
                self._operator.carry_on()
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
                self._refused = tuple(error.problems)
                # The event is the line of the first.
                self._plane.events.add(Action("reload_refused", by, detail=_first_of(self._refused)))
                signals.refused("configuration", *self._refused[1:])
                raise
            self._refused = ()
            others = changes_of_reload(self._settings, settings)
            self._settings = after_reload(self._settings, settings)
            self._secrets = WatchedFiles(settings.secret_files)
            self._tls.take(settings.tls)
            self._core.take_settings(self._settings)
            changed = self._plane.reload(settings, by, others)
            self._take_remedies(settings)
            self._starter.reloaded()
            signals.taken("configuration")
            return changed

    def _expiries(self) -> list[Expiry]:
        ends = self._plane.reach.certificate_ends()
        units = [Expiry(f"unit {unit}", "", end) for unit, end in ends.items()]
        return [*self._tls.expiries, *units, *shown_by_helpers()]

    def _tls_and_configuration(self) -> dict[str, HelperTrouble | None]:
        """What is wrong with certificates, those of units as well, and with the file as it is now."""
        wall, refused = time.time(), None
        if self._refused:
            said = f"the file was refused, and what was in use stays: {_first_of(self._refused)}"
            refused = HelperTrouble(said, has_event=True)
        found = {**self._tls.troubles(), "configuration": refused}
        ends = self._plane.reach.certificate_ends()
        for unit, end in ends.items():
            found[f"unit {unit}"] = trouble_of(Expiry(f"unit {unit}", "", end), wall)
        return found | {f"certificate of {one.of}": trouble_of(one, wall) for one in shown_by_helpers()}

    def _take_remedies(self, settings: Settings) -> None:
        if self._operator is None and settings.remedies:
            self._operator = self._make_operator()
            self._operator.start(None)
        if self._operator is not None:
            self._operator.configure(settings.remedies)

    def _look_for_kv_events(self, _now: float) -> None:
        """Follow KV events, from the first unit on that may publish some."""
        if self._kv_events_begin is None and any(map(_may_have_kv_events, self._plane.board)):
            self._kv_events_begin = asyncio.get_running_loop().create_task(self._follow_kv_events())

    async def _follow_kv_events(self) -> None:
        # In a thread, because streams would wait for this import.
        start = await asyncio.to_thread(part_of, "kv_events", "start")
        await self._add(start.follow_kv_events(self._plane))

    def _announce(self) -> None:
        host, port = self._admin.address
        names = ", ".join(f"{state.unit.name} ({state.unit.url})" for state in self._plane.board)
        listening = f"{self._settings.listen.host}:{self._core.port}"
        log_line("info", f"listening on {listening}, admin on {host}:{port}, units: {names}")
        if line := descriptors.shortage(self._settings):
            log_line("warning", line)
        for line in cannot_be_meant(self._settings):
            log_line("warning", line)
        for line in unsaid_ports(self._settings.fleet):
            log_line("info", line)
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
            "" if settings.keys is not None else ADDRESS,
        )
        return AdminView(
            board=plane.board,
            events=plane.events,
            troubles=plane.helpers.shown,
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
            act_on_engine=plane.engine_controller.act_on_engine,
            history=plane.history.shown,
            roll=self._operator.roll if self._operator is not None else lambda: None,
            pages=plane.pages | (dict(self._operator.pages) if self._operator is not None else {}),
            capacity=plane.capacity.view,
            reload=self._reload_settings,
            needs_tls=lambda: self._tls.admin() is not None,
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPart:
    """What acts on units by itself, as an app knows it: an extra makes it.

    `start` needs a running loop, and takes the recoveries that were under way at the previous gate, if there
    was one; `hand_over` has those under way, for a successor, and none begins any more; `carry_on`: there is
    no successor. `roll` is the roll under way, or the last one; `pages` answer on the admin port, by path.
    """

    start: Callable[[Mapping[str, Any] | None], None]
    configure: Callable[[Mapping[str, Any]], None]
    hand_over: Callable[[], Any]
    carry_on: Callable[[], None]
    close: Callable[[], Awaitable[None]]
    roll: Callable[[], dict[str, Any] | None]
    pages: Mapping[str, PageHandler]


def _first_of(problems: Sequence[str]) -> str:
    """The first problem, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


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


def _may_have_kv_events(state: UnitState) -> bool:
    return state.unit.kv_events is not None or state.engine in KV_EVENTS_ENGINES


class Gate:
    """A gate of one process: a plane that has not begun and a gateway that uses it, on one loop and timer."""

    def __init__(self, plane: Plane, gateway: Gateway) -> None:
        self.plane = plane
        self.gateway = plane.front = gateway
        plane.metrics.include(partial(access_log_metrics, gateway.log_dropped))

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
    plane: Plane, loop: asyncio.AbstractEventLoop, rng: random.Random, access_log: AccessLog, read: ReadBody
) -> Gateway:
    """A gateway with a control plane in the same process."""
    dispatcher: Dispatcher = LocalDispatcher(plane)
    if plane.accounting is not None:
        dispatcher = LimitedDispatcher(dispatcher, plane.accounting.ledger)
    services = Services(
        plane.settings,
        loop,
        rng,
        board=plane.board,
        dispatcher=dispatcher,
        reports=LocalReports(plane),
        pool=plane.reach.pool,
        load_lines=plane.orca.lines,
        access_log=access_log,
        read=read,
    )
    gateway = Gateway(services, loop, plane.ticker, plane.reach)
    if plane.accounting is not None:
        plane.accounting.key_check = make_key_check(plane.settings, plane.accounting.ledger)
        gateway.ask_for_keys(plane.accounting.key_check)
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
    """A gate with these settings; the arguments are described at Plane and Services."""
    ticker = Ticker(loop)
    plane = Plane(settings, loop, rng, ticker, events=events, publish=publish, unit_tls=unit_tls)
    return Gate(plane, local_gateway(plane, loop, rng, access_log, read))


# The entry: starts the processes of a gate from its settings, and creates the parts of each.


def serve(settings: Settings, reload: Reload) -> int:
    """Run a gate until it is told to stop; returns the exit code. What signals mean: process/signals.py.

    Raises ConfigError when there are too few file descriptors, OSError when it cannot listen,
    NoInheritanceError when the inheritance from the previous gate did not arrive.
    """
    descriptors.check(settings.workers)
    configure("json" if settings.access_log == "json" else "console")
    return_large_blocks()
    preload(settings)
    secrets = settings.admin_token, settings.agent_token, settings.fleet_secret
    if any(secrets) or any(unit.api_key for unit in settings.fleet.units):
        keep_from_others()
    if settings.workers > 1:
        code: int = part_of("workers", "supervisor").supervise(settings, reload, inherit())
        return code
    return uvloop.run(_serve(settings, reload, inherit()))


async def _serve(settings: Settings, reload: Reload, heritage: Inheritance | None) -> int:
    """Run a gate of one process until it is told to end."""
    listeners = await listeners_of(settings, heritage)
    large, shared_status = LargeBodies(), SharedStatus()
    tls = LiveTls(settings.tls)
    gate = make_gate(
        settings,
        asyncio.get_running_loop(),
        random.Random(),
        events=EventLog(time.time, settings.rules.passes),
        access_log=AccessLog(settings.access_log, stdout_sink(), time.time),
        read=large.read,
        publish=shared_status.publish,
        unit_tls=tls.units,
    )
    end_tracing = trace(settings.tracing, gate.gateway)
    watch_generations(settings.otlp_metrics, gate.gateway)

    async def let_clients_in(_: Signals) -> bool:
        await gate.gateway.listen(tls.clients(), listening_for(listeners, LISTEN))
        return True

    app = App(settings, reload, tls, listeners, gate, shared_status, let_clients_in)
    try:
        return await live(app, heritage)
    finally:
        await large.close()
        end_tracing()
