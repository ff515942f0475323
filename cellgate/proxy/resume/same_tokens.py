"""The proof by token ids: the prompt has the tokens that it had, and the answer's spell what was shown. Pure.

Wire formats of vLLM from 0.11 on: `/tokenize`, `/detokenize`, and `/v1/completions` with token ids as prompt.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from cellgate.proxy.resume.proof import (
    CONTEXT_TOKENS,
    UNKNOWN_CHARACTER,
    ProofRequest,
    Tokens,
    UnprovenError,
    rendered,
    text_of,
)
from cellgate.proxy.resume.token_ids import TokenLog, digest_of
from cellgate.proxy.resume.transcript import Transcript

_SAMPLING = """model temperature top_p top_k min_p seed logit_bias allowed_token_ids bad_words stop_token_ids
    ignore_eos include_stop_str_in_output stream_options stream_interval user priority cache_salt session_id
    repetition_penalty"""
_COPIED = frozenset(_SAMPLING.split())


class SameTokens(NamedTuple):
    """Proven: the tokens of the prompt and of the answer so far, whose raw text is `raw`."""

    model: dict[str, Any]
    prompt: list[int]
    ids: list[int]
    raw: str
    max_tokens: int
    """How long the answer may get altogether."""

    @property
    def counts(self) -> Tokens:
        return Tokens(len(self.prompt), len(self.ids), is_exact=True)

    def prompt_text(self) -> Generator[ProofRequest, dict[str, Any], str]:
        """The text of the whole prompt."""
        return (yield from text_of(self.model, self.prompt))


def ids_of(transcript: Transcript) -> TokenLog:
    """The ids of an answer. Raises UnprovenError if there are none."""
    tokens = transcript.tokens
    if tokens is None or not tokens.prompt or not tokens.ids:
        raise UnprovenError("its unit has sent no token ids")
    return tokens


def prove_tokens(
    body: dict[str, Any], tokens: TokenLog
) -> Generator[ProofRequest, dict[str, Any], SameTokens]:
    """Prove that the prompt of `body` has the tokens that it had; and the raw text of those generated."""
    prompt, limit = yield from rendered(body)
    if not limit:
        raise UnprovenError("the answer of /tokenize has no max_model_len")
    if digest_of(prompt) != tokens.prompt:
        raise UnprovenError("the unit's prompt has other tokens than that of the broken one")
    model = {"model": body["model"]} if body.get("model") else {}
    ids, context = tokens.ids.tolist(), prompt[-CONTEXT_TOKENS:]
    before = yield from text_of(model, context)
    both = yield from text_of(model, context + ids)
    raw = both.removeprefix(before)
    if not both.startswith(before) or UNKNOWN_CHARACTER in raw:
        raise UnprovenError("the tokens already sent are no text of their own")
    return SameTokens(model, prompt, ids, raw, limit - len(prompt))


def continued_by_ids(body: dict[str, Any], proven: SameTokens, left: dict[str, int]) -> dict[str, Any]:
    """The request to /v1/completions that goes on behind these tokens."""
    copied = {name: value for name, value in body.items() if name in _COPIED}
    limits = [left[name] for name in ("max_tokens", "max_completion_tokens") if name in left]
    copied["max_tokens"] = min(limits, default=proven.max_tokens - len(proven.ids))
    if "min_tokens" in left:
        copied["min_tokens"] = left["min_tokens"]
    return copied | {
        "prompt": proven.prompt + proven.ids,
        "stream": True,
        "return_token_ids": True,
        # Markers may be special tokens, and an engine that calls tools or reasons does not skip them.
        "skip_special_tokens": False,
    }
