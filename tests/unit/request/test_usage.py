"""What an answer says it has used."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from cellgate.proxy.request.response import read_usage, usage_of
from cellgate.proxy.resume.answer_reader import AnswerReader
from cellgate.router.cost_model import Usage

CHAT = {"prompt_tokens": 120, "total_tokens": 130, "completion_tokens": 10}
DETAILS = {"prompt_tokens_details": {"cached_tokens": 96}}
NOTHING = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
TELLS = {"usage": CHAT}


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (CHAT, Usage(120, 10, None)),
        (CHAT | DETAILS, Usage(120, 10, 96)),
        (CHAT | {"prompt_tokens_details": None}, Usage(120, 10, None)),
        ({"input_tokens": 7, "output_tokens": 3}, Usage(7, 3, None)),
        (
            {"input_tokens": 7, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
            Usage(7, 3, 4),
        ),
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8, 0, None)),
        ({"total_tokens": 9}, Usage(9, 0, None)),
        ({"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 2}, Usage(5, 6, 2)),
        ({"generated_tokens": 4, "input_length": 9, "finish_reason": "length"}, Usage(9, 4, None)),
        ({"num_input_tokens": 9, "num_output_tokens": 4}, Usage(9, 4, None)),
        ({"input_tokens": 7, "output_tokens": 3, "cache_read_input_tokens": 0}, Usage(7, 3, 0)),
        (
            {
                "input_tokens": 7,
                "output_tokens": 3,
                "cache_read_input_tokens": 100,
                "cache_creation_input_tokens": 20,
            },
            Usage(127, 3, 100),
        ),
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
        {"choices": [], **TELLS},
        {"choices": [], **TELLS, "prompt_logprobs": None, "metadata": {"weight_version": "default"}, "e": []},
        {**TELLS, "id": "x", "timings": {"prompt_ms": 1.5, "usage": 3}},
        {**TELLS, "user": "usage"},
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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"usage",
        b'{"usage":null}',
        b'{"a":{"usage":{"prompt_tokens":5}}}',
        b'{"usage":{"prompt_tokens":5}',
        b'[{"usage":5}, 3]',
        b'"usage":{"prompt_tokens":5}}',
        b'{"x":"\\"usage":{"prompt_tokens":5}}',
    ],
)
def test_what_is_not_told_is_unknown(body: bytes) -> None:
    assert read_usage(body) is None


TGI = {"generated_text": "a", "details": {"generated_tokens": 10, "input_length": 120}}
TRITON = {"text_output": "a", "num_input_tokens": 120, "num_output_tokens": 10}
SGLANG = {"text": "a", "meta_info": {"prompt_tokens": 120, "completion_tokens": 10}}


@pytest.mark.parametrize("answer", [TGI, TRITON, SGLANG, TELLS])
@pytest.mark.parametrize("size", [0, 100_000])
def test_usage_is_read_in_each_dialect_alone_and_in_a_batch(answer: dict[str, Any], size: int) -> None:
    if size == 0:
        assert read_usage(orjson.dumps(answer)) == Usage(120, 10, None)
    batch = [answer | {"pad": "x" * size}, answer, answer]
    assert read_usage(orjson.dumps(batch)) == Usage(360, 30, None)


@pytest.mark.parametrize(
    ("events", "usage"),
    [
        ([{"token": {"text": "a"}, "details": None}, TGI], Usage(120, 10, None)),
        ([TRITON, TRITON | {"num_output_tokens": 1}, {"text_output": ""}], Usage(120, 11, None)),
        (
            [SGLANG, SGLANG | {"meta_info": {"prompt_tokens": 120, "completion_tokens": 12}}],
            Usage(120, 12, None),
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_usage_is_read_in_streams_of_engines_own_dialects(
    events: list[dict[str, Any]], usage: Usage, step: int
) -> None:
    stream = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    reader = AnswerReader(is_typed=False)
    for at in range(0, len(stream), step):
        reader.feed(stream[at : at + step])
    assert usage_of(reader.told) == usage
