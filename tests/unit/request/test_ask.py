"""From a body to an Ask."""

from __future__ import annotations

import marshal
import pickle
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request.body import ANSWERS_MAX, has_more_nodes, is_large, read_ask, read_large_ask
from cellgate.proxy.resume.eligible import AGAIN, OPEN, TOKENS
from cellgate.proxy.workers.protocol import ask_out
from cellgate.router.nouns import Ask


def ask_of(**fields: Any) -> Ask:
    """The ask of a body with these fields."""
    ask = read_ask(orjson.dumps(fields), "chat" if "messages" in fields else "completions")
    assert isinstance(ask, Ask), ask
    return ask


def refusal_of(body: bytes) -> Failure:
    """Why a body is refused."""
    failure = read_ask(body)
    assert isinstance(failure, Failure), failure
    assert failure.kind is FailureKind.BAD_JSON
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
    assert ask_of(**chat, tools=[{"type": "function"}]).continuable == OPEN | TOKENS
    assert ask_of(**chat, logprobs=True, temperature=0).continuable == AGAIN | TOKENS
    assert not ask_of(**chat, n=2).continuable
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


# -- strange shapes ----------------------------------------------------------------------------------------

FIELDS = (
    *("model", "messages", "prompt", "input", "tools", "stop", "user", "priority", "stream", "max_tokens"),
    *("previous_response_id", "response_format", "n", "metadata", "cache_salt", "a_field_of_next_year"),
)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("depth", [250, 253, 254, 255, 256, 300, 1000, LIMITS.json_depth - 1])
def test_what_is_nested_deeper_than_can_be_written_is_passed_on(field: str, depth: int) -> None:
    """An engine may take it, and the prompt beside it counts."""
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = opened * depth + b"1" + closed * depth
        body = b'{"stream":true,"messages":[{"role":"user","content":"%b"}],"%b":%b}' % (
            b"x" * 4000,
            field.encode(),
            deep,
        )
        ask = read_ask(body)
        if field == "model":
            assert isinstance(ask, Failure)
            assert ask.param == "model"
        else:
            assert isinstance(ask, Ask), ask
            assert ask.prompt_bytes > 4000 or field == "messages"


def test_what_is_nested_deeper_than_is_read_is_refused_by_name() -> None:
    counted = REACHED["json_depth"]
    deep = b"[" * LIMITS.json_depth + b"]" * LIMITS.json_depth
    assert "more than 1024 objects and arrays within each other" in refusal_of(b'{"a":%b}' % deep).message
    assert REACHED["json_depth"] == counted + 1


def test_a_body_with_too_many_values_is_refused_by_name() -> None:
    body = b'{"a":[%b0]}' % (b"0," * LIMITS.json_nodes)
    counted = REACHED["json_nodes"]
    failure = read_large_ask(body)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.message) == (FailureKind.BAD_JSON, "the body has more than 2097152 values")
    assert REACHED["json_nodes"] == counted + 1


def test_commas_of_a_text_are_no_values() -> None:
    table = orjson.dumps({"model": "m", "prompt": 'a,"[{\\",' * LIMITS.json_nodes})
    ask = read_large_ask(table)
    assert isinstance(ask, Ask)
    assert ask.prompt_bytes == 8 * LIMITS.json_nodes


def test_a_long_text_is_read_at_once_and_what_has_many_values_is_not() -> None:
    text = "The quick brown fox, [1] as they say, jumps. " * 20_000
    assert not is_large(orjson.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}))
    assert is_large(orjson.dumps({"prompt": "x" * LIMITS.json_bytes_on_loop}))
    assert is_large(b'{"a":[%b0]}' % (b"0," * LIMITS.json_nodes_on_loop))
    assert not is_large(b'{"a":[%b0]}' % (b"0," * (LIMITS.json_nodes_on_loop // 2 - 10)))


def test_names_without_end_are_refused_or_cut() -> None:
    long = "x" * 1_000_000
    failure = refusal_of(orjson.dumps({"model": long}))
    assert (failure.message, failure.param) == ("`model` is longer than 1024 characters", "model")
    ask = ask_of(user=long, previous_response_id=long)
    assert (ask.session, ask.follows) == ("x" * LIMITS.name_chars, None)


def marks(body: bytes) -> int:
    """What `has_more_nodes` counts, the slow way."""
    count, in_string, escaped = 0, False, False
    for char in body.decode():
        if in_string:
            escaped, in_string = char == "\\" and not escaped, char != '"' or escaped
        else:
            in_string = char == '"'
            count += char in ",[{"
    return count


odd = st.sampled_from(['"', "\\", "\\\\", '\\"', ",", "[", "{", ",,,,,", "\n", "é", "\u0000"])
texts = st.lists(odd, max_size=6).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0, 1, -1, 1e308, -1e308, 2**64 - 1, True, "", "x", "true", "yes", [], {}, [[]], [{}]])
    | texts,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | st.sampled_from(FIELDS), inner, max_size=4)
    ),
    max_leaves=12,
)
parts = st.dictionaries(
    st.sampled_from(["role", "content", "text", "image_url", "url", "tool_calls"]), values, max_size=3
)
messages = st.dictionaries(
    st.sampled_from(["role", "content", "name"]), values | st.lists(parts, max_size=3), max_size=3
)
bodies = st.dictionaries(
    st.sampled_from(FIELDS), values | st.lists(messages | values, max_size=3), max_size=5
)
law = settings(derandomize=True, deadline=None, max_examples=400)


