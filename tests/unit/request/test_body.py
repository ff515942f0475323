"""From a body to an Ask, and the prompt as a chain of hashes."""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.http.errors import Failure, FailureKind
from cellgate.proxy.request import body_shape
from cellgate.proxy.request.answer_limits import ANSWERS_MAX
from cellgate.proxy.request.body import has_more_nodes, is_large, read_ask, read_large_ask
from cellgate.proxy.request.body_shape import SHAPES_KEPT, shape_of_body
from cellgate.proxy.request.content_coding import DamagedError, pieces
from cellgate.proxy.request.prompt import MAX_BLOCKS, MEDIA_BYTES, block_hashes, pieces_of, read_prompt
from cellgate.proxy.resume.eligible import AGAIN, OPEN, TOKENS
from cellgate.router.cost_model import BLOCK_BYTES
from cellgate.router.nouns import Ask


def asked(found: Ask | Failure) -> Ask:
    assert isinstance(found, Ask), found
    return found


def ask_of(**fields: Any) -> Ask:
    """The ask of a body with these fields."""
    route = "chat" if "messages" in fields else "completions" if "prompt" in fields else "generate"
    return asked(read_ask(orjson.dumps(fields), route))


def refusal_of(body: bytes) -> Failure:
    """Why a body is refused."""
    failure = read_ask(body)
    assert isinstance(failure, Failure), failure
    assert failure.kind is FailureKind.BAD_JSON
    return failure


def test_what_routing_needs_is_read_and_what_is_not_said_is_not_guessed() -> None:
    ask = ask_of(model="tiny", stream=True, previous_response_id="resp_1", messages=[])
    assert (ask.model, ask.stream, ask.follows) == ("tiny", True, "resp_1")
    ask = ask_of()
    assert (ask.model, ask.stream, ask.follows, ask.unit) == (None, False, None, None)
    assert ask_of(model=None).model is None
    others: list[object] = [1, "true", [], {}]
    assert not any(ask_of(stream=other).stream for other in others)
    assert not any(ask_of(previous_response_id=other).follows for other in others if other != "true")


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


def test_tokens_are_estimated_by_four_bytes_each() -> None:
    ask = ask_of(prompt="x" * 4000)
    assert (ask.prompt_bytes, ask.prompt_tokens, len(ask.blocks)) == (4000, 1000, 7)


NO_JSON = {
    b"": "line 1 column 1 (char 0)",
    b'{"a": 1,\n "b" 2}': "line 2 column 6 (char 14)",
    b'{"a": 1} x': "line 1 column 10 (char 9)",
    b'{"a": "\xff"}': "line 1 column",
    b'{"a": "\\ud800"}': "line 1 column 8 (char 7)",
    b'{"a": %b}' % (b"9" * 5000): "number is infinity",
    b"\x1f\x8b\x08\x00": "not valid UTF-8",
    b'{"a":' * 1_000_000: "more than 1024 objects and arrays within each other",
    # What Python's parser would take, but for what is behind it.
    b"\xef\xbb\xbf{": "byte order mark",
    b"{NaN": "line 1 column 2 (char 1)",
    b'{"prompt": "\\ud83d", "seed": NaN}': "line 1 column 13 (char 12)",
}


@pytest.mark.parametrize(("body", "where"), NO_JSON.items(), ids=range(len(NO_JSON)))
def test_what_is_no_json_is_refused_with_its_place(body: bytes, where: str) -> None:
    message = refusal_of(body).message
    assert message.startswith("the body is not valid JSON: ")
    assert where in message


