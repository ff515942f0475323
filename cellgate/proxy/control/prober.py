"""Runs the probes of every unit, and acts on what they find.

1. All evidence, of probes and of finished requests, goes through `observe`: nothing else changes a verdict.
2. A finding about a unit that has left the Board, or was replaced under its name, is dropped.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from typing import Any, cast

from cellgate.probes import GATE_PROBES, PROBES
from cellgate.probes.agents import AgentLink, AgentReport, is_connected
from cellgate.probes.base import Fetch, Net, Probe
from cellgate.probes.canary import Canary, late_at
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.fault_status import FaultStatus
from cellgate.probes.readiness import VIA_GATE, Readiness
from cellgate.probes.runner import FEW_TOGETHER_S, TOGETHER_S, Runner, Timers
from cellgate.probes.served import EngineVersion, ModelList
from cellgate.proxy.config.limits import LIMITS, reached
from cellgate.proxy.config.sources import SOURCES
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.proxy.observe.helpers import HelperTrouble
from cellgate.router import doubted_agents, health
from cellgate.router.attention import STAYS_S, Attention, rest
from cellgate.router.board import Board, Consequence
from cellgate.router.health import (
    borne_idle_s,
    borne_until,
    hides_work,
    is_late_by_chance,
    is_seen_still,
    record_canary,
    shows_nothing_else,
    stall_limit_s,
)
from cellgate.router.judge import said_again
from cellgate.router.nouns import (
    USABLE,
    Answered,
    Build,
    Built,
    EnginePause,
    Evidence,
    Finding,
    Load,
    Models,
    Node,
    NodeFacts,
    RankFaults,
    Rules,
    Served,
    Sign,
    Strength,
    Unit,
    Urgency,
    Use,
    Verdict,
)
from cellgate.router.unit_state import UnitState
from cellgate.router.uses import Uses

_OTHER_GATE = "gate "
"""How the sources of what other gates say begin."""
_LOOK_AT: dict[Verdict, tuple[str, ...]] = {
    # Whether its health check is good meanwhile tells a wedge from a crash; and its ranks may say why.
    Verdict.SUSPECT: (Readiness.name, FaultStatus.name),
    # It may have restarted while it was down: that must be known before it gets requests.
    Verdict.PROBATION: (EngineMetrics.name,),
    # Another process may be another build, and only a known one may resume streams; or serve other models,
    # which a canary has to name.
    Verdict.STARTING: (EngineVersion.name, ModelList.name),
}
"""What is looked at as soon as a unit has this verdict."""

_SAID_AGAIN = "again"
"""Note: what a node says again and again, and where that is kept; its time is that of the last time."""
_set = object.__setattr__
SWEEP_S = 1.0
PEERS_ASKED = 2
"""So many idle ones get a canary when a unit stalls, or that of an idle one is late: do they do better?"""
LATE_CANARY_S = 3.0
"""For so long after a late canary they are asked each second, while that may tell something."""
BEHIND_S, BEHIND_LOOKS = 1.0, 10
"""Probes that are so late, in so many seconds one after the other, are too many for the gate."""
READ_AGAIN_S = 0.3
"""The counters of a unit that stands still are read once more within this time."""


class Prober:
    """Probes all units of a board. `on_consequence` is called for each flip, once the board has it."""

    def __init__(
        self,
        board: Board,
        transport_of: Callable[[UnitState], ProbeTransport],
        rng: random.Random,
        on_consequence: Callable[[Consequence], None],
        agent_token: str = "",
    ) -> None:
        self._board = board
        self._agent_token = agent_token
        self._transport_of = transport_of
        self._rng = rng
        self._on_consequence = on_consequence
        self._probes = [kind() for kind in PROBES.values()]
        self.on_answered: Callable[[UnitState, Answered], None] = lambda _state, _answered: None
        """Called with each answer of a unit to the known prompt."""
        self.on_corrupted: Callable[[UnitState, float], None] = lambda _state, _count: None
        self.on_models: Callable[[UnitState, Models], None] = lambda _state, models: board.set_models(models)
        """Called with what a unit lists."""
        self.on_load: Callable[[UnitState, Load], None] = lambda _state, _load: None
        """Called when an engine has counted more corrupted requests: the unit, and how many more."""
        self._gate_probes = [kind() for kind in GATE_PROBES.values()]
        self._all: dict[str, list[Runner]] = {}
        self._running: dict[Runner, None] = {}
        """Those that look just now."""
        self._runners: dict[str, dict[str, Runner]] = {}
        """The probes of the unit as a whole, by name."""
        self._reports: dict[str, list[Runner]] = {}
        """Those that read the reports of agents."""
        self._agents: dict[str, dict[str, Mapping[str, Any]]] = {}
        """The state of the connections to agents, by unit and node."""
        self._trust_from = -math.inf
        self.distrusted = 0
        """How much evidence was not counted because the gate lagged."""
        self.weigh_canary: Callable[[UnitState, Evidence], Evidence] = lambda _state, evidence: evidence
        """Says what a canary means that was refused."""
        self._timers: Timers | None = None
        self._sweep_at = 0.0
        self._behind = deque([0.0], maxlen=BEHIND_LOOKS)
        """How late probes were, each second."""
        self._late: dict[str, float] = {}
        """Units whose canaries are late, and when the last one was."""
        self.on_pause: Callable[[UnitState, EnginePause], None] = lambda _state, _said: None
        """Takes what engines say of standing still on purpose."""

    def add(self, probe: Probe) -> None:
        """One more for each unit that is started from now on."""
        self._probes.append(probe)

    def start(self, unit: Unit) -> None:
        """Start the probes of a unit that is on the Board, or restart them. Needs a running loop."""
        self.stop(unit.name)
        state, attention = self._board.units[unit.name], self._board.attention
        if self._timers is None:
            self._timers = Timers(asyncio.get_running_loop(), TOGETHER_S)
        self._timers.few_early_s = FEW_TOGETHER_S if attention.is_large else 0.0
        runners = self._runners[unit.name] = {}
        everyone = self._all[unit.name] = []
        transport = self._transport_of(state)
        agents = self._agents[unit.name] = {}
        reports = self._reports[unit.name] = []
        take = partial(self._take, state)
        for node, probe in self._looks_at(unit):
            notes: dict[str, Any] = {}
            runner = self._runner(state, node, probe, transport, notes, take)
            if node is not None and isinstance(probe, AgentLink):
                agents[node.name] = notes
            elif isinstance(probe, AgentReport):
                reports.append(runner)
            everyone.append(runner)
            if node is None:
                runners[probe.name] = runner
            runner.start()

    def _looks_at(self, unit: Unit) -> list[tuple[Node | None, Probe]]:
        """Every probe of a unit, with its node, if it is of one."""
        if not unit.url:
            # Its source does not know the address yet.
            return []
        probes = self._gate_probes if unit.engine == VIA_GATE else self._probes
        looks: list[tuple[Node | None, Probe]] = [(None, probe) for probe in probes]
        for node in unit.nodes:
            looks += [(node, cast("Probe", probe)) for probe in node.probes]
            if node.agent:
                looks.append((node, AgentLink(node.agent, self._agent_token)))
                looks.append((node, AgentReport(node.agent, self._agent_token)))
        return looks

    def _runner(
        self,
        state: UnitState,
        node: Node | None,
        probe: Probe,
        transport: ProbeTransport,
        notes: dict[str, Any],
        take: Callable[[Finding], None],
    ) -> Runner:
        loop, rules = asyncio.get_running_loop(), self._board.rules
        assert self._timers is not None
        fetch, net, uses = transport.fetch, transport.net, self._board.uses
        attention = self._board.attention
        context = UnitContext(state, node, rules, fetch, net, loop.time, self._rng, notes, uses, attention)
        return Runner(probe, context, take, self._rng, self._timers, self._running)

    def stop(self, name: str) -> None:
        """Stop the probes of a unit, if it has any."""
        self._runners.pop(name, None)
        self._agents.pop(name, None)
        self._reports.pop(name, None)
        for runner in self._all.pop(name, ()):
            runner.stop()

    def close(self) -> None:
        """Stop all probes."""
        for name in list(self._all):
            self.stop(name)

    def sweep(self, now: float) -> None:
        """End probes that take too long, once a second."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        self._behind.append(self._timers.late_s if self._timers is not None else 0.0)
        for runner in list(self._running):
            runner.sweep(now)
        for name, at in list(self._late.items()):
            if now - at < LATE_CANARY_S and (state := self._board.units.get(name)) is not None:
                self._ask_idle_peers(state, now)
            else:
                del self._late[name]

    def observe(self, evidence: Evidence) -> Consequence:
        """Give evidence to the Board, and act on what follows from it."""
        if evidence.at < self._trust_from and evidence.sign is Sign.BAD:
            evidence = self._distrusted(evidence)
        state = self._board.units.get(evidence.unit)
        if state is not None and state.hold is not None and health.explains(state.hold, evidence):
            reason = f"{evidence.reason}; not counted, because the unit is {state.hold.kind.value}"
            evidence = replace(evidence, sign=Sign.NEUTRAL, reason=reason)
        if state is not None:
            evidence = self.weigh_canary(state, evidence)
        weighed = doubted_agents.weighed(self._board, evidence)
        if weighed is not evidence:
            for word in doubted_agents.taken_back(self._board, evidence.at):
                self.observe(word)
        evidence = weighed
        consequence = self._board.observe(evidence)
        if consequence.wants_canary:
            # An idle unit's numbers are old: they must show whether others keep this canary waiting.
            self.look_now(evidence.unit, Canary.name, EngineMetrics.name)
        if evidence.sign is Sign.BAD and evidence.source != Canary.name:
            self._hasten_canary(evidence)
        elif evidence.is_unseen and state is not None and state.case.verdict in USABLE:
            self._late[evidence.unit] = evidence.at
            self._ask_idle_peers(state, evidence.at)
        if consequence.flip is not None:
            if probes := _LOOK_AT.get(consequence.flip.after):
                self.look_now(evidence.unit, *probes)
            if consequence.flip.after in (Verdict.SUSPECT, Verdict.DOWN):
                self._ask_ranks(evidence.unit)
            self._on_consequence(consequence)
        return consequence

    def look_now(self, unit: str, *probes: str) -> None:
        """Run these probes of a unit now."""
        runners = self._runners.get(unit, {})
        for name in probes:
            if name in runners:
                runners[name].nudge()

    def wake(self, name: str) -> None:
        """A unit does not rest any more: what was put off is looked at."""
        for runner in self._all.get(name, ()):
            runner.hurry()

    def _ask_idle_peers(self, state: UnitState, now: float) -> None:
        """A canary is late: whether that is chance equals show, where only they tell and few are known."""
        if state.overtaken.knows_few(now) and shows_nothing_else(state):
            for other in islice(filter(shows_nothing_else, self._board.peers(state)), PEERS_ASKED):
                self.look_now(other.unit.name, Canary.name)

    def _hasten_canary(self, evidence: Evidence) -> None:
        """A canary on its way to a unit that is now a suspect gets no longer than that of any suspect,
        but for the counters to be read once more.
        """
        runner = self._runners.get(evidence.unit, {}).get(Canary.name)
        state = self._board.units.get(evidence.unit)
        if runner is None or state is None or state.case.verdict is not Verdict.SUSPECT:
            return
        runner.hasten(max(evidence.at + READ_AGAIN_S, late_at(runner.context, state.case.since)))

    def _ask_ranks(self, unit: str) -> None:
        """What they say before the unit is restarted may be the only trace."""
        for runner in self._reports.get(unit, ()):
            runner.nudge()

    def unanswered(self, probe: str, for_s: float, now: float) -> list[str]:
        """The units where a run of this probe has taken so long."""
        began = now - for_s
        late = [runner for runner in self._running if runner.looks_since <= began]
        return [runner.context.unit.name for runner in late if runner.probe_name == probe]

    def unheard(self, for_s: float, now: float) -> list[UnitState]:
        """The units that have not answered a probe for so long."""
        began = now - for_s
        names = dict.fromkeys(r.context.unit.name for r in self._running if r.looks_since <= began)
        return [state for name in names if (state := self._board.units.get(name)) is not None]

    def due_s(self, unit: str, probe: str, now: float) -> float | None:
        """In how many seconds a probe is due; None when there is no such probe."""
        runner = self._runners.get(unit, {}).get(probe)
        return max(0.0, runner.due_at() - now) if runner is not None else None

    def agents(self) -> dict[tuple[str, str], bool]:
        """Whether agents are connected, and their lost connections, by unit and node."""
        return {
            (unit, node): is_connected(notes)
            for unit, nodes in self._agents.items()
            for node, notes in nodes.items()
        }

    def troubles(self) -> Mapping[str, HelperTrouble | None]:
        """Whether the gate has had too little CPU for its probes, for a while."""
        behind_s = min(self._behind)
        if behind_s < BEHIND_S:
            return {"probes": None}
        says = f"{behind_s:.0f} s late, and so is what they find; give the gate more CPU, or fewer units"
        return {"probes": HelperTrouble(says)}

    def trust_from(self, at: float) -> None:
        """Do not count bad evidence from timeouts that began before `at`, because the gate lagged."""
        self._trust_from = at

    def _distrusted(self, evidence: Evidence) -> Evidence:
        # A refused connection or a report of an agent is a fact, however late it is read. What another gate
        # or a source of units says was not timed here, and is said once.
        if evidence.strength is Strength.FATAL or evidence.source.startswith(_OTHER_GATE):
            return evidence
        if evidence.source in SOURCES:
            return evidence
        self.distrusted += 1
        reason = f"{evidence.reason}; not counted, because the gate lagged"
        return replace(evidence, sign=Sign.NEUTRAL, reason=reason)

    def _take(self, state: UnitState, finding: Finding) -> None:
        if self._board.units.get(state.unit.name) is not state:
            return
        match finding:
            case Evidence():
                if not self._is_known(state, finding):
                    self.observe(finding)
            case Load():
                self._take_load(state, finding)
            case Models():
                self.on_models(state, _bounded(finding))
            case Served():
                self._board.set_engine(finding)
            case EnginePause():
                self.on_pause(state, finding)
            case Built():
                state.build = state.build.updated(finding.build)
            case Answered():
                self.on_answered(state, finding)
            case NodeFacts():
                state.facts.take(finding)
            case RankFaults():
                state.facts.faults = finding.faults

    def _is_known(self, state: UnitState, evidence: Evidence) -> bool:
        """Whether a node that is well only says so again, as most do each second: then all that is new is the
        time.
        """
        if evidence.node is None or evidence.sign is not Sign.GOOD or evidence.strength is not Strength.WEAK:
            return False
        if evidence.epoch is not None or not state.is_healthy_unchanged:
            return False
        state.last_evidence[evidence.node, evidence.source] = evidence
        return True

    def _take_load(self, state: UnitState, load: Load) -> None:
        known = dict(state.case.epochs).get(EngineMetrics.name)
        if load.epoch is not None and _is_news(load.epoch, known):
            reason = "its process has started again" if known else "its process has started"
            source = EngineMetrics.name
            self.observe(
                Evidence(load.unit, Sign.NEUTRAL, Strength.WEAK, source, reason, load.at, epoch=load.epoch)
            )
        before = state.load
        self._board.report(load)
        self.on_load(state, load)
        if before is not None and load.corrupted > before.corrupted:
            self.on_corrupted(state, load.corrupted - before.corrupted)


