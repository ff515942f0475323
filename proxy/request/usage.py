"""The token usage of an answer: estimates, limits and bills go by it.

It is searched in the end of the answer, and not parsed: that would cost as much as all else, and the gate
does not keep whole answers.
"""

from __future__ import annotations

from re import compile as pattern

from cellgate.router.cost_model import Usage

_PROMPT = pattern(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})')
_ANSWER = pattern(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_CACHED = pattern(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_new = tuple.__new__


def read_usage(end: bytes) -> Usage | None:
    """The last `usage` object in the end of an answer, plain or in events; None if there is none.

    https://platform.openai.com/docs/api-reference/chat/object: prompt_tokens, completion_tokens, and
    prompt_tokens_details.cached_tokens; input_tokens and output_tokens in responses.
    """
    at = end.rfind(b'"usage"')
    if at < 0:
        return None
    prompt = _PROMPT.search(end, at)
    if prompt is None:
        return None
    answer, cached = _ANSWER.search(end, at), _CACHED.search(end, at)
    tokens = int(prompt[1]), int(answer[1]) if answer else 0, int(cached[1]) if cached else None
    return _new(Usage, tokens)
