"""Streams that no other unit could go on with: one error event, which says why, then the end."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import REACHED
from tests.wire.client import chat, post
from tests.wire.replies import Reply
from tests.wire.stage import live, stage
from tests.wire.unit import LAST_CHUNK, SSE_HEAD, STREAM, Script, chunk, in_turn, then_close

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
MESSAGES = [{"role": "user", "content": "hi"}]


def event(delta: dict[str, Any], **choice: Any) -> bytes:
    """One event of a chat, as vLLM writes it."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} | choice]
    return b"data: %b\n\n" % orjson.dumps(
        {"id": "chatcmpl-1", "created": 1, "model": "tiny", "choices": choices}
    )


ROLE = event({"role": "assistant", "content": ""})
TEXT = [ROLE, event({"content": "Once"}), event({"content": " upon"})]
LOGPROBS = {"content": [{"token": " upon", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}

CASES: dict[str, tuple[dict[str, Any], list[bytes], str]] = {
    "tools, called": (
        {"tools": [TOOL], "tool_choice": "required"},
        [ROLE, event({"tool_calls": [CALL]})],
        "the request has tool",
    ),
    "n": ({"n": 2}, [*TEXT, event({"content": "Twice"}, index=1)], "the request has n"),
    "logprobs": ({"logprobs": True}, [ROLE, event({"content": " upon"}, logprobs=LOGPROBS)], "has logprobs"),
    "JSON schema": ({"response_format": SCHEMA}, TEXT, "the request has response_format"),
    "JSON object": ({"response_format": {"type": "json_object"}}, TEXT, "the request has response_format"),
    "guided decoding": ({"guided_json": {"type": "object"}}, TEXT, "guided_json"),
    "stop strings without end": (
        {"stop": ["Z" * 300_000]},
        TEXT,
        "its stop strings are longer than 4096 bytes",
    ),
    "reasoning": ({}, [ROLE, event({"reasoning_content": "Hm"})], "has carried reasoning_content"),
    "reasoning, as vLLM calls it now": ({}, [ROLE, event({"reasoning": "Hm"})], "has carried reasoning"),
    "reasoning, then text": ({}, [ROLE, event({"reasoning": "Hm"}), *TEXT[1:]], "has carried reasoning"),
    "a call has begun": (
        {"tools": [TOOL]},
        [*TEXT, event({"tool_calls": [CALL]})],
        "has carried tool_calls, and its answer is sampled without a seed",
    ),
    "tool calls that nobody asked for": ({}, [ROLE, event({"tool_calls": [CALL]})], "has carried tool_calls"),
}
ERROR = b'data: {"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}}\n\n'
BREAKS = {"truncated": b"", "stream_error": chunk(ERROR) + LAST_CHUNK}


def broken(shown: list[bytes], code: str) -> Script:
    """A unit that shows this and then breaks off in the way of which the error's code tells."""
    sent = SSE_HEAD + b"".join(map(chunk, shown))
    return then_close(sent) if code == "truncated" else in_turn(sent, BREAKS[code])


def told(reply: Reply, shown: bytes) -> dict[str, Any]:
    """The error that follows what was shown; there is but one, and nothing comes after it."""
    assert (reply.status, reply.whole) == (200, False)
    assert reply.body.startswith(shown)
    events = reply.body.removeprefix(shown).split(b"\n\n")
    assert (len(events), events[-1]) == (2, b"")
    error: dict[str, Any] = orjson.loads(events[0].removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("code", BREAKS)
@pytest.mark.parametrize("name", CASES)
@live
async def test_one_error_event_with_a_code_and_the_reason_then_the_end(name: str, code: str) -> None:
    fields, shown, why = CASES[name]
    async with stage(broken(shown, code), STREAM) as here, here.client() as client:
        error = told(await client.ask(chat(**{"messages": MESSAGES} | fields)), b"".join(shown))
        assert error["code"] == code
        assert "could not be continued" in error["message"]
        assert why in error["message"]
        # Nobody was asked to go on: neither for tokens nor for text.
        assert [len(unit.requests) for unit in here.units] == [1, 0]
        assert here.outcomes == [code]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "the request has n"),
        ({"logprobs": 1}, "the request has logprobs"),
        ({"echo": True}, "the request has echo"),
        ({"best_of": 2}, "the request has best_of"),
        ({"prompt": [1, 2, 3]}, "its prompt is not one string"),
    ],
)
@live
async def test_completions_likewise(fields: dict[str, Any], why: str) -> None:
    choices = [{"index": 0, "text": "Once", "logprobs": None, "finish_reason": None}]
    shown = [b"data: %b\n\n" % orjson.dumps({"id": "cmpl-1", "created": 1, "choices": choices})]
    body = orjson.dumps({"model": "tiny", "prompt": "hi", "stream": True} | fields)
    async with stage(broken(shown, "truncated"), STREAM) as here, here.client() as client:
        error = told(await client.ask(post(body, path="/v1/completions")), b"".join(shown))
        assert error["code"] == "truncated"
        assert why in error["message"]


@live
async def test_stop_strings_that_are_too_long_are_counted_as_a_limit() -> None:
    before = REACHED["stop_bytes"]
    async with stage(broken(TEXT, "truncated"), STREAM) as here, here.client() as client:
        await client.ask(chat(messages=MESSAGES, stop="Z" * 5000))
    assert REACHED["stop_bytes"] == before + 1


@pytest.mark.parametrize("code", BREAKS)
@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
@live
async def test_what_goes_wrong_behind_the_end_is_nothing_to_the_client(
    fields: dict[str, Any], code: str
) -> None:
    shown = [*TEXT, b"data: [DONE]\n\n"]
    async with stage(broken(shown, code), STREAM) as here, here.client() as client:
        reply = await client.ask(chat(**{"messages": MESSAGES} | fields))
        assert (reply.status, reply.whole, reply.body) == (200, True, b"".join(shown))
