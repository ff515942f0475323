"""Compressed requests: units get them plain, bombs do nothing, and what is not supported is said."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import Limits
from tests.wire.client import post
from tests.wire.stage import live, stage
from tests.wire.unit import STREAM

zstd: Any = pytest.importorskip("backports.zstd")

BODY = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi" * 1000}], "stream": True})
CODED = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "deflate": zlib.compress(BODY),
    "zstd": zstd.compress(BODY),
    "GZIP": gzip.compress(BODY),
    "identity": BODY,
}


def coded(body: bytes, coding: str = "gzip") -> bytes:
    return post(body, f"Content-Encoding: {coding}\r\n")


@pytest.mark.parametrize("coding", CODED)
@live
async def test_the_unit_gets_it_plain_and_its_model_counts(coding: str) -> None:
    async with stage(STREAM, models={"gpt": (("tiny", 1.0),)}) as here, here.client() as client:
        reply = await client.ask(coded(CODED[coding], coding))
        assert (reply.status, reply.whole) == (200, True)
        request = here.unit.requests[0]
        assert (request.body, request.get("content-encoding")) == (BODY, None)
        assert here.records.kept[0].model == "tiny"


@live
async def test_a_large_one_is_decoded_over_many_turns() -> None:
    body = orjson.dumps({"model": "tiny", "text": "".join(f"{n} {n * n}" for n in range(200_000))})
    async with stage(STREAM) as here, here.client() as client:
        for coding, whole in (("gzip", gzip.compress(body)), ("zstd", zstd.compress(body))):
            assert (await client.ask(coded(whole, coding))).status == 200
            assert here.unit.requests[-1].body == body


@pytest.mark.parametrize("coding", ["br", "gzip, zstd", "compress", "x" * 100])
@live
async def test_another_coding_gets_415_that_says_which_are_known(coding: str) -> None:
    async with stage(STREAM) as here, here.client() as client:
        reply = await client.ask(coded(b"xyz", coding))
        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        assert reply.get("accept-encoding") == "gzip, deflate, zstd"
        assert (await client.ask(post(BODY))).status == 200
        assert here.received == 1


@live
async def test_a_bomb_is_refused_and_its_memory_freed() -> None:
    async with stage(STREAM, limits=Limits(body_bytes=3_000_000)) as here:
        for size in (2_900_000, 50_000_000):
            for body, coding in ((gzip.compress(b" " * size), "gzip"), (zstd.compress(b" " * size), "zstd")):
                async with here.client() as client:
                    reply = await client.ask(coded(body, coding))
                    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
        assert here.received == 0


@live
async def test_what_is_not_what_it_says_gets_400() -> None:
    async with stage(STREAM) as here:
        for body in (BODY, CODED["gzip"][:-1], CODED["zstd"]):
            async with here.client() as client:
                reply = await client.ask(coded(body))
                assert (reply.status, reply.error["code"]) == (400, "bad_request")
        assert here.received == 0


@live
async def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async with stage(STREAM) as here, here.client() as client:
        noisy = orjson.dumps({"model": "tiny", "text": "".join(f"{n} {n * n}" for n in range(400_000))})
        client.send(coded(gzip.compress(noisy)))
        await here.until(lambda: here.gateway.memory.used > 3_000_000)
        client.abort()
        await here.until_quiet()
