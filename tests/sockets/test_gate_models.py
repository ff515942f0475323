"""Names of the gate's own for models, from the client's body to the unit's, and back in a header line."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import orjson

from cellgate.proxy.observe.counters import FALLBACKS, NAMED, TALLIES
from cellgate.router.nouns import Fleet, Models
from tests.unit.request.test_form_model import field, file, form, lines
from tests.wire.client import chat, get, post
from tests.wire.stage import Stage, live, stage
from tests.wire.unit import STREAM, whole

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


def reports(here: Stage, *models: str) -> None:
    """Each unit lists its model; the configuration names none."""
    units = [replace(state.unit, models=()) for state in here.plane.board]
    here.plane.configure(Fleet(units=tuple(units)))
    for unit, model in zip(units, models, strict=True):
        here.plane.board.set_models(Models(unit.name, (model,), here.plane.board.units[unit.name].case.since))


@live
async def test_a_name_that_no_unit_lists_goes_to_units_that_are_all_alike_as_it_is() -> None:
    """llama.cpp, for one, serves any name; and what no name stands for, the engine says."""
    async with stage(STREAM, STREAM) as here, here.client() as client:
        reports(here, "tiny", "tiny")
        for name in ("gpt-4o", ""):
            assert (await client.ask(chat(model=name))).status == 200
        assert models_of(here) == ["gpt-4o", ""]


@live
async def test_a_name_without_a_tag_means_the_latest_of_several_models() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        reports(here, "llama3:latest", "qwen:7b")
        for _ in range(5):
            assert (await client.ask(chat(model="llama3"))).status == 200
        assert [len(unit.requests) for unit in here.units] == [5, 0]
        reply = await client.ask(chat(model="qwen"))
        assert (reply.status, reply.error["code"]) == (404, "unknown_model")


def kinds(here: Stage) -> None:
    """The first unit serves text, the second one audio."""
    units = [state.unit for state in here.plane.board]
    served = [replace(unit, models=models) for unit, models in zip(units, ROLES, strict=True)]
    here.plane.configure(Fleet(units=tuple(served)))


ROLES = (("org/llama", "chat"), ("whisper", "ensemble"))


def a_form(model: str, *, first: bool) -> bytes:
    """A request for a transcription."""
    parts = [field("model", model.encode()), file(b"\xff\r\n" * 50_000)]
    body = form(parts if first else parts[::-1])
    kind = lines()[0].decode().replace("content-type", "Content-Type")
    head = (
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: gate\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@live
async def test_a_form_goes_to_the_unit_that_serves_its_model() -> None:
    async with stage(whole(), whole(), models={"gpt-audio": (("whisper", 1.0),)}) as here:
        kinds(here)
        async with here.client() as client:
            for number in range(20):
                asked = a_form("whisper", first=number % 2 == 0)
                assert (await client.ask(asked)).status == 200
                assert asked.endswith(here.units[1].requests[-1].body)
            reply = await client.ask(a_form("gpt-audio", first=False))
            assert (reply.status, reply.get("x-cellgate-model")) == (200, "whisper")
            assert a_form("whisper", first=False).endswith(here.units[1].requests[-1].body)
            reply = await client.ask(a_form("none", first=True))
            assert (reply.status, reply.error["code"]) == (404, "unknown_model")
        assert [len(unit.requests) for unit in here.units] == [0, 21]
        assert [record.model for record in here.records.kept] == ["whisper"] * 21 + ["none"]


@live
async def test_json_goes_by_its_model_where_most_send_a_form() -> None:
    async with stage(whole(), whole()) as here:
        kinds(here)
        async with here.client() as client:
            for path in ("/v1/images/edits", "/v1/audio/transcriptions"):
                for _ in range(4):
                    assert (await client.ask(post(b'{"model": "whisper"}', path=path))).status == 200
        assert [len(unit.requests) for unit in here.units] == [0, 8]


@live
async def test_a_path_that_names_a_model_goes_to_a_unit_that_serves_it() -> None:
    async with stage(whole(), whole(), models={"gpt": (("ensemble", 1.0),)}) as here:
        kinds(here)
        async with here.client() as client:
            for _ in range(5):
                for path in (
                    "/v1/models/org/llama",
                    "/v1/models/org%2Fllama",
                    "/v2/models/org%2fllama/ready",
                ):
                    assert (await client.ask(get(path))).status == 200
                for path in ("/v1/models/whisper?x=1", "/v2/models/ensemble/versions/1/config"):
                    assert (await client.ask(get(path))).status == 200
                assert (await client.ask(post(b"{}", path="/v2/models/ensemble/infer"))).status == 200
            assert {request.target for request in here.units[0].requests} == {
                *("/v1/models/org/llama", "/v1/models/org%2Fllama", "/v2/models/org%2fllama/ready")
            }
            assert [len(unit.requests) for unit in here.units] == [15, 15]
            reply = await client.ask(post(b'{"model": "org/llama"}', path="/v2/models/gpt/generate?a=b"))
            assert reply.get("x-cellgate-model") == "ensemble"
            assert here.units[1].requests[-1].target == "/v2/models/ensemble/generate?a=b"


@live
async def test_a_path_with_a_model_that_nobody_lists_is_for_any_unit() -> None:
    async with stage(whole(status="404 Not Found")) as here, here.client() as client:
        assert (await client.ask(get("/v1/models/none"))).status == 404
        assert here.received == 1