KINDS = {"an array": [], "a string": "x", "a number": 1.5, "a boolean": True, "null": None, "an object": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_object_and_a_model_that_is_no_name_are_refused(kind: str) -> None:
    value = KINDS[kind]
    if value != {}:
        message = refusal_of(orjson.dumps(value)).message
        assert message == f"the body must be a JSON object, not {kind}"
    if value not in ("x", None):
        failure = refusal_of(orjson.dumps({"model": value}))
        assert (failure.message, failure.param) == (f"`model` must be a string, not {kind}", "model")


FIELDS = (
    *("model", "messages", "prompt", "input", "tools", "stop", "user", "priority", "stream", "max_tokens"),
    *("previous_response_id", "response_format", "n", "metadata", "cache_salt", "a_field_of_next_year"),
    *("system", "text"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_nested_deeper_than_can_be_written_is_passed_on(field: str) -> None:
    """An engine may take it, and the prompt beside it counts."""
    for depth in (253, 254, 255, LIMITS.json_depth - 1):
        for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
            beside = b'{"messages":[{"role":"user","content":"%b"}],"%b":' % (b"x" * 4000, field.encode())
            ask = read_ask(beside + opened * depth + b"1" + closed * depth + b"}")
            if field in ("model", "messages"):
                assert isinstance(ask, Failure)
                assert ask.param == field
            else:
                assert asked(ask).prompt_bytes > 4000


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
    table = orjson.dumps({"model": "m", "prompt": 'a,"[{\\",' * (LIMITS.json_nodes // 3)})
    assert asked(read_large_ask(table)).prompt_bytes == 8 * (LIMITS.json_nodes // 3)


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
    for name in ("user", "prompt_cache_key"):
        ask = ask_of(**{name: long}, previous_response_id=long)
        assert (ask.session, ask.follows) == ("x" * LIMITS.name_chars, None)


def test_the_session_of_a_body_is_its_cache_key_or_else_its_user() -> None:
    assert ask_of(user="u", prompt_cache_key="k").session == "k"
    assert (
        ask_of(user="u", prompt_cache_key="").session == ask_of(user="u", prompt_cache_key=7).session == "u"
    )


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
    st.sampled_from(["role", "content", "name", "text", "image_url", "url", "tool_calls"]), values, max_size=3
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values | st.lists(parts | values, max_size=3), max_size=5)
law = settings(max_examples=150)


@pytest.mark.parametrize("text", [",[{" * 400, 'a \\" b ' * 20 + "," * 400, "\\\\"])
@pytest.mark.parametrize("strings", [1, 40])
def test_marks_within_text_are_no_values(text: str, strings: int) -> None:
    """Text is seen without counting; the values around it count wherever they are."""
    some = ",".join([f'"{text}"'] * strings).encode()
    assert not has_more_nodes(b"[%b]" % some, 100)
    for more in (b"[%b%b]" % (some, b",0" * 100), b"[%b%b]" % (b"0," * 100, some), b"[" * 101 + some):
        assert has_more_nodes(more, 100)


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
    assert read_ask(orjson.dumps(body)) == found


def test_equal_keys_that_matter_are_refused_in_any_encoding() -> None:
    """Python's own parser takes the last, others the first."""
    twice = '{"model": "a", "model": "b"}'
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        assert isinstance(read_ask(twice.encode(encoding)), Failure)
    assert asked(read_ask(b'{"user": "a", "model": "b", "user": "c"}')).session == "c"


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
    ask = asked(read_ask(body))
    assert (ask.model, ask.stream) == ("tiny", True)


@pytest.mark.parametrize(
    ("body", "limit", "answers"),
    [
        ({"max_tokens": 5, "n": 40}, 5, 40),
        ({"max_tokens": 5, "n": 2, "best_of": 6}, 5, 6),
        ({"max_tokens": 5, "n": 2, "prompt": ["a", "b", "c"]}, 5, 6),
        ({"max_tokens": 5, "prompt": [1, 2, 3]}, 5, 1),
        ({"max_tokens": 5, "prompt": []}, 5, 1),
        ({"text": ["a", "b"], "sampling_params": {"max_new_tokens": 7, "n": 3}}, 7, 6),
        ({"inputs": "a", "parameters": {"max_new_tokens": 7}}, 7, 1),
        ({"token_ids": [1], "sampling_params": {"max_tokens": 8}}, 8, 1),
        ({"n": "many", "max_tokens": 5}, 5, 1),
        ({"n": -3}, 0, 1),
        ({"n": True}, 0, 1),
        ({"n": 10**12}, 0, ANSWERS_MAX),
        ({"sampling_params": [1]}, 0, 1),
    ],
)
def test_how_many_answers_are_asked_for_and_how_long(body: dict[str, Any], limit: int, answers: int) -> None:
    ask = ask_of(**body)
    assert (ask.max_tokens, ask.answers) == (limit, answers)


# The prompt as a chain of hashes: what is the same to an engine's prefix cache, and what is not.

prompt_law = settings(max_examples=60)

Body = dict[str, Any]

words = st.text(max_size=12).flatmap(lambda word: st.integers(1, 120).map(lambda times: word * times))
prompt_parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, words),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, words),
    st.builds(lambda url: {"type": "input_image", "image_url": url}, words),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, words),
)
calls = st.builds(lambda text: [{"id": "1", "function": {"name": "f", "arguments": text}}], words)
prompt_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": words | st.none() | st.lists(prompt_parts, max_size=3),
        "tool_calls": calls,
        "tool_call_id": words,
    },
)
chats = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(prompt_messages, min_size=1, max_size=6)},
    optional={"tools": st.lists(st.dictionaries(words, words, max_size=2), min_size=1, max_size=2)},
)
ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=600)


