"""From what units answer to verdicts: probes, judge and board together, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from cellgate.probes.base import FetchError, Net, Reply, Trouble
from cellgate.probes.runner import GAP_S
from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.control.prober import Prober
from cellgate.proxy.http.fetch import ProbeTransport
from cellgate.router.board import Board, Consequence
from cellgate.router.nouns import Ask, Cell, Evidence, Fleet, Models, Rules, Sign, Strength, Unit, Verdict
from cellgate.router.unit_state import UnitState
from tests.sim.world import World, played, run

STARTING, UP, SUSPECT, DOWN, PROBATION = Verdict
RULES = Rules()
LATENCY_S = 0.01
METRICS = """vllm:num_requests_running {running}
vllm:generation_tokens_total {tokens}
process_start_time_seconds {epoch}
"""


class PendingTask:
    """A request on its way, as a task."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def abandon(self) -> None:
        self._task.cancel()


class Engine:
    """What a unit does: refuse, hang behind a lying `/health` (frozen), or answer.

    `tokens_per_s` is other people's work there.
    """

    def __init__(self) -> None:
        self.refuses = False
        self.frozen = False
        self.epoch = 1
        self.tokens_per_s = 0.0
        self.running = 3
        self.asked: list[tuple[float, str]] = []
        self.thawed = asyncio.Event()
        self.answered_at = 0.0

    def thaw(self) -> None:
        """What hung is answered now."""
        self.frozen = False
        self.thawed.set()

    async def __call__(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        content_type: str = "application/json",
        request_id: str = "",
        rank: int | None = None,
        fresh: bool = False,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> Reply:
        now = asyncio.get_running_loop().time()
        self.asked.append((now, target))
        await asyncio.sleep(LATENCY_S)
        if self.refuses:
            raise FetchError(Trouble.REFUSED, "connection refused")
        if target == "/metrics":
            tokens = int(now * self.tokens_per_s)
            return Reply(
                200, {}, METRICS.format(running=self.running, tokens=tokens, epoch=self.epoch).encode()
            )
        if target == "/version":
            return Reply(200, {}, b'{"version": "0.32.0"}')
        if target == "/v1/models":
            return Reply(200, {}, b'{"data": [{"id": "m"}]}')
        if target.startswith("/v1/") and self.frozen:
            thawed = asyncio.ensure_future(self.thawed.wait())
            try:
                done, _ = await asyncio.wait((thawed,), timeout=timeout_s)
            finally:
                thawed.cancel()
            if not done:
                raise FetchError(Trouble.TIMEOUT, "no answer in time")
        return Reply(200, {}, b'{"choices": [{}]}')

    def get(
        self,
        target: str,
        done: Callable[[Reply | FetchError], None],
        *,
        timeout_s: float,
        max_bytes: int = 1 << 20,
    ) -> PendingTask:
        async def ask() -> Reply | FetchError:
            try:
                return await self("GET", target, timeout_s=timeout_s, max_bytes=max_bytes)
            except FetchError as error:
                return error

        def tell(asked: asyncio.Task[Reply | FetchError]) -> None:
            if not asked.cancelled():
                done(asked.result())

        asking = asyncio.create_task(ask())
        asking.add_done_callback(tell)
        return PendingTask(asking)

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
