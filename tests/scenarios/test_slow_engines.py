"""Slow and small engines that are well keep their requests; more seeds: slow_engines.py."""

from __future__ import annotations

import asyncio

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.slow_engines import PATIENT, hangs, well
from tests.sim.timing import Timing

ONE_SLOT = Timing(0.05, step_s=0.2, max_running=1, prefill_tokens_per_s=200.0)


@pytest.mark.parametrize("seed", seeds(range(1, 12)))
def test_engines_of_any_speed_that_are_well_are_left_alone(seed: int) -> None:
    assert not well(seed)


@pytest.mark.parametrize("seed", seeds((3, 4, 5, 6, 7, 8)))
def test_engines_of_any_speed_that_hang_are_found(seed: int) -> None:
    assert not hangs(seed)[2]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("is_blind", [True, False], ids=["blind", "with metrics"])
def test_an_engine_for_one_request_computes_a_long_one_to_its_end(
    is_blind: bool, units: int, stream: bool
) -> None:
    """30 s to the first token, 110 s to the last one."""
    stage = Stage(units=units, timing=ONE_SLOT, is_blind=is_blind, max_in_flight=1)

    async def scenario() -> None:
        visit = await stage.ask(prompt_tokens=6_000, max_tokens=400, stream=stream, manner=PATIENT)
        assert visit.is_answered, (visit.reply.status, visit.code)
        await asyncio.sleep(1.0)

    stage.play(scenario())
    assert all(stage.flips(name) == ["up"] for name in stage.engines)
    assert not stage.gate.containment.counts["deaths"]
