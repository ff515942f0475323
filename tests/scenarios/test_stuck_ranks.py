"""A rank that hangs in a collective: the unit is found by its stall, and `why` names the rank."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from cellgate.proxy.admin.views import Moment, explain
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, PROMISE_S, Stage
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour
from tests.sim.world import played

SAID = "rank 5 on node a-1 (process 4711) never entered AllReduce 1001, which 7 of 8 ranks wait in"


def report(launched: int = 1001, **more: Any) -> dict[str, Any]:
    """What an agent reports of a job of eight ranks whose sixth is behind."""
    behind = [[5, "10.0.0.2", 4711, "AllReduce", launched - 1, launched]]
    comm = {"id": "c", "size": 8, "launched": 8 * launched - 1, "behind_count": 1, "behind": behind}
    return {"addresses": ["10.0.0.2"], "ranks": [comm | {"missing": [], "failed": []}], **more}


def why(stage: Stage) -> list[str]:
    return explain(stage.gate.board.units["a"], Moment(stage.now, stage.gate.board.rules, None, None))


def told(stage: Stage) -> list[str]:
    return [event["line"] for event in stage.gate.events.last() if event["kind"] == "ranks"]


@played(Stage, followers=1, agents=True)
async def test_the_rank_that_never_entered_the_collective_is_named(stage: Stage) -> None:
    stage.engines["a"].nodes[1].report = report()
    users = Users(stage, 2)
    await asyncio.sleep(60.0)
    assert told(stage) == [], "nobody asks the ranks of a unit that works"
    stage.engines["a"].behaviour = Behaviour(wedged=True)
    await stage.until(lambda: stage.verdict("a") is Verdict.DOWN, PROMISE_S)
    await stage.until(lambda: bool(told(stage)), 5.0)
    assert told(stage) == [f"what ranks of unit a say: {SAID}"]
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
    assert len(told(stage)) <= 31
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
    assert told(stage) == []
