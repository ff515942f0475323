"""Units that answer badly, first events of any size, and streams that no unit can go on with."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import orjson
import pytest

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.config.settings import Limits
from tests.wire.client import chat, get, post
from tests.wire.replies import Reply
from tests.wire.stage import Stage, simulated, stage
from tests.wire.unit import (
    LAST_CHUNK,
    SSE_HEAD,
    STREAM,
    TOKENS,
    Received,
    Script,
    ScriptedUnit,
    chunk,
    in_turn,
    listening,
    then_close,
    then_reset,
    whole,
)

BODY = b"".join(TOKENS)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PLAIN_CHUNKED = PLAIN + b"Transfer-Encoding: chunked\r\n\r\n"
ERROR = b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n'


BEFORE_COMMIT: dict[str, Script] = {
    # Garbage: more of it is in tests/unit/http/test_http_unit.py.
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "coding not chunked": then_close(PLAIN + b"Transfer-Encoding: gzip\r\n\r\n{}"),
    "endless interim heads": b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n" * 3000,
    "switches protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "two replies": STREAM + STREAM,
    "bad chunk": SSE_HEAD + b"zz\r\ndata",
    # Gone before the commit
    "closes at once": then_close(b""),
    "closes in its head": then_close(PLAIN),
    "closes after an interim head": then_close(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "resets at once": then_reset(b""),
    "resets after the head of a stream": then_reset(SSE_HEAD),
    "closes after the head of a stream": then_close(SSE_HEAD),
    "closes after the head of a stream with a length": then_close(SSE + b"Content-Length: 80\r\n\r\n"),
    "closes after the head of a stream until close": then_close(SSE + b"\r\n"),
    "closes in its first event": then_close(SSE_HEAD + chunk(b"data: {")),
    "closes after comments": then_close(SSE_HEAD + chunk(b": working\n\n")),
    "ends without an event": SSE_HEAD + LAST_CHUNK,
    "ends after comments": SSE_HEAD + chunk(b": working\n\n") * 3 + LAST_CHUNK,
    # Says itself that it has failed
    "begins with an error": SSE_HEAD + chunk(ERROR) + LAST_CHUNK,
    "begins with an error after comments": SSE_HEAD + chunk(b": working\n\n" + ERROR) + LAST_CHUNK,
    "begins with an error in pieces": SSE_HEAD + chunk(ERROR[:20]) + chunk(ERROR[20:]) + LAST_CHUNK,
    "closes in a large first event": then_close(
        SSE_HEAD + chunk(b"data: " + b"x" * (LIMITS.event_bytes + 1))
    ),
}


@pytest.mark.parametrize("script", BEFORE_COMMIT.values(), ids=BEFORE_COMMIT)
async def test_before_the_commit_another_unit_answers_and_without_one_the_gate_does(script: Script) -> None:
    async with stage(script, STREAM) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (200, BODY, True)
        assert reply.get("x-cellgate-unit") == "u1"
        assert [len(unit.requests) for unit in here.units] == [1, 1]
        bad, good = (unit.requests[0] for unit in here.units)
        assert (bad.body, bad.get("x-request-id")) == (good.body, good.get("x-request-id"))
    async with stage(script) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.whole, reply.error["type"]) == (502, True, "service_unavailable_error")
        assert len(here.unit.requests) == 1
        await here.unit.connections[0].until_gone()


async def test_nobody_is_asked_twice_when_all_units_are_bad_and_who_asks_again_is_not_banned() -> None:
    for names in (["not HTTP", "closes at once", "begins with an error"], ["ends after comments"] * 3):
        async with stage(*(BEFORE_COMMIT[name] for name in names)) as here, here.client() as client:
            assert (await client.ask(chat())).status == 502
            assert [len(unit.requests) for unit in here.units] == [1, 1, 1]
            if len(set(names)) == 1:
                for _ in range(2):
                    assert (await client.ask(chat())).error["code"] == "garbage"


async def test_a_unit_that_refuses_connections_costs_nobody_anything() -> None:
    async with stage(STREAM, STREAM) as here, here.client() as client:
        here.gateway.services.pool(here.plane.board.units["u0"]).port = 1  # Nobody listens there.
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (200, BODY, True)


def _chat_event(delta: bytes, finish: bytes) -> bytes:
    return chunk(b'data: {"choices":[{"delta":%b,"finish_reason":%b}]}\n\n' % (delta, finish))


_ROLE, _DONE = _chat_event(b'{"role":"assistant","content":""}', b"null"), chunk(b"data: [DONE]\n\n")
_WORDS = SSE_HEAD + _ROLE + _chat_event(b'{"content":"Hi"}', b'"stop"') + _DONE + LAST_CHUNK
_BROKEN = {
    "aborted": _ROLE + _chat_event(b"{}", b'"abort"') + _DONE,
    "ended": _DONE,
    "begun and ended": _ROLE + _DONE,
}


@pytest.mark.parametrize("events", _BROKEN.values(), ids=_BROKEN)
async def test_streams_that_an_engine_ends_before_they_have_a_token_are_answered_by_another_unit(
    events: bytes,
) -> None:
    """As one that has lost a rank ends all it has: more at once than opinions may cost."""
    async with stage(SSE_HEAD + events + LAST_CHUNK, _WORDS) as here:
        assert {b'"Hi"' in reply.body for reply in await _burst(here, 20)} == {True}


async def _burst(here: Stage, clients: int) -> list[Reply]:
    """What so many clients get that ask at the same time."""

    async def use(number: int) -> Reply:
        async with here.client() as client:
            return await client.ask(chat(max_tokens=8, user=str(number)))

    return await asyncio.gather(*(use(number) for number in range(clients)))


@pytest.mark.parametrize("clients", [64, 200])
@simulated
async def test_a_burst_at_a_unit_with_a_changed_key_is_served_by_others(clients: int) -> None:
    """More at once than are asked twice: the first opinion decides for all."""

    async def serve(request: Received) -> None:
        await asyncio.sleep(0.5)
        request.write(_WORDS)

    refuses = whole(b'{"error":{"message":"Unauthorized"}}', "401 Unauthorized")
    async with stage(refuses, serve) as here:
        assert {reply.status for reply in await _burst(here, clients)} == {200}
        assert len(here.units[0].requests) > 20


@simulated
async def test_a_burst_of_bad_requests_gets_its_refusals_and_few_are_asked_twice() -> None:
    refuses = whole(b'{"error":{"message":"no such tool"}}', "400 Bad Request")
    async with stage(refuses, refuses, refuses) as here:
        for _ in range(3):
            assert {reply.status for reply in await _burst(here, 64)} == {400}
        assert here.received < 3 * 64 * 1.1


_USED = b'"usage":{"prompt_tokens":4,"completion_tokens":0,"total_tokens":4}'
_RAW = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 8\r\n\r\n" + bytes(8)
_EMPTY: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "no tokens": (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 0, "echo": False},
        whole(b'{"choices":[{"text":"","finish_reason":"length"}],%b}' % _USED),
    ),
    "stops at once": (
        "/v1/chat/completions",
        {"messages": []},
        whole(b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}],%b}' % _USED),
    ),
    "bytes": ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, _RAW),
    "pooled bytes": ("/pooling", {"input": "a", "encoding_format": "bytes_only"}, _RAW),
    "nothing to rank": ("/rerank", {"query": "a", "documents": []}, whole(b"[]")),
    "a job": ("/v1/responses", {"input": "a", "background": True}, whole(b'{"id":"1","status":"queued"}')),
}


@pytest.mark.parametrize(("path", "fields", "script"), _EMPTY.values(), ids=_EMPTY)
async def test_an_answer_without_a_text_that_is_right_is_shown_and_nobody_else_is_asked(
    path: str, fields: dict[str, Any], script: bytes
) -> None:
    async with stage(script, script, script) as here, here.client() as client:
        for at in range(6):
            body = orjson.dumps({"model": "tiny", "user": str(at), **fields})
            assert (await client.ask(post(body, path=path))).status == 200
        assert here.received == 6
        assert set(here.outcomes) == {"ok"}


@pytest.mark.parametrize("status", [500, 502, 503, 429, 400, 404, 422])
@simulated
async def test_statuses_that_another_unit_may_better_are_tried_there_and_without_one_it_has_its_say(
    status: int,
) -> None:
    sorry = whole(b'{"error": {"x": 1}}', f"{status} Sorry")
    async with stage(sorry) as here, here.client() as client:
        reply = await client.ask(chat())
        assert (reply.status, reply.body, reply.whole) == (status, b'{"error": {"x": 1}}', True)
    if status in (429, 500, 502, 503):
        async with stage(sorry, STREAM) as here, here.client() as client:
            reply = await client.ask(chat())
            assert (reply.status, reply.body, reply.whole) == (200, BODY, True)


TOLD = {
    "TGI": b'data: {"error": "Input validation error: too long", "error_type": "validation"}\n\n',
    "TGI, chat": b'data: {"error": {"message": "too long", "http_status_code": 422}}\n\n',
    "Triton": b'data: {"error": "bad words are too long"}\n\n',
    "Ollama": b'data: {"error": {"message": "invalid format", "type": "api_error", "code": null}}\n\n',
    "a code in words": b'data: {"error": {"message": "long", "code": "context_length_exceeded"}}\n\n',
    "a code": b'data: {"error": {"message": "long", "code": 400}}\n\n',
    "a named event": b'event: error\ndata: {"type": "error", "error": {"message": "long"}}\n\n',
    "CRLF": b'data: {"error": "too long"}\r\n\r\n',
    "before the end": b'data: {"error": "too long"}\n\ndata: [DONE]\n\n',
    "llama.cpp, older": b'error: {"code": 400, "message": "too long"}\n\n',
}


@pytest.mark.parametrize(("units", "cut"), [(1, 0), (3, 12)])
@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@simulated
async def test_a_mistake_told_under_200_reaches_its_client_as_every_unit_tells_it(
    told: bytes, units: int, cut: int
) -> None:
    pieces = [piece for piece in (told[:cut], told[cut:]) if piece]

    async def play(request: Received) -> None:
        request.write(SSE_HEAD)
        for piece in pieces:
            request.write(chunk(piece))
            await asyncio.sleep(0.1 * (cut != 0))
        request.write(LAST_CHUNK)

    async with stage(*[play] * units) as here, here.client() as client:
        for _ in range(2):
            reply = await client.ask(chat())
            assert (reply.status, reply.body, reply.whole) == (200, told, True)


FIRST = b"".join(TOKENS[:2])
BEGUN = SSE_HEAD + b"".join(map(chunk, TOKENS[:2]))
STREAM_CUT: dict[str, Script] = {
    "closes between chunks": then_close(BEGUN),
    "closes in a chunk": then_close(BEGUN + chunk(TOKENS[2])[:9]),
    "closes in a chunk size": then_close(BEGUN + b"1"),
    "closes in its last chunk": then_close(BEGUN + b"0\r\n"),
    "closes in its trailers": then_close(BEGUN + b"0\r\nX-A: b\r\n"),
    "closes in an event": then_close(BEGUN + chunk(b"data: {")),
    "closes before its length": then_close(SSE + b"Content-Length: 99\r\n\r\n" + FIRST),
    "resets": then_reset(BEGUN),
    "resets a stream until close": then_reset(SSE + b"\r\n" + FIRST),
}


@pytest.mark.parametrize(
    ("script", "version"),
    [(script, b"1.1") for script in STREAM_CUT.values()] + [(STREAM_CUT["resets"], b"1.0")],
    ids=[*STREAM_CUT, "resets, for HTTP/1.0"],
)
async def test_a_begun_stream_ends_in_an_error_event_and_a_cut(script: Script, version: bytes) -> None:
    async with stage(script, STREAM) as here, here.client() as client:
        reply = await client.ask(chat().replace(b"HTTP/1.1", b"HTTP/" + version))
        assert reply.status == 200
        assert reply.body.startswith(FIRST)
        assert is_error_event(reply.body[len(FIRST) :])
        # HTTP/1.0 has no frame that could be left open, so there the event alone must do.
        assert reply.whole is (version == b"1.0")
        assert len(here.units[1].requests) == 0
        assert here.outcomes == ["truncated"]


def is_error_event(event: bytes) -> bool:
    """Whether this is exactly one event, an error in OpenAI's shape."""
    if not event.startswith(b"data: ") or not event.endswith(b"\n\n") or event.count(b"\n") != 2:
        return False
    return bool(Reply(body=event.removeprefix(b"data: ")).error["code"] == "truncated")


