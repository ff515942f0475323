"""The token usage of an answer: estimates, limits and bills go by it.

It is searched in the end of the answer, and not parsed: that would cost as much as all else, and the gate
does not keep whole answers.
"""

from __future__ import annotations

from re import compile as pattern

from cellgate.router.cost_model import Usage

_USUAL = pattern(
    rb'"usage":\{"prompt_tokens":(\d{1,9}),(?:"total_tokens":\d{1,9},)?"completion_tokens":(\d{1,9})'
)
"""As most engines begin it: all at once, in half the time."""
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
    usual = _USUAL.match(end, at)
    if usual is not None:
        prompt, answer = usual.groups()
    elif (found := _PROMPT.search(end, at)) is not None:
        other = _ANSWER.search(end, at)
        prompt, answer = found[1], other[1] if other is not None else 0
    else:
        return None
    cached = _CACHED.search(end, at)
    return _new(Usage, (int(prompt), int(answer), int(cached[1]) if cached is not None else None))
