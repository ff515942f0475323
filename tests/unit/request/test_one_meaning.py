"""Bodies that mean two things are refused; those that only look like it are not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from cellgate.proxy.http.errors import Failure
from cellgate.proxy.request.body import read_ask
from cellgate.proxy.request.conversation import read_conversation
from cellgate.proxy.request.one_meaning import models_beside, models_in_query, why_repeated
from cellgate.router.nouns import Ask

MESSAGES = b'"messages":[{"role":"user","content":"hello"}]'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"model":"a","model":"b"', "model"),
        (b'"model":"a", "model" :"a"', "model"),
        (b'"model":"a","Model":"b"', "Model"),
        (b'"MODEL":"b"', "MODEL"),
        (b'"model":"a","mod\\u0065l":"b"', "model"),
        (b'"mod\\u0065l":"a","mod\\u0065l":"b"', "model"),
        (b'"max_tokens":1,"max_tokens":4000', "max_tokens"),
        (b'"max_tokens":1,"Max_Tokens":4000', "Max_Tokens"),
        (b'"n":1,"n":64', "n"),
        (b'"priority":0,"PRIORITY":-5', "PRIORITY"),
        (b'"lora_path":"a","lora_path":"b"', "lora_path"),
        (b'"parameters":{"max_new_tokens":1,"max_new_tokens":4000}', "max_new_tokens"),
        (b'"extra_body":{"n":1,"n":64}', "n"),
        (b'"messages":[]', "messages"),
    ],
)
def test_what_engines_read_differently_is_refused(fields: bytes, param: str) -> None:
    for body in (b"{%b,%b}" % (fields, MESSAGES), b"{%b,%b}" % (MESSAGES, fields)):
        found = read_ask(body, "chat")
        assert isinstance(found, Failure), body
        assert found.param == param
        assert "send it once" in found.message
        # Nor is it in the frame of a conversation that is read in parts.
        assert read_conversation(body, "chat") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "a", "tools": [{"function": {"parameters": {"model": {}, "n": {}, "max_tokens": {}}}}]},
        {"model": "a", "metadata": {"Model": "b", "model": "c"}, "n": 2},
        {"model": "a", "user": '"model":"b"', "max_tokens": 5},
        {"model": "mod\u00e9l"},
        {"a": 1, "b": 2},
    ],
)
def test_what_only_looks_like_it_is_not(fields: dict[str, Any]) -> None:
    for dumped in (
        orjson.dumps(fields),
        str(orjson.dumps(fields), "utf-8").encode("ascii", "backslashreplace"),
    ):
        body = b"%b,%b}" % (dumped[:-1].replace(b"\\xe9", b"\\u00e9"), MESSAGES)
        found = read_ask(body, "chat")
        assert isinstance(found, Ask), (body, found)
        assert found.model == fields.get("model")


@pytest.mark.parametrize(
    ("fields", "models"),
    [
        ({"lora_path": "b"}, ("b",)),
        ({"lora_path": ["b", None, "c"]}, ("b", "c")),
        ({"models": ["a", "b"], "fallbacks": [{"model": "c"}]}, ("a", "b", "c")),
        ({"extra_body": {"model": "b", "lora_path": "c"}}, ("b", "c")),
        ({"lora_request": {"lora_name": "b", "lora_int_id": 1}}, ("b",)),
        ({"model": "a"}, ()),
    ],
)
def test_models_beside_the_model_are_known(fields: dict[str, Any], models: tuple[str, ...]) -> None:
    assert models_beside(fields) == models
    ask = read_ask(orjson.dumps({"prompt": "x", **fields}), "completions")
    assert isinstance(ask, Ask)
    assert ask.models_beside == models


def test_models_in_a_query_are_known_however_they_are_written() -> None:
    assert models_in_query(b"/v1/chat/completions?a=1&model=b&Model=c%20d") == {"b", "c d"}
    assert models_in_query(b"/v1/chat/completions") == set()


def test_for_a_guardrail_no_field_of_any_object_is_there_twice() -> None:
    for twofold, param in (
        (b'{"messages":[{"role":"user","content":"fine","content":"not fine"}]}', "content"),
        (b'{"input":[{"content":[{"type":"text","text":"a","te\\u0078t":"b"}]}]}', "text"),
        (b'{"prompt":"a", "prompt" :"b"}', "prompt"),
        ('{"prompt":"a","prompt":"b"}'.encode("utf-16"), "prompt"),
    ):
        found = why_repeated(twofold)
        assert isinstance(found, Failure)
        assert found.param == param
    assert why_repeated(b'{"messages":[{"content":"\\"content\\":1"},{"content":"b"}],"a":{"a":{}}}') is None
    assert why_repeated(b"no JSON") is None