# JSON is held until it is whole, if it is small.
WORDS = PLAIN_CHUNKED.replace(b"application/json", b"text/plain")
WORDS_BY_CLOSE = PLAIN.replace(b"application/json", b"text/plain")
PLAIN_CUT: dict[str, Script] = {
    "shorter than its length": then_close(PLAIN + b"Content-Length: 99999\r\n\r\n{"),
    "shorter than its length, reset": then_reset(PLAIN + b"Content-Length: 99999\r\n\r\n{"),
    "closes between chunks": then_close(WORDS + chunk(b"{")),
    "closes in a chunk": then_close(WORDS + b"9\r\n{"),
    "closes in its last chunk": then_close(WORDS + chunk(b"{") + b"0\r\n"),
    "bad chunk": in_turn(WORDS + chunk(b"{"), b"zz\r\n"),
    "reset before its close": then_reset(WORDS_BY_CLOSE + b"\r\n{"),
}


@pytest.mark.parametrize("name", [*PLAIN_CUT, "bad chunk, for HTTP/1.0"])
async def test_a_begun_plain_body_is_cut_so_that_the_client_can_tell(name: str) -> None:
    name, _, old = name.partition(", for ")
    async with stage(PLAIN_CUT[name]) as here, here.client() as client:
        asked = chat(stream=False)
        reply = await client.ask(asked.replace(b"HTTP/1.1", b"HTTP/1.0") if old else asked)
        assert (reply.status, reply.whole) == (200, False)
        assert b"{".startswith(reply.body)
        assert here.outcomes == ["truncated"]


