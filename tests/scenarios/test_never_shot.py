"""What looks like trouble and is none: no verdict changes."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Any

import pytest

from tests.scenarios.harness import CHAT, Stage
from tests.scenarios.users import Users
from tests.scenarios.visit import encode
from tests.sim.behaviour import Behaviour
from tests.sim.client import Manner
from tests.sim.timing import Timing
from tests.sim.world import played

STREAMS, MANY_STREAMS = 32, 64
CHUNKED = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=2048, max_running=48)
WHOLE = Timing(step_s=0.05, prefill_tokens_per_s=20_000.0, chunk_tokens=0, max_running=48)
"""A prompt of 100k tokens is computed in one step of 5 s, in which nothing moves."""
FEW_PLACES = Timing(step_s=0.05, max_running=4)

BURST = 150
BURST_EVERY_S = 5.0
LONG_TOKENS = 100_000
LONG_AT_ONCE = 3
LATE_S = 5.0
BAD_PER_S = 100
SLOW_CLIENTS = 32

Phase = Callable[[Stage, float], Awaitable[object]]


async def bursts(stage: Stage, seconds: float) -> None:
    """Many requests in the same instant, again and again."""
    for _ in range(math.ceil(seconds / BURST_EVERY_S)):
        crowd = stage.crowd(BURST, prompt_tokens=stage.rng.randrange(50, 500))
        await asyncio.sleep(BURST_EVERY_S)
        await crowd


async def long_prompts(stage: Stage, seconds: float) -> None:
    """Prompts of 100k tokens, a few at a time, streamed and not."""

    def draw(rng: Random) -> dict[str, Any]:
        return {"prompt_tokens": LONG_TOKENS, "max_tokens": 4, "stream": rng.random() < 0.5}

    users = Users(stage, LONG_AT_ONCE, draw)
    await asyncio.sleep(seconds)
    await users.leave()


async def queues_full(stage: Stage, seconds: float) -> None:
    """One unit refuses everybody with 503 and the other with 429: they are full of other people's work."""
    for engine, status in zip(stage.engines.values(), (503, 429), strict=True):
        engine.behaviour = Behaviour(busy_status=status)
    await asyncio.sleep(seconds)


async def short_queues(stage: Stage, seconds: float) -> None:
    """Few may wait at each unit, and more users come than have a place."""
    for engine in stage.engines.values():
        engine.max_waiting = 4
    users = Users(stage, MANY_STREAMS)
    await asyncio.sleep(seconds)
    await users.leave()
    for engine in stage.engines.values():
        engine.max_waiting = sys.maxsize


async def late_probes(stage: Stage, seconds: float) -> None:
    """What probes ask is answered after 5 s; generation goes on."""
    for engine in stage.engines.values():
        engine.behaviour = Behaviour(late_s=LATE_S)
    await asyncio.sleep(seconds)


async def storm_of_400(stage: Stage, seconds: float) -> None:
    """Requests that the units refuse as nonsense."""
    nonsense = encode({"model": "tiny", "messages": [{"role": "user"}]})
    storm = []
    for _ in range(math.ceil(seconds * BAD_PER_S)):
        storm.append(asyncio.ensure_future(stage.send("POST", CHAT, nonsense)))
        await asyncio.sleep(1.0 / BAD_PER_S)
    assert {visit.reply.status for visit in await asyncio.gather(*storm)} == {400}


async def slow_clients(stage: Stage, seconds: float) -> None:
    """Clients that read now and then, or not at all until they leave."""
    manners = (
        Manner(read_every_s=2.0, leave_after_s=seconds),
        Manner(read_every_s=math.inf, leave_after_s=seconds),
    )
    crowds = (stage.crowd(SLOW_CLIENTS // 2, manner=manner, max_tokens=400) for manner in manners)
    await asyncio.gather(*crowds)


PHASES: dict[str, Phase] = {
    "bursts": bursts,
    "long prompts": long_prompts,
    "queues full": queues_full,
    "short queues": short_queues,
    "late probes": late_probes,
    "400-storm": storm_of_400,
    "slow clients": slow_clients,
}


def weather(
    seed: int, timing: Timing, phases: Iterable[Phase], phase_s: float = 20.0, streams: int = STREAMS
) -> Stage:
    """Let the phases take turns over a full load; the stage afterwards."""
    stage = Stage(seed, timing=timing)

    async def scenario() -> None:
        users = Users(stage, streams)
        for phase in phases:
            await phase(stage, phase_s)
            for engine in stage.engines.values():
                engine.behaviour = Behaviour()
        await users.leave()

    stage.play(scenario())
    return stage


@pytest.mark.parametrize("name", PHASES)
def test_a_storm_changes_no_verdict(name: str) -> None:
    assert not weather(1, CHUNKED, [PHASES[name]], phase_s=6.0).shots()


@pytest.mark.nightly
@pytest.mark.parametrize("timing", [CHUNKED, WHOLE], ids=["chunked", "whole"])
@pytest.mark.parametrize("seed", range(3))
def test_storms_that_take_turns_change_no_verdict(seed: int, timing: Timing) -> None:
    assert not weather(seed, timing, 4 * [*PHASES.values()], streams=MANY_STREAMS).shots()


def test_prompts_that_stop_everything_for_seconds_change_no_verdict() -> None:
    assert not weather(1, WHOLE, [PHASES["long prompts"]], phase_s=15.0).shots()


@pytest.mark.parametrize(("seed", "size"), [(0, 6), (1, 6), (0, 8), (1, 8)])
@played(Stage, given=("seed",), timing=FEW_PLACES, is_blind=True)
async def test_an_engine_without_metrics_that_answers_after_30_s_changes_no_verdict(
    stage: Stage, size: int
) -> None:
    """With 6 users one place of each unit is free, and canaries pass; with 8 they stand in line."""
    users = Users(stage, size, lambda _: {"stream": False, "max_tokens": 600})
    await asyncio.sleep(120.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)
    assert not stage.shots()


@played(Stage, units=1, timing=FEW_PLACES)
async def test_streams_that_wait_for_long_behind_a_full_batch_change_no_verdict(stage: Stage) -> None:
    whole = Users(stage, 4, lambda _: {"stream": False, "max_tokens": 600})
    await asyncio.sleep(2.0)
    streaming = Users(stage, 32, lambda _: {"max_tokens": 4})
    await asyncio.sleep(60.0)
    await asyncio.gather(whole.leave(), streaming.leave())
    assert max(visit.reply.ttft_s for visit in streaming.visits) > 20.0
    assert not stage.shots()


@pytest.mark.parametrize("options", [{}, {"agents": True, "followers": 1}, {"is_blind": True}], ids=str)
@played(lambda options: Stage(timing=CHUNKED, **options), given=("options",))
async def test_a_gate_that_stood_still_under_load_holds_it_against_nobody(stage: Stage) -> None:
    users = Users(stage, 12)
    for _ in range(5):
        await asyncio.sleep(stage.rng.uniform(1.0, 4.0))
        stage.stand_still(3.0)
    await asyncio.sleep(3.0)
    await users.leave()
    assert not stage.shots()


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
