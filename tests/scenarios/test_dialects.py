"""Streams of `/v1/messages` and `/v1/responses` that a unit breaks: another one continues them.

That each answer says what one unit alone would have said is looked at after every scenario (see visit.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.scenarios.harness import BACK_S, MESSAGES, RESPONSES, Stage
from tests.scenarios.test_continuation import on, results
from tests.scenarios.visit import Visit
from tests.sim.behaviour import Behaviour
from tests.sim.conversation import End
from tests.sim.world import played

PATHS = {"messages": MESSAGES, "responses": RESPONSES}
dialects = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@dialects
def test_where_the_engine_converts_differently_only_a_deterministic_answer_is_resumed(path: str) -> None:
    stage = Stage(units=2)

    async def scenario(**fields: Any) -> list[Visit]:
        for engine in stage.engines.values():
            engine.behaviour = Behaviour(template=lambda text: text + " more")
        crowd = stage.crowd(8, max_tokens=40, path=path, **fields)
        await asyncio.sleep(0.5)
        stage.engines["a"].die()
        return on("a", await crowd)

    async def both() -> None:
        broken = await scenario()
        assert {visit.code for visit in broken} == {"truncated"}
        assert all(visit.reply.end is End.TRUNCATED for visit in broken)
        stage.engines["a"].restart()
        await asyncio.sleep(BACK_S)
        assert all(visit.is_answered for visit in await scenario(temperature=0))

    stage.play(both())
    assert results(stage) == {"refused": 4, "continued": 4}


@dialects
@played(Stage, units=1)
async def test_errors_have_the_shape_of_their_api(stage: Stage, path: str) -> None:
    crowd = stage.crowd(2, max_tokens=40, path=path)
    await asyncio.sleep(0.5)
    stage.engines["a"].die()
    for visit in await crowd:
        last = orjson.loads(visit.reply.events[-1])
        numbers = [orjson.loads(event).get("sequence_number") for event in visit.reply.events]
        assert (last["type"], last["error"]["code"]) == ("error", "truncated")
        if path == RESPONSES:
            assert numbers == list(range(len(numbers)))
            assert (last["code"], last["param"]) == ("truncated", None)
        else:
            assert last["error"]["type"] == "api_error"
    refused = await stage.ask(path=path)
    assert refused.reply.status in (502, 503, 504)
    assert refused.reply.json.get("type") == ("error" if path == MESSAGES else None)
