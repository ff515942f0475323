"""From what units answer to verdicts: probes, judge and board together, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from cellgate.probes.base import Net
from cellgate.probes.runner import GAP_S, JITTER
from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.router.board import Board, Consequence
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Models, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.unit_state import UnitState
from tests.sim.world import World, played, run
from tests.unit.control.played_engine import LATENCY_S, Engine

STARTING, UP, SUSPECT, DOWN, PROBATION = Verdict
RULES = Rules()


class Scene:
    """A board with the units `a` and `b`, watched; `flips` in order."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.board = Board(RULES)
        self.engines = {"a": Engine(), "b": Engine()}
        self.consequences: list[Consequence] = []
        self.watch = Prober(self.board, self._ways_to, random.Random(seed), self.consequences.append)

    def _ways_to(self, state: UnitState) -> ProbeTransport:
        return ProbeTransport(self.engines[state.unit.url.removeprefix("http://")], cast("Net", None))

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


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_fresh_unit_comes_up_by_a_canary(scene: Scene) -> None:
    """Before the first user's request; its models and its load are then known."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=0.5)
        assert scene.engines["a"].canaries
        assert scene.board.units["a"].models == {"m"}
        load = scene.board.units["a"].load
        assert load is not None
        assert (load.running, load.epoch) == (3, "1")

    scene.play(scenario())
    assert scene.flips("a") == [UP]


def test_a_healthy_idle_fleet_never_flips(scene: Scene) -> None:
    """For an hour; nor does one that works."""

    async def scenario() -> None:
        scene.engines["b"].tokens_per_s = 100.0
        await asyncio.sleep(3600.0)

    scene.play(scenario())
    assert (scene.flips("a"), scene.flips("b")) == ([UP], [UP])


def test_a_unit_that_refuses_is_down_at_once_and_comes_back_by_two_canaries(scene: Scene) -> None:
    """Readiness sees it within its period; leases there are evicted."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=1.0)
        lease = scene.board.open("a", Ask(), scene.now, retry=False)
        scene.engines["a"].refuses = True
        await scene.until("a", DOWN, within_s=1.0 + JITTER + 2 * LATENCY_S)
        assert scene.consequences[-1].evicted == (lease,)
        scene.board.close(lease, scene.now)
        await asyncio.sleep(600.0)
        scene.engines["a"].refuses = False
        await scene.until("a", UP, within_s=2.5)

    scene.play(scenario())
    assert scene.flips("a") == [UP, DOWN, PROBATION, UP]
    assert scene.flips("b") == [UP]


def test_a_wedged_idle_unit_is_found_out_though_its_health_lies(scene: Scene) -> None:
    """Two canaries without life; and it comes back when the engine goes on."""

    async def scenario() -> None:
        await asyncio.sleep(10.0)
        scene.engines["a"].frozen = True
        expected_s = RULES.canary_idle_s + 2 * RULES.canary_timeout_s
        await scene.until("a", DOWN, within_s=(1.0 + JITTER) * expected_s + 1.0)
        await asyncio.sleep(600.0)
        scene.engines["a"].thaw()
        await scene.until("a", UP, within_s=1.0)

    scene.play(scenario())
    assert scene.flips("a") == [UP, SUSPECT, DOWN, PROBATION, UP]
    assert scene.flips("b") == [UP]


def test_an_idle_unit_is_asked_for_a_token_every_few_seconds(scene: Scene) -> None:
    """Its `/health` is no sign of life."""
    scene.play(asyncio.sleep(100.0))
    assert len(scene.engines["a"].canaries) > 100.0 / ((1.0 + JITTER) * RULES.canary_idle_s + 1.0)


def test_a_working_unit_is_asked_for_none(scene: Scene) -> None:
    """Its counters grow, or a stream of ours brings tokens."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=1.0)
        await scene.until("b", UP, within_s=1.0)
        scene.engines["a"].tokens_per_s = 50.0
        for _ in range(600):
            scene.board.units["b"].progress_at = scene.now
            await asyncio.sleep(0.1)

    scene.play(scenario())
    for engine in scene.engines.values():
        assert [at for at in engine.canaries if at > 1003.0] == []


def test_a_suspicion_asks_for_a_canary_now(scene: Scene) -> None:
    """It clears the unit, and its answer comes before the period is over."""

    async def scenario() -> None:
        await asyncio.sleep(10.3)
        assert scene.strike("a", Strength.STRONG).wants_canary
        assert scene.verdict("a") is SUSPECT
        assert await scene.until("a", UP, within_s=1.0) <= GAP_S + 3 * LATENCY_S

    scene.play(scenario())
    assert scene.flips("a") == [UP, SUSPECT, UP]


def test_a_busy_unit_that_leaves_a_canary_waiting_stays_suspect_until_it_answers(scene: Scene) -> None:
    """Busy is not sick: it goes neither down nor, without an answer, up; and it is asked again."""

    async def scenario() -> None:
        await asyncio.sleep(10.3)
        engine = scene.engines["a"]
        engine.tokens_per_s, engine.frozen = 50.0, True
        scene.strike("a", Strength.STRONG)
        await asyncio.sleep(30.0)
        assert scene.verdict("a") is SUSPECT
        engine.thaw()
        await scene.until("a", UP, within_s=2.5)

    scene.play(scenario())
    assert scene.flips("a") == [UP, SUSPECT, UP]


@pytest.mark.parametrize("eighths", range(24))
def test_a_crowd_of_others_at_an_idle_unit_does_not_take_it_down(scene: Scene, eighths: int) -> None:
    """Whenever it comes between two readings of the engine's numbers, which are rare while it is idle."""
    for engine in scene.engines.values():
        engine.running = 0

    async def scenario() -> None:
        await asyncio.sleep(10.0 + eighths / 8)
        engine = scene.engines["a"]
        engine.running, engine.tokens_per_s, engine.frozen = 3, 50.0, True
        await asyncio.sleep(30.0)
        engine.thaw()
        await scene.until("a", UP, within_s=9.0)

    scene.play(scenario())
    assert DOWN not in scene.flips("a")


