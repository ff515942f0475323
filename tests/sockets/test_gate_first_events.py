"""First events of any size: an answer begins with what its client has sent, or with log probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.settings import Limits
from tests.wire.client import post
from tests.wire.stage import live, simulated, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, Received, chunk

SEGMENT = 1448
TEXT = "Why is the sky blue? "


def data(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def typed(name: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\n" % name.encode() + data({"type": name, **document})


def chat(size: int) -> bytes:
    """As vLLM answers `echo` with log probabilities: all in the first event."""
    tokens = [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20}]
    many = tokens * (size // len(orjson.dumps(tokens[0])) + 1)
    choice = {"index": 0, "delta": {"content": TEXT}, "logprobs": {"content": many}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    return data({"id": "a", "choices": [choice]}) + data({"id": "a", "choices": [end]}) + b"data: [DONE]\n\n"


def completions(size: int) -> bytes:
    choice = {"index": 0, "text": TEXT * (size // len(TEXT) + 1), "finish_reason": None}
    end = {"index": 0, "text": "", "finish_reason": "stop"}
    return data({"id": "a", "choices": [choice]}) + data({"id": "a", "choices": [end]}) + b"data: [DONE]\n\n"


def responses(size: int) -> bytes:
    response = {"id": "resp_1", "error": None, "instructions": TEXT * (size // len(TEXT) // 2 + 1)}
    return (
        typed("response.created", {"response": response})
        + typed("response.in_progress", {"response": response})
        + typed("response.output_item.added", {"item": {"type": "message", "content": []}})
        + typed("response.output_text.delta", {"delta": "a"})
        + typed("response.completed", {"response": response})
    )


def messages(size: int) -> bytes:
    message = {
        "id": "msg_1",
        "metadata": {"said": TEXT * (size // len(TEXT) + 1)},
        "usage": {"input_tokens": 1},
    }
    return (
        typed("message_start", {"message": message})
        + typed("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}})
        + typed("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "a"}})
        + typed("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}})
        + typed("message_stop", {})
    )


DIALECTS = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}
ASKED = orjson.dumps({"model": "tiny", "stream": True, "messages": [], "prompt": "a", "input": "a"})


def in_segments(body: bytes) -> bytes:
    pieces = [body[at : at + SEGMENT] for at in range(0, len(body), SEGMENT)]
    return SSE_HEAD + b"".join(map(chunk, pieces)) + LAST_CHUNK


@pytest.mark.parametrize("size", [64 << 10, 600_000, (1 << 20) + 1, 3 << 20, 8 << 20])
@pytest.mark.parametrize("path", DIALECTS)
@live
async def test_a_large_first_event_comes_whole_from_the_first_unit(path: str, size: int) -> None:
    body = DIALECTS[path](size)
    for script in (in_segments(body), SSE_HEAD + chunk(body) + LAST_CHUNK):
        async with stage(script, script) as here, here.client() as client:
            reply = await client.ask(post(ASKED, path=path))
            assert (reply.status, reply.whole, reply.body == body) == (200, True, True)
            assert here.received == 1
        assert here.outcomes == ["ok"]


@pytest.mark.parametrize("path", DIALECTS)
@live
async def test_without_memory_for_it_a_first_event_is_passed_on_as_it_comes(path: str) -> None:
    body = DIALECTS[path](3 << 20)
    async with stage(in_segments(body), limits=Limits(bodies_bytes=1 << 20)) as here, here.client() as client:
        reply = await client.ask(post(ASKED, path=path))
        assert (reply.status, reply.whole, reply.body == body) == (200, True, True)


@live
async def test_no_answer_holds_more_than_one_body_may() -> None:
    """A unit that never ends its first event does not use up the memory of others."""
    begun = SSE_HEAD + b"".join(map(chunk, [b"data: " + b"x" * 100_000] + [b"x" * 100_000] * 40))
    async with stage(begun, limits=Limits(body_bytes=2 << 20)) as here, here.client() as client:
        client.send(post(ASKED))
        assert (await client.reader.readexactly(12)) == b"HTTP/1.1 200"
        assert 1 << 19 < here.gateway.memory.used <= 2 << 20


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@simulated
async def test_a_large_first_event_that_takes_its_time_is_on_its_way(path: str) -> None:
    """What an answer begins with may repeat the request: over a slow network it is no idle event yet."""
    body = DIALECTS[path](100_000)

    async def play(request: Received) -> None:
        request.write(SSE_HEAD)
        for at in range(0, len(body), 10_000):
            request.write(chunk(body[at : at + 10_000]))
            await asyncio.sleep(0.4)
        request.write(LAST_CHUNK)

    async with stage(play, play) as here, here.client() as client:
        reply = await client.ask(post(ASKED, path=path))
        assert (reply.status, reply.whole, reply.body == body, here.received) == (200, True, True, 1)
