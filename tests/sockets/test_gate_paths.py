"""Paths of other APIs than chat: where they go, and what comes back."""

from __future__ import annotations

import orjson
import pytest

from tests.wire.client import get, post
from tests.wire.stage import live, stage
from tests.wire.unit import whole

BODY = orjson.dumps({"model": "tiny", "input": "hello"})
AUDIO = (
    b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nContent-Length: 200000\r\n\r\n" + b"\xff\xfb" * 100_000
)


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/moderations", "/invocations"])
@live
async def test_they_are_generations(path: str) -> None:
    async with stage(whole(b'{"made": 1}')) as here, here.client() as client:
        reply = await client.ask(post(BODY, path=path))
        assert (reply.status, reply.body) == (200, b'{"made": 1}')
        assert (await client.ask(get(path))).status == 405
        missing = await client.ask(post(orjson.dumps({"model": "none"}), path=path))
        assert (missing.status, missing.error["code"]) == (404, "unknown_model")
        assert [received.target for received in here.unit.requests] == [path]


@live
async def test_speech_is_passed_on_as_it_is() -> None:
    async with stage(AUDIO) as here, here.client() as client:
        reply = await client.ask(post(BODY, path="/v1/audio/speech"))
        assert (reply.status, reply.get("content-type"), len(reply.body)) == (200, "audio/mpeg", 200_000)
        assert reply.body == b"\xff\xfb" * 100_000


@live
async def test_sagemaker_pings_the_gate_and_no_unit() -> None:
    async with stage(whole()) as here, here.client() as client:
        assert (await client.ask(get("/ping"))).status == 200
        here.plane.set_drain("u0", True)
        assert (await client.ask(get("/ping"))).status == 503
        assert here.received == 0
