"""The OpenAI SDK through the gate before two simulated units: what it gets, and what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, AsyncStream, OpenAI
from openai.types.chat import ChatCompletionChunk

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually

MODEL = "sim"
MESSAGES: Any = [{"role": "user", "content": "Tell me about gates."}]
TOKENS = 24
AT_ONCE = 6
"""Requests that a unit takes at once."""


@pytest.fixture(scope="module")
def units() -> Iterator[list[SimUnit]]:
    started = SimUnit.start_all(["a", "b"], followers=1, step_ms=2)
    yield started
    for unit in started:
        unit.stop()


@pytest.fixture(scope="module")
def gate(units: list[SimUnit], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GateProcess]:
    process = GateProcess(tmp_path_factory.mktemp("gate"), {}, queue={"limit": 0})
    process.configure({unit.name: unit.url for unit in units}, max_in_flight=AT_ONCE)
    with process:
        process.until_up("a", "b")
        yield process


@pytest.fixture(scope="module")
def client(gate: GateProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0, timeout=10.0) as made:
        yield made


@pytest.fixture(scope="module")
def text(units: list[SimUnit]) -> str:
    """What a unit says when it is asked without a gate in between."""
    with OpenAI(base_url=f"{units[0].url}/v1", api_key="x", max_retries=0, timeout=10.0) as direct:
        reply = direct.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=TOKENS)
    return reply.choices[0].message.content or ""


def test_chat_is_what_the_unit_says_whole_and_token_by_token(client: OpenAI, text: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOKENS}
    for _ in range(4):
        reply = client.chat.completions.create(**asked)
        assert reply.choices[0].message.content == text
        assert reply.usage is not None
        assert reply.usage.completion_tokens == TOKENS
        chunks = list(
            client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        assert said(chunks) == text
        assert len(chunks) > TOKENS / 2
        finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
        assert finishes == ["length"]
        assert chunks[-1].usage is not None


def said(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_completions_streamed_and_not(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="Once", max_tokens=TOKENS)
    parts = list(client.completions.create(model=MODEL, prompt="Once", max_tokens=TOKENS, stream=True))
    assert whole.choices[0].text
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text


def test_embeddings(client: OpenAI) -> None:
    reply = client.embeddings.create(model=MODEL, input=["one", "two"], dimensions=8)
    assert [len(row.embedding) for row in reply.data] == [8, 8]
    assert reply.data[0].embedding != reply.data[1].embedding


@pytest.mark.parametrize(
    ("path", "body", "raised", "status", "code"),
    [
        ("/chat/completions", {"model": MODEL, "messages": []}, openai.BadRequestError, 400, None),
        ("/chat/completions", ["no", "object"], openai.BadRequestError, 400, "bad_json"),
        ("/load_lora_adapter", {}, openai.PermissionDeniedError, 403, "denied"),
        ("/images/memories", {}, openai.NotFoundError, 404, "unknown_path"),
    ],
    ids=["by the unit", "by the gate", "administration", "no path"],
)
def test_what_is_refused_raises_its_own_exception(
    client: OpenAI,
    path: str,
    body: object,
    raised: type[openai.APIStatusError],
    status: int,
    code: str | None,
) -> None:
    with pytest.raises(raised) as caught:
        client.post(path, body=body, cast_to=object)
    assert caught.value.status_code == status
    assert code in (None, caught.value.code)


def test_a_model_that_nobody_lists_is_left_to_units_that_are_all_alike(client: OpenAI) -> None:
    """Engines that ignore names answer; this one says in its own words that it has none of that name."""
    with pytest.raises(openai.NotFoundError, match="`gpt-9` does not exist"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)


def test_without_a_unit_the_service_is_unavailable(client: OpenAI, gate: GateProcess) -> None:
    for name in ("a", "b"):
        assert gate.admin("POST", f"/units/{name}/drain")[0] == 200
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES)
    finally:
        for name in ("a", "b"):
            gate.admin("POST", f"/units/{name}/undrain")
    assert (caught.value.status_code, caught.value.code) == (503, "no_unit")
    assert caught.value.response.headers["retry-after"] == "1"


def async_client(gate: GateProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0, timeout=10.0)


async def begin(client: AsyncOpenAI, max_tokens: int) -> AsyncStream[ChatCompletionChunk]:
    """A streamed chat, once its first chunk is there."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=max_tokens, stream=True
    )
    await anext(aiter(stream))
    return stream


def test_many_streams_at_once_do_not_mix(gate: GateProcess) -> None:
    async def ask(client: AsyncOpenAI, number: int) -> tuple[str, str]:
        messages: Any = [{"role": "user", "content": f"Story number {number}"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=TOKENS)
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=TOKENS, stream=True
        )
        return whole.choices[0].message.content or "", said([chunk async for chunk in stream])

    async def main() -> list[tuple[str, str]]:
        async with async_client(gate) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(2 * AT_ONCE)))

    answers = asyncio.run(main())
    assert all(whole == streamed for whole, streamed in answers)
    assert len({whole for whole, _ in answers}) == len(answers)


def test_one_too_many_is_told_to_come_again_and_leaving_makes_room(gate: GateProcess) -> None:
    async def main() -> openai.RateLimitError:
        async with async_client(gate) as client:
            streams = [await begin(client, 4000) for _ in range(2 * AT_ONCE)]
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            for stream in streams:
                await stream.close()
        return caught.value

    error = asyncio.run(main())
    assert (error.code, error.response.headers["retry-after"]) == ("full", "1")
    assert eventually(lambda: sum(unit["in_flight"] for unit in gate.units().values()) == 0)