def _bounded(models: Models) -> Models:
    """The limits of a unit's list of models: requests are looked up in it, and clients can list it."""
    if len(models.names) <= LIMITS.unit_models:
        return models
    reached("unit_models")
    names = models.names[: LIMITS.unit_models]
    return replace(models, names=names, bases={n: models.bases[n] for n in names if n in models.bases})


def _is_news(born: str, known: str | None) -> bool:
    """Whether a process that started at `born` means a restart since `known`.

    One that started earlier is another process on the same port: an engine may have several front ends.
    """
    return known is None or float(born) > float(known)


# What a probe sees of its unit: the `ProbeContext` of probes/base.py, from the unit's state on the Board.


@dataclass(frozen=True, slots=True)
class UnitContext:
    """What one probe sees of a unit, or of a node of it."""

    unit_state: UnitState
    node: Node | None
    rules: Rules
    fetch: Fetch
    net: Net
    now: Callable[[], float]
    rng: random.Random
    notes: dict[str, Any]
    known_uses: Uses
    attention: Attention

    @property
    def uses(self) -> Sequence[Use]:
        return list(self.known_uses.of(self.unit_state, self.now()))

    def takes_turn(self) -> Use | None:
        use, self.unit_state.asks_next = self.unit_state.asks_next, None
        return use

    def answers_since(self, since: float) -> bool:
        return self.known_uses.answers_since(self.unit_state, since)

    @property
    def unit(self) -> Unit:
        return self.unit_state.unit

    @property
    def verdict(self) -> Verdict:
        return self.unit_state.case.verdict

    @property
    def in_flight(self) -> int:
        return self.unit_state.in_flight

    @property
    def is_calm(self) -> bool:
        return self.unit_state.calm_since < inf

    @property
    def is_of_many(self) -> bool:
        return self.attention.is_large

    def rest(self, at: float) -> float:
        return rest(self.unit_state, at)

    def asks(self, at: float) -> None:
        if self.unit_state.asked_at == inf:
            self.unit_state.asked_at = at

    def says_again(self, said: Evidence) -> bool:
        state = self.unit_state
        if not state.is_healthy_unchanged:
            return False
        if said.node is None:
            at = self.now()
            word = Evidence(said.unit, said.sign, said.strength, said.source, said.reason, at)
            state.last_evidence[None, said.source] = word
            state.extend(said_again(state.case, word, self.rules))
            self.attention.tell(state)
            return True
        if (again := self.notes.get(_SAID_AGAIN)) is not None:
            key, word = again
            if state.last_evidence.get(key) is word:
                # Nobody else has it: a new one each time would cost as much as the question.
                _set(word, "at", self.now())
                return True
        key, word = (said.node, said.source), replace(said, at=self.now())
        state.last_evidence[key], self.notes[_SAID_AGAIN] = word, (key, word)
        return True

    def wake(self) -> None:
        self.attention.note(self.unit_state, self.now() + STAYS_S)

    @property
    def progress_at(self) -> float:
        return self.unit_state.progress_at

    @property
    def answered_at(self) -> float:
        return self.fetch.answered_at

    @property
    def is_peers_turn(self) -> bool:
        return self.unit_state.peer_canary_at >= self.unit_state.progress_at

    @property
    def load(self) -> Load | None:
        return self.unit_state.load

    @property
    def ranks(self) -> int:
        return self.unit_state.ranks.count

    @property
    def stalled_rank(self) -> int | None:
        found = self.unit_state.ranks.still_rank(self.unit_state.counters_at)
        return found.rank if found is not None and found.still_s >= self.rules.silent_min_s else None

    @property
    def stall_limit_s(self) -> float:
        return stall_limit_s(self.unit_state, self.rules)

    @property
    def held_down(self) -> bool:
        return bool(self.unit_state.case.faults)

    @property
    def is_on_hold(self) -> bool:
        return health.is_on(self.unit_state.hold)

    def hides_work(self, asked_at: float = inf) -> bool:
        return hides_work(self.unit_state, self.now(), self.rules, asked_at)

    @property
    def borne_until(self) -> float:
        return borne_until(self.unit_state, self.now(), self.rules)

    @property
    def borne_s(self) -> float:
        return borne_idle_s(self.unit_state, self.now())

    def answered_beside(self, asked_at: float, late: int, waited_s: float) -> None:
        self.unit_state.record_slots(asked_at)
        record_canary(self.unit_state, late, waited_s, self.now())

    def is_late_by_chance(self, late: int, *, is_young: bool, is_beside: bool) -> bool:
        return is_late_by_chance(
            self.unit_state, late, self.now(), self.rules, is_young=is_young, is_beside=is_beside
        )

    def occupied_until(self, at: float) -> None:
        self.unit_state.occupied_until = at

    @property
    def is_seen_still(self) -> bool:
        return is_seen_still(self.unit_state, self.now())

    @property
    def engine(self) -> str:
        return self.unit_state.engine

    @property
    def restarted(self) -> tuple[str, float] | None:
        return self.unit_state.case.restarted

    @property
    def build(self) -> Build:
        return self.unit_state.build

    @property
    def urgency(self) -> Urgency:
        return self.unit_state.urgency

    @property
    def models(self) -> frozenset[str]:
        return self.unit_state.base_models()

    async def pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)

    def new_id(self) -> str:
        return f"{self.rng.getrandbits(40):010x}"

    def received(self) -> None:
        self.unit_state.answered_at, self.unit_state.asked_at = self.now(), inf
