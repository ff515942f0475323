"""From what units answer to verdicts, what follows when nothing happens, what is kept and compared."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cellgate.probes.base import FetchError, Net, Reply, Trouble
from cellgate.probes.canary import Canary
from cellgate.probes.engine_metrics import EngineMetrics
from cellgate.probes.fault_status import FaultStatus
from cellgate.probes.readiness import Readiness
from cellgate.probes.runner import GAP_S, Timers
from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.control.comparisons import STACK_PERIOD_S, STEPS_A_TURN, CommonCauseWatch, StackWatch
from cellgate.proxy.control.containment import Containment
from cellgate.proxy.control.link_watch import LinkWatch
from cellgate.proxy.control.prober import BEHIND_LOOKS, BEHIND_S, Prober
from cellgate.proxy.control.stall_watch import DISTRUST_S, LAG_S, StallWatch
from cellgate.proxy.http.errors import FailureKind
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.proxy.observe.events import Action, EventLog
from cellgate.router import comparisons
from cellgate.router.board import Board, Consequence, Flip
from cellgate.router.nouns import (
    ORPHANED,
    TRANSFERRED,
    UNCLAIMED_S,
    Ask,
    Cell,
    Evidence,
    Fleet,
    Load,
    Models,
    Node,
    NodeFacts,
    Refusal,
    Role,
    Rules,
    Sign,
    SplitStep,
    Strength,
    Unit,
    Verdict,
)
from cellgate.router.outliers import COMPARE_S
from cellgate.router.unit_state import UnitState
from tests.scenarios.day_sizes import sizes
from tests.sim.world import World, played, run
from tests.unit.router.test_shared_fate import board, fall, rise

STARTING, UP, SUSPECT, DOWN, PROBATION = Verdict
RULES = Rules()
LATENCY_S = 0.01
METRICS = "vllm:num_requests_running %d\nvllm:generation_tokens_total %d\nprocess_start_time_seconds %d\n"


class Engine:
    """What a unit does: refuse, hang behind a lying `/health` (frozen), or answer.

    `tokens_per_s` is other people's work there.
    """

    def __init__(self) -> None:
        self.refuses = self.frozen = False
        self.epoch, self.tokens_per_s, self.running = 1, 0.0, 3
        self.asked: list[tuple[float, str]] = []
        self.thawed = asyncio.Event()

    def thaw(self) -> None:
        """What hung is answered now."""
        self.frozen = False
        self.thawed.set()

    async def __call__(self, _method: str, target: str, *, timeout_s: float, **_: Any) -> Reply:
        now = asyncio.get_running_loop().time()
        self.asked.append((now, target))
        await asyncio.sleep(LATENCY_S)
        if self.refuses:
            raise FetchError(Trouble.REFUSED, "connection refused")
        pages = {
            "/metrics": METRICS % (self.running, int(now * self.tokens_per_s), self.epoch),
            "/version": '{"version": "0.32.0"}',
            "/v1/models": '{"data": [{"id": "m"}]}',
        }
        if self.frozen and target.startswith("/v1/") and target not in pages:
            try:
                await asyncio.wait_for(self.thawed.wait(), timeout_s)
            except TimeoutError:
                raise FetchError(Trouble.TIMEOUT, "no answer in time") from None
        return Reply(200, {}, pages.get(target, '{"choices": [{}]}').encode())

    def get(self, target: str, done: Callable[[Reply | FetchError], None], **bounds: Any) -> Any:
        async def ask() -> None:
            try:
                answer: Reply | FetchError = await self("GET", target, **bounds)
            except FetchError as error:
                answer = error
            done(answer)

        return SimpleNamespace(abandon=asyncio.create_task(ask()).cancel)

    @property
    def canaries(self) -> list[float]:
        """When each canary came."""
        return [at for at, target in self.asked if target == "/v1/chat/completions"]


class Scene:
    """A board with the units `a` and `b`, watched; `flips` in order."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.board = Board(RULES)
        self.engines = {"a": Engine(), "b": Engine()}
        self.consequences: list[Consequence] = []
        self.watch = Prober(self.board, self._ways_to, random.Random(seed), self.consequences.append)

    def _ways_to(self, state: UnitState) -> ProbeTransport:
        return ProbeTransport(
            cast("Any", self.engines[state.unit.url.removeprefix("http://")]), cast("Net", None)
        )

    def play(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run a scenario with both units started; nothing may be left of it."""

        async def main() -> None:
            self.configure(unit("a"), unit("b"))
            await scenario
            self.watch.close()

        run(self.world, main())

    def configure(self, *units: Unit) -> None:
        """As the composition root does: stop the units removed, start those added."""
        added, removed, _ = self.board.configure(Fleet((Cell("c"),), units), self.now)
        for gone in removed:
            self.watch.stop(gone.name)
        for new in added:
            self.watch.start(new)

    @property
    def now(self) -> float:
        return self.world.loop.time()

    def verdict(self, name: str) -> Verdict:
        return self.board.units[name].case.verdict

    def flips(self, name: str) -> list[Verdict]:
        """The verdicts that a unit has come to."""
        flips = [consequence.flip for consequence in self.consequences]
        return [flip.after for flip in flips if flip is not None and flip.unit == name]

    async def until(self, name: str, verdict: Verdict, within_s: float) -> float:
        """Wait for a verdict; how long it took."""
        began = self.now
        while self.verdict(name) is not verdict:
            assert self.now - began <= within_s, f"still {self.verdict(name)} after {within_s} s"
            await asyncio.sleep(0.01)
        return self.now - began

    def strike(self, name: str, strength: Strength) -> Consequence:
        """Bad evidence from a finished request."""
        return self.watch.observe(Evidence(name, Sign.BAD, strength, "request", "seen", self.now))


def unit(name: str, engine: str = "") -> Unit:
    """A unit that tells its own models."""
    return Unit(name, "c", f"http://{engine or name}")


@played(Scene)
async def test_a_suspicion_asks_for_a_canary_now(scene: Scene) -> None:
    """It clears the unit before the period is over. A busy unit that leaves it waiting goes neither down nor,
    without an answer, up; and it is asked again.
    """
    await asyncio.sleep(10.3)
    assert scene.strike("a", Strength.STRONG).wants_canary
    assert scene.verdict("a") is SUSPECT
    assert await scene.until("a", UP, within_s=1.0) <= GAP_S + 3 * LATENCY_S
    await asyncio.sleep(10.3)
    engine = scene.engines["a"]
    engine.tokens_per_s, engine.frozen = 50.0, True
    scene.strike("a", Strength.STRONG)
    await asyncio.sleep(30.0)
    assert scene.verdict("a") is SUSPECT
    engine.thaw()
    await scene.until("a", UP, within_s=2.5)
    assert scene.flips("a") == [UP, SUSPECT, UP, SUSPECT, UP]


@pytest.mark.parametrize("eighths", range(0, 24, 2))
@played(Scene)
async def test_a_crowd_of_others_at_an_idle_unit_does_not_take_it_down(scene: Scene, eighths: int) -> None:
    """Whenever it comes between two readings of the engine's numbers, which are rare while it is idle."""
    for engine in scene.engines.values():
        engine.running = 0
    await asyncio.sleep(10.0 + eighths / 8)
    engine = scene.engines["a"]
    engine.running, engine.tokens_per_s, engine.frozen = 3, 50.0, True
    await asyncio.sleep(30.0)
    engine.thaw()
    await scene.until("a", UP, within_s=9.0)
    assert DOWN not in scene.flips("a")


@pytest.mark.parametrize("eighths", range(1, 24, 2))
@played(Scene)
async def test_a_unit_that_freezes_with_a_crowd_of_others_is_soon_found_out(
    scene: Scene, eighths: int
) -> None:
    """One without such a crowd takes as long."""
    engine = scene.engines["a"]
    engine.tokens_per_s = 50.0
    await asyncio.sleep(10.0 + eighths / 8)
    engine.tokens_per_s, engine.frozen = 0.0, True
    await scene.until("a", DOWN, within_s=5.0)


@played(Scene)
async def test_a_new_incarnation_starts_again(scene: Scene) -> None:
    """Seen by the start time of its process: leases are evicted, and one canary brings it up. Its version is
    asked for soon, usually once a minute: only a unit whose build is known may resume streams.
    """
    state = scene.board.units["a"]
    versions = [state.build.version]
    state.engine = "vllm"
    await asyncio.sleep(5.0)
    versions.append(state.build.version)
    lease = scene.board.open("a", Ask(), scene.now, retry=False)
    scene.engines["a"].epoch = 2
    await scene.until("a", STARTING, within_s=1.5)
    versions.append(state.build.version)
    assert scene.consequences[-1].evicted == (lease,)
    flip = scene.consequences[-1].flip
    assert flip is not None
    assert flip.evidence.reason == "its process has started again"
    scene.board.close(lease, scene.now)
    await scene.until("a", UP, within_s=1.0)
    assert scene.flips("a") == [UP, STARTING, UP]
    state.engine = "vllm"
    await asyncio.sleep(1.2)
    assert [*versions, state.build.version] == ["", "0.32.0", "", "0.32.0"]


@played(Scene)
async def test_a_canary_meant_for_the_last_incarnation_is_not_held_against_the_next(scene: Scene) -> None:
    """It was given less time than a unit that has to warm up."""
    engine = scene.engines["a"]
    await asyncio.sleep(5.0)
    engine.refuses = True
    await scene.until("a", DOWN, within_s=1.5)
    engine.refuses, engine.frozen = False, True
    await asyncio.sleep(1.5)
    engine.epoch = 2
    await asyncio.sleep(20.0)
    engine.thaw()
    await scene.until("a", UP, within_s=1.0)
    assert scene.flips("a") == [UP, DOWN, STARTING, UP]


@played(Scene)
async def test_a_unit_removed_while_its_probes_are_in_the_air_does_no_harm(scene: Scene) -> None:
    """Nor does evidence from its last requests; nor to stop and close again."""
    await scene.until("a", UP, within_s=1.0)
    scene.engines["a"].frozen = True
    await asyncio.sleep(1.9)
    scene.configure(unit("b"))
    asked = len(scene.engines["a"].asked)
    assert scene.strike("a", Strength.FATAL) == Consequence()
    await asyncio.sleep(60.0)
    assert len(scene.engines["a"].asked) == asked
    assert (list(scene.board.units), scene.flips("b")) == (["b"], [UP])
    for name in ("nobody", "a", "b", "b"):
        scene.watch.stop(name)
    scene.watch.close()


@played(Scene)
async def test_of_a_list_of_more_models_than_are_heeded_the_first_are_known(scene: Scene) -> None:
    before = REACHED["unit_models"]
    await scene.until("a", UP, 5.0)
    state = scene.board.units["a"]
    names = tuple(f"m{n}" for n in range(LIMITS.unit_models + 1))
    scene.watch._take(state, Models("a", names, scene.now))
    assert state.models == frozenset(names[:-1])
    scene.watch._take(state, Models("a", names[:2], scene.now))
    assert state.models == {"m0", "m1"}
    assert REACHED["unit_models"] == before + 1


NOW = 100.0
STREAM = Ask("m", stream=True, prompt_tokens=10)


def test_probes_that_are_late_for_a_while_are_said_to_be_too_many_for_the_gate() -> None:
    bench, loop = Round(), asyncio.new_event_loop()
    bench.watch._timers = timers = Timers(loop)
    loop.close()
    found: list[bool] = []
    for second in range(3 * BEHIND_LOOKS):
        timers.late_s = 3.0 * BEHIND_S if 2 <= second < 2 * BEHIND_LOOKS else 0.0
        bench.watch.sweep(NOW + second)
        found.append(bench.watch.troubles()["probes"] is not None)
    assert found.index(True) == 1 + BEHIND_LOOKS
    assert found.count(True) == BEHIND_LOOKS - 1
    assert not found[-1]


class Round:
    """A stall watch over so many units, all UP; `asked` are the looks that it has asked for."""

    def __init__(self, units: int = 1) -> None:
        self.now = NOW
        self.board = Board(Rules())
        self.board.configure(Fleet(units=tuple(Unit(n, "c", f"http://{n}") for n in "abcde"[:units])), 0.0)
        self.events = EventLog(lambda: 1_700_000_000.0, 2, lambda *_: None)
        self.flips: list[Flip] = []
        self.watch = Prober(self.board, _no_way, random.Random(1), self._take)
        self.asked: list[tuple[str, ...]] = []
        self.watch.look_now = lambda unit, *probes: self.asked.append((unit, *probes))  # type: ignore[method-assign]
        self.stall_watch = StallWatch(self.board, self.watch, self.events, lambda: self.now)
        for name in self.board.units:
            self.observe(name, Sign.GOOD, Strength.STRONG, NOW)
        self.flips.clear()

    def _take(self, consequence: Any) -> None:
        self.flips.append(consequence.flip)

    def observe(
        self, name: str, sign: Sign, strength: Strength, at: float, source: str = Canary.name
    ) -> None:
        self.watch.observe(Evidence(name, sign, strength, source, "seen", at))

    def unit_state(self, name: str = "a") -> UnitState:
        return self.board.units[name]

    def verdict(self) -> Verdict:
        return self.unit_state().case.verdict

    def told(self) -> list[str]:
        # What lasts is counted in one event.
        return [event["kind"] for event in self.events.last() for _ in range(event.get("count", 1))]

    def last_line(self) -> str:
        return str(self.events.last()[-1]["line"])


def _no_way(state: UnitState) -> Any:
    raise AssertionError(f"{state} is not to be probed here")


def test_a_silent_unit_is_suspected_with_a_reason_and_a_canary_is_sent() -> None:
    """Once for each limit; its counters are read before. One without requests is left alone."""
    scene = Round()
    scene.unit_state().answered_at = NOW + 50.0
    scene.stall_watch.tick(NOW + 50.0, 0.0)
    assert (scene.asked, scene.flips) == ([], [])
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.stall_watch.tick(NOW + 0.75, 0.0)
    assert scene.verdict() is Verdict.UP
    scene.stall_watch.tick(NOW + 1.0, 0.0)
    assert scene.verdict() is Verdict.SUSPECT
    (flip,) = scene.flips
    assert flip.evidence.reason == "stalled for 1.0 s with 1 requests in flight; the limit is 1.0 s"
    doubted = "a", Canary.name, EngineMetrics.name
    assert scene.asked == [doubted, ("a", Readiness.name, FaultStatus.name)]
    for quarter in range(5, 13):
        scene.stall_watch.tick(NOW + quarter / 4, 0.0)
    assert scene.asked == [doubted, ("a", Readiness.name, FaultStatus.name), doubted, doubted]
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.board.report(Load("a", NOW, running=1, progress=1.0, sighted=True))
    scene.stall_watch.tick(NOW + 0.2, 0.0)
    assert scene.asked == [], "tokens came a moment ago"
    scene.stall_watch.tick(NOW + 0.25, 0.0)
    assert scene.asked == [("a", EngineMetrics.name)]


def test_a_gate_that_lags_counts_no_bad_news_but_fatal_and_says_so_now_and_then() -> None:
    """Good news counts meanwhile, and no silence that it slept through."""
    scene = Round()
    scene.board.open("a", STREAM, NOW, retry=False).commit(NOW)
    scene.stall_watch.tick(NOW + 10.0, 9.75)
    assert scene.verdict() is Verdict.UP
    scene = Round()
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW)
    scene.stall_watch.tick(NOW, LAG_S + 0.01)
    scene.observe("a", Sign.GOOD, Strength.STRONG, NOW + 0.1)
    assert scene.verdict() is Verdict.UP
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW + DISTRUST_S - 0.01)
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.UP, 1)
    reason = scene.unit_state().last_evidence[None, Canary.name].reason
    assert reason == "seen; not counted, because the gate lagged"
    scene.observe("a", Sign.BAD, Strength.STRONG, NOW + DISTRUST_S)
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.SUSPECT, 1)
    scene.observe("a", Sign.BAD, Strength.FATAL, NOW + DISTRUST_S - 0.01, "request")
    assert (scene.verdict(), scene.watch.distrusted) == (Verdict.DOWN, 1)
    for once in ("gate g2", "lws"):
        scene = Round()
        scene.observe("a", Sign.GOOD, Strength.STRONG, NOW)
        scene.stall_watch.tick(NOW, LAG_S + 0.01)
        scene.observe("a", Sign.BAD, Strength.STRONG, NOW + 0.1, once)
        assert scene.verdict() is Verdict.SUSPECT, "it was not timed here, and is not said again"
    scene = Round()
    for quarter in range(8):
        scene.stall_watch.tick(NOW + quarter / 4, LAG_S + 0.05)
    assert scene.told() == ["lag"]
    assert "a timer fired 0.30 s late; evidence against units is not counted for 1 s" in scene.last_line()
    scene.stall_watch.tick(NOW + 10.1, LAG_S + 0.05)
    assert scene.told() == ["lag", "lag"]
    scene.stall_watch.tick(NOW + 30.0, LAG_S)
    assert scene.told() == ["lag", "lag"]


