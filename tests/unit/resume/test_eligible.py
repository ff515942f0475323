"""Which requests may be continued, and which not: a field that is not known counts as one that may not."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.resume.eligible import AGAIN, LONG_STOPS, OPEN, TOKENS, ways_of, why_ineligible

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}

HARMLESS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "echo": False},
    {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "best_of": 1},
    {"response_format": {"type": "text"}, "modalities": ["text"], "functions": None, "anything": None},
    {
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 1,
        "stop": ["x"],
        "max_tokens": 5,
        "min_tokens": 2,
        "user": "u",
    },
    {"continue_final_message": True, "add_generation_prompt": False},
    {"tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [{"type": "function"}], "tool_choice": "none", "include_reasoning": True},
)
HARMFUL: dict[str, Any] = {
    "n": 2,
    "best_of": 2,
    "logprobs": True,
    "top_logprobs": 3,
    "prompt_logprobs": 1,
    "functions": [{}],
    "tool_choice": "required",
    "response_format": {"type": "json_object"},
    "guided_json": {},
    "structured_outputs": {"regex": "a"},
    "regex": "a",
    "echo": True,
    "suffix": "y",
    "audio": {"voice": "v"},
    "modalities": ["text", "audio"],
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "use_beam_search": True,
    "return_token_ids": True,
    "add_generation_prompt": False,
    "skip_special_tokens": False,
    "include_reasoning": False,
    "kv_transfer_params": {},
    "a_field_of_next_year": 0,
}


@pytest.mark.parametrize("fields", HARMLESS)
def test_ordinary_requests_may_be_continued(fields: dict[str, Any]) -> None:
    assert why_ineligible(CHAT | fields, chat=True) == ""


@pytest.mark.parametrize("name", HARMFUL)
def test_whatever_asks_for_more_than_a_text_may_not_and_is_named(name: str) -> None:
    for body, chat in ((CHAT, True), (COMPLETION, False)):
        assert name in why_ineligible(body | {name: HARMFUL[name]}, chat=chat)


COMPUTED: tuple[dict[str, Any], ...] = (
    {"logprobs": True, "top_logprobs": 3},
    {"tools": [{"type": "function"}], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"guided_json": {}},
    {"structured_outputs": {"regex": "a"}},
    {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    {"include_reasoning": False},
)


@pytest.mark.parametrize("fields", COMPUTED)
def test_what_depends_on_what_was_generated_is_computed_again_if_it_comes_out_the_same(
    fields: dict[str, Any],
) -> None:
    assert ways_of(COMPLETION | fields, chat=False) == 0
    assert not ways_of(CHAT | fields | {"temperature": 0.5}, chat=True) & (OPEN | AGAIN)
    assert ways_of(CHAT | fields | {"temperature": 0}, chat=True) & ~TOKENS == AGAIN
    assert ways_of(CHAT | fields | {"temperature": 1.0, "seed": 5}, chat=True) & ~TOKENS == AGAIN
    assert "sampled without a seed" in why_ineligible(CHAT | fields, chat=True)


def test_token_ids_are_of_use_where_more_than_text_may_come_and_the_same_tokens_are_enough() -> None:
    tools = {"tools": [{"type": "function"}]}
    assert ways_of(CHAT | tools, chat=True) == OPEN | TOKENS
    assert ways_of(CHAT | {"logprobs": True}, chat=True) == TOKENS
    assert ways_of(CHAT | {"repetition_penalty": 1.1}, chat=True) == TOKENS
    assert ways_of(CHAT | {"reasoning_effort": "low", "temperature": 0}, chat=True) == OPEN | AGAIN | TOKENS
    assert ways_of(CHAT | {"logprobs": True, "presence_penalty": 0.1}, chat=True) == 0
    assert ways_of(COMPLETION | {"logprobs": 1}, chat=False) == 0
    assert why_ineligible(CHAT | {"logprobs": True}, chat=True, has_ids=True) == ""


def test_plain_text_goes_both_ways_if_it_comes_out_the_same() -> None:
    assert ways_of(CHAT, chat=True) == OPEN
    assert ways_of(CHAT | {"temperature": 0.0}, chat=True) == OPEN | AGAIN
    assert ways_of(COMPLETION | {"prompt": [1, 2], "temperature": 0}, chat=False) == AGAIN


@pytest.mark.parametrize(
    "name", ["n", "best_of", "use_beam_search", "kv_transfer_params", "a_field_of_next_year"]
)
def test_what_nobody_could_join_is_not_computed_again(name: str) -> None:
    assert ways_of(CHAT | {name: HARMFUL[name], "temperature": 0}, chat=True) == 0
    both = CHAT | {name: HARMFUL[name], "logprobs": True}
    assert f"the request has {name}" in why_ineligible(both, chat=True)


def test_log_probabilities_of_completions_are_asked_for_by_zero_as_well() -> None:
    assert "logprobs" in why_ineligible(COMPLETION | {"logprobs": 0}, chat=False)


@pytest.mark.parametrize("prompt", [[1, 2], ["a", "b"], ["a"], None, 3])
def test_a_prompt_that_is_not_one_text_may_not(prompt: object) -> None:
    assert why_ineligible(COMPLETION | {"prompt": prompt}, chat=False) == "its prompt is not one string"


@pytest.mark.parametrize("messages", [None, [], "x", ["x"]])
def test_messages_that_are_none_may_not(messages: object) -> None:
    assert (
        why_ineligible(CHAT | {"messages": messages}, chat=True) == "its messages are not a list of objects"
    )


def test_what_continues_a_message_of_parts_may_not() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert "not plain text" in why_ineligible(CHAT | fields, chat=True)


@pytest.mark.parametrize(
    "stop", ["Z" * LIMITS.stop_bytes, ["é"] * (LIMITS.stop_bytes // 2), 5, {"a": 1}, [None]]
)
def test_as_many_stop_strings_as_are_looked_at(stop: object) -> None:
    assert why_ineligible(CHAT | {"stop": stop}, chat=True) == ""


@pytest.mark.parametrize(
    "stop", ["Z" * 300_000, ["ZZ"] * LIMITS.stop_bytes, ["é"] * (LIMITS.stop_bytes // 2 + 1)]
)
def test_longer_stop_strings_are_a_reason(stop: object) -> None:
    assert why_ineligible(CHAT | {"stop": stop}, chat=True) is LONG_STOPS
