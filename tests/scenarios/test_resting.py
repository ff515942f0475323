"""Idle units of a large fleet are asked rarely; what befalls them is found as soon as promised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from statistics import median

import pytest

from cellgate.probes.base import REST_MAX_S
from cellgate.proxy.cli.check import REFUSED_S
from cellgate.router import attention
from cellgate.router.attention import rest
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import PROMISE_S, Stage
from tests.scenarios.test_panic import cut_off, told
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop
from tests.sim.world import played

CALM_S = 150.0
TWICE_S = 2.2
"""A page of a node is asked each second, and must say twice that it is not well."""


@pytest.fixture(autouse=True)
def _five_units_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SMALL", 4)


async def calm(stage: Stage) -> None:
    """Until all units rest, and to a random moment of their pauses."""
    await asyncio.sleep(CALM_S + stage.rng.uniform(0.0, REST_MAX_S))
    await stage.until(lambda: all(rest(state, stage.now) > 5.0 for state in stage.gate.board), 100.0)


def ill(engine: Engine) -> None:
    """A page says so, and nothing else does."""
    engine.nodes[1].is_well = False


@played(Stage, units=5, followers=1, pages=True)
async def test_idle_units_are_asked_ever_more_rarely_and_at_once_when_they_get_a_request(
    stage: Stage,
) -> None:
    await asyncio.sleep(CALM_S)
    nodes = [node for engine in stage.engines.values() for node in engine.nodes]
    before = [len(node.read_at) for node in nodes]
    await asyncio.sleep(100.0)
    read = [len(node.read_at) - earlier for node, earlier in zip(nodes, before, strict=True)]
    # One whose metrics were read during a canary seems to work for others: it is asked as often as usual.
    assert 9 <= min(read) <= median(read) <= 14 < 50 > max(read)
    visit = await stage.ask(max_tokens=100)
    assert stage.now - stage.engines[str(visit.unit)].nodes[1].read_at[-1] < 1.5
    assert stage.all_up()


@pytest.mark.parametrize(
    ("hurt", "limit_s"),
    [
        (Engine.die, REFUSED_S),
        (partial(kill, rank=1), TWICE_S),
        (partial(stop, rank=1), PROMISE_S),
        (ill, REST_MAX_S - 1.0 + TWICE_S),
    ],
    ids=["the leader is gone", "a follower is gone", "a follower is frozen", "a page says that it is ill"],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_befalls_a_unit_that_rests_is_found_in_time(
    hurt: Callable[[Engine], None], limit_s: float, seed: int
) -> None:
    stage = Stage(seed, units=5, followers=1, pages=True)

    async def scenario() -> None:
        await calm(stage)
        if hurt is ill:
            read = stage.engines["a"].nodes[1].read_at
            before = len(read)
            await stage.until(lambda: len(read) > before, 2.0 * REST_MAX_S)
        hurt(stage.engines["a"])
        await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, limit_s)
        assert stage.all_up() or [event["unit"] for event in stage.told("flip")].count("b") == 1

    stage.play(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_the_first_request_after_long_has_a_unit_asked_at_once(seed: int) -> None:
    stage = Stage(seed, units=5, followers=1, pages=True)

    async def scenario() -> None:
        await calm(stage)
        for engine in stage.engines.values():
            ill(engine)
        asked_at, visit = stage.now, asyncio.ensure_future(stage.ask(max_tokens=200))
        await stage.until(lambda: any(e["after"] == "down" for e in stage.told("flip")), TWICE_S)
        assert stage.now - asked_at < TWICE_S
        await visit

    stage.play(scenario())


@played(Stage, units=5, followers=1, pages=True)
async def test_a_gate_that_is_cut_off_from_units_that_rest_holds_them(stage: Stage) -> None:
    await calm(stage)
    cut_off(stage, "abcde")
    for engine in stage.engines.values():
        for node in engine.nodes:
            stage.world.net.partition(node.page.removeprefix("http://").partition("/")[0])
    await asyncio.sleep(25.0)
    assert all(state.is_usable() for state in stage.gate.board)
    assert not any("down" in stage.flips(name) for name in "abcde")
    assert told(stage) == ["panic"]
    stage.world.net.heal()
    await asyncio.sleep(15.0)
    assert stage.all_up()
