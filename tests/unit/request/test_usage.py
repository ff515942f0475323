"""What an answer says it has used."""

from __future__ import annotations

import pytest

from cellgate.proxy.request.usage import read_usage
from cellgate.router.cost_model import Usage

CHAT = b'"usage":{"prompt_tokens":120,"total_tokens":130,"completion_tokens":10'


@pytest.mark.parametrize(
    ("end", "usage"),
    [
        (b'{"choices":[],' + CHAT + b"}}", Usage(120, 10, None)),
        (CHAT + b',"prompt_tokens_details":{"cached_tokens":96}}}', Usage(120, 10, 96)),
        (CHAT + b',"prompt_tokens_details":null}}', Usage(120, 10, None)),
        (b'data: {"usage":null}\n\ndata: {' + CHAT + b"}}\n\ndata: [DONE]\n\n", Usage(120, 10, None)),
        (b'"usage": {"input_tokens": 7, "output_tokens": 3}', Usage(7, 3, None)),
        (b'"usage":{"prompt_tokens":8,"total_tokens":8}', Usage(8, 0, None)),
        (b'"usage":null}', None),
        (b'the word "prompt_tokens":5 in a text', None),
        (b"", None),
    ],
)
def test_usage_is_read_off_the_end_of_an_answer(end: bytes, usage: Usage | None) -> None:
    assert read_usage(end) == usage
