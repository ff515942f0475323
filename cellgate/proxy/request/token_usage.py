"""The token usage of an answer, as its engine tells it: estimates, limits and bills go by it.

It is read where the API has it, at the top of the object that ends the answer, never searched for: an
answer repeats what its client has sent.
"""

from __future__ import annotations

from re import compile as pattern
from typing import Any

import orjson

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.sse import JsonSkim
from cellgate.proxy.resume.answer_reader import (
    PARSED_BYTES,
    told_in,
    told_in_batch,
)
from cellgate.router.cost_model import Usage

_TOKENS_MAX = 10**9
_new = tuple.__new__
# A scalar, or an object or array of scalars; the strings have no escapes.
_FLAT = rb'(?:"[^"\\]*+"|[^\s"{}\[\],]++|\{[^{}\[\]\\]*+\}|\[[^{}\[\]\\]*+\])'
_USUAL = pattern(
    rb'(?<=[,{])"usage":(\{(?:[^{}\[\]"\\]|"[a-z_]*+"|\{[^{}\[\]"\\]*+(?:"[a-z_]*+"[^{}\[\]"\\]*+)*+\})*+\})(?:,"[a-z_]++":'
    + _FLAT
    + rb")*+\}\s*\Z"
)
"""The end of an object whose `usage` is followed by flat fields at most: no more of it need be read."""
_COUNTED = pattern(
    rb'(?<=[,{])"usage":\{"prompt_tokens":(\d{1,8}),(?:"total_tokens":\d++,)?"completion_tokens":(\d{1,8})'
    rb'(?:,"total_tokens":\d++)?(?:,"prompt_tokens_details":null)?\}(?:,"[a-z_]++":' + _FLAT + rb")*+\}\s*\Z"
)
"""As most engines end it: read in half the steps."""


def usage_of(told: dict[str, Any] | None) -> Usage | None:
    """The same as numbers; None: it says nothing of tokens.

    https://platform.openai.com/docs/api-reference/chat/object: prompt_tokens, completion_tokens, and
    prompt_tokens_details.cached_tokens; input_tokens and output_tokens in responses and messages. Rerankers
    have total_tokens alone. What `/v1/messages` has read from a cache, or written to one, is not in its
    input_tokens (https://platform.claude.com/docs/en/build-with-claude/prompt-caching).
    """
    if told is None:
        return None
    prompt, answer = told.get("prompt_tokens"), told.get("completion_tokens")
    details = told.get("prompt_tokens_details")
    if type(prompt) is type(answer) is int and details is None and "cached_tokens" not in told:
        # The usual case.
        return _new(Usage, (prompt, answer, None)) if 0 <= prompt + answer < _TOKENS_MAX else None
    answer = _first(told, "completion_tokens", "output_tokens", "generated_tokens", "num_output_tokens")
    prompt = _first(told, "prompt_tokens", "input_tokens", "input_length", "num_input_tokens")
    if prompt is None and (total := _first(told, "total_tokens")) is not None:
        prompt = max(0, total - (answer or 0))
    if prompt is None:
        return None
    if (read := _first(told, "cache_read_input_tokens")) is not None:
        written = _first(told, "cache_creation_input_tokens") or 0
        return Usage(prompt + read + written, answer or 0, read)
    details = details or told.get("input_tokens_details") or told
    return Usage(prompt, answer or 0, _first(details, "cached_tokens") if isinstance(details, dict) else None)


def _first(counts: dict[str, Any], *names: str) -> int | None:
    """The first of these that is a number of tokens."""
    for name in names:
        count = counts.get(name)
        if type(count) is int and 0 <= count < _TOKENS_MAX:
            return count
    return None


def read_usage(body: bytes) -> Usage | None:
    """The usage in a whole answer that is one JSON object, or an array of them; None if there is none."""
    at = body.rfind(b'"usage":{')
    if at >= 0:
        if (counted := _COUNTED.match(body, at)) is not None:
            return _new(Usage, (int(counted[1]), int(counted[2]), None))
        if (usual := _USUAL.match(body, at)) is not None:
            return usage_of(orjson.loads(usual[1]))
    if not body[:1].isspace() and not body.startswith((b"{", b"[")):
        return None
    is_batch = body.lstrip()[:1] == b"["
    if len(body) > (LIMITS.json_bytes_on_loop if is_batch else PARSED_BYTES):
        skim = JsonSkim()
        skim.feed(body)
        return usage_of(told_in(skim.document()))
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if isinstance(document, list):
        return usage_of(told_in_batch(document))
    return usage_of(told_in(document)) if isinstance(document, dict) else None
