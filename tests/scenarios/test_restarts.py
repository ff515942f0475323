"""Leaders that restart faster than anybody looks: no process gets anybody before it has answered a canary.

That is checked after every scenario (see harness.py); here are those in which it is hard.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scenarios.harness import BACK_S, Stage
from tests.scenarios.seeds import seeds
from tests.scenarios.users import Users
from tests.sim.engine import PORT
from tests.sim.timing import Timing
from tests.sim.world import played

TIMING = Timing(step_s=0.05, warm_up_s=2.0)
GAPS_S = (0.0, 0.3)


@pytest.mark.parametrize("seed", seeds(range(3)))
@pytest.mark.parametrize("gap_s", GAPS_S)
@pytest.mark.parametrize("users", [0, 8])
@pytest.mark.parametrize("options", [{}, {"agents": True, "followers": 1}, {"is_blind": True}], ids=str)
def test_a_leader_that_starts_anew_between_two_probes_gets_nobody_before_a_canary(
    options: dict[str, Any], users: int, gap_s: float, seed: int
) -> None:
    stage = Stage(seed, timing=TIMING, **options)
    engine = stage.engines["a"]

    async def scenario() -> None:
        crowd = Users(stage, users)
        await asyncio.sleep(stage.rng.uniform(3.0, 5.0))
        await _restart(stage, gap_s)
        began_at = stage.now
        # Whoever comes in the next two seconds, and had not been there before, is answered.
        asks = []
        for _ in range(40):
            asks.append(asyncio.ensure_future(stage.ask(max_tokens=2)))
            await asyncio.sleep(0.05)
        assert all(visit.is_answered for visit in await asyncio.gather(*asks))
        await stage.until(stage.all_up, BACK_S)
        await crowd.leave()
        served = [one for record in engine.served.values() for one in record]
        first = min((one.arrived_s for one in served if one.arrived_s > began_at), default=began_at)
        canaries = [one.arrived_s for one in engine.canaries if one.arrived_s > began_at]
        assert first == began_at or min(canaries) < first

    stage.play(scenario())
    assert stage.flips("b") == ["up"]


@pytest.mark.parametrize("seed", seeds(range(3)))
@played(Stage, given=("seed",), timing=TIMING)
async def test_the_same_without_any_connection_that_could_break(stage: Stage) -> None:
    engine = stage.engines["a"]
    await asyncio.sleep(stage.rng.uniform(3.0, 5.0))
    for transport in list(stage.world.net.transports):
        if transport.sock.local == (engine.host, PORT):
            transport.close()
    await asyncio.sleep(0.1)
    engine.restart()
    assert all(visit.is_answered for visit in await stage.crowd(16))
    await stage.until(stage.all_up, BACK_S)


async def _restart(stage: Stage, gap_s: float) -> None:
    engine = stage.engines["a"]
    engine.die()
    if gap_s:
        await asyncio.sleep(gap_s)
    engine.start()
    for node in engine.nodes:
        node.start()
