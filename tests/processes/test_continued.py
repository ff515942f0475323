"""Clients that people use read streams whose unit dies in the middle: real processes, real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually

MODEL = "sim"
MESSAGES: Any = [{"role": "user", "content": "Tell me about gates."}]
TOKENS = 200
STREAMS = 8
SHOWN_S = 0.6
"""After that some of each stream has been shown, and by far not all."""
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}

BREAKS: dict[str, Callable[[SimUnit], object]] = {
    "leader killed": lambda unit: unit.kill(),
    "leader frozen": lambda unit: unit.signal_leader(signal.SIGSTOP),
    "follower killed": lambda unit: unit.signal_follower(signal.SIGKILL),
    "follower frozen": lambda unit: unit.signal_follower(signal.SIGSTOP),
    "error in the stream": lambda unit: unit.fault("in_stream_error", after_tokens=50),
}


@pytest.fixture
def units() -> Iterator[list[SimUnit]]:
    started = SimUnit.start_all(["a", "b"], followers=1, step_ms=10)
    yield started
    for unit in started:
        unit.stop()


@pytest.fixture
def gate(units: list[SimUnit], tmp_path: Path) -> Iterator[GateProcess]:
    with GateProcess(tmp_path, {unit.name: unit.url for unit in units}) as process:
        process.until_up("a", "b")
        yield process


def unbroken(unit: SimUnit, **changed: Any) -> tuple[str, dict[str, Any]]:
    """Text and usage as one unit alone gives them."""
    asked = ASKED | {"stream": False, "stream_options": None} | changed
    with OpenAI(base_url=f"{unit.url}/v1", api_key="x", max_retries=0, timeout=20.0) as direct:
        reply = direct.chat.completions.create(**asked)
    assert reply.usage is not None
    return reply.choices[0].message.content or "", reply.usage.model_dump()


def halfway(gate: GateProcess) -> bool:
    """Whether both units have streams."""
    return all(unit["in_flight"] for unit in gate.units().values())


@pytest.mark.parametrize("breaks", BREAKS.values(), ids=BREAKS)
def test_the_openai_sdk_notices_nothing(
    breaks: Callable[[SimUnit], object], gate: GateProcess, units: list[SimUnit]
) -> None:
    text, usage = unbroken(units[1])

    async def read(client: AsyncOpenAI) -> tuple[str, Any, list[str], set[str], int]:
        said, counts, finishes, ids, roles = "", None, [], set(), 0
        async for chunk in await client.chat.completions.create(**ASKED):
            ids.add(f"{chunk.id} {chunk.created} {chunk.model}")
            counts = chunk.usage or counts
            for choice in chunk.choices:
                said += choice.delta.content or ""
                roles += choice.delta.role is not None
                finishes += [choice.finish_reason] if choice.finish_reason else []
        return said, counts, finishes, ids, roles

    async def main() -> None:
        async with AsyncOpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0, timeout=30.0) as client:
            streams = [asyncio.ensure_future(read(client)) for _ in range(STREAMS)]
            assert await asyncio.to_thread(eventually, lambda: halfway(gate))
            await asyncio.sleep(SHOWN_S)
            await asyncio.to_thread(breaks, units[0])
            for said, counts, finishes, ids, roles in await asyncio.gather(*streams):
                assert said == text
                assert (counts.prompt_tokens, counts.completion_tokens) == (usage["prompt_tokens"], TOKENS)
                assert (finishes, len(ids), roles) == (["length"], 1, 1)

    asyncio.run(main())
    with urlopen(f"http://127.0.0.1:{gate.admin_port}/metrics") as reply:
        page = reply.read().decode()
    assert 'cellgate_continuations_total{kind="text",result="continued"} 0.0' not in page
    assert 'cellgate_streams_broken_total{unit="a"} 0.0' not in page
    assert 'cellgate_streams_broken_total{unit="b"} 0.0' in page


def test_stop_strings_and_completions_are_as_of_one_unit(gate: GateProcess, units: list[SimUnit]) -> None:
    whole, _ = unbroken(units[1])
    stop = whole[-40:-30]
    with OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0, timeout=30.0) as client:
        expected = client.completions.create(model=MODEL, prompt="Once", max_tokens=TOKENS).choices[0].text
        units[0].fault("in_stream_error", after_tokens=50)
        units[1].fault("in_stream_error", after_tokens=10_000)
        for _ in range(4):
            chunks = list(client.chat.completions.create(**ASKED | {"stop": [stop]}))
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert said == whole[: whole.index(stop)]
            parts = client.completions.create(model=MODEL, prompt="Once", max_tokens=TOKENS, stream=True)
            assert "".join(part.choices[0].text for part in parts if part.choices) == expected


def test_curl_notices_nothing(gate: GateProcess, units: list[SimUnit]) -> None:
    text, usage = unbroken(units[1])
    curl = ["curl", "-sS", "-N", "--fail-with-body", "--max-time", "30", f"{gate.url}/v1/chat/completions"]
    command = [*curl, "-H", "content-type: application/json", "-d", json.dumps(ASKED)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(STREAMS)
    ]
    assert eventually(lambda: halfway(gate))
    time.sleep(SHOWN_S)
    units[0].kill()
    for each in started:
        out, err = each.communicate(timeout=30.0)
        assert (each.returncode, err) == (0, b"")
        lines = [line.removeprefix("data: ") for line in out.decode().splitlines() if line]
        assert lines.pop() == "[DONE]"
        documents = [json.loads(line) for line in lines]
        choices = [choice for document in documents for choice in document["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert documents[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_what_cannot_be_continued_raises_an_error_that_says_why(
    gate: GateProcess, units: list[SimUnit]
) -> None:
    form: Any = {"type": "json_object"}
    units[0].fault("in_stream_error", after_tokens=20)
    units[1].fault("in_stream_error", after_tokens=20)
    with (
        OpenAI(base_url=f"{gate.url}/v1", api_key="x", max_retries=0, timeout=30.0) as client,
        pytest.raises(
            openai.APIError, match="could not be continued: the request has response_format"
        ) as caught,
    ):
        list(client.chat.completions.create(**ASKED | {"response_format": form, "temperature": 1.0}))
    assert caught.value.code == "stream_error"
