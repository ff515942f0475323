"""What an answer says it has used."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from cellgate.proxy.request.response import read_usage, usage_of
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
        b'[{"usage":{"prompt_tokens":5}}]',
        b'"usage":{"prompt_tokens":5}}',
        b'{"x":"\\"usage":{"prompt_tokens":5}}',
    ],
)
def test_what_is_not_told_is_unknown(body: bytes) -> None:
    assert read_usage(body) is None
