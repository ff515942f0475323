"""The chats that requests of `/v1/messages` and `/v1/responses` stand for, as far as that is known."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.resume import messages as messages_request
from cellgate.proxy.resume import responses
from cellgate.proxy.resume.eligible import AGAIN, OPEN
from cellgate.proxy.resume.messages import InexactError

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
        [{"type": "document"}],
        7,
    ],
)
def test_what_engines_convert_in_several_ways_is_not_converted(content: Any) -> None:
    with pytest.raises(InexactError):
        messages_of(("user", content))


def test_items_of_one_turn_are_one_message_of_the_assistant() -> None:
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "b"}],
        },
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


@pytest.mark.parametrize("given", [[{"type": "reasoning"}], [{"role": "assistant", "content": "a"}], [], 7])
def test_an_input_that_ends_in_anything_but_a_question_or_a_result_is_not_converted(given: Any) -> None:
    with pytest.raises(InexactError):
        responses.chat_of({"input": given})


@pytest.mark.parametrize(
    ("more", "ways"),
    [
        ({}, OPEN),
        ({"temperature": 0}, OPEN | AGAIN),
        ({"tool_choice": {"type": "any"}}, 0),
        ({"temperature": 0, "tool_choice": {"type": "any"}, "thinking": {"type": "enabled"}}, AGAIN),
        ({"temperature": 0, "kv_transfer_params": {"a": 1}}, 0),
        ({"temperature": 0, "a_field_of_next_year": 1}, 0),
    ],
)
def test_the_ways_that_a_request_of_messages_leaves_open(more: dict[str, Any], ways: int) -> None:
    assert messages_request.FIELDS.ways_of({"model": "m", "messages": [], "max_tokens": 1, **more}) == ways


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"background": True}])
def test_what_only_one_unit_has_is_not_resumed_by_another(more: dict[str, Any]) -> None:
    body = {"model": "m", "input": "a", "temperature": 0, **more}
    assert responses.FIELDS.ways_of(body) == 0
    assert "the request has" in responses.FIELDS.why_none(body)