def test_panic_is_told_when_it_begins_and_when_it_ends_and_troubles_of_the_gates_own_now_and_then() -> None:
    scene = Round(units=3)
    for _ in range(2):
        scene.observe("a", Sign.BAD, Strength.STRONG, NOW + 3.0)
    scene.stall_watch.tick(NOW + 3.0, 0.0)
    assert scene.told() == ["panic"]
    assert "3 units do not answer at all (a, b, c)" in scene.last_line()
    scene.stall_watch.tick(NOW + 4.0, 0.0)
    scene.unit_state("b").answered_at = NOW + 5.0
    scene.stall_watch.tick(NOW + 5.0, 0.0)
    assert scene.told() == ["panic", "panic_over"]
    assert "units were kept in rotation for 2.0 s, until units answered again" in scene.last_line()
    scene = Round()
    for _ in range(3):
        scene.stall_watch.gate_fault("no file descriptor is left")
    assert (scene.stall_watch.gate_faults, scene.told()) == (3, ["gate_fault"])
    scene.now += 10.1
    scene.stall_watch.gate_fault("no file descriptor is left")
    assert scene.told() == ["gate_fault"] * 2
    assert scene.verdict() is Verdict.UP


def test_a_slow_unit_is_told_of_once_when_it_is_degraded_and_once_when_it_has_recovered() -> None:
    """Speeds are not compared on every tick."""
    scene = Round(units=3)
    for name, gap_ms in (("a", 39), ("b", 19), ("c", 19)):
        scene.unit_state(name).gaps_ms[gap_ms] += 200
        scene.unit_state(name).batch = 1000.0
    for quarter in range(int(2 * COMPARE_S * 4)):
        scene.stall_watch.tick(NOW + quarter / 4, 0.0)
    assert scene.unit_state("a").outlier == (0.0, 2)
    scene.stall_watch.tick(NOW + 2 * COMPARE_S, 0.0)
    assert scene.told() == ["degraded"]
    assert "a token takes 2.0 times as long there as on the other units of cell c" in scene.last_line()
    assert "its share of requests falls by 50%" in scene.last_line()
    scene.unit_state("a").gaps_ms[19] += 2000
    for number in range(3, 10):
        scene.stall_watch.tick(NOW + number * COMPARE_S, 0.0)
    assert scene.told() == ["degraded", "recovered"]


