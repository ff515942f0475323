"""Stored responses, conversations, files and batches: who may ask for them, and where they are found."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import KeySettings
from tests.sockets.test_gate_keys import bearer, line, mounted
from tests.wire.client import Client, get, post
from tests.wire.stage import Stage, stage
from tests.wire.unit import Play, Received, whole

ALICE, BOB = bearer("sk-alice"), bearer("sk-bob")
COUNT = itertools.count()


def storing(kept: dict[str, str]) -> Play:
    """A unit that keeps what it makes, under a name of its own or the one that its client wants."""

    async def play(request: Received) -> None:
        path = request.target.strip("/").split("/")
        if request.method == "POST" and path[-1] != "cancel":
            request.write(made(path[-1], orjson.loads(request.body), kept))
            return
        one = path[2] if len(path) > 2 else ""
        found = kept.get(one) if one else f"all of {sorted(kept)}"
        if request.method == "DELETE":
            kept.pop(one, None)
        body = {"id": one, "object": "response", "text": found}
        request.write(whole(orjson.dumps(body)) if found else whole(b"{}", "404 Not Found"))

    return play


def made(kind: str, body: dict[str, Any], kept: dict[str, str]) -> bytes:
    if (before := body.get("previous_response_id")) is not None and before not in kept:
        return whole(b"{}", "404 Not Found")
    prefix = {"responses": "resp", "batches": "batch", "files": "file"}[kind]
    name = body.get("request_id") or f"{prefix}_{next(COUNT):04x}5f0c7e1b9a8d4c3e8f7a6b5c4d3e"
    kept[name] = f"{kept.get(before or '', '')} {body['input']}".strip()
    status = "queued" if body.get("background") else "completed"
    output = [] if body.get("background") else [{"content": [{"text": kept[name]}]}]
    answer = {"id": name, "object": "response", "status": status, "output": output}
    return whole(orjson.dumps(answer | {"background": body.get("background", False)}))


@asynccontextmanager
async def keeping(tmp_path: Path | None = None, units: int = 3, **options: Any) -> AsyncIterator[Stage]:
    """A gate before units that keep; with keys of Alice and Bob, if there is a folder for them."""
    if tmp_path is not None:
        mounted(tmp_path, "one", line(), line("bob", "sk-bob"))
        options["keys"] = KeySettings(str(tmp_path / "data" / "keys.jsonl"), on_revoke="finish")
    async with stage(*(storing({}) for _ in range(units)), **options) as here:
        yield here


async def make(client: Client, head: str = "", path: str = "/v1/responses", **body: Any) -> str:
    """The id of a new response, or what was refused instead."""
    reply = await client.ask(post(orjson.dumps({"model": "tiny", "input": "hi", **body}), head, path))
    return reply.json["id"] if reply.status == 200 else f"{reply.status} {reply.error['code']}"


Attack = Callable[[str, str], bytes]


@pytest.mark.parametrize(
    "attack",
    [
        lambda one, head: get(f"/v1/responses/{one}", head),
        lambda one, head: get(f"/v1/%72esponses/{one}", head),
        lambda one, head: get(f"/v1/responses/{one.replace('resp_', 'resp%5F')}", head),
        lambda one, head: get(f"/v1/responses/{one}/", head),
        lambda one, head: get(f"/v1/responses/{one}/input_items", head),
        lambda one, head: get(f"/v1/responses/{one}", head, "DELETE"),
        lambda one, head: post(b"{}", head, f"/v1/responses/{one}/cancel"),
        lambda one, head: post(
            orjson.dumps({"model": "tiny", "input": "say it", "previous_response_id": one}),
            head,
            "/v1/responses",
        ),
        lambda one, head: post(
            orjson.dumps({"model": "tiny", "input": "say it", "conversation": {"id": one}}),
            head,
            "/v1/responses",
        ),
    ],
)
@pytest.mark.parametrize("units", [1, 3])
async def test_a_key_reaches_nothing_that_another_tenant_made(
    tmp_path: Path, attack: Attack, units: int
) -> None:
    """It reads, cancels, deletes, goes on from another's, by any spelling: 404, as for what nobody made."""
    async with keeping(tmp_path, units, pass_unlisted=True) as here, here.client() as client:
        mine = await make(client, ALICE, input="a secret")
        before = here.received
        stolen = await client.ask(attack(mine, BOB))
        nobodys = await client.ask(attack("resp_nobody", BOB))
        assert (stolen.status, nobodys.status, here.received) == (404, 404, before)
        assert stolen.body.replace(mine.encode(), b"resp_nobody") == nobodys.body
        reply = await client.ask(get(f"/v1/responses/{mine}", ALICE))
        assert (reply.status, reply.json["text"]) == (200, "a secret")


async def test_a_name_that_a_client_chooses_takes_no_others_response(tmp_path: Path) -> None:
    async with keeping(tmp_path) as here, here.client() as client:
        mine = await make(client, ALICE, input="mine")
        for _ in range(3):
            assert await make(client, BOB, input="bob's", request_id=mine) == mine
        reply = await client.ask(get(f"/v1/responses/{mine}", ALICE))
        assert (reply.status, reply.json["text"]) == (200, "mine")
        assert "resp_" in await make(client, ALICE, previous_response_id=mine)


async def test_a_job_in_the_background_is_made_once_and_found(tmp_path: Path) -> None:
    async with keeping(tmp_path) as here, here.client() as client:
        jobs = [await make(client, ALICE, background=True) for _ in range(6)]
        assert here.received == 6
        for job in jobs:
            assert (await client.ask(get(f"/v1/responses/{job}", ALICE))).status == 200
            assert (await client.ask(post(b"{}", ALICE, f"/v1/responses/{job}/cancel"))).status == 200


async def test_files_and_batches_are_asked_of_the_unit_that_made_them_and_no_list_shows_anothers(
    tmp_path: Path,
) -> None:
    async with keeping(tmp_path, pass_unlisted=True) as here, here.client() as client:
        for kind in ("files", "batches"):
            made = [await make(client, ALICE, f"/v1/{kind}", input="a secret") for _ in range(4)]
            for one in made:
                assert (await client.ask(get(f"/v1/{kind}/{one}", ALICE))).json["text"] == "a secret"
                assert (await client.ask(get(f"/v1/{kind}/{one}/content", BOB))).status == 404
                refused = await make(client, BOB, "/v1/batches", input_file_id=one)
                assert refused == "404 response_gone"
            assert (await client.ask(get(f"/v1/{kind}", BOB))).status == 404


async def test_without_keys_units_are_asked_for_what_the_gate_has_forgotten_and_no_more_than_eight(
    tmp_path: Path,
) -> None:
    async with keeping(units=10) as here, here.client() as client:
        mine = await make(client)
        chosen = await make(client, request_id="resp_1")
        here.plane.stored.__init__(here.plane.board)  # type: ignore[misc]
        before = here.received
        assert (await client.ask(get(f"/v1/responses/{mine}"))).status == 200
        assert here.received <= before + 9
        # What a client has named could be any other's.
        assert (await client.ask(get(f"/v1/responses/{chosen}"))).status == 404
        before = here.received
        nobodys = mine.replace("5f0c", "f0c5")
        assert (await client.ask(get(f"/v1/responses/{nobodys}"))).status == 404
        assert here.received == before + 8
        assert await make(client, previous_response_id=mine) != "404 response_gone"
