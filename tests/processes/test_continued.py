"""Clients that people use read streams whose unit dies in the middle: real processes, real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from loadtests.simunit.process import SimUnit
from tests.wire.process import GateProcess, eventually, metrics

MODEL = "sim"
MESSAGES: Any = [{"role": "user", "content": "Tell me about gates."}]
TOKENS = 200
STREAMS = 8
SHOWN = 20 * STREAMS
"""Tokens of both units after which some of each stream has been shown, and by far not all."""
LONGER = 8.0
"""By so much a unit that will break is slowed down: no stream of it ends before."""
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
MARKS = dict.fromkeys(("leader killed", "leader frozen"), pytest.mark.nightly)
"""For this client. Curl sees the first, and what is silent is silent."""


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


def until_halfway(gate: GateProcess, units: list[SimUnit]) -> None:
    """Wait until both units have streams, in the middle of which they are. The first gets slow."""
    before = generated(units)
    assert eventually(lambda: all(unit["in_flight"] for unit in gate.units().values()))
    units[0].fault("slow", factor=LONGER)
    assert eventually(lambda: generated(units) > before + SHOWN)


def generated(units: list[SimUnit]) -> int:
    return sum(int(unit.state()["counts"]["generation_tokens"]) for unit in units)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=MARKS.get(each, ())) for each in BREAKS], ids=list(BREAKS)
)
def test_the_openai_sdk_notices_nothing(name: str, gate: GateProcess, units: list[SimUnit]) -> None:
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
            await asyncio.to_thread(until_halfway, gate, units)
            await asyncio.to_thread(BREAKS[name], units[0])
            for said, counts, finishes, ids, roles in await asyncio.gather(*streams):
                assert said == text
                assert (counts.prompt_tokens, counts.completion_tokens) == (usage["prompt_tokens"], TOKENS)
                assert (finishes, len(ids), roles) == (["length"], 1, 1)

    asyncio.run(main())
    page = metrics(gate)
    assert 'cellgate_continuations_total{kind="text",result="continued"} 0.0' not in page
    assert 'cellgate_streams_broken_total{unit="a"} 0.0' not in page
    assert 'cellgate_streams_broken_total{unit="b"} 0.0' in page


def test_curl_notices_nothing(gate: GateProcess, units: list[SimUnit]) -> None:
    text, usage = unbroken(units[1])
    curl = ["curl", "-sS", "-N", "--fail-with-body", "--max-time", "30", f"{gate.url}/v1/chat/completions"]
    command = [*curl, "-H", "content-type: application/json", "-d", json.dumps(ASKED)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(STREAMS)
    ]
    until_halfway(gate, units)
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
