"""The token usage of an answer, as its engine tells it: estimates, limits and bills go by it.

It is read where the API has it, at the top of the object that ends the answer, never searched for: an
answer repeats what its client has sent.
"""

from __future__ import annotations

from re import compile as pattern
from typing import Any

import orjson

from cellgate.probes.engines import object_of, parsed
from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.http.sse import JsonSkim
from cellgate.proxy.request.answer_limits import ANSWER_TOKENS_MAX, RULES, limit_of
from cellgate.proxy.request.body import is_large
from cellgate.proxy.resume.answer_reader import PARSED_BYTES, reported_in, reported_in_batch
from cellgate.router.cost_model import Usage
from cellgate.router.nouns import Ask

_USAGE_TOKENS_MAX = 10**9
_new = tuple.__new__
# A scalar, or an object or array of scalars; the strings have no escapes.
_FLAT = rb'(?:"[^"\\]*+"|[^\s"{}\[\],]++|\{[^{}\[\]\\]*+\}|\[[^{}\[\]\\]*+\])'
_USAGE_USUAL = pattern(
    rb'(?<=[,{])"usage":(\{(?:[^{}\[\]"\\]|"[a-z_]*+"|\{[^{}\[\]"\\]*+(?:"[a-z_]*+"[^{}\[\]"\\]*+)*+\})*+\})(?:,"[a-z_]++":'
    + _FLAT
    + rb")*+\}\s*\Z"
)
"""The end of an object whose `usage` is followed by flat fields at most: no more of it need be read."""
_USAGE_COUNTED = pattern(
    rb'(?<=[,{])"usage":\{"prompt_tokens":(\d{1,8}),(?:"total_tokens":\d++,)?"completion_tokens":(\d{1,8})'
    rb'(?:,"total_tokens":\d++)?(?:,"prompt_tokens_details":null)?\}(?:,"[a-z_]++":' + _FLAT + rb")*+\}\s*\Z"
)
"""As most engines end it: read in half the steps."""


def usage_of(reported: dict[str, Any] | None) -> Usage | None:
    """The same as numbers; None: it says nothing of tokens.

    https://platform.openai.com/docs/api-reference/chat/object: prompt_tokens, completion_tokens, and
    prompt_tokens_details.cached_tokens; input_tokens and output_tokens in responses and messages. Rerankers
    have total_tokens alone. What `/v1/messages` has read from a cache, or written to one, is not in its
    input_tokens (https://platform.claude.com/docs/en/build-with-claude/prompt-caching).
    """
    if reported is None:
        return None
    prompt, answer = reported.get("prompt_tokens"), reported.get("completion_tokens")
    details = reported.get("prompt_tokens_details")
    if type(prompt) is type(answer) is int and details is None and "cached_tokens" not in reported:
        # The usual case.
        is_count = 0 <= prompt < _USAGE_TOKENS_MAX and 0 <= answer < _USAGE_TOKENS_MAX
        return _new(Usage, (prompt, answer, None)) if is_count else None
    answer = _first(reported, "completion_tokens", "output_tokens", "generated_tokens", "num_output_tokens")
    prompt = _first(reported, "prompt_tokens", "input_tokens", "input_length", "num_input_tokens")
    if prompt is None and (total := _first(reported, "total_tokens")) is not None:
        prompt = max(0, total - (answer or 0))
    if prompt is None:
        return None
    if (read := _first(reported, "cache_read_input_tokens")) is not None:
        written = _first(reported, "cache_creation_input_tokens") or 0
        return Usage(prompt + read + written, answer or 0, read)
    details = details or reported.get("input_tokens_details") or reported
    return Usage(prompt, answer or 0, _first(details, "cached_tokens") if isinstance(details, dict) else None)


def _first(counts: dict[str, Any], *names: str) -> int | None:
    """The first of these that is a number of tokens."""
    for name in names:
        count = counts.get(name)
        if type(count) is int and 0 <= count < _USAGE_TOKENS_MAX:
            return count
    return None


TEMPLATE_TOKENS = 16_384
"""What an engine's template and its own instructions add to a prompt, at most."""
_UNSEEN_TOKENS = 1 << 22
"""At most so many tokens has a prompt whose text is not in its body: pictures, what was stored before."""
_PAIRED = ("rerank", "score", "classify")
"""Routes that compute one text with each of the others."""
_UNSEEN = pattern(rb'"(?:[a-z]+_url|input_[a-z]+|image|images|source|file|video|audio|conversation)"')


class CappedUsage(Usage):
    """As much of what a unit has told as can be: it pays for nothing more, and teaches nothing."""

    __slots__ = ()


def is_possible(usage: Usage, ask: Ask) -> bool:
    """Whether a unit may have used so much, as nearly all have: a token of a prompt is a byte or more."""
    return (
        usage[0] <= ask.prompt_bytes + TEMPLATE_TOKENS
        and usage[1] <= (ask.max_tokens or ANSWER_TOKENS_MAX) * ask.answers
    )


def believed(usage: Usage, ask: Ask, body: bytes, engine: str, shown: int) -> Usage:
    """What a unit has told, as far as it can be: a request has no more tokens than its bytes, and an answer
    none beyond its limit, but for those that were `shown`.
    """
    most_prompt = max(ask.prompt_bytes, len(body)) + TEMPLATE_TOKENS
    if ask.follows is not None or ask.route in _PAIRED or _UNSEEN.search(body) is not None:
        most_prompt = max(most_prompt, _UNSEEN_TOKENS)
    limit = longest_answer(ask, body, engine) or ANSWER_TOKENS_MAX
    prompt = min(usage.prompt_tokens, most_prompt)
    answer = min(usage.answer_tokens, max(limit * ask.answers, shown))
    if (prompt, answer) == usage[:2]:
        return usage
    cached = usage.cached_tokens
    return CappedUsage(prompt, answer, None if cached is None else min(cached, prompt))


def longest_answer(ask: Ask, body: bytes, engine: str) -> int:
    """How long the engine that has answered may have made each answer; 0: as long as it liked. If it is not
    known, it may be any that has this route. A body that is not read here has the largest of its limits.
    """
    if body.lstrip()[:1] != b"{" or is_large(body):
        return ask.max_tokens
    if (data := object_of(body)) is None:
        return ask.max_tokens
    engines = [engine] if engine in RULES else [name for name in RULES if ask.route in RULES[name]]
    limits = [limit_of(each, data, ask.route) for each in engines]
    return max(limits) if limits and all(limits) else 0


def read_usage(body: bytes) -> Usage | None:
    """The usage in a whole answer that is one JSON object, or an array of them; None if there is none."""
    at = body.rfind(b'"usage":{')
    if at >= 0:
        if (counted := _USAGE_COUNTED.match(body, at)) is not None:
            return _new(Usage, (int(counted[1]), int(counted[2]), None))
        if (usual := _USAGE_USUAL.match(body, at)) is not None:
            return usage_of(orjson.loads(usual[1]))
    if not body[:1].isspace() and not body.startswith((b"{", b"[")):
        return None
    is_batch = body.lstrip()[:1] == b"["
    if len(body) > (LIMITS.json_bytes_on_loop if is_batch else PARSED_BYTES):
        skim = JsonSkim()
        skim.feed(body)
        return usage_of(reported_in(skim.document()))
    document = parsed(body)
    if isinstance(document, list):
        return usage_of(reported_in_batch(document))
    return usage_of(reported_in(document)) if isinstance(document, dict) else None