def canonical(body: dict[str, Any]) -> bytes:
    """The prompt of a body as one run of bytes."""
    shape = shape_of_body(body)
    return b"".join(pieces_of(body, shape.preamble, shape.prompts))


def shared(one: Body, other: Body) -> int:
    """How many blocks two prompts have in common at their beginning."""
    pairs = zip(read_prompt(one).blocks, read_prompt(other).blocks, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def user(content: object) -> Body:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


@prompt_law
@given(chat=chats, more=st.lists(prompt_messages, min_size=1, max_size=3))
def test_a_message_appended_keeps_every_full_block(chat: Body, more: list[Body]) -> None:
    longer = chat | {"messages": [*chat["messages"], *more]}
    blocks = read_prompt(chat).blocks
    assert read_prompt(longer).blocks[: len(blocks)] == blocks
    assert shared(chat, longer) == len(blocks)


@prompt_law
@given(start=ids, more=ids)
def test_token_ids_appended_keep_every_full_block(start: list[int], more: list[int]) -> None:
    blocks = read_prompt({"prompt": start}).blocks
    assert len(blocks) == len(start) * 4 // BLOCK_BYTES
    assert read_prompt({"prompt": start + more}).blocks[: len(blocks)] == blocks


@prompt_law
@given(
    text=st.binary(min_size=4 * BLOCK_BYTES, max_size=4 * BLOCK_BYTES), at=st.integers(0), seed=st.integers(0)
)
def test_a_change_changes_its_block_and_all_later_ones(text: bytes, at: int, seed: int) -> None:
    at, seed = at % len(text), seed % (1 << 60)
    changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    same = [a == b for a, b in zip(block_hashes(text, seed), block_hashes(changed, seed), strict=True)]
    assert same == [block < at // BLOCK_BYTES for block in range(4)]


@prompt_law
@given(chat=chats, other=words)
def test_another_model_or_salt_or_template_has_nothing_in_common(chat: Body, other: str) -> None:
    blocks = read_prompt(chat).blocks
    for change in ({"model": "m" + other}, {"cache_salt": "s" + other}, {"chat_template": "t" + other}):
        elsewhere = chat | change
        if elsewhere != chat:
            assert not set(blocks) & set(read_prompt(elsewhere).blocks)


@prompt_law
@given(chat=chats)
def test_the_size_is_that_of_what_is_hashed(chat: Body) -> None:
    prompt = read_prompt(chat)
    assert prompt.size == len(canonical(chat))
    assert len(prompt.blocks) == prompt.size // BLOCK_BYTES
    assert all(0 <= block < 1 << 60 for block in prompt.blocks)
    assert prompt == read_prompt(dict(reversed(chat.items())))


LONG = "all work and no play " * 100


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"prompt": LONG},
        {"prompt": [LONG, "another"]},
        {"prompt": list(range(1000))},
        {"prompt": [list(range(1000)), [1]]},
        {"input": LONG, "instructions": "be brief"},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]}]},
        {"input": [{"type": "function_call_output", "call_id": "1", "output": LONG}]},
        {"system": [{"type": "text", "text": LONG}], "messages": []},
        {"text": LONG},
        {"input_ids": list(range(1000))},
    ],
    ids=lambda body: " ".join(body),
)
def test_every_api_has_a_prompt(body: Body) -> None:
    assert len(read_prompt(body).blocks) >= 2


def test_what_does_not_reach_the_model_changes_nothing() -> None:
    plain = user(LONG)
    dressed = plain | {
        "stream": True,
        "user": "someone",
        "max_tokens": 7,
        "metadata": {"a": "b"},
        "priority": 1,
    }
    assert read_prompt(plain) == read_prompt(dressed | {"tools": []})
    assert read_prompt(plain) == read_prompt(user([{"type": "text", "text": LONG}]))


