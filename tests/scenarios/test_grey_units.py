"""Units that are neither well nor broken in a way that shows: what they may cost, and what they may not."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cellgate.proxy.config.settings import Timeouts
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour, Break
from tests.sim.timing import Timing
from tests.sim.world import played

STEPS = Timing(step_s=0.05)
CHUNKED = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=2048)


@played(Stage, 1, timing=STEPS, timeouts=Timeouts(answer_s=60.0))
async def test_streams_that_a_unit_has_lost_are_held_against_it_now_and_then(stage: Stage) -> None:
    """It passes every canary: to suspect it every second would say nothing new."""
    stage.engines["a"].behaviour = Behaviour(breaks=Break.LOSE, breaks_after_events=3)
    users = Users(stage, 8)
    await asyncio.sleep(120.0)
    stage.engines["a"].behaviour = Behaviour()
    await users.leave()
    assert "down" not in stage.flips("a")
    # It was 168 when it could be suspected of the same streams again and again.
    assert len(stage.flips("a")) < 60
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("warm", [False, True], ids=["the first large prompt", "one like it was seen"])
@played(Stage, 1, timing=CHUNKED)
async def test_a_wedge_under_a_large_prompt_is_found_sooner_once_one_like_it_was_seen(
    stage: Stage, warm: bool
) -> None:
    users = Users(stage, 32)
    await asyncio.sleep(15.0)
    stage.gate.set_drain("b", drained=True)
    if warm:
        for _ in range(4):
            await stage.ask(prompt_tokens=100_000, max_tokens=4)
    large = asyncio.ensure_future(stage.ask(prompt_tokens=100_000, max_tokens=4))
    await asyncio.sleep(0.3)
    stage.gate.set_drain("b", drained=False)
    await asyncio.sleep(1.0)
    stage.engines["a"].behaviour.wedged = True
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 3.0 if warm else 90.0)
    await users.leave()
    assert (await large).is_answered
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("seed", seeds(range(6)))
@played(Stage, given=("seed",), timing=STEPS)
async def test_a_unit_that_restarts_while_it_is_down_starts_once(stage: Stage, seed: int) -> None:
    """Its new epoch is read before it gets users, not after."""
    users = Users(stage, 16)
    await asyncio.sleep(3.0 + seed / 10)
    engine = stage.engines["a"]
    engine.die()
    await asyncio.sleep(1.5)
    engine.start()
    await asyncio.sleep(15.0)
    await users.leave()
    flips = stage.flips("a")
    assert flips[-1] == "up"
    assert flips.count("up") == 2, flips


def test_a_gate_that_stands_still_blames_none_of_its_probes(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(1)

    async def scenario() -> None:
        stage.engines["a"].behaviour.silent = True
        await asyncio.sleep(1.5)
        stage.stand_still(5.0)
        await asyncio.sleep(1.0)

    with caplog.at_level(logging.ERROR):
        stage.play(scenario())
    assert not caplog.records
