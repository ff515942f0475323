"""Which requests may be continued, the chats they stand for, and stop strings at the seam."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.resume import messages as messages_request
from cellgate.proxy.resume import responses
from cellgate.proxy.resume.eligible import (
    AGAIN,
    LONG_STOPS,
    OPEN,
    TOKENS,
    BoundaryStops,
    StopMatch,
    stops_of,
    token_start,
    ways_of,
    why_ineligible,
)
from cellgate.proxy.resume.messages import InexactError
from tests.cost.bench import counted

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True}

HARMLESS: tuple[dict[str, Any], ...] = (
    {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "echo": False},
    {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "best_of": 1},
    {"response_format": {"type": "text"}, "modalities": ["text"], "functions": None, "anything": None},
    {"temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["x"], "max_tokens": 5, "min_tokens": 2},
    {"continue_final_message": True, "add_generation_prompt": False, "user": "u"},
    {"tools": [{"type": "function"}], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [{"type": "function"}], "tool_choice": "none", "include_reasoning": True},
)
HARMFUL_AS: dict[object, str] = {
    2: "n best_of top_logprobs prompt_logprobs tool_choice functions structured_outputs kv_transfer_params",
    True: "logprobs regex echo suffix audio use_beam_search return_token_ids guided_json modalities",
    False: "add_generation_prompt skip_special_tokens include_reasoning response_format",
    0.1: "frequency_penalty repetition_penalty a_field_of_next_year",
}
HARMFUL = {name: value for value, names in HARMFUL_AS.items() for name in names.split()}


def test_requests_may_be_continued_unless_they_ask_for_more_than_a_text_which_is_named() -> None:
    for fields in HARMLESS:
        assert why_ineligible(CHAT | fields, chat=True) == ""
    for body, chat in ((CHAT, True), (COMPLETION, False)):
        for name, value in HARMFUL.items():
            assert name in why_ineligible(body | {name: value}, chat=chat)
    assert "logprobs" in why_ineligible(COMPLETION | {"logprobs": 0}, chat=False)


COMPUTED: tuple[dict[str, Any], ...] = (
    {"logprobs": True, "top_logprobs": 3},
    {"tools": [{"type": "function"}], "tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1},
    {"include_reasoning": False},
)


@pytest.mark.parametrize("fields", COMPUTED)
def test_what_depends_on_the_answer_is_computed_again_if_it_is_the_same(fields: dict[str, Any]) -> None:
    assert ways_of(COMPLETION | fields, chat=False) == 0
    assert not ways_of(CHAT | fields | {"temperature": 0.5}, chat=True) & (OPEN | AGAIN)
    assert ways_of(CHAT | fields | {"temperature": 0}, chat=True) & ~TOKENS == AGAIN
    assert ways_of(CHAT | fields | {"temperature": 1.0, "seed": 5}, chat=True) & ~TOKENS == AGAIN
    assert "sampled without a seed" in why_ineligible(CHAT | fields, chat=True)


def test_token_ids_count_a_text_and_are_of_use_where_the_same_tokens_are_enough() -> None:
    tools = {"tools": [{"type": "function"}]}
    assert ways_of(CHAT | tools, chat=True) == OPEN | TOKENS
    assert ways_of(CHAT | {"logprobs": True}, chat=True) == TOKENS
    assert ways_of(CHAT | {"repetition_penalty": 1.1}, chat=True) == TOKENS
    assert ways_of(CHAT | {"reasoning_effort": "low", "temperature": 0}, chat=True) == OPEN | AGAIN | TOKENS
    assert ways_of(CHAT | {"logprobs": True, "presence_penalty": 0.1}, chat=True) == 0
    assert ways_of(COMPLETION | {"logprobs": 1}, chat=False) == 0
    assert why_ineligible(CHAT | {"logprobs": True}, chat=True, has_ids=True) == ""
    # Plain text goes both ways if it comes out the same.
    assert ways_of(CHAT, chat=True) == ways_of(COMPLETION, chat=False) == OPEN | TOKENS
    assert ways_of(CHAT | {"temperature": 0.0}, chat=True) == OPEN | AGAIN | TOKENS
    assert ways_of(COMPLETION | {"prompt": [1, 2], "temperature": 0}, chat=False) == AGAIN
    # What nobody could join is not computed again.
    for name in ("n", "best_of", "use_beam_search", "kv_transfer_params", "a_field_of_next_year"):
        assert ways_of(CHAT | {name: HARMFUL[name], "temperature": 0}, chat=True) == 0
        both = CHAT | {name: HARMFUL[name], "logprobs": True}
        assert f"the request has {name}" in why_ineligible(both, chat=True)


def test_a_prompt_that_is_not_one_text_and_messages_that_are_none_may_not() -> None:
    for prompt in ([1, 2], ["a"], None, 3):
        assert why_ineligible(COMPLETION | {"prompt": prompt}, chat=False) == "its prompt is not one string"
    for none in (None, [], "x", ["x"]):
        why = why_ineligible(CHAT | {"messages": none}, chat=True)
        assert why == "its messages are not a list of objects"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert "not plain text" in why_ineligible(CHAT | fields, chat=True)


def test_stop_strings_that_are_longer_than_are_looked_at_are_a_reason() -> None:
    half = LIMITS.stop_bytes // 2
    for stop in ("Z" * LIMITS.stop_bytes, ["é"] * half, 5, {"a": 1}, [None]):
        assert why_ineligible(CHAT | {"stop": stop}, chat=True) == ""
    for stop in ("Z" * (LIMITS.stop_bytes + 1), ["é"] * (half + 1)):
        assert why_ineligible(CHAT | {"stop": stop}, chat=True) is LONG_STOPS


# The chats that requests of `/v1/messages` and `/v1/responses` stand for, as far as that is known.

CALL = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain."}]}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def messages_of(*messages: tuple[str, Any], **more: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **more}
    chat: list[dict[str, Any]] = messages_request.chat_of(body)["messages"]
    return chat


def test_results_of_tools_come_before_the_text_and_a_call_has_its_text_beside_it() -> None:
    text = {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}
    chat = messages_of(
        ("user", "a"), ("assistant", [{"type": "text", "text": "b"}, CALL]), ("user", [text, RESULT])
    )
    assert chat[1:] == [
        {"role": "assistant", "tool_calls": [CHAT_CALL], "content": "b"},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
        {"role": "user", "content": "And now?"},
    ]


def test_the_system_text_is_one_and_leaves_out_what_engines_leave_out() -> None:
    parts = ["x-anthropic-billing-header: 1", "a", "", "b"]
    system = [{"type": "text", "text": text} for text in parts]
    assert messages_of(("user", "c"), system=system)[0] == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image", "source": {}}],
        [{"type": "text", "text": "a", "citations": [1]}],
        [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}],
        7,
    ],
)
def test_what_engines_convert_in_several_ways_is_not_converted(content: Any) -> None:
    with pytest.raises(InexactError):
        messages_of(("user", content))
    for given in ([{"type": "reasoning"}], [{"role": "assistant", "content": "a"}], [], 7):
        with pytest.raises(InexactError):
            responses.chat_of({"input": given})


def test_items_of_one_turn_are_one_message_of_the_assistant() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ]
    chat = responses.chat_of({"input": given, "instructions": "i"})["messages"]
    assert chat == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
    ]


def test_the_ways_that_a_request_of_messages_leaves_open() -> None:
    body, greedy = {"model": "m", "messages": [], "max_tokens": 1}, {"temperature": 0}
    tools = {"tool_choice": {"type": "any"}}
    ways = messages_request.MESSAGES_FIELDS.ways_of
    assert (ways(body), ways(body | greedy), ways(body | tools)) == (OPEN, OPEN | AGAIN, 0)
    assert ways(body | greedy | tools | {"thinking": {"type": "enabled"}}) == AGAIN
    assert ways(body | greedy | {"a_field_of_next_year": 1}) == 0


def test_what_only_one_unit_has_is_not_resumed_by_another() -> None:
    for more in ({"previous_response_id": "resp_1"}, {"background": True}):
        body = {"model": "m", "input": "a", "temperature": 0, **more}
        assert responses.RESPONSES_FIELDS.ways_of(body) == 0
        assert "the request has" in responses.RESPONSES_FIELDS.why_none(body)


# Stop strings at the seam: what looking for them costs, and where a unit goes on.

LONGEST = LIMITS.stop_bytes


def steps(stop: str, shown: str, behind: list[str]) -> int:
    """Bytecodes for one stop string, from the first look to the end of the text."""
    with counted() as counts:
        seam = BoundaryStops(shown, [stop])
        for piece in behind:
            seam.feed(piece)
    return sum(counts.values())


@pytest.mark.parametrize(("stop", "shown", "behind"), [("Z", "Z", "Z"), ("Z", "ZY", "Z"), ("ZY", "ZY", "ZY")])
def test_twice_as_long_a_stop_string_costs_twice_as_much(stop: str, shown: str, behind: str) -> None:
    one, two = (
        steps(stop * (size // len(stop)), shown * size, [behind] * size) for size in (LONGEST // 2, LONGEST)
    )
    assert two < 2.2 * one
    assert two < 400 * LONGEST


def test_a_match_is_the_longest_beginning_that_is_an_end_of_the_text() -> None:
    stop, text = "abaabab", "abaabaabababaabab"
    match = StopMatch(stop)
    for end in range(1, len(text) + 1):
        complete = match.take(text[end - 1])
        longest = max(n for n in range(len(stop) + 1) if text[:end].endswith(stop[:n]))
        assert (match.size, complete) == (longest, longest == len(stop))


def test_with_stop_strings_it_goes_on_where_the_last_word_began() -> None:
    starts = {
        "": 0,
        "one": 0,
        "one two thr": 7,
        "one two ": 3,
        "one  two": 0,
        "one\n two three 4": 8,
        "a é": 1,
    }
    for shown, start in starts.items():
        assert token_start(shown, ["xy"]) == start
        assert token_start(shown, ["x"]) == token_start(shown, []) == len(shown)


def test_stop_strings_of_a_strange_form_are_none() -> None:
    assert stops_of({"stop": 5}) == stops_of({"stop": {"a": 1}}) == stops_of({}) == []
    assert stops_of({"stop": "ab"}) == stops_of({"stop": ["ab", 5, None]}) == ["ab"]