# What is kept of split requests: as much as there are units, however long the gate runs.


def test_units_that_are_gone_are_not_counted_for_ever_and_orphans_are_forgotten() -> None:
    """Also where nobody reads the metrics."""
    board, now = Board(Rules()), [0.0]
    watch = LinkWatch(board, SimpleNamespace(add=lambda *_: None), lambda: now[0])  # type: ignore[arg-type]
    for number in range(50):
        units = tuple(Unit(name, "c", f"http://{name}") for name in ("p", f"d{number}"))
        board.configure(Fleet(units=units), now[0])
        watch.apply(SplitStep(TRANSFERRED, "p", f"d{number}", tokens=1, seconds=0.1))
    assert list(watch.pairs) == [("p", "d49")]
    assert watch.steps == {("p", "d49", TRANSFERRED): 1}
    for _ in range(100):
        watch.apply(SplitStep(ORPHANED, "p", "d49"))
        now[0] += UNCLAIMED_S / 2
    assert len(watch._orphaned_at) <= 3


# One event for units that fail together, once it is known which.


def test_a_switch_is_named_once_when_its_last_unit_has_been_down_for_a_while() -> None:
    """And again when it is lost again."""
    found, told = board(a=("z/s1",), b=("z/s1",), c=("z/s1",), d=("z/s2",)), list[Action]()
    watch = CommonCauseWatch(found, SimpleNamespace(add=told.append))  # type: ignore[arg-type]
    fall(found, "a", "b")
    for now in range(5):
        watch.tick(float(now))
    assert told == [], "one unit under it works"
    for begin in (5, 100):
        fall(found, "a", "b", "c")
        for now in range(begin, begin + 25):
            watch.tick(float(now))
        rise(found, "a", "b", "c")
        watch.tick(float(begin + 40))
    assert [action.kind for action in told] == ["shared_fate"] * 2
    assert told[0].detail.startswith("all 3 units with a node under z/s1 are DOWN: a, b, c;")


