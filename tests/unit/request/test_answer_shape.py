"""What a good answer is, by path."""

from __future__ import annotations

from typing import Any

import pytest

from cellgate.proxy.request.answer_shape import REPEATS, SHAPES, are_idle, repeats, status_in

SAID = b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}]}'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

WHOLE = [
    ("chat", SAID, ""),
    ("chat", b'{"choices":[{"message":{"content":null,"tool_calls":[{"id":"1"}]}}]}', ""),
    ("chat", b'{"choices":[{"message":{"content":""}}],"usage":{"completion_tokens":3}}', ""),
    ("chat", b'{"choices":[{"message":{"content":""},"finish_reason":"stop"}]}', "nothing generated"),
    ("chat", b'{"choices":[]}', "no answer in its JSON"),
    ("chat", b'{"error":"CUDA error"}', "an error object under 200"),
    ("chat", b'{"error": {"message": "x", "text": "y"}}', "an error object under 200"),
    ("chat", b'{"error":null,' + SAID[1:], ""),
    ("chat", SAID[:-9], "no JSON"),
    ("chat", b"", "an empty body"),
    ("chat", b"<html>It works</html>", "a page of HTML"),
    ("chat", b"OK", "no JSON"),
    ("chat", b'{"choices":[{"message":{"content":"' + b"the " * 400 + b'"}}]}', REPEATS),
    ("messages", b'{"content":[{"type":"text","text":"Hi"}]}', ""),
    ("messages", b'{"content":[],"stop_reason":"refusal"}', ""),
    ("responses", b'{"output":[{"type":"function_call","name":"f"}]}', ""),
    ("embeddings", b'{"data":[{"embedding":[0.1]}]}', ""),
    ("embeddings", b'{"data":[{"embedding":"AAAA"}]}', ""),
    ("embeddings", b'{"data":[{"embedding":[]}]}', "no answer in its JSON"),
    ("rerank", b'{"results":[{"relevance_score":0}]}', ""),
    ("audio", b"some words", ""),
    ("speech", b"", "an empty body"),
    ("tokenize", b'{"count":2,"tokens":[1,2]}', ""),
    ("tokenize", b'[{"id":1,"text":"a"}]', ""),
    ("tokenize", b'{"input_tokens":9}', ""),
    ("tokenize", b"{}", "no answer in its JSON"),
]


@pytest.mark.parametrize(("path", "body", "why"), WHOLE)
def test_whole_answers(path: str, body: bytes, why: str) -> None:
    assert SHAPES[path].why_doubtful(body, is_events=False, streams=False) == why


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (ROLE + TOKEN + DONE, ""),
        (ROLE + DONE, "a stream without a token"),
        (DONE, "a stream without a token"),
        (b": ping\n\n", "a stream without a token"),
        (b'data: {"error":{"message":"x"}}\n\n', "an error in the stream"),
        (b'data: {"new":1}\n\n', ""),
    ],
)
def test_streams(body: bytes, why: str) -> None:
    assert SHAPES["chat"].why_doubtful(body, is_events=True, streams=True) == why


def test_json_is_no_speech_but_may_be_a_transcription() -> None:
    json: Any = {"is_events": False, "streams": False, "content_type": b"content-type: application/json\r\n"}
    assert SHAPES["speech"].why_doubtful(b"{}", **json) == "JSON in place of media"
    assert not SHAPES["speech"].is_plain(b"{}")
    assert SHAPES["audio"].why_doubtful(b'{"text":""}', **json) == ""


def test_a_whole_answer_is_no_stream() -> None:
    assert SHAPES["chat"].why_doubtful(SAID, is_events=False, streams=True) == "no event stream"


@pytest.mark.parametrize(("events", "idle"), [(ROLE, True), (ROLE * 3, True), (ROLE + TOKEN, False)])
def test_events_without_work(events: bytes, idle: bool) -> None:
    assert are_idle(events) is idle


@pytest.mark.parametrize(
    ("text", "does"), [(b"the " * 400, True), (b"the " * 20, False), (bytes(range(32, 127)) * 20, False)]
)
def test_long_texts_that_repeat_themselves(text: bytes, does: bool) -> None:
    assert repeats(text) is does


@pytest.mark.parametrize(
    ("body", "status"), [(b'{"error":{"code":404}}', 404), (b'{"status":"422"}', 422), (b'{"code":"x"}', 0)]
)
def test_the_status_that_an_error_gives_itself(body: bytes, status: int) -> None:
    assert status_in(body) == status
