"""Units of several nodes: what agents and pages tell of one is believed of all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, LATENCY_S, PROMISE_S, Stage
from tests.scenarios.users import Users
from tests.sim.engine import Engine
from tests.sim.hurt import kill, stop
from tests.sim.node import AGENT_PORT, Node
from tests.sim.timing import Timing
from tests.sim.world import played

TIMING = Timing(step_s=0.1)
USERS = 8
PREFILL_S = 2.0
NODE_PERIODS_S = 3.5
"""A page is asked each second, with jitter; twice it must say that it is not well."""


@pytest.mark.parametrize(("hurt", "heal"), [(Node.die, Node.start), (Node.stop, Node.go_on)])
@played(Stage, timing=TIMING, followers=2, agents=True)
async def test_while_a_follower_s_fault_stands_no_canary_brings_the_unit_back(
    stage: Stage, hurt: Callable[[Node], None], heal: Callable[[Node], None]
) -> None:
    follower = stage.engines["a"].nodes[1]
    users = Users(stage, USERS)
    await asyncio.sleep(2.0)
    # The engine goes on answering: only the agent knows.
    hurt(follower)
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 0.3)
    down_at = stage.now
    await asyncio.sleep(30.0)
    assert stage.verdict("a") is Verdict.DOWN
    assert not stage.picks("a", down_at)
    heal(follower)
    await stage.until(stage.all_up, 5.0)
    await asyncio.sleep(5.0)
    assert stage.picks("a", down_at)
    await users.leave()
    assert stage.flips("a").count("down") == 1
    assert stage.flips("b") == ["up"]


@played(Stage, timing=TIMING, followers=2, agents=True)
async def test_a_follower_that_has_started_anew_makes_the_unit_start_anew(stage: Stage) -> None:
    await asyncio.sleep(2.0)
    stage.engines["a"].nodes[2].start()
    await asyncio.sleep(1.0)
    await stage.until(stage.all_up, BACK_S)
    assert stage.flips("a") == ["up", "starting", "up"]


@pytest.mark.parametrize("hurt", [kill, stop])
@played(Stage, timing=TIMING, followers=2, pages=True)
async def test_the_page_of_a_follower_tells_of_it_too(
    stage: Stage, hurt: Callable[[Engine, int], None]
) -> None:
    await asyncio.sleep(2.0)
    hurt(stage.engines["a"], 1)
    limit_s = NODE_PERIODS_S if hurt is kill else PROMISE_S
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, limit_s)
    stage.engines["a"].restart()
    await stage.until(stage.all_up, BACK_S)
    assert stage.flips("b") == ["up"]


@played(Stage, timing=TIMING, followers=2, agents=True)
async def test_agents_that_cannot_be_reached_take_no_unit_out(stage: Stage) -> None:
    users = Users(stage, USERS)
    await asyncio.sleep(2.0)
    for node in stage.engines["a"].nodes:
        stage.world.net.partition(f"{node.name}:{AGENT_PORT}")
    await asyncio.sleep(30.0)
    assert stage.all_up()
    heard = {place for place, standing in stage.gate.prober.agents().items() if standing}
    assert {unit for unit, _ in heard} == {"b"}
    stage.world.net.heal()
    await asyncio.sleep(5.0)
    assert all(standing for standing in stage.gate.prober.agents().values())
    await users.leave()
    assert set(stage.flips("a")) <= {"up", "suspect"}
    # Once for each node: that it goes on is no news.
    assert stage.flips("a").count("suspect") <= 3
    assert all(visit.is_answered for visit in stage.visits)


@played(Stage, timing=TIMING, followers=3, agents=True, pages=True)
async def test_a_unit_with_agents_at_rest_is_left_alone(stage: Stage) -> None:
    await asyncio.sleep(60.0)
    assert not stage.shots()


@played(Stage, timing=Timing(prefill_s=PREFILL_S), followers=1, agents=True)
async def test_a_follower_killed_under_an_agent_moves_its_requests_at_once(stage: Stage) -> None:
    crowd = stage.crowd(16)
    await asyncio.sleep(1.0)
    kill(stage.engines["a"], 1)
    killed_at = stage.now
    visits = await crowd
    assert all(visit.is_answered and visit.unit == "b" for visit in visits)
    assert max(visit.reply.event_times_s[0] for visit in visits) < killed_at + 0.3 + PREFILL_S + LATENCY_S


@pytest.mark.parametrize("units", [1, 2, 3, 4])
@played(Stage, given=("units",), timing=TIMING, followers=1, agents=True)
async def test_agents_that_all_say_gone_while_the_units_serve_empty_no_fleet(stage: Stage) -> None:
    """What they have in common is wrong, and not the units: canaries decide, and no request is refused."""
    users = Users(stage, USERS)
    await asyncio.sleep(2.0)
    # The engines go on answering.
    for engine in stage.engines.values():
        engine.nodes[1].stop()
    await asyncio.sleep(5.0)
    assert all(state.is_usable() for state in stage.gate.board)
    await asyncio.sleep(10.0)
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)


@played(Stage, units=3, timing=TIMING, followers=1, agents=True)
async def test_units_that_really_stop_all_at_once_are_out_by_their_canaries(stage: Stage) -> None:
    await asyncio.sleep(2.0)
    for engine in stage.engines.values():
        stop(engine, 1)
    await stage.until(lambda: not any(state.is_usable() for state in stage.gate.board), PROMISE_S)
    for engine in stage.engines.values():
        engine.restart()
    await stage.until(stage.all_up, BACK_S)