# How much of the comparison of stacks is done in one turn of the loop.

TURNS = 10
UNITS = STEPS_A_TURN * (TURNS // 2 - 1)
USUAL = {"program": "vllm", "driver nvidia": "570"}


class StackSite:
    """Units of one cell, whose stacks are compared; `reads` counts stacks that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 0.0, 0
        units = tuple(
            Unit(f"u{n}", "c", f"http://u{n}", models=("m",), nodes=(Node("n", Role.LEADER),))
            for n in range(UNITS)
        )
        self.board = Board(Rules())
        self.board.configure(Fleet((Cell("c"),), units), 0.0)
        events: Any = self
        self.watch = StackWatch(self.board, events, lambda _: None)
        read = comparisons.software_of

        def counted(stack: comparisons.Stack) -> comparisons.Software:
            self.reads += 1
            return read(stack)

        monkeypatch.setattr(comparisons, "software_of", counted)

    def add(self, *_: object) -> None:
        """An event."""

    def report(self, **others: str) -> None:
        """All units report; `others` have another driver."""
        for name, state in self.board.units.items():
            stack = {**USUAL, "driver nvidia": others.get(name, USUAL["driver nvidia"])}
            state.facts.take(NodeFacts(name, "n", self.now, stack))

    def turns(self) -> list[int]:
        """One comparison: how many stacks are read in each turn."""
        self.now += STACK_PERIOD_S
        found = []
        for _ in range(TURNS):
            before = self.reads
            self.watch.tick(self.now)
            found.append(self.reads - before)
        return found


def test_one_turn_reads_a_bounded_number_of_stacks_and_none_again_that_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A unit that goes meanwhile is forgotten."""
    site = StackSite(monkeypatch)
    site.report()
    turns = site.turns()
    assert (max(turns), sum(turns)) == (STEPS_A_TURN, UNITS)
    site.report(u3="550")
    assert sum(site.turns()) == 1
    odd = {name: state.facts.odd for name, state in site.board.units.items() if state.facts.odd}
    assert odd == {"u3": "driver nvidia 550 (u0: 570)"}
    site = StackSite(monkeypatch)
    site.report(u3="550")
    site.now += STACK_PERIOD_S
    site.watch.tick(site.now)
    kept = tuple(state.unit for state in site.board if state.unit.name != "u3")
    site.board.configure(Fleet((Cell("c"),), kept), site.now)
    site.turns()
    site.turns()
    assert not any(state.facts.odd for state in site.board)
    assert len(cast("Any", site.watch)._stacks._units) == UNITS - 1


# What containment keeps of units does not outlive them; and what dies with a gate.

PASSED = Evidence("", Sign.GOOD, Strength.STRONG, "canary", "one token", NOW)
PROMPT = Ask(fingerprint=7)


class Contained:
    """Containment of these units, by name their address; it never picks one, and its time is 100."""

    def __init__(self, **urls: str) -> None:
        self.tried: list[set[str]] = []
        self.board = Board(Rules())
        self.have(**urls)
        events, nobody = EventLog(float, 2, log=lambda _level, _line: None), cast("Any", None)
        self.all = Containment(
            self.board, self.pick, events, lambda: NOW, nobody, answered=lambda _: 9, ban_s=1.0
        )

    def have(self, **urls: str) -> None:
        self.board.configure(
            Fleet(units=tuple(Unit(*unit) for unit in ((n, "a", urls[n]) for n in urls))), NOW
        )

    def pick(self, *given: Any, **_: Any) -> Refusal:
        self.tried.append(set(given[2]))
        return Refusal.FULL

    def broke(self, name: str, kind: FailureKind, tokens: int = 0, *, given_up: bool = True) -> None:
        """A request of prompt 7 that ran there."""
        lease = self.board.open(name, PROMPT, NOW, retry=False)
        lease.evicted = lease.unit_state.fell_unseen = given_up
        self.all.broke(lease, kind, tokens, tokens)


def test_a_prompt_whose_gate_was_killed_goes_to_another_one() -> None:
    """A router reaches u1 and u2 by way of one gate: with it both are lost, and that is one death."""
    contained = Contained(u1="http://gate", u2="http://gate", u3="http://other")
    for name in ("u1", "u2", "u3"):
        contained.board.observe(replace(PASSED, unit=name))
    for name in ("u1", "u2"):
        contained.broke(name, FailureKind.CLOSED_EARLY, given_up=False)
    assert contained.all.bans.find(7, NOW) is None
    contained.all.pick(PROMPT, ("u1",), evicted=True, retry=False)
    assert contained.tried == [{"u1", "u2"}, {"u1"}]


def test_what_was_given_up_by_a_time_out_of_ours_makes_no_prompt_poison() -> None:
    """But the request goes to no third unit. Many at one unit all go to another."""
    contained, tried = Contained(a="http://a", b="http://b", c="http://c"), list[str]()
    for name in "ab":
        assert not contained.all.bars(PROMPT, tried)
        contained.broke(name, FailureKind.EVICTED)
        tried.append(name)
    assert contained.all.bars(PROMPT, tried)
    assert contained.all.failure(PROMPT, tried).kind is FailureKind.EVICTED
    assert contained.all.bans.find(7, NOW) is None
    assert not contained.all.bars(PROMPT, ()), "whoever asks the same again is not refused"
    contained.all.tick(NOW + 1000.0)
    assert not contained.all.bars(PROMPT, tried)
    assert not contained.all.watchful
    contained = Contained(a="http://a", b="http://b")
    for _ in range(4):
        contained.broke("a", FailureKind.CUT, 5)
    assert not contained.all.bars(PROMPT, ("a",))
    assert not contained.all.bars(PROMPT, ("b",))


def test_a_thousand_units_that_came_and_went_leave_nothing() -> None:
    contained = Contained()
    for number in range(1000):
        name = f"pod-{number}"
        contained.have(**{name: f"http://{name}"})
        contained.all.flipped(Flip(name, "a", Verdict.STARTING, Verdict.UP, 1.0, PASSED))
    assert sizes(contained.all)["Containment._answered_before"] == 1
