"""The control plane of one gate: the verdicts of its units, which of them a request gets, and what follows
from a change of verdict. It has no client connections.

Time comes only from the loop, chance only from the given `random.Random`, and the network only from
`Reach`, so that a simulation can replace all three.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Protocol

from cellgate.extras import attending, part_of
from cellgate.policies import POLICIES
from cellgate.probes.base import Fetch
from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.served import ModelList
from cellgate.proxy.admission.usage import Accounting
from cellgate.proxy.config.settings import Peers, Settings, changes_of_unit, secret_of
from cellgate.proxy.config.sources import RedisSource
from cellgate.proxy.control.comparisons import Comparisons
from cellgate.proxy.control.containment import Containment, poison_metrics
from cellgate.proxy.control.engine_control import EngineController
from cellgate.proxy.control.full_engines import FullEngines
from cellgate.proxy.control.hold_watch import HoldWatch
from cellgate.proxy.control.last_requests import LastRequests
from cellgate.proxy.control.link_watch import LinkWatch, split_metrics
from cellgate.proxy.control.model_capacity import Capacity, Starts
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.control.refusals import Refusals
from cellgate.proxy.control.refused_canaries import RefusedCanaries
from cellgate.proxy.control.refused_watch import RefusedWatch
from cellgate.proxy.control.replacement import Replacement
from cellgate.proxy.control.response_search import ResponseSearch
from cellgate.proxy.control.stall_watch import StallWatch
from cellgate.proxy.control.stored_responses import StoredResponses
from cellgate.proxy.handover import InheritedView
from cellgate.proxy.http.errors import Failure
from cellgate.proxy.http.fetch import Reach
from cellgate.proxy.http.unit import MakeTls
from cellgate.proxy.ingress.haproxy import Balancers
from cellgate.proxy.ingress.reports import Orca, UnitRows, as_json, lines, readiness, readyz_headers, unit_row
from cellgate.proxy.observe.counters import Collect, Continuations, Metrics
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.proxy.observe.exposition import (
    Exposition,
    History,
    Traffic,
    build_metrics,
    node_agent_metrics,
    tally_metrics,
)
from cellgate.proxy.observe.gen_ai import GenAiMetrics
from cellgate.proxy.observe.helpers import Helpers, counted_helpers
from cellgate.proxy.observe.rare_events import RareEvents
from cellgate.proxy.observe.routing_metrics import RoutingMetrics
from cellgate.proxy.process.signals import Ticker
from cellgate.router.attention import ROUND_TICKS
from cellgate.router.board import Board, Consequence, Flip
from cellgate.router.nouns import Ask, Fleet, Outcome, Refusal, Verdict
from cellgate.router.pick import Router
from cellgate.router.queue import Queue
from cellgate.router.unit_state import Lease, UnitState

UNCHANGED = "no unit added, removed or changed"
MODELS_AGAIN_S = 2.0
"""Requests for unknown models make units list their models at most this often."""


class Plane:
    """The control plane of one gate. `front` must be set before it begins. `extras` are those that attend,
    and `pages` theirs on the admin port, by path.

    `publish` is called with whether the gate is ready, and with the body and header lines of /readyz;
    `unit_tls` is for https units. `on_flip` are called for each change of verdict, `on_fleet` for each new
    fleet, `on_gone` for each unit that is no more, `on_units` when units have changed (True: replicas must
    have the change before the call returns).
    """

    front: Front

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        ticker: Ticker,
        *,
        events: EventLog,
        publish: Publish = lambda _ready, _body, _lines: None,
        unit_tls: MakeTls | None = None,
    ) -> None:
        self._loop, self.settings = loop, settings
        self.events, self.now = events, loop.time
        self.ticker = ticker
        self.board = board = Board(settings.rules)
        self.router = Router(self.board, POLICIES[settings.policy](), rng, Queue(settings.queue))
        self.metrics, self.generations = Metrics(self.board), GenAiMetrics()
        self.reach, self.helpers = self._make_reach(unit_tls), self._make_helpers()
        self.prober = self._make_prober(rng)
        self.comparisons = Comparisons(self.board, events, self.prober.observe)
        self.stall_watch = StallWatch(self.board, self.prober, events, loop.time)
        self.link_watch = LinkWatch(self.board, events, loop.time)
        self._rare_events = RareEvents(events, loop.time)
        self.hold_watch = self._make_hold_watch()
        self.refused_watch = RefusedWatch(board, events, self.prober.observe, self.fetch_of, self.now)
        self.engine_controller = self._make_engine_controller()
        self.containment = self._make_containment()
        self.stored = StoredResponses(self.board, keyed=settings.keys is not None)
        self.search = ResponseSearch(self.stored, self.board, self.fetch_of)
        self.balancers, self.peers = Balancers(), Peers(settings.trusted)
        self.continuations = Continuations(self.metrics.stream_resume, events)
        self.replacement = self._make_replacement()
        self.routing = RoutingMetrics(self.board, self.router.queue)
        self.last_requests = LastRequests()
        self.capacity, self.starts = Capacity(board, events.add, self.now), Starts(board, events.add)
        self.history = History(self.metrics, self.routing.completion_tokens, self.waiting)
        self.orca = Orca(self.board, self.metrics.responses, self.waiting)
        self.on_flip: list[Callable[[Flip], object]] = []
        self.on_fleet: list[Callable[[Fleet], object]] = []
        self.on_gone, self.on_close = list[Callable[[str], object]](), list[Callable[[], object]]()
        self.on_units: Callable[[bool], None] = lambda _at_once: None
        self.take_over: Callable[[Settings], str] = lambda fresh: self.configure(fresh.fleet)
        self.remember: Callable[[Fleet], None] = lambda _fleet: None
        """Called for units that were known before this process, until their sources report them."""
        self._page = ReadinessPage(self.board, publish, loop.call_soon, lambda: self.front.is_full())
        self._refusals, self._room_noted = Refusals(self.board), False
        self._models_asked_at = -MODELS_AGAIN_S
        self.accounting = self._make_accounting()
        self.pages, self.extras = dict[str, Any](), dict[str, Any]()
        self._connect()

    def _connect(self) -> None:
        self.on_flip += (self.metrics.flip, self.containment.flipped, self.starts.flipped)
        self.ticker.looks += self._looks()
        self._include_metrics()
        for name in attending():
            self.extras[name] = part_of(name, "plane").attend(self)

    def _make_reach(self, tls: MakeTls | None) -> Reach:
        return Reach(
            self._loop,
            connect_timeout_s=self.settings.timeouts.connect_s,
            tls=tls,
            own_keys=self.settings.keys is not None,
            secret=lambda: secret_of(self.settings),
            on_broken=self.suspect_restart,
            on_gate_fault=self.gate_fault,
        )

    def _make_helpers(self) -> Helpers:
        helpers = Helpers(self.events, self.now)
        for helper in counted_helpers(self.settings, self.metrics.workers_tallies):
            helpers.watch(helper.ask)
        return helpers

    def _make_hold_watch(self) -> HoldWatch:
        watch = HoldWatch(
            self.board,
            self.prober,
            self.events,
            self.now,
            evict=self._evict_soon,
            changed=self._units_changed,
        )
        self.prober.on_pause = watch.hear
        return watch

    def _make_engine_controller(self) -> EngineController:
        wait_s = self.settings.timeouts.drain_s
        return EngineController(self.fetch_of, self.set_drain, self.hold_watch, wait_s)

    def fetch_of(self, state: UnitState) -> Fetch:
        """How probes ask a unit."""
        return self.reach.probe_transport(state).fetch

    def _make_replacement(self) -> Replacement:
        drain_s, sources = self.settings.timeouts.drain_s, self.settings.sources
        # With Redis as their source, units change their address with the gate that they are reached through.
        keeps = not any(isinstance(source, RedisSource) for source in sources)
        return Replacement(self.board, self.events, drain_s, self.configure, keeps=keeps)

    def _make_prober(self, rng: random.Random) -> Prober:
        settings = self.settings
        token = settings.agent_token or ""
        prober = Prober(self.board, self.reach.probe_transport, rng, self._flipped, token)
        prober.weigh_canary = RefusedCanaries(
            self.board, self.events, prober.look_now, lambda found, use: self.refused_watch.take(found, use)
        ).weighed
        prober.on_load = FullEngines(self.events.add).look
        self.helpers.watch(prober.troubles)
        return prober

    def _make_containment(self) -> Containment:
        return Containment(
            self.board,
            lambda *ask, **how: self.router.pick(*ask, **how),
            self.events,
            self.now,
            self._loop.call_soon,
            answered=lambda unit: self.metrics.tally(unit).outcomes[Outcome.OK],
            ban_s=self.settings.poison.ban_s,
        )

    def _make_accounting(self) -> Accounting | None:
        settings = self.settings
        if settings.keys is None:
            return None
        accounting = Accounting(settings.keys, settings.usage_log, self.events, self._configured_models)
        self.metrics.include(accounting.counts.collect)
        self.helpers.watch(accounting.troubles)
        self.ticker.looks.append(accounting.tick)
        return accounting

    def _configured_models(self) -> frozenset[str]:
        return frozenset(model for state in self.board for model in state.unit.models)

    def _include_metrics(self) -> None:
        exposition = Exposition(
            self.metrics,
            waiting=self.waiting,
            connections=lambda: self.front.connections(),
            suspended=lambda: self.prober.distrusted,
            gate_faults=lambda: self.stall_watch.gate_faults,
        )
        self.metrics.include(exposition.collect)
        self.metrics.include(Traffic(self.metrics).collect)
        self.metrics.include(partial(node_agent_metrics, self.prober.agents))
        self.metrics.include(partial(tally_metrics, self.metrics.workers_tallies))
        self.metrics.include(partial(poison_metrics, self.containment))
        self.metrics.include(partial(build_metrics, self.board))
        self.metrics.include(self.comparisons.metrics)
        self.metrics.include(self.routing.collect)
        for collector in (self.capacity, self.starts, self.helpers):
            self.metrics.include(collector.collect)
        self.metrics.include(partial(split_metrics, self.board, self.link_watch))

    def _looks(self) -> tuple[Callable[[float], object], ...]:
        """What runs on each tick, in this order."""
        return (
            self.hold_watch.tick,
            self.replacement.look,
            self._look_for_stalls,
            self._look_at_units_out,
            self.prober.sweep,
            self.containment.tick,
            self.refused_watch.tick,
            self.comparisons.tick,
            self.continuations.tick,
            self.orca.refresh,
            self.history.tick,
            self.capacity.tick,
            self.starts.tick,
            self._look_at_queue,
            self.helpers.tick,
            self._page.tick,
        )

    # -- life ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the probes of all units, and read the keys of clients."""
        if self.accounting is not None:
            self.accounting.begin()
        self.configure(self.settings.fleet)

    def announce_stop(self) -> None:
        """The gate stops: it is not ready any more."""
        self._page.stopping = True
        self._page.publish()

    def is_stopping(self) -> bool:
        """True once the gate has begun to stop; health checks report it."""
        return self._page.stopping

    async def close(self) -> None:
        """Stop all probes and close all connections."""
        if self.accounting is not None:
            await self.accounting.close()
        self.search.close()
        self.refused_watch.close()
        for close in self.on_close:
            close()
        self.prober.close()
        self.reach.close()

    # -- for requests --------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """How many requests wait for a unit."""
        return len(self.router.queue)

    def on_lost_response(self, ask: Ask) -> None:
        """A request follows a response of a unit that is not there."""
        if unit := self.stored.newly_lost(ask):
            detail = f"such as {ask.follows}; they are refused, because no other unit knows the conversation"
            self.events.add(Action("responses_lost", "gate", unit, detail))

    def room(self) -> None:
        """Room may have appeared: serve waiting requests at the end of this turn of the loop."""
        if self.router.queue.size and not self._room_noted:
            self._room_noted = True
            self._loop.call_soon(self._serve_waiting)

    def explain(self, refusal: Refusal, ask: Ask) -> Failure:
        """The failure for an ask that got no unit. It is counted."""
        self.metrics.refusal(refusal)
        if refusal is Refusal.UNKNOWN_MODEL:
            self.ask_for_models()
        return self._refusals.explain(refusal, ask, self.router.drain_s(ask.model))

    # -- what is noticed of units --------------------------------------------------------------------------

    def suspect_restart(self, state: UnitState) -> None:
        """A unit closed a connection and may have restarted: probe it before it gets more requests."""
        if not state.retired and self.board.suspect_restart(state.unit.name, self.now()):
            self.prober.look_now(state.unit.name, Canary.name, EngineMetrics.name)

    def ask_for_models(self) -> None:
        """A request was for a model that no unit serves, or a unit did not: ask units for their models now,
        because a LoRA adapter may just have been loaded.
        """
        now = self.now()
        if now - self._models_asked_at >= MODELS_AGAIN_S:
            self._models_asked_at = now
            for state in self.board:
                self.prober.look_now(state.unit.name, ModelList.name)

    def gate_fault(self, reason: str) -> None:
        """A connection could not be opened, or accepted, through no fault of a unit."""
        self.stall_watch.gate_fault(reason)

    def impossible_usage(self, unit: str, listener: str) -> None:
        """A unit has told more tokens for an answer than it can have."""
        more = "check its engine; limits, bills and costs do not go by what is above"
        self._rare_events.add(Action("impossible_usage", "gate", unit, f"{listener}; {more}"))

    # -- for operators, and sources of units ---------------------------------------------------------------

    def configure(self, fleet: Fleet) -> str:
        """Apply a fleet while requests in flight continue; returns what changed, as text."""
        old = {state.unit.name: state for state in self.board}
        before = {name: state.unit for name, state in old.items()}
        fleet, (added, removed, probed_again) = self.replacement.configure(fleet, self.now())
        for unit in removed:
            self.prober.stop(unit.name)
            self.reach.leave(old[unit.name])
            for gone in self.on_gone:
                gone(unit.name)
        self.reach.renew()
        for unit in (*added, *probed_again):
            self.prober.start(unit)
        self._publish_soon()
        self.room()
        for listener in self.on_fleet:
            listener(fleet)
        names = [f"+{u.name}" for u in added] + [f"-{u.name}" for u in removed]
        names += [f"{u.name} has other probes now" for u in probed_again]
        if kept := sum(state.kept is not None for state in self.board):
            names.append(f"{kept} no longer configured {'is' if kept == 1 else 'are'} kept")
        same = ((before.get(u.name, u), u) for u in fleet.units if before.get(u.name, u).url == u.url)
        changed = [words for one, other in same if (words := changes_of_unit(one, other))]
        return "; ".join([", ".join(names), *changed] if names else changed) or UNCHANGED

    def set_drain(self, unit: str, drained: bool) -> bool:
        """Drain or undrain a unit for an operator; False when there is no such unit."""
        known = self.board.drain(unit, drained=drained)
        if known:
            self.board.units[unit].drained_at = self.now()
        self._publish_soon()
        self.room()
        self.on_units(True)
        self._loop.call_soon(self._look_at_kept)
        return known

    def inherit(self, view: InheritedView) -> None:
        """Take over what another process knew of the units that have appeared since."""
        if view.apply(self.board):
            self._units_changed()

    def reload(self, settings: Settings, by: str, others: str = "") -> str:
        """Apply the units of a configuration that `by` had read again; returns what changed, as text.
        `others`: what changed beside units.
        """
        changed = self.take_over(settings)
        changed = f"{changed}; {others}" if others else changed
        self.events.add(Action("reload", by, detail=changed))
        return changed

    # -- inside --------------------------------------------------------------------------------------------

    def _flipped(self, consequence: Consequence) -> None:
        flip = consequence.flip
        assert flip is not None
        self.events.add(flip, consequence.evicted, consequence.staying)
        for listener in self.on_flip:
            listener(flip)
        if flip.after in (Verdict.DOWN, Verdict.STARTING):
            self.reach.distrust(self.board.units[flip.unit])
        if consequence.evicted:
            self._evict_soon(consequence.evicted)
        self._units_changed()

    def _evict_soon(self, leases: tuple[Lease, ...]) -> None:
        # Later, because this may be called from within one of these exchanges.
        self._loop.call_soon(_evict, leases)

    def _units_changed(self) -> None:
        self.room()
        self._publish_soon()
        # Later, because this may be called while a fleet is applied.
        self._loop.call_soon(self._look_at_kept)

    def _look_at_kept(self) -> None:
        self.replacement.look(self.now())

    def _publish_soon(self) -> None:
        self._page.changed()
        self.on_units(False)

    def _serve_waiting(self) -> None:
        self._room_noted = False
        self.router.serve_waiting(self.now())

    def _look_for_stalls(self, now: float) -> None:
        lag_s = self.ticker.lag_s
        self.metrics.loop_lag(lag_s)
        self.stall_watch.tick(self.front.seen_until(now), lag_s)

    def _look_at_units_out(self, now: float) -> None:
        if leavers := self.board.leavers(now):
            self._evict_soon(leavers)

    def _look_at_queue(self, now: float) -> None:
        if len(self.router.queue):
            self.router.tick(now)


