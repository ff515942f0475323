"""What an answer is: good or not by its path, when it has begun, what it says it has used."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from cellgate.proxy.request.answer_shape import (
    NO_TEXT,
    NONE_COUNTED,
    REPEATS,
    SHAPES,
    are_idle,
    repeats,
    status_in,
)
from cellgate.proxy.request.response import shows_token
from cellgate.proxy.request.token_usage import read_usage, usage_of
from cellgate.proxy.resume.answer_reader import AnswerReader
from cellgate.router.cost_model import Usage

SAID = b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

WHOLE = [
    ("chat", SAID, ""),
    ("chat", b'{"choices":[{"message":{"content":null,"tool_calls":[{"id":"1"}]}}]}', ""),
    ("chat", b'{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":3}}', NO_TEXT),
    ("chat", b'{"usage":{"completion_tokens":3},"choices":[{"message":{"content":"Hi"}}]}', ""),
    ("chat", b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}', "nothing generated"),
    ("chat", b'{"choices":[]}', "no answer in its JSON"),
    ("chat", b'{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":0}}', NONE_COUNTED),
    ("chat", b'{"choices":[{"message":{"content":""},"finish_reason":"length"}]}', NONE_COUNTED),
    ("responses", b'{"id":"resp_1","status":"queued","output":[]}', ""),
    ("responses", b'{"id":"resp_1","status":"in_progress","output":[]}', ""),
    ("rerank", b'{"results":[],"usage":{"total_tokens":0}}', NONE_COUNTED),
    ("chat", b'{"error":"CUDA error"}', "an error object under 200"),
    ("chat", b'{"error":null,' + SAID[1:], ""),
    ("chat", SAID[:-9], "no JSON"),
    ("chat", b"", "an empty body"),
    ("chat", b"<html>It works</html>", "a page of HTML"),
    ("chat", b"OK", "no JSON"),
    ("chat", b'{"choices":[{"message":{"content":"' + b"the " * 400 + b'"}}]}', REPEATS),
    ("messages", b'{"content":[{"type":"text","text":"Hi"}]}', ""),
    ("messages", b'{"content":[],"stop_reason":"refusal"}', ""),
    ("responses", b'{"output":[{"type":"function_call","name":"f"}]}', ""),
    ("embeddings", b'{"data":[{"embedding":[0.1]}]}', ""),
    ("embeddings", b'{"data":[{"embedding":"AAAA"}]}', ""),
    ("embeddings", b'{"data":[{"embedding":[]}]}', "no answer in its JSON"),
    ("rerank", b'{"results":[{"relevance_score":0}]}', ""),
    ("audio", b"some words", ""),
    ("speech", b"", "an empty body"),
    ("tokenize", b'{"count":2,"tokens":[1,2]}', ""),
    ("tokenize", b'[{"id":1,"text":"a"}]', ""),
    ("tokenize", b'{"input_tokens":9}', ""),
    ("tokenize", b"{}", "no answer in its JSON"),
]


@pytest.mark.parametrize(("path", "body", "why"), WHOLE)
def test_whole_answers(path: str, body: bytes, why: str) -> None:
    assert SHAPES[path].why_doubtful(body, is_events=False, streams=False) == why


def test_streams() -> None:
    streams = {
        ROLE + TOKEN + DONE: "",
        ROLE + DONE: "a stream without a token",
        DONE: "a stream without a token",
        ROLE
        + b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n'
        + DONE: "a stream without a token",
        ROLE + b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n' + DONE: "nothing generated",
        ROLE + b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n' + DONE: NONE_COUNTED,
        b": ping\n\n": "a stream without a token",
        b'data: {"error":{"message":"x"}}\n\n': "an error in the stream",
        b'data: {"new":1}\n\n': "",
    }
    for body, why in streams.items():
        assert SHAPES["chat"].why_doubtful(body, is_events=True, streams=True) == why
    assert SHAPES["chat"].why_doubtful(SAID, is_events=False, streams=True) == "no event stream"
    assert [are_idle(events) for events in (ROLE, ROLE * 3, ROLE + TOKEN)] == [True, True, False]


ASKED_FOR = [
    ("completions", b'{"prompt":"a","max_tokens":0,"echo":true}', b"", b'{"choices":[{"text":""}]}', True),
    ("chat", b'{"max_completion_tokens": 0}', b"", DONE, True),
    ("chat", b'{"max_completion_tokens": 0}', b"", b'{"error":"CUDA error"}', False),
    ("chat", b'{"max_tokens": 10}', b"", b'{"choices":[]}', False),
    ("rerank", b'{"query":"a","documents":[]}', b"", b"[]", True),
    ("embeddings", b'{"encoding_format":"bytes_only"}', b"application/octet-stream", b"\0\1", True),
    ("pooling", b'{"encoding_format": "bytes"}', b"application/octet-stream", b"\0\1", True),
    ("embeddings", b'{"encoding_format":"bytes"}', b"application/octet-stream", b"", False),
    ("embeddings", b'{"encoding_format":"float"}', b"application/octet-stream", b"\0\1", False),
    ("chat", b'{"encoding_format":"bytes"}', b"application/octet-stream", b"\0\1", False),
]


@pytest.mark.parametrize(("path", "request_body", "content_type", "answer", "is_good"), ASKED_FOR)
def test_who_asks_for_nothing_or_for_bytes_gets_it(
    path: str, request_body: bytes, content_type: bytes, answer: bytes, is_good: bool
) -> None:
    assert SHAPES[path].is_asked_for(request_body, answer, content_type) is is_good


def test_json_is_no_speech_but_may_be_a_transcription() -> None:
    json: Any = {"is_events": False, "streams": False, "content_type": b"content-type: application/json\r\n"}
    assert SHAPES["speech"].why_doubtful(b"{}", **json) == "JSON in place of media"
    assert not SHAPES["speech"].is_plain(b"{}")
    assert SHAPES["audio"].why_doubtful(b'{"text":""}', **json) == ""


def test_long_texts_that_repeat_themselves_and_the_status_that_an_error_gives_itself() -> None:
    assert repeats(b"the " * 400)
    assert not repeats(b"the " * 20)
    assert not repeats(bytes(range(32, 127)) * 20)
    bodies = (b'{"error":{"code":404}}', b'{"status":"422"}', b'{"code":"x"}')
    assert [status_in(body) for body in bodies] == [404, 422, 0]


# What shows that an answer has begun, as engines spell it.


ENDED = b'{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":%d}}'
NO_TOKEN = [
    *(ROLE, ENDED % 0, b": comment\n\n", b"", b'data: {"choices":[{"index":0,"text":""}]}\n\n'),
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
    b'{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[]}}]}',
]
A_TOKEN = [
    # The only token was the end.
    *(TOKEN, b'{"choices": [{"text": " a"}]}', ENDED % 1),
    b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"\\n"}}]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
]


def test_an_answer_has_begun_with_its_first_token() -> None:
    assert [answer for answer in NO_TOKEN if shows_token(answer)] == []
    assert [answer for answer in A_TOKEN if not shows_token(answer)] == []


# What an answer says it has used.

CHAT = {"prompt_tokens": 120, "total_tokens": 130, "completion_tokens": 10}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 96}}
SAYS = {"input_tokens": 7, "output_tokens": 3}
NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
TELLS = {"usage": CHAT}


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (CHAT | DETAILS, Usage(120, 10, 96)),
        (CHAT | {"prompt_tokens_details": None}, Usage(120, 10, None)),
        (SAYS | {"input_tokens_details": {"cached_tokens": 4}}, Usage(7, 3, 4)),
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8, 0, None)),
        ({"total_tokens": 9}, Usage(9, 0, None)),
        ({"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 2}, Usage(5, 6, 2)),
        ({"generated_tokens": 4, "input_length": 9, "finish_reason": "length"}, Usage(9, 4, None)),
        ({"num_input_tokens": 9, "num_output_tokens": 4}, Usage(9, 4, None)),
        (SAYS | {"cache_read_input_tokens": 0}, Usage(7, 3, 0)),
        (SAYS | {"cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}, Usage(127, 3, 100)),
        ({"prompt_tokens": "8"}, None),
        ({"prompt_tokens": -1}, None),
        ({}, None),
        (None, None),
    ],
)
def test_usage_is_the_numbers_that_an_engine_tells(told: dict[str, Any] | None, usage: Usage | None) -> None:
    assert usage_of(told) == usage


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [], **TELLS, "prompt_logprobs": None, "metadata": {"weight_version": "default"}, "e": []},
        {**TELLS, "id": "x", "timings": {"prompt_ms": 1.5, "usage": 3}},
        {**TELLS, "user": '"usage":{"prompt_tokens":0,"completion_tokens":0}'},
        {**TELLS, "user": "\\", "end": True},
        {**TELLS, "tools": [{"parameters": {"properties": {"usage": NOTHING}}}]},
        {"metadata": {"usage": NOTHING}, **TELLS},
        {**TELLS, "metadata": {"usage": NOTHING}},
        {**TELLS, "last": {"usage": NOTHING, "x": {"usage": NOTHING}}},
        {"choices": [{"text": "x" * 100_000, "logprobs": [{"usage": NOTHING}]}], **TELLS, "a": [[NOTHING]]},
    ],
)
def test_usage_is_read_where_the_engine_tells_it(answer: dict[str, Any]) -> None:
    for body in (orjson.dumps(answer), json.dumps(answer).encode(), json.dumps(answer, indent=2).encode()):
        assert read_usage(body) == Usage(120, 10, None)


def test_what_is_not_told_is_unknown() -> None:
    said = b'"usage":{"prompt_tokens":5}'
    for body in (b"", b"usage", b'{"usage":null}', b'{"a":{%b}}' % said, b"{" + said, said + b"}"):
        assert read_usage(body) is None
    for body in (b'[{"usage":5}, 3]', b'{"x":"\\%b}' % said):
        assert read_usage(body) is None


TGI = {"generated_text": "a", "details": {"generated_tokens": 10, "input_length": 120}}
TRITON = {"text_output": "a", "num_input_tokens": 120, "num_output_tokens": 10}
SGLANG = {"text": "a", "meta_info": {"prompt_tokens": 120, "completion_tokens": 10}}


@pytest.mark.parametrize("answer", [TGI, TRITON, SGLANG, TELLS])
def test_usage_is_read_in_each_dialect_alone_and_in_a_batch(answer: dict[str, Any]) -> None:
    assert read_usage(orjson.dumps(answer)) == Usage(120, 10, None)
    for size in (0, 100_000):
        batch = [answer | {"pad": "x" * size}, answer, answer]
        assert read_usage(orjson.dumps(batch)) == Usage(360, 30, None)


SGLANG_MORE = {"meta_info": {"prompt_tokens": 120, "completion_tokens": 12}}


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        ([{"token": {"text": "a"}, "details": None}, TGI], Usage(120, 10, None)),
        ([TRITON, TRITON | {"num_output_tokens": 1}, {"text_output": ""}], Usage(120, 11, None)),
        ([SGLANG, SGLANG | SGLANG_MORE], Usage(120, 12, None)),
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_usage_is_read_in_streams_of_dialects(events: list[dict[str, Any]], usage: Usage, step: int) -> None:
    stream = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    reader = AnswerReader(is_typed=False)
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
    assert usage_of(reader.reported) == usage
