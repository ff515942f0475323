"""Names of the gate's own for models, from the client's body to the unit's, and back in a header line."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import orjson

from cellgate.proxy.process.tallies import FALLBACKS, NAMED, TALLIES
from tests.wire.client import chat, get
from tests.wire.stage import Stage, live, stage
from tests.wire.unit import STREAM

SPLIT = {"gpt": (("tiny", 95.0), ("other", 5.0))}
ALIAS = {"gpt": (("tiny", 1.0),)}


def models_of(here: Stage) -> list[str]:
    """What units were asked for."""
    return [orjson.loads(request.body)["model"] for unit in here.units for request in unit.requests]


@live
async def test_an_alias_reaches_the_unit_as_its_model() -> None:
    async with stage(STREAM, models=ALIAS) as here, here.client() as client:
        before = TALLIES[NAMED, "gpt", "tiny"]
        reply = await client.ask(chat(model="gpt"))
        assert (reply.status, reply.get("x-cellgate-model")) == (200, "tiny")
        plain = await client.ask(chat(model="tiny"))
        assert (plain.status, plain.get("x-cellgate-model")) == (200, None)
        assert models_of(here) == ["tiny", "tiny"]
        assert TALLIES[NAMED, "gpt", "tiny"] == before + 1
        assert [record.model for record in here.records.kept] == ["tiny", "tiny"]


@live
async def test_sessions_stay_with_their_version() -> None:
    async with stage(STREAM, models={"gpt": (("tiny", 1.0), ("none", 1.0))}) as here, here.client() as client:
        statuses: dict[str, set[int]] = {}
        for turn in range(3):
            for number in range(20):
                name = f"s{number}"
                reply = await client.ask(chat(model="gpt", head=f"x-session-id: {name}\r\n"))
                statuses.setdefault(name, set()).add(reply.status)
                assert turn is not None
        assert all(len(seen) == 1 for seen in statuses.values())
        assert Counter(seen.copy().pop() for seen in statuses.values())[404] in range(4, 17)


@live
async def test_another_model_serves_when_none_can() -> None:
    async with stage(STREAM, fallback={"gone": ("tiny",)}) as here, here.client() as client:
        before = TALLIES[FALLBACKS, "gone", "tiny"]
        reply = await client.ask(chat(model="gone"))
        assert (reply.status, reply.whole) == (200, True)
        assert reply.get("x-cellgate-model") == "tiny"
        assert reply.get("x-cellgate-fallback-from") == "gone"
        assert models_of(here) == ["tiny"]
        assert TALLIES[FALLBACKS, "gone", "tiny"] == before + 1


@live
async def test_without_a_model_left_the_client_gets_the_last_refusal() -> None:
    async with stage(STREAM, fallback={"gone": ("also gone",)}) as here, here.client() as client:
        reply = await client.ask(chat(model="gone"))
        assert (reply.status, reply.error["code"]) == (404, "unknown_model")
        assert "also gone" in reply.error["message"]
        assert here.received == 0


@live
async def test_names_are_listed_and_shown() -> None:
    async with stage(STREAM, models=ALIAS) as here, here.client() as client:
        listed = orjson.loads((await client.ask(get("/v1/models"))).body)["data"]
        assert [card["id"] for card in listed] == ["tiny", "gpt"]
        shown = await client.ask(get("/v1/models/gpt"))
        assert (shown.status, orjson.loads(shown.body)["id"]) == (200, "gpt")
        assert here.received == 0


@live
async def test_new_weights_count_from_the_next_request_on() -> None:
    async with stage(STREAM, models=ALIAS) as here, here.client() as client:
        assert (await client.ask(chat(model="gpt"))).status == 200
        here.gateway.take_settings(replace(here.gateway.settings, models={}))
        assert (await client.ask(chat(model="gpt"))).status == 404
