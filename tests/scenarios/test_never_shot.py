"""What looks like trouble and is none: no verdict changes. `storms.py` keeps it up for longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.storms import CHUNKED, PHASES, WHOLE, shots, weather
from tests.scenarios.users import Users
from tests.sim.timing import Timing

STREAMS = 32
FEW_PLACES = Timing(step_s=0.05, max_running=4)


@pytest.mark.parametrize("name", PHASES)
def test_a_storm_changes_no_verdict(name: str) -> None:
    assert not shots(weather(1, CHUNKED, [PHASES[name]], phase_s=6.0, streams=STREAMS))


def test_prompts_that_stop_everything_for_seconds_change_no_verdict() -> None:
    assert not shots(weather(1, WHOLE, [PHASES["long prompts"]], phase_s=15.0, streams=STREAMS))


@pytest.mark.parametrize(("seed", "size"), [(0, 6), (1, 6), (0, 8), (1, 8)])
def test_an_engine_without_metrics_that_answers_after_30_s_changes_no_verdict(seed: int, size: int) -> None:
    """With 6 users one place of each unit is free, and canaries pass; with 8 they stand in line."""
    stage = Stage(seed, timing=FEW_PLACES, is_blind=True)

    async def scenario() -> None:
        users = Users(stage, size, lambda _: {"stream": False, "max_tokens": 600})
        await asyncio.sleep(120.0)
        await users.leave()
        assert all(visit.is_answered for visit in users.visits)

    stage.play(scenario())
    assert not shots(stage)


def test_streams_that_wait_for_long_behind_a_full_batch_change_no_verdict() -> None:
    stage = Stage(units=1, timing=FEW_PLACES)

    async def scenario() -> None:
        whole = Users(stage, 4, lambda _: {"stream": False, "max_tokens": 600})
        await asyncio.sleep(2.0)
        streaming = Users(stage, 32, lambda _: {"max_tokens": 4})
        await asyncio.sleep(60.0)
        await asyncio.gather(whole.leave(), streaming.leave())
        assert max(visit.reply.ttft_s for visit in streaming.visits) > 20.0

    stage.play(scenario())
    assert not shots(stage)


@pytest.mark.parametrize("options", [{}, {"agents": True, "followers": 1}, {"is_blind": True}], ids=str)
def test_a_gate_that_stood_still_under_load_holds_it_against_nobody(options: dict[str, Any]) -> None:
    stage = Stage(timing=CHUNKED, **options)

    async def scenario() -> None:
        users = Users(stage, STREAMS)
        for _ in range(5):
            await asyncio.sleep(stage.rng.uniform(1.0, 4.0))
            stage.stand_still(3.0)
        await asyncio.sleep(3.0)
        await users.leave()

    stage.play(scenario())
    assert not shots(stage)
