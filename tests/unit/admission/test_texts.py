"""The text of answers, as the four APIs write it."""

from __future__ import annotations

import orjson
import pytest

from cellgate.proxy.admission.guardrail_client import WrittenText, written_in


def events(*values: object) -> bytes:
    return b"".join(b"event: x\ndata: %b\n\n" % orjson.dumps(value) for value in values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([{"choices": [{"delta": {"role": "assistant"}}]}], ""),
        ([{"choices": [{"delta": {"content": "a"}}, {"delta": {"reasoning_content": "b"}}]}], "ab"),
        ([{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}}]}], "f{x"),
        ([{"choices": [{"text": "plain"}]}], "plain"),
        ([{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}}], "hi"),
        ([{"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "{"}}], "{"),
        ([{"type": "response.output_text.delta", "delta": "re"}], "re"),
        ([{"type": "response.output_text.delta", "delta": "re"}, {"type": "x.done", "text": "re"}], "re"),
        ([{"type": "response.output_text.done", "text": "never shown"}], "never shown"),
        ([{"model_name": "m", "text_output": "triton"}], "triton"),
        ([{"token": {"id": 3, "text": "tgi", "logprob": 0.1}, "generated_text": None}], "tgi"),
        ([{"model": "m", "response": "ollama", "done": False}], "ollama"),
        ([{"message": {"role": "assistant", "content": "chat"}}], "chat"),
        ([{"choices": [{"delta": {"refusal": "no"}}]}], "no"),
        ([{"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}}], "hm"),
        ([{"type": "response.custom_tool_call_input.delta", "delta": "rm -rf"}], "rm -rf"),
        ([{"type": "response.audio_transcript.delta", "delta": "said"}], "said"),
        ([{"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}], "f"),
        ([{"choices": [{"delta": {"annotations": [{"url_citation": {"title": "t"}}]}}]}], "t"),
        ([{"a": {"field": "that nobody knows"}}], "that nobody knows"),
        ([{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [0.1]}}]}], "a"),
        ([{"choices": [{"delta": {}, "logprobs": {"content": [{"token": "alone"}]}}]}], "alone"),
        ([{"id": "x" * 300}], "x" * 300),
    ],
)
def test_what_a_model_wrote_is_found(values: list[object], text: str) -> None:
    written = written_in(events(*values) + b"data: [DONE]\n\n")
    assert ("".join((*written.run, *written.beside)), written.is_unread) == (text, False)


@pytest.mark.parametrize(
    "data",
    [
        events({"choices": [{"index": 0, "token_ids": [1, 2]}]}),
        events({"output_ids": [3], "meta_info": {"id": "a"}}),
        events({"token": {"id": 1}, "ids": [[4]]}),
        events({"choices": [{"delta": {"audio": {"data": "UklGRg=="}}}]}),
        events({"type": "response.audio.delta", "delta": "UklGRg=="}),
        events({"b64_json": "iVBORw0KGgo="}),
        b"\x1f\x8b\x08\x00\xff\xfe",
    ],
)
def test_what_is_no_text_cannot_be_read(data: bytes) -> None:
    assert written_in(data).is_unread


def test_tokens_beside_their_text_are_read_with_it() -> None:
    written = written_in(events({"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]}))
    assert (written.run, written.beside, written.is_unread) == (["a"], [], False)


def test_what_is_not_understood_is_shown_as_it_is() -> None:
    assert written_in(b"data: {broken\n\n").run == ["{broken"]


def test_events_in_parts_are_read_whole() -> None:
    written = WrittenText(has_head=True, is_chunked=True, is_events=True)
    event = events({"choices": [{"text": "whole"}]})
    written.feed(b"HTTP/1.1 200 OK\r\n\r\n%x\r\n%b\r\n" % (9, event[:9]))
    assert written.take().run == []
    written.feed(b"%x;q=1\r\n%b\r\n0\r\n\r\n" % (len(event) - 9, event[9:]))
    assert (written.size, written.take().run) == (5, ["whole"])
