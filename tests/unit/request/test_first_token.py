"""What shows that an answer has begun, as engines spell it."""

from __future__ import annotations

import pytest

from cellgate.proxy.request.response import shows_token


@pytest.mark.parametrize(
    "answer",
    [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices":[{"index":0,"text":""}]}\n\n',
        b'{"choices":[{"message":{"role":"assistant","content":null,"tool_calls":[]}}]}',
        b'{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":0}}',
        b": comment\n\n",
        b"",
    ],
)
def test_without_a_token(answer: bytes) -> None:
    assert not shows_token(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"\\n"}}]}\n\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
        b'{"choices": [{"text": " a"}]}',
        # The only token was the end.
        b'{"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}',
    ],
)
def test_with_a_token(answer: bytes) -> None:
    assert shows_token(answer)
