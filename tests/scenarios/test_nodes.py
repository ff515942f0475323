"""Units of several nodes: what agents and pages tell of one is believed of all."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from cellgate.proxy.admin.views import Moment, explain
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, LATENCY_S, PROMISE_S, Stage
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour
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


# -- what agents say of software -----------------------------------------------------------------------

STACK = {"program": "vllm", "driver nvidia": "570", "flag --max-model-len": "8192"}
TOLD_S = 40.0


def stage_of(units: int) -> Stage:
    stage = Stage(units=units, followers=1, agents=True)
    for engine in stage.engines.values():
        for node in engine.nodes:
            node.report = {"stack": STACK}
    return stage


@played(stage_of, 3)
async def test_a_node_with_another_driver_is_said_and_stays_in_rotation(stage: Stage) -> None:
    stage.engines["b"].nodes[1].report = {"stack": STACK | {"driver nvidia": "550"}}
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(TOLD_S)
    assert len(stage.told("stack_drift")) == 1
    assert "unit b" in stage.told("stack_drift")[0]["line"]
    assert "has driver nvidia 550" in stage.told("stack_drift")[0]["line"]
    state = stage.gate.board.units["b"]
    why = explain(state, Moment(stage.now, stage.gate.board.rules, None, None))
    assert any("different software: b-1 has driver nvidia 550" in line for line in why), why
    stage.engines["b"].nodes[1].report = {"stack": STACK}
    await asyncio.sleep(TOLD_S)
    assert stage.gate.board.units["b"].facts.mixed == ""
    assert stage.flips("b") == ["up"]


@played(stage_of, 2)
async def test_an_agent_that_tells_something_else_each_time_takes_no_unit_out(stage: Stage) -> None:
    versions = map(str, itertools.count())

    async def lie() -> None:
        while True:
            stage.engines["a"].nodes[1].report = {"stack": STACK | {"driver nvidia": next(versions)}}
            await asyncio.sleep(5.0)

    lying = asyncio.ensure_future(lie())
    await asyncio.sleep(600.0)
    lying.cancel()
    assert stage.verdict("a") is Verdict.UP
    assert len(stage.told("stack_drift")) <= 20
    assert stage.flips("a") == ["up"]


@played(stage_of, 3)
async def test_a_unit_with_another_flag_is_an_event_of_its_cell(stage: Stage) -> None:
    for node in stage.engines["b"].nodes:
        node.report = {"stack": STACK | {"flag --max-model-len": "4096"}}
    await asyncio.sleep(TOLD_S)
    assert [("b has --max-model-len 4096" in event["line"]) for event in stage.told("stack_drift")] == [True]
    assert all(stage.flips(unit) == ["up"] for unit in stage.engines)


# -- what agents say of ranks --------------------------------------------------------------------------

SAID = "rank 5 on node a-1 (process 4711) never entered AllReduce 1001, which 7 of 8 ranks wait in"


def report(launched: int = 1001, **more: Any) -> dict[str, Any]:
    """What an agent reports of a job of eight ranks whose sixth is behind."""
    behind = [[5, "10.0.0.2", 4711, "AllReduce", launched - 1, launched]]
    comm = {"id": "c", "size": 8, "launched": 8 * launched - 1, "behind_count": 1, "behind": behind}
    return {"addresses": ["10.0.0.2"], "ranks": [comm | {"missing": [], "failed": []}], **more}


def why(stage: Stage) -> list[str]:
    return explain(stage.gate.board.units["a"], Moment(stage.now, stage.gate.board.rules, None, None))


@played(Stage, followers=1, agents=True)
async def test_the_rank_that_never_entered_the_collective_is_named(stage: Stage) -> None:
    stage.engines["a"].nodes[1].report = report()
    users = Users(stage, 2)
    await asyncio.sleep(60.0)
    assert stage.told("ranks") == [], "nobody asks the ranks of a unit that works"
    stage.engines["a"].behaviour = Behaviour(wedged=True)
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    await stage.until(lambda: bool(stage.told("ranks")), 5.0)
    assert [event["line"] for event in stage.told("ranks")] == [f"what ranks of unit a say: {SAID}"]
    assert any(SAID in line for line in why(stage)), why(stage)
    stage.engines["a"].behaviour = Behaviour()
    await stage.until(stage.all_up, BACK_S)
    await asyncio.sleep(100.0)
    assert stage.gate.board.units["a"].facts.ranks == ()
    await users.leave()


@pytest.mark.nightly
@played(Stage, followers=1, agents=True)
async def test_agents_that_lie_change_no_verdict(stage: Stage) -> None:
    """Of a unit that works they say all the time that its ranks and links fail, each time in other words."""
    numbers = itertools.count(1)

    async def lie() -> None:
        while True:
            n = next(numbers)
            for node in stage.engines["a"].nodes:
                node.report = report(n, counters={f"mlx5_{n % 9}/1 link_downed": n * n})
            await asyncio.sleep(1.0)

    lying = asyncio.ensure_future(lie())
    users = Users(stage, 4)
    await asyncio.sleep(300.0)
    lying.cancel()
    await users.leave()
    assert len(stage.told("ranks")) <= 31
    assert stage.flips("a") == ["up"]


@played(Stage, followers=1, agents=True)
async def test_nonsense_of_an_agent_harms_nobody(stage: Stage) -> None:
    odd: tuple[dict[str, Any], ...] = (
        {"ranks": [{}]},
        {"ranks": {"behind": 1}, "stack": [1], "counters": {"x": "y"}, "addresses": 7},
        {"ranks": [{"id": 1, "size": "8", "behind": "all"}], "counters": {"a": 10**400}},
    )
    for said in odd:
        stage.engines["a"].nodes[1].report = said
        stage.engines["a"].behaviour = Behaviour(wedged=True)
        await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, 20.0)
        await asyncio.sleep(10.0)
        stage.engines["a"].behaviour = Behaviour()
        await stage.until(stage.all_up, BACK_S)
    assert stage.told("ranks") == []
