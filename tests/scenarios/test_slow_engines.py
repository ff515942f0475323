"""Slow and small engines that are well keep their requests; more seeds: slow_engines.py."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.slow_engines import PATIENT, hangs, well
from tests.scenarios.users import Users
from tests.sim.timing import Timing

ONE_SLOT = Timing(0.05, step_s=0.2, max_running=1, prefill_tokens_per_s=200.0)


@pytest.mark.parametrize("seed", seeds((*range(1, 12), 25, 166)))
def test_engines_of_any_speed_that_are_well_are_left_alone(seed: int) -> None:
    assert not well(seed)


@pytest.mark.parametrize("seed", seeds((3, 4, 5, 6, 7, 8)))
def test_engines_of_any_speed_that_hang_are_found(seed: int) -> None:
    assert not hangs(seed)[2]


@pytest.mark.parametrize(("seed", "within_s"), [(7, 3.1), (191, 6.0), (354, 3.0)])
def test_no_hang_is_found_later_than_what_was_seen_of_the_unit_explains(seed: int, within_s: float) -> None:
    """7: a canary with the patience of a unit that is well is on its way. 191: an engine that is always full
    has never shown a prompt alone. 354: an agent says so of the only unit.
    """
    assert hangs(seed)[0] < within_s


@pytest.mark.parametrize("seed", seeds((4, 0, 6)))
def test_a_slow_engine_that_computes_all_new_prompts_in_one_step_is_left_alone(seed: int) -> None:
    """A single prompt has taught it a second; six of them, three times as large, take ten."""
    timing = Timing(0.0, step_s=0.018, max_running=64, prefill_tokens_per_s=87.7)
    stage = Stage(seed, units=1, timing=timing, max_in_flight=128)

    def ask(rng: Random) -> dict[str, Any]:
        sizes = {"prompt_tokens": rng.randint(10, 292), "max_tokens": rng.randint(1, 256)}
        return sizes | {"stream": True, "manner": PATIENT}

    async def scenario() -> None:
        users = Users(stage, 6, ask)
        await asyncio.sleep(100.0)
        await users.leave()

    stage.play(scenario())
    assert stage.flips("a") == ["up"]


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
