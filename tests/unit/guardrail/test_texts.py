"""The text of answers, as the four APIs write it."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.guardrail.texts import WrittenText, text_of


def events(*values: object) -> bytes:
    return b"".join(b"event: x\ndata: %b\n\n" % orjson.dumps(value) for value in values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"choices": [{"delta": {"role": "assistant"}}]}], ""),
        ([{"choices": [{"delta": {"content": "a"}}, {"delta": {"reasoning_content": "b"}}]}], "ab"),
        ([{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}}]}], "{x"),
        ([{"choices": [{"text": "plain"}]}], "plain"),
        ([{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}], "hi"),
        ([{"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}], "{"),
        ([{"type": "response.output_text.delta", "delta": "re"}], "re"),
        ([{"type": "response.output_text.done", "text": "again"}], ""),
    ],
)
def test_what_a_model_wrote_is_found(values: list[object], text: str) -> None:
    assert text_of(events(*values) + b"data: [DONE]\n\n") == text


def test_what_is_not_understood_is_shown_as_it_is() -> None:
    assert text_of(b"data: {broken\n\n") == "{broken"


def test_events_in_parts_are_read_whole() -> None:
    written = WrittenText(has_head=True, is_chunked=True, is_events=True)
    event = events({"choices": [{"text": "whole"}]})
    written.feed(b"HTTP/1.1 200 OK\r\n\r\n%x\r\n%b\r\n" % (9, event[:9]))
    assert written.take() == ""
    written.feed(b"%x;q=1\r\n%b\r\n0\r\n\r\n" % (len(event) - 9, event[9:]))
    assert (written.size, written.take()) == (5, "whole")