@pytest.mark.parametrize("text", [",[{" * 400, 'a \\" b ' * 20 + "," * 400, "\\\\"])
@pytest.mark.parametrize("strings", [1, 10, 40])
def test_marks_within_text_are_no_values(text: str, strings: int) -> None:
    """Text is seen without counting; the values around it count wherever they are."""
    some = ",".join([f'"{text}"'] * strings).encode()
    assert not has_more_nodes(b"[%b]" % some, 100)
    for body in (b"[%b%b]" % (some, b",0" * 100), b"[%b%b]" % (b"0," * 100, some), b"[" * 101 + some):
        assert has_more_nodes(body, 100)


@law
@given(value=values, at=st.integers(-1, 1))
def test_values_are_counted_without_a_parse(value: object, at: int) -> None:
    body = orjson.dumps(value)
    limit = max(0, marks(body) + at)
    assert has_more_nodes(body, limit) is (marks(body) > limit)


@law
@given(body=bodies)
def test_a_body_of_any_shape_is_an_ask_or_a_refusal(body: dict[str, Any]) -> None:
    found = read_ask(orjson.dumps(body))
    if isinstance(found, Failure):
        assert found.kind is FailureKind.BAD_JSON
        assert found.param == "model"
        return
    assert (type(found.stream), type(found.continuable), type(found.session)) == (bool, int, str)
    assert isinstance(found.priority, int)
    assert found.prompt_bytes >= 0
    # As it goes to another process.
    assert marshal.loads(marshal.dumps(ask_out(found))) == ask_out(found)
    assert read_ask(orjson.dumps(body)) == found


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\ud800"}',
        b'{"a": %b}' % (b"9" * 5000),
        b'{"a": 1e400}',
        b"\x1f\x8b\x08\x00",
        b'{"a": "\x00"}',
        b"--boundary\r\n",
        b"{" * 1_000_000,
        b'{"a":' * 1_000_000,
    ],
    ids=range(8),
)
def test_what_is_no_json_is_refused_with_its_place(body: bytes) -> None:
    assert "is not valid JSON" in refusal_of(body).message


def test_the_last_of_equal_keys_counts() -> None:
    """As in Python's own parser, which engines use."""
    ask = read_ask(b'{"model": "a", "model": "b"}')
    assert isinstance(ask, Ask)
    assert ask.model == "b"


PLAIN = '{"model": "tiny", "prompt": "hi", "stream": true}'
ODD = {
    "with a mark": PLAIN.encode("utf-8-sig"),
    "UTF-16": PLAIN.encode("utf-16"),
    "UTF-16 without a mark": PLAIN.encode("utf-16-be"),
    "UTF-32": PLAIN.encode("utf-32"),
    "NaN": PLAIN[:-1].encode() + b', "temperature": NaN, "top_p": -Infinity}',
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_what_pythons_parser_takes_is_read_like_any_json(body: bytes) -> None:
    ask = read_ask(body)
    assert isinstance(ask, Ask)
    assert (ask.model, ask.stream) == ("tiny", True)


@pytest.mark.parametrize(
    "body",
    [b"\xef\xbb\xbf{", b"{NaN", b"[" * 2000 + b"NaN", b"\xff\xfe{", b'{"prompt": "\\ud83d", "seed": NaN}'],
)
def test_what_no_parser_takes_is_refused_in_the_same_words(body: bytes) -> None:
    assert isinstance(read_ask(body), Failure)


@pytest.mark.parametrize(
    ("body", "limit", "answers"),
    [
        ({"max_tokens": 5}, 5, 1),
        ({"max_tokens": 5, "n": 40}, 5, 40),
        ({"max_tokens": 5, "n": 2, "best_of": 6}, 5, 6),
        ({"max_tokens": 5, "n": 2, "prompt": ["a", "b", "c"]}, 5, 6),
        ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5, 1),
        ({"max_tokens": 5, "prompt": []}, 5, 1),
        ({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 7, "n": 3}}, 7, 6),
        ({"inputs": "a", "parameters": {"max_new_tokens": 7}}, 7, 1),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 8}}, 8, 1),
        ({"n": "many", "max_tokens": 5}, 5, 1),
        ({"n": -3, "max_tokens": 5}, 5, 1),
        ({"n": True}, 0, 1),
        ({"n": 10**12}, 0, ANSWERS_MAX),
        ({"sampling_params": [1]}, 0, 1),
    ],
)
def test_how_many_answers_are_asked_for_and_how_long(body: dict[str, Any], limit: int, answers: int) -> None:
    ask = read_ask(orjson.dumps(body))
    assert isinstance(ask, Ask)
    assert (ask.max_tokens, ask.answers) == (limit, answers)
