"""Two gates, and a prompt that ends units."""

from __future__ import annotations

import asyncio

from tests.scenarios.gates import GatesStage
from tests.scenarios.test_poison import drink, poisoned
from tests.sim.poison import Mode
from tests.sim.world import played


@played(GatesStage, 1, 4)
async def test_what_one_gate_has_found_out_no_other_one_sends_and_who_clears_it_clears_it_for_all(
    stage: GatesStage,
) -> None:
    poison = poisoned(stage, Mode.CRASH)
    await stage.until(stage.all_up, 10.0)
    await asyncio.sleep(2.0)
    first, second = stage.alive.values()
    visit = await drink(stage, via=stage.alive_client(0))
    assert visit.code == "poison_suspected"
    killed = len(poison.kills)
    await asyncio.sleep(0.2)
    assert (await drink(stage, via=stage.alive_client(1))).code == "poison_suspected"
    assert len(poison.kills) == killed
    assert second.containment.bans.all()[0].gate
    stage.redis.forget()
    await asyncio.sleep(5.0)
    (ban,) = second.containment.bans.all()
    assert second.containment.lift(ban.fingerprint, "an operator")
    await asyncio.sleep(0.2)
    assert not first.containment.bans.all()
    poison.marker = "nothing any more"
    assert (await drink(stage, via=stage.alive_client(0))).is_answered