@pytest.mark.parametrize(
    "more", [{"seed": 7}, {"temperature": 0.5}, {"stop": ["a"]}, {"lora_path": "a"}, {"top_k": 1}]
)
def test_what_changes_the_computation_is_another_request_with_the_same_prompt(more: Body) -> None:
    one, other = read_prompt(user(LONG)), read_prompt(user(LONG) | more)
    assert one.blocks == other.blocks
    assert one.fingerprint != other.fingerprint


def test_the_role_is_part_of_the_prompt_and_tools_come_before_the_messages() -> None:
    other = {"model": "m", "messages": [{"role": "system", "content": LONG}]}
    assert shared(user(LONG), other) == 0
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    one, other = user("a") | {"tools": tools}, user("b") | {"tools": tools}
    assert shared(one, other) == len(read_prompt(one).blocks) >= 4


def test_an_image_is_known_by_its_address_and_weighs_what_its_tokens_do() -> None:
    def image(url: str, detail: str = "auto") -> Body:
        return user([{"type": "image_url", "image_url": {"url": url, "detail": detail}}])

    data = "data:image/png;base64," + "A" * 100_000
    assert read_prompt(image(data)) == read_prompt(image(data, "low"))
    assert shared(image(data), image(data + "B")) == 0
    assert MEDIA_BYTES <= read_prompt(image(data)).size < MEDIA_BYTES + 50


def test_a_call_of_a_tool_is_part_of_the_prompt() -> None:
    def called(arguments: str) -> Body:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}

    empty, full = called("{}"), called('{"a": 1}')
    assert canonical(empty) != canonical(full)


def test_a_prompt_without_end_is_hashed_up_to_a_limit() -> None:
    prompt = read_prompt({"prompt": "x" * (MAX_BLOCKS + 3) * BLOCK_BYTES})
    assert (len(prompt.blocks), prompt.size) == (MAX_BLOCKS, (MAX_BLOCKS + 3) * BLOCK_BYTES)


