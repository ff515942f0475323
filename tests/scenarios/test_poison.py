"""A query of death: it costs two or three units, no neighbour anything, and then it is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.scenarios.harness import Stage
from tests.scenarios.users import Users
from tests.scenarios.visit import Visit, chat, encode
from tests.sim.poison import MARKER, Mode, Poison

DEATHS_MAX = 3
END_S = 10.0
WEDGED_END_S = 25.0


def poisoned(stage: Stage, mode: Mode) -> Poison:
    """The stage, its engines mortal."""
    poison = Poison(mode)
    for engine in stage.engines.values():
        engine.poison = poison
    return poison


async def drink(stage: Stage, **fields: Any) -> Visit:
    """One client asks for it."""
    body = chat(f"{MARKER} for you", **fields)
    visit = stage._visit("/v1/chat/completions", body)
    headers = {"x-request-id": visit.request_id}
    visit.reply = await stage.client.request("POST", visit.path, encode(body), headers)
    return visit


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name.lower())
def test_poison_costs_three_units_at_most_and_its_neighbours_nothing(mode: Mode, stream: bool) -> None:
    stage = Stage(units=4)
    poison = poisoned(stage, mode)

    async def scenario() -> None:
        users = Users(stage, 12)
        await asyncio.sleep(5.0)
        began_at = stage.now
        visit = await drink(stage, stream=stream, max_tokens=200)
        assert stage.now - began_at < (WEDGED_END_S if mode is Mode.WEDGE else END_S)
        # An engine that says what it died of says it before it is seen to be dead.
        assert visit.code == "poison_suspected" or (mode is Mode.FATAL and visit.code is not None)
        await asyncio.sleep(2.0)
        killed = len(poison.kills)
        again_at = stage.now
        again = await drink(stage, stream=not stream)
        assert (again.reply.status, again.code) == (502, "poison_suspected")
        assert stage.now - again_at < 0.1
        assert len(poison.kills) == killed
        await asyncio.sleep(5.0)
        await users.leave()
        lost = [each for each in users.visits if not each.is_answered]
        assert not lost, [(each.reply.status, each.code) for each in lost]

    stage.play(scenario())
    assert 1 < len(poison.kills) <= DEATHS_MAX, poison.kills
