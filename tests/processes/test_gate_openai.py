"""The OpenAI SDK through the gate before two simulated units: what it gets, and what it raises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess

MODEL = "sim"
MESSAGES: Any = [{"role": "user", "content": "Tell me about gates."}]
TOKENS = 24


@pytest.fixture(scope="module")
def units() -> Iterator[list[SimUnit]]:
    started = SimUnit.start_all(["a", "b"], followers=1, step_ms=2)
    yield started
    for unit in started:
        unit.stop()


@pytest.fixture(scope="module")
def gate(units: list[SimUnit], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GateProcess]:
    with GateProcess(tmp_path_factory.mktemp("gate"), {unit.name: unit.url for unit in units}) as process:
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