@pytest.mark.parametrize("eighths", range(24))
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


def test_a_new_incarnation_starts_again(scene: Scene) -> None:
    """Seen by the start time of its process: leases are evicted, one canary brings it up."""

    async def scenario() -> None:
        await asyncio.sleep(5.0)
        lease = scene.board.open("a", Ask(), scene.now, retry=False)
        scene.engines["a"].epoch = 2
        await scene.until("a", STARTING, within_s=1.5)
        assert scene.consequences[-1].evicted == (lease,)
        flip = scene.consequences[-1].flip
        assert flip is not None
        assert flip.evidence.reason == "its process has started again"
        scene.board.close(lease, scene.now)
        await scene.until("a", UP, within_s=1.0)

    scene.play(scenario())
    assert scene.flips("a") == [UP, STARTING, UP]


def test_a_canary_meant_for_the_last_incarnation_is_not_held_against_the_next(scene: Scene) -> None:
    """It was given less time than a unit that has to warm up."""

    async def scenario() -> None:
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

    scene.play(scenario())
    assert scene.flips("a") == [UP, DOWN, STARTING, UP]


def test_only_flips_are_told(scene: Scene) -> None:
    """What changes no verdict has no consequence for anybody else."""
    scene.play(asyncio.sleep(60.0))
    assert all(consequence.flip is not None for consequence in scene.consequences)


def test_a_unit_removed_while_its_probes_are_in_the_air_does_no_harm(scene: Scene) -> None:
    """Nor does evidence from its last requests."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=1.0)
        scene.engines["a"].frozen = True
        await asyncio.sleep(1.9)
        scene.configure(unit("b"))
        asked = len(scene.engines["a"].asked)
        assert scene.strike("a", Strength.FATAL) == Consequence()
        await asyncio.sleep(60.0)
        assert len(scene.engines["a"].asked) == asked
        assert list(scene.board.units) == ["b"]

    scene.play(scenario())
    assert scene.flips("b") == [UP]


def test_a_unit_off_the_board_but_still_watched_does_no_harm(scene: Scene) -> None:
    """Its findings are dropped until somebody stops the watch."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=1.0)
        scene.board.configure(Fleet((Cell("c"),), (unit("b"),)), scene.now)
        scene.engines["a"].refuses = True
        await asyncio.sleep(10.0)

    scene.play(scenario())
    assert scene.flips("a") == [UP]


def test_what_was_found_about_a_replaced_unit_is_not_held_against_its_successor(scene: Scene) -> None:
    """The name is the same, the address is another: the old probes' findings are dropped."""

    async def scenario() -> None:
        await scene.until("a", UP, within_s=1.0)
        scene.engines["a"].refuses = True
        scene.board.configure(Fleet((Cell("c"),), (unit("a", engine="b"), unit("b"))), scene.now)
        await asyncio.sleep(5.0)
        assert scene.verdict("a") is STARTING
        scene.watch.start(scene.board.units["a"].unit)
        await scene.until("a", UP, within_s=1.0)

    scene.play(scenario())
    assert scene.flips("a") == [UP, UP]


@played(Scene)
async def test_stopping_what_is_not_watched_does_nothing(scene: Scene) -> None:
    """And closing twice neither."""
    scene.watch.stop("nobody")
    scene.watch.stop("a")
    scene.watch.stop("a")
    scene.watch.close()


def test_the_same_seed_gives_the_same_history() -> None:
    """Canaries at the same times."""

    def history(seed: int) -> list[tuple[float, str]]:
        scene = Scene(seed)
        scene.play(asyncio.sleep(30.0))
        return scene.engines["a"].asked

    assert history(3) == history(3) != history(4)


def test_of_a_list_of_more_models_than_are_heeded_the_first_are_known(scene: Scene) -> None:
    before = REACHED["unit_models"]

    async def scenario() -> None:
        scene.configure(unit("a"))
        await scene.until("a", UP, 5.0)
        state = scene.board.units["a"]
        names = tuple(f"m{n}" for n in range(LIMITS.unit_models + 1))
        scene.watch._take(state, Models("a", names, scene.now))
        assert state.models == frozenset(names[:-1])
        scene.watch._take(state, Models("a", names[:2], scene.now))
        assert state.models == {"m0", "m1"}

    scene.play(scenario())
    assert REACHED["unit_models"] == before + 1


# A new incarnation may be another build.


def test_the_version_of_a_new_incarnation_is_asked_for_soon() -> None:
    """Only a unit whose build is known may resume streams; usually it is asked for once a minute."""

    scene = Scene()

    def version() -> str:
        return scene.board.units["a"].build.version

    async def scenario() -> None:
        scene.board.units["a"].engine = "vllm"
        await asyncio.sleep(5.0)
        assert version() == "0.32.0"
        scene.engines["a"].epoch = 2
        await scene.until("a", Verdict.STARTING, within_s=1.5)
        assert not version()
        await scene.until("a", Verdict.UP, within_s=1.0)
        scene.board.units["a"].engine = "vllm"
        await asyncio.sleep(1.2)
        assert version() == "0.32.0"

    scene.play(scenario())