def test_what_is_nested_too_deep_to_be_written_is_hashed_as_it_came() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    data = {"prompt": [deep, "a" * 5000]}
    body = b'{"prompt": [' + b"[" * 900 + b'"x"' + b"]" * 900 + b', "' + b"a" * 5000 + b'"]}'
    assert orjson.loads(body) == data
    prompt, other = read_prompt(data, body), read_prompt({"model": "m"} | data, body)
    assert (prompt.size, len(prompt.blocks)) == (len(body), len(body) // BLOCK_BYTES)
    assert not set(prompt.blocks) & set(other.blocks)


MANY = LIMITS.prompt_pieces


@pytest.mark.parametrize(
    "chat",
    [
        user([{"type": "text", "text": f"part {n}"} for n in range(MANY)]),
        user("x") | {"messages": [{"role": "user", "content": f"message {n}"} for n in range(MANY)]},
        {"prompt": [f"text {n}" for n in range(MANY)]},
        user([{}] * MANY),
    ],
    ids=["parts", "messages", "texts", "nothing"],
)
def test_what_is_appended_to_more_than_is_looked_at_keeps_every_full_block(chat: Body) -> None:
    name = "prompt" if "prompt" in chat else "messages"
    longer = chat | {name: [*chat[name], {"role": "user", "content": LONG}]}
    counted = REACHED["prompt_pieces"]
    prompt = read_prompt(chat)
    assert REACHED["prompt_pieces"] == counted + 1
    # But for the bracket that ends what is written as it stands.
    whole = (prompt.size - 3) // BLOCK_BYTES
    assert whole > 2
    assert read_prompt(longer).blocks[:whole] == prompt.blocks[:whole]
    assert read_prompt(longer).size > prompt.size


def test_what_makes_an_engine_do_other_work_is_part_of_the_fingerprint() -> None:
    plain = user(LONG + "the end")
    work: list[Body] = [
        *(user(LONG + "the End"), user("The same" + LONG), {"model": "another"}),
        *({"tools": [{"type": "function"}]}, {"cache_salt": "x"}, {"logit_bias": {"1": 5}}),
        {f"field {number}": 1 for number in range(LIMITS.fields + 1)},
    ]
    assert len({read_prompt(plain | change).fingerprint for change in ({}, *work)}) == 1 + len(work)
    prompt = "x" * (MAX_BLOCKS + 3) * BLOCK_BYTES
    assert len({read_prompt({"prompt": prompt + end}).fingerprint for end in ("", "a", "b")}) == 3


def test_images_without_end_are_not_hashed_as_images() -> None:
    """A small body of thousands would make megabytes."""
    few, many = ([{"image": str(number)} for number in range(count)] for count in (100, 8000))
    prompts = [read_prompt({"messages": [{"role": "user", "content": parts}]}) for parts in (few, many)]
    assert prompts[0].size > 100 * MEDIA_BYTES
    assert prompts[1].size < 1 << 20
    # What is appended changes no block before.
    known = len(prompts[0].blocks) - 1
    assert prompts[0].blocks[:known] == prompts[1].blocks[:known]


# What is kept of the names of bodies: bounded, and the same for each body with these names.


def test_bodies_with_the_same_names_have_the_same_shape_in_the_order_of_templates() -> None:
    assert shape_of_body({"model": "a", "messages": []}) is shape_of_body({"model": "b", "messages": [1]})
    shape = shape_of_body({"prompt": "x", "messages": [], "system": "y", "tools": []})
    assert (shape.preamble, shape.prompts) == (("tools", "system"), ("messages", "prompt"))
    usual, two = (
        shape_of_body({"messages": [], "max_tokens": 2}),
        shape_of_body({"max_tokens": 1, "n_predict": 2}),
    )
    assert (usual.limit, usual.multiplies) == ("max_tokens", False)
    assert (two.limit, two.multiplies) == ("", True), "several are read one by one"
    few = {f"field {number}": 1 for number in range(LIMITS.fields)}
    assert shape_of_body({"model": "m", **few}).more == tuple(sorted(few))
    many = {"model": "m", "last": 1, **few}
    assert shape_of_body(many).more == tuple(many)


def test_clients_cannot_make_it_keep_more_than_so_much() -> None:
    before = dict(body_shape.shapes)
    long = {"x" * 2000: 1}
    assert shape_of_body(long) is not shape_of_body(long)
    assert body_shape.shapes == before
    for number in range(2 * SHAPES_KEPT):
        shape_of_body({f"name {number}": 1})
        assert len(body_shape.shapes) <= SHAPES_KEPT


# Compressed bodies become what they were, in pieces of bounded size; what is damaged is told as such.

zstd: Any = pytest.importorskip("backports.zstd")


def raw(body: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(body) + coder.flush()


CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate without a frame": raw,
    "zstd": zstd.compress,
}
plain_bodies = st.one_of(
    st.binary(max_size=1000),
    st.tuples(st.binary(max_size=9), st.integers(0, 50_000)).map(lambda t: t[0] * t[1]),
)


@pytest.mark.parametrize("name", CODERS)
@settings(max_examples=40)
@given(plain_bodies)
def test_what_was_compressed_is_what_it_was(name: str, body: bytes) -> None:
    coder, code = name.split(" ")[0], CODERS[name]
    found = list(pieces(coder, code(body)))
    assert b"".join(found) == body
    assert max(map(len, found), default=0) <= LIMITS.decoded_piece_bytes
    if coder != "deflate":
        # Several members are one body.
        assert b"".join(pieces(coder, code(body) + code(b"") + code(b"b"))) == body + b"b"


@pytest.mark.parametrize("name", CODERS)
@settings(max_examples=40)
@given(st.binary(max_size=50))
def test_what_is_damaged_or_cut_off_is_told(name: str, noise: bytes) -> None:
    whole = CODERS[name](bytes(range(256)) * 9)
    told = noise + whole if noise and name != "deflate without a frame" else whole[: len(whole) // 2]
    for damaged in (whole[:-1], told, whole + b"\xff\xff"):
        with pytest.raises(DamagedError):
            list(pieces(name.split(" ")[0], damaged))


def test_a_frame_that_needs_much_memory_is_refused() -> None:
    options = {int(zstd.CompressionParameter.window_log): 27}
    coder = zstd.ZstdCompressor(options=options)
    with pytest.raises(DamagedError):
        list(pieces("zstd", coder.compress(b"x" * 9_000_000) + coder.flush()))
