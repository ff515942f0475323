"""Units that are slow, or have only just come up: they get less, and are not taken for dead."""

from __future__ import annotations

import asyncio
from random import Random
from statistics import median
from typing import Any

import pytest

from tests.scenarios.harness import BACK_S, RULES, Stage
from tests.scenarios.users import Users
from tests.sim.timing import Timing

TIMING = Timing(step_s=0.1)
USERS = 16
DEGRADED_LIMIT_S = 60.0


def long_answers(rng: Random) -> dict[str, Any]:
    """Prompts take little of a unit's time, so that its gaps are compared in each comparison."""
    return {"prompt_tokens": rng.randrange(20, 400), "max_tokens": rng.randrange(40, 120)}


def test_a_unit_1_5_times_as_slow_is_degraded_within_a_minute_and_never_suspected() -> None:
    """Whom each of the few requests goes to is by chance: how much less it gets is the median of worlds."""
    assert median(_share_of_a_degraded_one(seed) for seed in (0, 2, 4)) < 0.7


def _share_of_a_degraded_one(seed: int) -> float:
    """How many requests the slower one gets for one of the other."""
    stage = Stage(seed, timing=TIMING)
    board, engine, shares = stage.gate.board, stage.engines["a"], []

    async def scenario() -> None:
        users = Users(stage, USERS, long_answers)
        await asyncio.sleep(15.0)
        engine.behaviour.slow = 1.5
        await stage.until(lambda: board.units["a"].outlier.degraded > 0.0, DEGRADED_LIMIT_S)
        at = stage.now
        await asyncio.sleep(30.0)
        assert board.units["a"].outlier.degraded == pytest.approx(1.0 - 1.0 / 1.5, abs=0.1)
        shares.append(len(stage.picks("a", at)) / len(stage.picks("b", at)))
        engine.behaviour.slow = 1.0
        await stage.until(lambda: board.units["a"].outlier.degraded == 0.0, DEGRADED_LIMIT_S)
        await users.leave()

    stage.play(scenario())
    assert not stage.shots()
    told = [(event["kind"], event["unit"]) for event in stage.gate.events.last() if event["kind"] != "flip"]
    assert told == [("degraded", "a"), ("recovered", "a")]
    return shares[0]


def test_a_unit_that_came_back_gets_its_share_little_by_little() -> None:
    """In the median of worlds: whom each request goes to is by chance."""
    worlds = [_shares_of_one_that_came_back(Stage(seed, timing=TIMING)) for seed in range(5)]
    begun, half, whole = map(median, zip(*worlds, strict=True))
    # Who has least gets most until they are even, but no more than the share it is considered for, and one
    # request whenever it has none.
    assert begun < half < 0.75
    assert begun < 0.45
    assert whole > 0.4


def _shares_of_one_that_came_back(stage: Stage) -> list[float]:
    """What it gets of all requests in each half of its slow start, and as long behind it."""
    shares: list[float] = []

    async def scenario() -> None:
        users = Users(stage, USERS)
        await asyncio.sleep(2.0)
        stage.engines["a"].die()
        await asyncio.sleep(5.0)
        stage.engines["a"].restart()
        await stage.until(stage.all_up, BACK_S)
        for _ in range(3):
            since = stage.now
            await asyncio.sleep(RULES.slow_start_s / 2.0)
            picks = len(stage.picks("a", since))
            shares.append(picks / (picks + len(stage.picks("b", since))))
        await users.leave()

    stage.play(scenario())
    return shares
