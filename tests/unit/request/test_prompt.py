"""The prompt as a chain of hashes: what is the same to an engine's prefix cache, and what is not."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellgate.proxy.config.limits import LIMITS, REACHED
from cellgate.proxy.request.body import (
    MAX_BLOCKS,
    MEDIA_BYTES,
    block_hashes,
    pieces_of,
    read_prompt,
    shape_of_body,
)
from cellgate.router.cost_model import BLOCK_BYTES

law = settings(derandomize=True, deadline=None, max_examples=150)

Body = dict[str, Any]

words = st.text(max_size=12).flatmap(lambda word: st.integers(1, 120).map(lambda times: word * times))
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, words),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, words),
    st.builds(lambda url: {"type": "input_image", "image_url": url}, words),
    st.builds(lambda data: {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, words),
)
calls = st.builds(lambda text: [{"id": "1", "function": {"name": "f", "arguments": text}}], words)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={
        "content": words | st.none() | st.lists(parts, max_size=3),
        "tool_calls": calls,
        "tool_call_id": words,
    },
)
chats = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(messages, min_size=1, max_size=6)},
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


# -- laws --------------------------------------------------------------------------------------------------


@law
@given(chat=chats, more=st.lists(messages, min_size=1, max_size=3))
def test_a_message_appended_keeps_every_full_block(chat: Body, more: list[Body]) -> None:
    longer = chat | {"messages": [*chat["messages"], *more]}
    blocks = read_prompt(chat).blocks
    assert read_prompt(longer).blocks[: len(blocks)] == blocks
    assert shared(chat, longer) == len(blocks)


@law
@given(start=ids, more=ids)
def test_token_ids_appended_keep_every_full_block(start: list[int], more: list[int]) -> None:
    blocks = read_prompt({"prompt": start}).blocks
    assert len(blocks) == len(start) * 4 // BLOCK_BYTES
    assert read_prompt({"prompt": start + more}).blocks[: len(blocks)] == blocks


@law
@given(
    text=st.binary(min_size=4 * BLOCK_BYTES, max_size=4 * BLOCK_BYTES), at=st.integers(0), seed=st.integers(0)
)
def test_a_change_changes_its_block_and_all_later_ones(text: bytes, at: int, seed: int) -> None:
    at, seed = at % len(text), seed % (1 << 60)
    changed = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
    same = [a == b for a, b in zip(block_hashes(text, seed), block_hashes(changed, seed), strict=True)]
    assert same == [block < at // BLOCK_BYTES for block in range(4)]


@law
@given(chat=chats, other=words)
def test_another_model_or_salt_or_template_has_nothing_in_common(chat: Body, other: str) -> None:
    blocks = read_prompt(chat).blocks
    for change in ({"model": "m" + other}, {"cache_salt": "s" + other}, {"chat_template": "t" + other}):
        elsewhere = chat | change
        if elsewhere != chat:
            assert not set(blocks) & set(read_prompt(elsewhere).blocks)


@law
@given(chat=chats)
def test_the_size_is_that_of_what_is_hashed(chat: Body) -> None:
    prompt = read_prompt(chat)
    assert prompt.size == len(canonical(chat))
    assert len(prompt.blocks) == prompt.size // BLOCK_BYTES
    assert all(0 <= block < 1 << 60 for block in prompt.blocks)
    assert prompt == read_prompt(dict(reversed(chat.items())))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@law
@given(
    body=st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "input", "tools", "system", "text", "cache_salt"]),
        json_values | st.lists(st.dictionaries(st.sampled_from(["role", "content", "text"]), json_values)),
    )
)
def test_no_json_at_all_upsets_it(body: Body) -> None:
    assert read_prompt(body).size >= 0


# -- what counts as the same -------------------------------------------------------------------------------

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
    dressed = plain | {"stream": True, "temperature": 0.5, "user": "someone", "max_tokens": 7, "tools": []}
    assert read_prompt(plain) == read_prompt(dressed)


def test_text_and_one_part_of_text_are_the_same() -> None:
    assert read_prompt(user(LONG)) == read_prompt(user([{"type": "text", "text": LONG}]))


def test_the_role_is_part_of_the_prompt() -> None:
    other = {"model": "m", "messages": [{"role": "system", "content": LONG}]}
    assert shared(user(LONG), other) == 0


def test_tools_come_before_the_messages() -> None:
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


def fingerprint(**changed: Any) -> int:
    return read_prompt({**user(LONG + "the end"), "model": "m", **changed}).fingerprint


@pytest.mark.parametrize(
    "changed",
    [{"stream": True}, {"user": "another"}, {"seed": 7}, {"temperature": 0.5}, {"max_tokens": 3}],
    ids=str,
)
def test_the_same_prompt_asked_again_has_the_same_fingerprint(changed: Body) -> None:
    assert fingerprint(**changed) == fingerprint()


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "another"},
        {"messages": user(LONG + "the End")["messages"]},
        {"messages": user("The same" + LONG)["messages"]},
        {"tools": [{"type": "function"}]},
        {"cache_salt": "x"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"1": 5}},
        {f"field {number}": 1 for number in range(LIMITS.fields + 1)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_makes_an_engine_do_other_work_is_part_of_the_fingerprint(changed: Body) -> None:
    assert fingerprint(**changed) != fingerprint()


def test_the_tail_of_a_prompt_too_long_to_be_hashed_in_blocks_is_part_of_its_fingerprint() -> None:
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