async def test_a_path_that_is_not_known_to_be_safe_is_asked_once() -> None:
    async with stage(then_close(b""), whole(), pass_unlisted=True) as here, here.client() as client:
        assert (await client.ask(get("/v1/batches"))).status == 502
        assert [len(unit.requests) for unit in here.units] == [1, 0]


async def test_a_unit_that_stops_in_the_middle_of_a_refusal_is_not_waited_for() -> None:
    stuck = b"HTTP/1.1 503 Sorry\r\nContent-Length: 10\r\n\r\n{"
    async with stage(stuck, STREAM) as here, here.client() as client:
        assert (await client.ask(chat())).body == BODY
        await here.units[0].connections[0].until_gone()


# First events of any size: an answer begins with what its client has sent, or with log probabilities.

SEGMENT = 1448
TEXT = "Why is the sky blue? "


def data(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def typed(name: str, document: dict[str, Any]) -> bytes:
    return b"event: %b\n" % name.encode() + data({"type": name, **document})


def echo(size: int) -> bytes:
    """As vLLM answers `echo` with log probabilities: all in the first event."""
    tokens = [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20}]
    many = tokens * (size // len(orjson.dumps(tokens[0])) + 1)
    choice = {"index": 0, "delta": {"content": TEXT}, "logprobs": {"content": many}, "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
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


DIALECTS = {"/v1/chat/completions": echo, "/v1/responses": responses}
ASKED = orjson.dumps({"model": "tiny", "stream": True, "messages": [], "prompt": "a", "input": "a"})


def in_segments(body: bytes) -> bytes:
    pieces = [body[at : at + SEGMENT] for at in range(0, len(body), SEGMENT)]
    return SSE_HEAD + b"".join(map(chunk, pieces)) + LAST_CHUNK


@pytest.mark.parametrize("size", [64 << 10, (1 << 20) + 1])
@pytest.mark.parametrize("path", DIALECTS)
async def test_a_large_first_event_comes_whole_from_the_first_unit(path: str, size: int) -> None:
    body = DIALECTS[path](size)
    for script in (in_segments(body), SSE_HEAD + chunk(body) + LAST_CHUNK):
        async with stage(script, script) as here, here.client() as client:
            reply = await client.ask(post(ASKED, path=path))
            assert (reply.status, reply.whole, reply.body == body) == (200, True, True)
            assert here.received == 1
        assert here.outcomes == ["ok"]


async def test_no_answer_holds_more_than_one_body_may() -> None:
    """A unit that never ends its first event does not use up the memory of others."""
    begun = SSE_HEAD + b"".join(map(chunk, [b"data: " + b"x" * 100_000] + [b"x" * 100_000] * 40))
    async with stage(begun, limits=Limits(body_bytes=2 << 20)) as here, here.client() as client:
        client.send(post(ASKED))
        assert (await client.reader.readexactly(12)) == b"HTTP/1.1 200"
        assert 1 << 19 < here.gateway.memory.used <= 2 << 20


# Streams that no other unit could go on with: one error event, which says why, then the end.

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
ONCE_UPON = [ROLE, event({"content": "Once"}), event({"content": " upon"})]
LOGPROBS = {"content": [{"token": " upon", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}

CASES: dict[str, tuple[dict[str, Any], list[bytes], str]] = {
    # All reasons: tests/unit/resume/test_eligible.py.
    "n": ({"n": 2}, [*ONCE_UPON, event({"content": "Twice"}, index=1)], "the request has n"),
    "stop strings without end": (
        {"stop": ["Z" * 300_000]},
        ONCE_UPON,
        "its stop strings are longer than 4096 bytes",
    ),
    "logprobs": ({"logprobs": True}, [ROLE, event({"content": " upon"}, logprobs=LOGPROBS)], "has logprobs"),
    "reasoning": ({}, [ROLE, event({"reasoning_content": "Hm"})], "has carried reasoning_content"),
    "reasoning, then text": ({}, [ROLE, event({"reasoning": "Hm"}), *ONCE_UPON[1:]], "has carried reasoning"),
    "a call has begun": (
        {"tools": [TOOL]},
        [*ONCE_UPON, event({"tool_calls": [CALL]})],
        "has carried tool_calls, and its answer is sampled without a seed",
    ),
    "tool calls that nobody asked for": ({}, [ROLE, event({"tool_calls": [CALL]})], "has carried tool_calls"),
}
ENGINE_ERROR = (
    b'data: {"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}}\n\n'
)
BREAKS = {"truncated": b"", "stream_error": chunk(ENGINE_ERROR) + LAST_CHUNK}


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
async def test_one_error_event_with_a_code_and_the_reason_then_the_end(name: str, code: str) -> None:
    fields, shown, why = CASES[name]
    before = REACHED["stop_bytes"]
    async with stage(broken(shown, code), STREAM) as here, here.client() as client:
        error = told(await client.ask(chat(**{"messages": MESSAGES} | fields)), b"".join(shown))
        assert error["code"] == code
        assert "could not be continued" in error["message"]
        assert why in error["message"]
        # Nobody was asked to go on: neither for tokens nor for text.
        assert [len(unit.requests) for unit in here.units] == [1, 0]
        assert here.outcomes == [code]
        assert REACHED["stop_bytes"] == before + ("stop" in fields)


@pytest.mark.parametrize("code", BREAKS)
async def test_what_goes_wrong_behind_the_end_is_nothing_to_the_client(code: str) -> None:
    shown = [*ONCE_UPON, b"data: [DONE]\n\n"]
    for tools in ([], [TOOL]):
        async with stage(broken(shown, code), STREAM) as here, here.client() as client:
            reply = await client.ask(chat(messages=MESSAGES, tools=tools))
            assert (reply.status, reply.whole, reply.body) == (200, True, b"".join(shown))


# The unit of the tests themselves: whatever it accepts is closed with it.


@pytest.mark.parametrize("turns", range(5))
async def test_who_connects_at_the_last_moment_is_let_go_as_well(turns: int) -> None:
    unit = ScriptedUnit(STREAM)
    async with listening(unit):
        # Of this the loop knows nothing yet: it accepts in a turn, and tells in the next.
        stranger = socket.create_connection(("127.0.0.1", unit.port))
        for _ in range(turns):
            await asyncio.sleep(0)
    stranger.close()
