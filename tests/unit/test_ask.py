"""From a body to an Ask."""

from __future__ import annotations

import pickle
from typing import Any

import orjson
import pytest

from proxy.ask import read_ask
from proxy.failure import Failure, Kind
from router.nouns import Ask


def ask_of(**fields: Any) -> Ask:
    """The ask of a body with these fields."""
    ask = read_ask(orjson.dumps(fields))
    assert isinstance(ask, Ask), ask
    return ask


def refusal_of(body: bytes) -> Failure:
    """Why a body is refused."""
    failure = read_ask(body)
    assert isinstance(failure, Failure), failure
    assert failure.kind is Kind.BAD_JSON
    return failure


def test_what_routing_needs_is_read() -> None:
    ask = ask_of(model="tiny", stream=True, previous_response_id="resp_1", messages=[])
    assert (ask.model, ask.stream, ask.follows) == ("tiny", True, "resp_1")


def test_what_is_not_said_is_not_guessed() -> None:
    ask = ask_of()
    assert (ask.model, ask.stream, ask.follows, ask.unit) == (None, False, None, None)
    assert ask_of(model=None).model is None


def test_whether_its_stream_could_be_continued_is_known_from_the_start() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    assert ask_of(**chat).continuable
    assert ask_of(prompt="x", stream=True).continuable
    assert pickle.loads(pickle.dumps(ask_of(**chat))).continuable
    assert not ask_of(**chat | {"stream": False}).continuable
    assert not ask_of(**chat, tools=[{"type": "function"}]).continuable
    assert not ask_of(prompt=[1, 2], stream=True).continuable


@pytest.mark.parametrize("stream", [1, "true", [], None, {}])
def test_a_stream_is_asked_for_by_true_alone(stream: object) -> None:
    assert ask_of(stream=stream).stream is False


@pytest.mark.parametrize("follows", [1, True, [], {}])
def test_what_is_no_id_is_left_to_the_engine(follows: object) -> None:
    assert ask_of(previous_response_id=follows).follows is None


def test_tokens_are_estimated_by_four_bytes_each() -> None:
    body = orjson.dumps({"prompt": "x" * 4000})
    ask = read_ask(body)
    assert isinstance(ask, Ask)
    assert (ask.prompt_bytes, ask.prompt_tokens, len(ask.blocks)) == (4000, 1000, 7)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "line 1 column 1 (char 0)"),
        (b"{", "line 1 column 2 (char 1)"),
        (b'{"a": 1,\n "b" 2}', "line 2 column 6 (char 14)"),
        (b'{"a": 1} x', "line 1 column 10 (char 9)"),
        (b'{"a": "\xff"}', "line 1 column"),
        (b"[" * 2000, "line 1 column"),
    ],
)
def test_the_position_of_what_does_not_parse_is_named(body: bytes, where: str) -> None:
    assert where in refusal_of(body).message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"[]", "an array"),
        (b'"x"', "a string"),
        (b"1", "a number"),
        (b"1.5", "a number"),
        (b"true", "a boolean"),
        (b"null", "null"),
    ],
)
def test_what_is_no_object_is_named(body: bytes, kind: str) -> None:
    assert refusal_of(body).message == f"the body must be a JSON object, not {kind}"


@pytest.mark.parametrize(
    ("model", "kind"), [(1, "a number"), (True, "a boolean"), ([], "an array"), ({}, "an object")]
)
def test_a_model_that_is_no_name_is_refused_by_field(model: object, kind: str) -> None:
    failure = refusal_of(orjson.dumps({"model": model}))
    assert (failure.message, failure.param) == (f"`model` must be a string, not {kind}", "model")
