"""What autoscalers are told, of one process and of workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cellgate.router.queue import FairRules
from tests.scenarios.harness import Stage
from tests.scenarios.kinds import HAS_WORKERS, crew
from tests.sim.timing import Timing
from tests.sim.world import played

GOAL_S = 2.0


async def pool(stage: Any) -> dict[str, Any]:
    view = await stage.gate.plane.extras["scaling"].view(GOAL_S)
    (only,) = view["pools"]
    assert view["desired_units"] == only["desired_units"]
    found: dict[str, Any] = only
    return found


@pytest.mark.parametrize(
    "kind", [Stage, pytest.param(crew, marks=HAS_WORKERS)], ids=["one process", "workers"]
)
@played(
    lambda kind: kind(units=2, max_in_flight=4, queue=FairRules(limit=100), timing=Timing(step_s=0.05)),
    given=("kind",),
)
async def test_full_units_ask_for_one_more_and_idle_ones_for_one_fewer(stage: Any) -> None:
    assert (await pool(stage))["desired_units"] == 2, "nothing is known yet"
    for _ in range(3):
        crowd = stage.crowd(40, max_tokens=40)
        await asyncio.sleep(1.0)
        full = await pool(stage)
        assert all(visit.is_answered for visit in await crowd)
    assert full["waiting"] > 10
    assert full["saturation"] > 0.5
    await asyncio.sleep(21.0)
    found = await pool(stage)
    waits = found["wait_p90_s"]
    assert waits["now"] > GOAL_S
    assert waits["more"] < waits["now"] < waits["fewer"]
    assert found["desired_units"] == 3
    await asyncio.sleep(400.0)
    for _ in range(40):
        assert all(visit.is_answered for visit in await stage.crowd(1, max_tokens=2))
    await asyncio.sleep(21.0)
    found = await pool(stage)
    assert found["desired_units"] == 1
    assert found["least_valued"]["unit"] in stage.engines
