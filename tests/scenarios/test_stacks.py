"""Nodes and units whose software differs: it is said, and nothing else comes of it."""

from __future__ import annotations

import asyncio
import itertools

from cellgate.proxy.admin.views import Moment, explain
from cellgate.router.nouns import Verdict
from tests.scenarios.harness import BACK_S, Stage
from tests.sim.world import played

STACK = {"program": "vllm", "driver nvidia": "570", "flag --max-model-len": "8192"}
TOLD_S = 40.0


def told(stage: Stage) -> list[str]:
    return [event["line"] for event in stage.gate.events.last() if event["kind"] == "stack_drift"]


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
    assert len(told(stage)) == 1
    assert "unit b" in told(stage)[0]
    assert "has driver nvidia 550" in told(stage)[0]
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
    assert len(told(stage)) <= 20
    assert stage.flips("a") == ["up"]
