"""Streams that a real llama.cpp server breaks in the middle, and another one continues: byte for byte what a
server says that does not break.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.real.asking import until
from tests.real.llamacpp import SLOTS, LlamaServer, Stream, chat, completion, read_all
from tests.wire.process import GateProcess, metrics
from tests.wire.stage import PROCESSES_S, live_for

pytestmark = pytest.mark.nightly

TOKENS = 1000
SHOWN_CHARS = 50
"""Each is one token."""
BREAKS: dict[str, signal.Signals] = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
ASKED: dict[str, Callable[..., dict[str, Any]]] = {"chat": chat, "completions": completion}
COUNTED = {"max_tokens": TOKENS, "stream_options": {"include_usage": True}}


def continued(gate: GateProcess) -> float:
    """So many streams were continued."""
    line = 'cellgate_continuations_total{kind="text",result="continued"} '
    return sum(float(each.removeprefix(line)) for each in metrics(gate).splitlines() if each.startswith(line))


async def said_by(server: LlamaServer, bodies: list[dict[str, Any]]) -> list[Stream]:
    """What a server says when nothing breaks."""
    streams = [Stream(server.port, body) for body in bodies]
    await read_all(streams)
    return streams


async def broken(
    gate: GateProcess, server: LlamaServer, bodies: list[dict[str, Any]], by: signal.Signals
) -> list[Stream]:
    """The same through the gate, while the server gets a signal in the middle of them."""
    streams = [Stream(gate.port, body) for body in bodies]
    reading = asyncio.create_task(read_all(streams))
    await until(lambda: all(len(stream.text) > SHOWN_CHARS for stream in streams))
    server.signal(by)
    await reading
    return streams


@pytest.mark.parametrize("by", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@live_for(PROCESSES_S)
async def test_a_broken_stream_is_what_one_server_says(
    gate: GateProcess,
    servers: dict[str, LlamaServer],
    asked: Callable[..., dict[str, Any]],
    by: signal.Signals,
) -> None:
    bodies = [asked(number, **COUNTED) for number in range(2 * SLOTS)]
    whole = await said_by(servers["b"], bodies)
    streams = await broken(gate, servers["a"], bodies, by)
    assert [stream.text for stream in streams] == [stream.text for stream in whole]
    for stream, one in zip(streams, whole, strict=True):
        assert (stream.finish, stream.is_done, stream.error) == ("length", True, None)
        assert (len(stream.ids), stream.roles) == (1, one.roles)
        assert stream.usage is not None
        assert one.usage is not None
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert stream.usage[count] == one.usage[count]
    assert continued(gate) == SLOTS


@live_for(PROCESSES_S)
async def test_stop_strings_end_a_continued_stream_where_they_end_a_whole_one(
    gate: GateProcess, servers: dict[str, LlamaServer]
) -> None:
    plain = await said_by(servers["b"], [chat(number, max_tokens=TOKENS) for number in range(2 * SLOTS)])
    stops = [[stream.text[700:705], "never said"] for stream in plain]
    bodies = [chat(number, stop=stop, **COUNTED) for number, stop in enumerate(stops)]
    whole = await said_by(servers["b"], bodies)
    streams = await broken(gate, servers["a"], bodies, signal.SIGKILL)
    assert [stream.text for stream in streams] == [stream.text for stream in whole]
    assert [stream.usage and stream.usage["completion_tokens"] for stream in streams] == [
        one.usage and one.usage["completion_tokens"] for one in whole
    ]
    assert {stream.finish for stream in streams} == {"stop"}
    assert continued(gate) == SLOTS


@live_for(PROCESSES_S)
async def test_a_completion_without_a_limit_goes_on_past_that_of_other_engines(
    gate: GateProcess, servers: dict[str, LlamaServer]
) -> None:
    """llama.cpp has none, where vLLM ends after 16 tokens."""
    plain = await said_by(
        servers["b"], [completion(number, max_tokens=TOKENS) for number in range(2 * SLOTS)]
    )
    bodies = [completion(number, stop=[stream.text[800:805]]) for number, stream in enumerate(plain)]
    streams = await broken(gate, servers["a"], bodies, signal.SIGKILL)
    for stream, one in zip(streams, plain, strict=True):
        assert one.text.startswith(stream.text)
        assert (len(stream.text) > SHOWN_CHARS, stream.finish) == (True, "stop")
    assert continued(gate) == SLOTS
