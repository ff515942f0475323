"""Units that die, hang, restart and heal: their requests move, their traffic stops, then comes back."""

from __future__ import annotations

import asyncio

import pytest

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, PROMISE_S, RULES, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour
from tests.sim.conversation import End
from tests.sim.timing import Timing
from tests.sim.world import played

SLOW_TO_START = Timing(prefill_s=1.0)
"""So that half of a crowd waits for its first token when something happens to the unit."""


@played(Stage, timing=Timing(prefill_s=0.5, step_s=0.2, max_running=4))
async def test_a_saturated_fleet_is_busy_and_not_sick(stage: Stage) -> None:
    # 30 requests of 4 s behind each 4 places: canaries wait far longer than their timeout.
    assert all(visit.is_answered for visit in await stage.crowd(60, max_tokens=20))
    assert stage.flips("a") == stage.flips("b") == ["up"]


@pytest.mark.parametrize("seed", seeds(range(5)))
@played(Stage, given=("seed",))
async def test_a_leader_that_dies_at_any_moment_costs_nobody_anything(stage: Stage) -> None:
    crowd = stage.crowd(64, max_tokens=30)
    await asyncio.sleep(stage.rng.uniform(0.0, 0.3))
    stage.engines["a"].die()
    assert all(visit.is_answered for visit in await crowd)


def is_broken_off(visit: Visit) -> bool:
    """Something was shown, then an error event, then an end that is none."""
    return len(visit.reply.events) > 1 and visit.code is not None and visit.reply.end is End.TRUNCATED


@pytest.mark.parametrize("seed", seeds([1, 59, 67, 86, 88]))
@played(Stage, given=("seed",), timing=Timing(warm_up_s=5.0))
async def test_a_restarted_unit_is_looked_at_anew_before_it_gets_users(stage: Stage) -> None:
    """With the later seeds a canary is answered, or broken, by the process that ends."""
    crowd = stage.crowd(32, max_tokens=20)
    await asyncio.sleep(0.1)
    stage.engines["a"].restart()
    await crowd
    await stage.until(lambda: stage.flips("a")[-1] == "starting", 2.0)
    assert all(visit.unit == "b" for visit in await stage.crowd(8))
    await stage.until(stage.all_up, BACK_S)
    # It has only just come up: its share is small yet.
    assert any(visit.unit == "a" for visit in await stage.crowd(32))


@pytest.mark.parametrize(
    "fault",
    [
        Behaviour(wedged=True),
        Behaviour(wedged=True, keepalive_s=0.5),
        Behaviour(spinning=True),
        Behaviour(silent=True),
    ],
    ids=["wedged", "wedged under comments", "spinning", "silent"],
)
@played(Stage, timing=SLOW_TO_START)
async def test_a_unit_that_hangs_loses_its_traffic_and_gets_it_back_when_it_is_well(
    stage: Stage, fault: Behaviour
) -> None:
    running = stage.crowd(16, max_tokens=400)
    await asyncio.sleep(2.0)
    waiting = stage.crowd(16, max_tokens=20)
    await asyncio.sleep(0.5)
    stage.engines["a"].behaviour = fault
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    assert all(visit.is_answered for visit in await waiting)
    assert [visit.unit for visit in await running].count("a") == 8
    assert all(visit.is_answered for visit in await running)
    assert {visit.unit for visit in await stage.crowd(8)} == {"b"}
    stage.engines["a"].behaviour = Behaviour()
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(RULES.slow_start_s)
    assert {visit.unit for visit in await stage.crowd(8)} == {"a", "b"}
    assert stage.flips("a") == ["up", "suspect", "down", "probation", "up"]
    assert stage.flips("b") == ["up"]


@played(Stage)
async def test_when_all_units_are_down_the_answer_names_them_and_where_to_read_why(stage: Stage) -> None:
    for engine in stage.engines.values():
        engine.die()
    await stage.until(lambda: not any(state.is_usable() for state in stage.gate.board), PROMISE_S)
    visit = await stage.ask()
    assert (visit.reply.status, visit.code) == (503, "no_unit")
    message = visit.reply.json["error"]["message"]
    assert "a is down, b is down" in message
    assert "see /units" in message
    # Whoever uses the API is not to learn where the units are.
    assert stage.engines["a"].address not in message


@played(Stage, units=1)
async def test_a_lone_unit_that_dies_and_returns_is_used_again(stage: Stage) -> None:
    crowd = stage.crowd(8, max_tokens=50)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    assert all(is_broken_off(visit) for visit in await crowd)
    await asyncio.sleep(20.0)
    stage.engines["a"].restart()
    await stage.until(stage.all_up, BACK_S)
    assert (await stage.ask()).is_answered


@played(Stage, timing=SLOW_TO_START)
async def test_a_request_that_lost_the_last_unit_waits_for_the_next_to_come_up(stage: Stage) -> None:
    stage.engines["b"].die()
    await stage.until(lambda: stage.verdict("b") is Verdict.DOWN, PROMISE_S)
    crowd = stage.crowd(8)
    await asyncio.sleep(0.5)
    stage.engines["b"].restart()
    stage.engines["a"].die()
    assert all(visit.is_answered and visit.unit == "b" for visit in await crowd)