class Front(Protocol):
    """What serves the clients: the gateway of this process, or the workers."""

    def connections(self) -> Mapping[str, int]:
        """How many connections are open by side (`client`, `unit`), but for those of probes."""

    def is_full(self) -> bool:
        """True while no client can be accepted, because file descriptors are short."""

    def seen_until(self, now: float) -> float:
        """Until when the progress of units is known."""


async def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What stands around a control plane: what it does when the gate ends and starts, and at each tick."""

    close: Callable[[], Awaitable[object]] = _nothing
    start: Callable[[], Awaitable[object]] = _nothing
    tick: Callable[[float], object] | None = None
    metrics: Collect | None = None


def _evict(leases: tuple[Lease, ...]) -> None:
    for lease in leases:
        if lease.on_evict is not None:
            lease.on_evict()


# What /readyz shows, for the health process: made again when units have changed, and once a second.
#
# It is published on every tick all the same, because an old status shows that the loop is blocked.


Publish = Callable[[bool, bytes, bytes], None]

RENDER_S, RENDER_LARGE_S = 1.0, 240.0
"""So old are the remarks about units at most, and those of a large fleet: with a thousand of them they take
milliseconds to write, so that a few are written on each tick. What changes of a unit is published at once."""


class ReadinessPage:
    """The page of one gate. `soon` calls something at the end of this turn of the loop, `is_full` says that
    no client can be accepted.
    """

    def __init__(
        self,
        board: Board,
        publish: Publish,
        soon: Callable[[Callable[[], None]], object],
        is_full: Callable[[], bool],
    ) -> None:
        self._board = board
        self._publish = publish
        self._soon = soon
        self._is_full = is_full
        self._rows = UnitRows()
        self._is_due = self._is_fresh = False
        """Units have changed; and it was published since the last tick."""
        self._render_at = 0.0
        self._made_for: tuple[bool, bool] = (False, False)
        self._made: tuple[bool, bytes, bytes] = (False, b"", b"")
        self.stopping = False
        """True once the gate has begun to stop."""

    def changed(self) -> None:
        """Units have changed: publish it once, at the end of this turn of the loop; in a large fleet, where
        it takes milliseconds, with the next tick if this one has seen it already.
        """
        if not self._is_due:
            self._is_due = True
            if not (self._is_fresh and self._board.attention.is_large):
                self._soon(self.publish)

    def publish(self) -> None:
        self._is_due, self._is_fresh = False, True
        board, stopping = self._board, self.stopping
        self._made_for = full, _ = self._facts()
        row_of = self._rows.of if board.attention.is_large else unit_row
        ready, detail = readiness(board, stopping, full=full, row_of=row_of)
        self._made = ready, as_json(detail), lines(readyz_headers(board, stopping=stopping))
        self._publish(*self._made)

    def tick(self, now: float) -> None:
        if self._board.attention.is_large:
            self._rows.renew(ceil(len(self._board.units) / ROUND_TICKS))
        if self._is_due or now >= self._render_at or self._facts() != self._made_for:
            self._render_at = now + (RENDER_LARGE_S if self._board.attention.is_large else RENDER_S)
            self.publish()
        else:
            self._publish(*self._made)
        self._is_fresh = False

    def _facts(self) -> tuple[bool, bool]:
        """What changes without units: whether the gate is full, and whether it is in panic."""
        return self._is_full(), self._board.panic_at is not None
