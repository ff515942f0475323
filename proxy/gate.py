"""The gate: what all exchanges, connections and probes of one process share, and what follows from a flip.

It knows sockets only through `loop.create_server` and `loop.create_connection`, time only through the loop,
and chance only through the `random.Random` it is given, so that a simulated world can replace all three.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from cellgate.policies import POLICIES
from cellgate.probes.base import Net
from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.settings import TICK_S, Settings
from cellgate.proxy.config.trusted_peers import Peers
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.containment_report import PoisonMetrics
from cellgate.proxy.control.local_dispatcher import LocalDispatcher
from cellgate.proxy.control.prober import Watch
from cellgate.proxy.control.reach import Reach
from cellgate.proxy.control.stall_watch import Vigil
from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.ingress.balancers import Balancers
from cellgate.proxy.ingress.envoy_health import lines, readyz_headers, response_line
from cellgate.proxy.ingress.haproxy_agent import GATE
from cellgate.proxy.ingress.orca import Orca
from cellgate.proxy.ingress.ready import as_json, readiness
from cellgate.proxy.logs.access_log import AccessLog
from cellgate.proxy.logs.events import Action, EventLog
from cellgate.proxy.logs.record import Finished
from cellgate.proxy.metrics.collectors import AccessLogMetrics, NodeAgentMetrics, PoolMetrics
from cellgate.proxy.metrics.continuations import Continuations
from cellgate.proxy.metrics.metrics import Metrics
from cellgate.proxy.metrics.routing import Routing
from cellgate.proxy.process.descriptors import Descriptors, allowed
from cellgate.proxy.process.listeners import Entrance
from cellgate.proxy.request.exchange import Exchange
from cellgate.proxy.request.local_endpoints import OwnAnswers
from cellgate.proxy.request.routing_headers import Wishes
from cellgate.proxy.request.table import TABLE
from cellgate.proxy.wire.body_memory import BodyMemory
from cellgate.proxy.wire.downstream import ClientConnection
from cellgate.proxy.wire.failure import Failure, Kind
from cellgate.proxy.wire.heads import REQUEST_FIELDS, Fields
from cellgate.proxy.wire.idle import least_missed
from cellgate.proxy.wire.pool import MakeTls, Pool
from cellgate.proxy.wire.request import Request
from cellgate.proxy.wire.rota import Rota
from cellgate.router.board import Board, Consequence
from cellgate.router.lease import Lease
from cellgate.router.nouns import Ask, Fleet, Flip, Outcome, Refusal, Verdict
from cellgate.router.queue import Waiting
from cellgate.router.router import Router
from cellgate.router.unit_state import Desk

if TYPE_CHECKING:
    from cellgate.proxy.request.dispatcher import Dispatcher
    from cellgate.proxy.tracing.tracing import Tracing

BACKLOG = 4096
"""Connections that may wait to be accepted; who finds no room tries again after 1 s, then 2 s. Usually the
kernel's own limit is as high (net.core.somaxconn).
"""
FULL_S = 1.0
"""A gate that accepts nobody for so long is not ready."""
LINGER_S = 0.5
"""How long a gate that stops keeps connections without a request: one may be on its way."""
Publish = Callable[[bool, bytes, bytes], None]
ReadLarge = Callable[[bytes], Awaitable[Ask | Failure]]


class Gate:
    """One gate, on one loop.

    `read_large` parses large bodies off the loop; `publish` is told whether the gate is ready, and what
    /readyz is to show, in its body and in header lines; `unit_tls` is for https units.
    """

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        events: EventLog,
        access_log: AccessLog,
        read_large: ReadLarge,
        publish: Publish = lambda _ready, _body, _lines: None,
        unit_tls: MakeTls | None = None,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.memory = BodyMemory(settings.limits.bodies_bytes, settings.limits.body_bytes)
        self.clients: dict[ClientConnection, None] = {}
        self.board = Board(settings.rules)
        self.router = Router(self.board, POLICIES[settings.policy](), rng, Waiting(settings.queue))
        self.events = events
        self.metrics = Metrics(
            self.board,
            loop.time,
            waiting=lambda: len(self.router.waiting),
            connections=self._connections,
            suspended=lambda: self.watch.distrusted,
            own_troubles=lambda: self._vigil.own_troubles,
        )
        self._reach = Reach(
            loop,
            connect_timeout_s=settings.timeouts.connect_s,
            tls=unit_tls,
            on_broken=self._doubt,
            on_own_trouble=lambda reason: self._vigil.own_trouble(reason),
        )
        self.watch = Watch(self.board, self._reach.ways, rng, self._flipped, settings.agent_token or "")
        self._vigil = Vigil(self.board, self.watch, events, loop.time)
        self.on_flip: Callable[[Flip], None] = lambda _flip: None
        self.on_tick: list[Callable[[float], None]] = []
        self.take_over: Callable[[Settings], str] = lambda anew: self.configure(anew.fleet)
        self.remember: Callable[[Fleet], None] = lambda _fleet: None
        """Told of units that were known before this process, until their sources tell of them."""
        self.containment = Containment(
            self.board,
            lambda *ask, **how: self.router.pick(*ask, **how),
            events,
            loop.time,
            loop.call_soon,
            answered=lambda unit: self.metrics.tally(unit).outcomes[Outcome.OK],
            ban_s=settings.poison.ban_s,
        )
        self.stored = StoredResponses(self.board)
        self.own_answers = OwnAnswers(self.board)
        self.wishes = Wishes(settings.headers)
        self.fields_read = REQUEST_FIELDS | self.wishes.names
        self.balancers = Balancers()
        self.peers = Peers(settings.trusted)
        self.continuations = Continuations(self.metrics, events)
        self.tracing: Tracing | None = None
        self.orca = Orca(self.board, self.metrics.responses, lambda: len(self.router.waiting))
        self.now = loop.time
        self.rota = Rota(loop.call_soon, LIMITS.request_bytes_per_turn)
        self._loop = loop
        self._rng = rng
        self._access_log = access_log
        self.metrics.include(NodeAgentMetrics(self.watch.agents))
        self.metrics.include(PoisonMetrics(self.containment))
        self.routing = Routing(self.board, self.router.waiting, lambda: self.wishes.ignored)
        self.metrics.include(self.routing)
        self.dispatcher: Dispatcher = LocalDispatcher(self)
        self.metrics.include(AccessLogMetrics(lambda: access_log.dropped))
        if settings.pool_metrics:
            self.metrics.include(PoolMetrics(self.board, lambda: len(self.router.waiting)))
        self._read_large = read_large
        self._publish = publish
        self._telling = False
        self._entrance = Entrance(loop, lambda: ClientConnection(self))
        self._tick_handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._handed_over = False
        self._empty = asyncio.Event()
        self._room_noted = False

    # -- life ----------------------------------------------------------------------------------------------

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen and begin to watch the units. Raises OSError when the address cannot be had."""
        await self.listen(tls)
        self.begin()

    async def listen(
        self, tls: ssl.SSLContext | None = None, listeners: Sequence[socket.socket] = ()
    ) -> None:
        """Accept clients: on `listeners`, where they are open already. Raises OSError."""
        if listeners:
            descriptors = Descriptors(allowed(), self._vigil.own_trouble, self._make_room)
            self._entrance.has_room = descriptors.has_room
        await self._entrance.open(self.settings.listen, listeners, tls, BACKLOG)

    def begin(self) -> None:
        """Watch the units."""
        self.configure(self.settings.fleet)
        self._schedule_tick()

    @property
    def port(self) -> int:
        """The port listened on; 0: none."""
        return self._entrance.port

    def configure(self, fleet: Fleet) -> str:
        """Take over a fleet, at start or while running; requests in flight go on. Says what changed."""
        old = {desk.unit.name: desk for desk in self.board}
        added, removed, probed_anew = self.board.configure(fleet, self.now())
        for unit in removed:
            self.watch.stop(unit.name)
            self._reach.leave(old[unit.name])
        for unit in (*added, *probed_anew):
            self.watch.start(unit)
        self._tell_soon()
        self.room()
        names = [f"+{u.name}" for u in added] + [f"-{u.name}" for u in removed]
        names += [f"{u.name} is probed otherwise" for u in probed_anew]
        return ", ".join(names) or "no unit added or removed"

    async def stop(self, *, delay_s: float, drain_s: float) -> None:
        """Stop in good order: not ready, accept for `delay_s` more, let answers end for up to `drain_s`."""
        self._stopping = True
        self._tell()
        await asyncio.sleep(delay_s)
        if drain_s > 0.0:
            await self._entrance.close_politely()
        for client in list(self.clients):
            client.leave_if_idle(LINGER_S)
        await self._end(drain_s)

    async def leave_to_successor(self, *, drain_s: float) -> None:
        """Another process accepts from the same queue now: let answers end for up to `drain_s`, then end.

        Connections without a request are left alone: who sends the next one is answered, and told to close.
        """
        self._handed_over = True
        await self._end(drain_s)

    async def _end(self, drain_s: float) -> None:
        self._entrance.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        for client in list(self.clients):
            client.cut()
        await self._close()

    async def _close(self) -> None:
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        await self.watch.close()
        self._reach.close()
        # One turn for the connections that were aborted to say goodbye.
        await asyncio.sleep(0)
        self._access_log.close()

    # -- for connections -----------------------------------------------------------------------------------

    def exchange(self, client: ClientConnection, request: Request) -> Exchange:
        """The exchange that answers `request`."""
        tracing = self.tracing
        observers = tracing.observers(client, request, self.now()) if tracing is not None else ()
        return Exchange(TABLE, self, client, request, observers)

    def refused(self, client: ClientConnection, failure: Failure) -> None:
        """A request did not even parse."""
        row = failure.kind.row
        self.finished(
            Finished(
                request_id="",
                peer=client.peer,
                method="",
                path="",
                route="unread",
                model="",
                status=row.status,
                code=failure.kind.value,
                unit="",
                outcome=row.outcome,
                attempts=0,
                ttft_s=None,
                duration_s=0.0,
                events=0,
                bytes_in=0,
                bytes_out=0,
            )
        )

    def is_stopping(self) -> bool:
        """True once the gate has begun to stop, and says so to whoever asks."""
        return self._stopping

    def is_full(self) -> bool:
        """True while nobody can be accepted, for longer than a moment: descriptors are short."""
        return self.now() - self._entrance.shut_at > FULL_S

    def is_leaving(self) -> bool:
        """True once answers close their connections: it stops, or a successor accepts in its place."""
        return self._stopping or self._handed_over

    # -- for exchanges -------------------------------------------------------------------------------------

    def new_id(self) -> bytes:
        """An id for a request that came without one."""
        return b"%032x" % self._rng.getrandbits(128)

    def report_lines(self, fields: Fields) -> bytes:
        """What the ingress is told of the gate with each response, in header lines."""
        return self.orca.line(fields) + response_line(stopping=self._stopping)

    def pool(self, desk: Desk) -> Pool:
        """The connections to a unit."""
        return self._reach.pool(desk)

    def net(self) -> Net:
        """The way to servers that are no unit's."""
        return self._reach.net()

    def read_large(self, request: Request, tell: Callable[[Ask | Failure], None]) -> Callable[[], None]:
        """Read a large body off the loop, then `tell`, in any case. What is returned stops that: the memory
        the body has reserved is given back once nobody reads it any more.
        """
        held = 0

        async def run() -> None:
            try:
                found = await self._read_large(request.body)
            except asyncio.CancelledError:
                # A task that ends in it keeps the traceback, and that the body, until garbage is collected.
                return
            except Exception as error:
                self.defect(f"a body of {len(request.body)} bytes could not be read", error)
                found = Failure(Kind.INTERNAL, "the gate failed on the request's body")
            tell(found)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if held:
                self.memory.give(held)

        def stop() -> None:
            nonlocal held
            if not task.done():
                held, request.reserved = request.reserved, 0
                task.cancel()

        task = self._loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(over)
        return stop

    def defect(self, what: str, error: Exception) -> None:
        """Make a defect of the gate's own loud, and count it: wherever the loop's exception handler does."""
        self._loop.call_exception_handler({"message": what, "exception": error})

    def asked(self, request: Request, peer: str) -> None:
        """An own path was asked for: it may be a load balancer's health check that says who it is."""
        for name, value in request.fields:
            if name == b"x-haproxy-server-state" and self.peers.trusts(peer):
                about = self.own_answers.about(request.path) or GATE
                self.balancers.told(about, value.decode("latin-1"), self.now())

    def explain(self, refusal: Refusal, ask: Ask) -> Failure:
        """Why no unit could be given to `ask`, for the one who asked."""
        self.metrics.refusal(refusal)
        return self.own_answers.explain(refusal, ask, self.router.drain_s(ask.model))

    def finished(self, record: Finished) -> None:
        """A request is over."""
        self.metrics.finished(record)
        self._access_log.write(record)

    def room(self) -> None:
        """Room may have appeared: serve those who wait, once this turn of the loop is over."""
        if len(self.router.waiting) and not self._room_noted:
            self._room_noted = True
            self._loop.call_soon(self._serve_waiting)

    # -- for the operator ----------------------------------------------------------------------------------

    def set_drain(self, unit: str, drained: bool) -> bool:
        """The operator's will; False when there is no such unit."""
        known = self.board.drain(unit, drained=drained)
        self._tell_soon()
        self.room()
        return known

    def reload(self, settings: Settings) -> None:
        """Take over the units of a configuration that was read anew."""
        changed = self.take_over(settings)
        self.events.add(Action("reload", "SIGHUP", detail=changed))

    # -- inside --------------------------------------------------------------------------------------------

    def _doubt(self, desk: Desk) -> None:
        """A unit that has ended a connection out of turn may have started anew: ask before it gets more."""
        if not desk.retired and self.board.doubt(desk.unit.name, self.now()):
            self.watch.look_now(desk.unit.name, Canary.name, EngineMetrics.name)

    def _flipped(self, consequence: Consequence) -> None:
        flip = consequence.flip
        assert flip is not None
        self.metrics.flip(flip)
        self.events.add(flip, consequence.evicted)
        self.on_flip(flip)
        desk = self.board.desks[flip.unit]
        self.containment.flipped(flip)
        if flip.after in (Verdict.DOWN, Verdict.STARTING):
            self._reach.distrust(desk)
        if consequence.evicted:
            # Not now: this may be called in the middle of one of the exchanges concerned.
            self._loop.call_soon(_evict, consequence.evicted)
        self.room()
        self._tell_soon()

    def _tell_soon(self) -> None:
        """Readiness may have changed: publish it once this turn is over, however many units flipped in it."""
        if not self._telling:
            self._telling = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = False
        ready, detail = readiness(self.board, self._stopping, full=self.is_full())
        self._publish(ready, as_json(detail), lines(readyz_headers(self.board, stopping=self._stopping)))

    def _shed(self) -> None:
        """Close the idle connections that are too many."""
        too_many = len(self.clients) - self.board.in_flight - LIMITS.idle_connections
        if too_many > 0:
            self._make_room(too_many)

    def _make_room(self, most: int) -> int:
        """Close at most so many connections that are least missed; how many it were."""
        going = least_missed(self.clients, most, self.now())
        for client in going:
            client.make_way()
            reached("idle_connections")
        return len(going)

    def _serve_waiting(self) -> None:
        self._room_noted = False
        self.router.serve_waiting(self.now())

    def _schedule_tick(self) -> None:
        self._due = self._loop.time() + TICK_S
        self._tick_handle = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        """The one timer. What fails of one look keeps nothing else from being looked at."""
        now = self.now()
        lag_s = max(0.0, now - self._due)
        for look in self._looks(now, lag_s):
            try:
                look()
            except Exception as error:
                self.defect("the gate's timer", error)
        self._schedule_tick()

    def _looks(self, now: float, lag_s: float) -> Iterable[Callable[[], object]]:
        """At every deadline there is."""
        yield partial(self.metrics.loop_lag, lag_s)
        yield partial(self._vigil.tick, self._seen_until(now), lag_s)
        yield partial(self.watch.sweep, now)
        yield partial(self._tick_clients, now)
        yield self._shed
        yield partial(self._reach.tick, now)
        yield partial(self.containment.tick, now)
        yield partial(self.continuations.tick, now)
        for listener in self.on_tick:
            yield partial(listener, now)
        yield partial(self.orca.refresh, now)
        if len(self.router.waiting):
            yield partial(self.router.tick, now)
        yield self._end_if_empty
        yield self._access_log.flush
        yield self._tell

    def _tick_clients(self, now: float) -> None:
        for client in list(self.clients):
            try:
                client.tick(now)
            except Exception as error:
                client.crashed("a client's clocks", error)

    def _end_if_empty(self) -> None:
        if self.is_leaving() and not self.clients:
            self._empty.set()

    def _seen_until(self, now: float) -> float:
        """Until when it is known what units have shown."""
        return now

    def _connections(self) -> dict[str, int]:
        return {"client": len(self.clients), "unit": len(self._reach)}


def _evict(leases: tuple[Lease, ...]) -> None:
    for lease in leases:
        if lease.on_evict is not None:
            lease.on_evict()
