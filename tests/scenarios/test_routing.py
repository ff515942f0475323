"""Routing while units fail: who errs gets little, and a dead unit's prompts find a new home."""

from __future__ import annotations

import asyncio

from tests.scenarios.harness import Stage
from tests.scenarios.users import Users
from tests.sim.behaviour import Behaviour
from tests.sim.world import played

LONG = "what everybody asks about, " * 400


@played(Stage, units=3)
async def test_a_unit_that_fails_at_once_gets_no_more_requests_than_canaries(stage: Stage) -> None:
    users = Users(stage, 6)
    await asyncio.sleep(10.0)
    stage.engines["a"].behaviour = Behaviour(error_rate=1.0)
    await asyncio.sleep(5.0)
    since = stage.now
    await asyncio.sleep(60.0)
    # A unit that shows no life gets a canary every 2 s.
    assert len(stage.picks("a", since)) <= 60.0 / 2.0
    assert len(stage.picks("b", since)) > 100
    await users.leave()
    assert all(visit.is_answered for visit in users.visits)


@played(Stage, units=4)
async def test_when_the_unit_dies_that_holds_what_everybody_asks_each_request_fails_once_at_most(
    stage: Stage,
) -> None:
    async def ask(number: int) -> None:
        messages = [{"role": "system", "content": LONG}, {"role": "user", "content": f"{number}"}]
        visit = await stage.ask(messages=messages, max_tokens=8)
        assert visit.is_answered

    await ask(0)
    (owner,) = {visit.unit for visit in stage.visits}
    assert owner is not None
    for number in range(1, 5):
        await ask(number)
    assert len(stage.picks(owner)) >= 4, "it stays where it is cached"
    waiting = [asyncio.ensure_future(ask(number)) for number in range(5, 69)]
    await asyncio.sleep(0.01)
    stage.engines[owner].die()
    await asyncio.gather(*waiting)
    homes = {pick.unit for pick in stage.gate.router.picks} - {owner}
    assert len(homes) > 1, "by load, and not all to one"
    assert max(record.attempts for record in stage.gate.records) <= 2
