"""Proves that another unit can resume a broken stream, and makes the request it gets. Pure.

The text already sent is given to the unit as the beginning of the answer. Templates may trim or wrap it, so
it is proven first that the unit would continue the original prompt followed by exactly this text.
Wire formats: `/tokenize` and `/detokenize` of vLLM 0.6 to 0.33, SGLang 0.4 to 0.5.23 and llama.cpp (build
11549), which has `/apply-template` besides.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from cellgate.proxy.resume.transcript import CountLog, TokenLog, Transcript, digest_of

PROOF_COMPLETION_TOKENS = 16
"""What /v1/completions generates when no limit is given; llama.cpp knows no such limit."""
LLAMA_CPP = "llamacpp"
CONTEXT_TOKENS = 8
"""Tokens before the boundary that are turned back into text with it: some tokenizers drop a leading space."""

_RENDERED = ("model", "messages", "tools", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")
_PROOF_LIMITS = ("max_tokens", "max_completion_tokens")
UNKNOWN_CHARACTER = "\ufffd"
"""Stands for bytes that are no text."""


def prove(body: dict[str, Any], text: str, *, chat: bool, engine: str) -> Proof:
    """Prove that a unit that runs `engine` would continue the answer to `body` where `text` ends."""
    if UNKNOWN_CHARACTER in text:
        raise UnprovenError("its text contains a replacement character (U+FFFD)")
    model = model_field(body)
    if chat and engine == "sglang":
        # It puts the tokens of the text behind those of the prompt, whatever the template says, and its
        # /tokenize takes no messages.
        plain = model | {"add_special_tokens": False}
        before = yield from tokens_of({"prompt": "\n"} | plain)
        added = yield from tokens_of({"prompt": text} | plain)
        yield from check_same(model, before, before + added, 0, text)
        return Tokens(None, len(added))
    render = _rendered_by_llama_cpp if engine == LLAMA_CPP else _rendered
    before = yield from render(body, chat=chat)
    after = yield from render(extended(body, text, chat=chat), chat=chat)
    common = _common(before, after)
    yield from check_same(model, before, after, max(0, common - CONTEXT_TOKENS), text)
    # A token that spans the end of the prompt and the beginning of the text counts as sent.
    return Tokens(len(before), len(after) - common, spans=common < len(before))


class UnprovenError(Exception):
    """It is not proven that the unit would continue exactly where the text ends."""


class ProofRequest(NamedTuple):
    """A request to the unit: its path and body; the answer is a JSON object.

    `is_optional`: where the engine has no such path, the answer is an empty object.
    """

    path: str
    body: dict[str, Any]
    is_optional: bool = False


class Tokens(NamedTuple):
    """The unit's token counts: of the prompt (None: unknown), and of the text already sent."""

    prompt: int | None
    shown: int
    is_exact: bool = False
    """Whether `shown` has the tokens without text as well, such as that which ended the answer."""
    spans: bool = False
    """Whether a token spans both: then the unit sees another prompt than the first one saw."""


Proof = Generator[ProofRequest, dict[str, Any], Tokens]
"""A generator: yields requests, is sent the answers, and returns the counts. Raises UnprovenError."""


def extended(body: dict[str, Any], text: str, *, chat: bool) -> dict[str, Any]:
    """`body` with `text` as the beginning of its answer."""
    if not chat:
        return body | {"prompt": body["prompt"] + text}
    messages = list(body["messages"])
    if body.get("continue_final_message"):
        messages[-1] = messages[-1] | {"content": messages[-1]["content"] + text}
    else:
        messages.append({"role": "assistant", "content": text})
    return body | {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def remaining(body: dict[str, Any], shown: int, *, chat: bool, engine: str) -> dict[str, int] | None:
    """The token limits of `body` less the tokens already sent; None when no token is left."""
    limits = _limits_of(body)
    if not limits and not chat and engine != LLAMA_CPP:
        limits = {"max_tokens": PROOF_COMPLETION_TOKENS}
    left = {name: limit - shown for name, limit in limits.items()}
    if any(tokens <= 0 for tokens in left.values()):
        return None
    if isinstance(body.get("min_tokens"), int):
        left["min_tokens"] = max(0, body["min_tokens"] - shown)
    return left


def model_field(body: dict[str, Any]) -> dict[str, Any]:
    """The field of a question to the engine that names the model."""
    return {"model": body["model"]} if body.get("model") else {}


def _limits_of(body: dict[str, Any]) -> dict[str, int]:
    return {name: body[name] for name in _PROOF_LIMITS if isinstance(body.get(name), int)}


def is_counted(body: dict[str, Any], *, chat: bool) -> bool:
    """Whether it matters how many tokens an answer has had."""
    options = body.get("stream_options")
    tells = isinstance(options, dict) and bool(options.get("include_usage"))
    return (
        not chat or tells or any(isinstance(body.get(name), int) for name in (*_PROOF_LIMITS, "min_tokens"))
    )


def check_count(tokens: int, pieces: Sequence[int]) -> None:
    """Where no ids are known, a text that came in as many events as it has `tokens` was spelt in these, if
    each event has one. Raises UnprovenError.
    """
    if tokens != len(pieces):
        raise UnprovenError(f"what is {tokens} tokens came in {len(pieces)} events: nobody knows how many")


def spelt(
    model: dict[str, Any], text: str, pieces: Sequence[int]
) -> Generator[ProofRequest, dict[str, Any], list[int]]:
    """The tokens of a text of which each event has brought just one: `pieces` are their characters. An event
    may have several tokens, and then as many may come out by chance. Raises UnprovenError.
    """
    asked = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = yield ProofRequest("/tokenize", model | asked)
    tokens, strings = _tokens_in(answer), answer.get("token_strs")
    check_count(len(tokens), pieces)
    if strings is None:
        # vLLM has them from 0.9 on; of others the number has to be enough.
        return tokens
    if not isinstance(strings, list) or len(strings) != len(tokens):
        raise UnprovenError("the answer of /tokenize has token_strs that are not those of its tokens")
    at = 0
    for string, size in zip(strings, pieces, strict=True):
        piece = text[at : at + size]
        # Its vocabulary has characters, or bytes as one character each; it may begin a text with a space.
        sizes = (size, len(piece.encode()), size + (at == 0))
        if not isinstance(string, str) or len(string) not in sizes:
            raise UnprovenError("its events are not the tokens of its text: nobody knows how many")
        at += size
    return tokens


def tokens_generated(
    body: dict[str, Any], text: str, tokens: int, counts: CountLog, finish: str, pieces: Sequence[int]
) -> int:
    """How many tokens an answer has had whose engine counts them, and of which this text was shown, that
    would be so many `tokens`. Raises UnprovenError.
    """
    reported = counts.shown
    if finish == "length" and (limits := _limits_of(body)):
        return min(limits.values())
    if finish and reported != len(pieces):
        # The token, or the tokens, that ended it may be among those that were told.
        raise UnprovenError(f"it ended with {reported} tokens in {len(pieces)} events, or more")
    is_whole = text[-1:].isascii() and text[-1:].strip() and not body.get("tools")
    if reported != tokens and not is_whole:
        # SGLang shows what precedes a character that is not whole up to a space, but counts all.
        raise UnprovenError(
            f"what is {tokens} tokens was counted as {reported}: some may not have been shown"
        )
    return reported


def rendered(body: dict[str, Any]) -> Generator[ProofRequest, dict[str, Any], tuple[list[int], int]]:
    """The tokens of the prompt of a chat, and how many tokens it may have with its answer; 0: unknown."""
    asked = {name: body[name] for name in _RENDERED if body.get(name) is not None}
    if effort := body.get("reasoning_effort"):
        # As vLLM's chat does.
        known = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        asked["chat_template_kwargs"] = known | (asked.get("chat_template_kwargs") or {})
    continues = bool(body.get("continue_final_message"))
    asked |= {"continue_final_message": continues, "add_generation_prompt": not continues}
    return (yield from _tokens_and_limit(asked))


def _tokens_and_limit(
    asked: dict[str, Any],
) -> Generator[ProofRequest, dict[str, Any], tuple[list[int], int]]:
    answer = yield ProofRequest("/tokenize", asked)
    limit = answer.get("max_model_len")
    return _tokens_in(answer), limit if isinstance(limit, int) else 0


def _prompt_of(body: dict[str, Any]) -> dict[str, Any]:
    """What /tokenize is asked of a completion."""
    return {name: body[name] for name in ("model", "prompt", "add_special_tokens") if name in body}


def _rendered(body: dict[str, Any], *, chat: bool) -> Generator[ProofRequest, dict[str, Any], list[int]]:
    """The tokens of the prompt of `body`."""
    if chat:
        return (yield from rendered(body))[0]
    return (yield from tokens_of(_prompt_of(body)))


def _rendered_by_llama_cpp(
    body: dict[str, Any], *, chat: bool
) -> Generator[ProofRequest, dict[str, Any], list[int]]:
    """The same from llama.cpp, whose /tokenize takes a text and no messages."""
    prompt = body.get("prompt")
    if chat:
        prompt = (yield ProofRequest("/apply-template", body)).get("prompt")
    if not isinstance(prompt, str):
        raise UnprovenError("the answer of /apply-template has no prompt")
    model = model_field(body)
    return (yield from tokens_of(model | {"content": prompt, "add_special": True}))


def tokens_of(body: dict[str, Any]) -> Generator[ProofRequest, dict[str, Any], list[int]]:
    return _tokens_in((yield ProofRequest("/tokenize", body)))


def _tokens_in(answer: dict[str, Any]) -> list[int]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise UnprovenError("the answer of /tokenize has no tokens")
    return tokens


def check_same(
    model: dict[str, Any], before: list[int], after: list[int], start: int, text: str
) -> Generator[ProofRequest, dict[str, Any], None]:
    """The tokens of `after` from `start` on must decode to those of `before` and then `text`."""
    old = yield from text_of(model, before[start:])
    new = yield from text_of(model, after[start:])
    if new != old + text:
        raise UnprovenError("the model's template or tokenizer does not reproduce the text already sent")


def text_of(model: dict[str, Any], tokens: list[int]) -> Generator[ProofRequest, dict[str, Any], str]:
    if not tokens:
        return ""
    answer = yield ProofRequest("/detokenize", model | {"tokens": tokens, "skip_special_tokens": False})
    # vLLM calls it `prompt`, SGLang `text`, llama.cpp `content`.
    text = answer.get("prompt", answer.get("text", answer.get("content")))
    if not isinstance(text, str):
        raise UnprovenError("the answer of /detokenize has no text")
    return text


def _common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    if other[: len(one)] == one:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


# The proof by token ids: the prompt has the tokens that it had, and the answer's spell what was shown.
# Pure.
#
# Wire formats of vLLM from 0.11 on: `/tokenize`, `/detokenize`, and `/v1/completions` with token ids as
# prompt.


_SAMPLED_BY = """model temperature top_p top_k min_p seed logit_bias allowed_token_ids bad_words
    stop_token_ids ignore_eos include_stop_str_in_output stream_options stream_interval user priority
    cache_salt session_id repetition_penalty"""
_COPIED = frozenset(_SAMPLED_BY.split())


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

    def within(self, text: str) -> Generator[ProofRequest, dict[str, Any], SameTokens]:
        """The same with as many of the ids as spell nothing but a beginning of `text`: an engine holds back
        what may become a stop string, and a character that is not whole. Raises UnprovenError.
        """
        if text.startswith(self.raw):
            # The rest was shown by a unit that broke before it could go on.
            return self
        size, step = len(self.ids), 1
        low, raw = 0, ""
        # Usually few are too many: steps back get longer, and then the last one is halved.
        while low + 1 < size:
            middle = max(size - step, low + 1) if not low else (low + size) // 2
            shorter = yield from text_behind(self.model, self.prompt, self.ids[:middle])
            if text.startswith(shorter):
                low, raw = middle, shorter
            else:
                size, step = middle, 2 * step
        return self._replace(ids=self.ids[:low], raw=raw)

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
    body: dict[str, Any], tokens: TokenLog, *, chat: bool = True
) -> Generator[ProofRequest, dict[str, Any], SameTokens]:
    """Prove that the prompt of `body` has the tokens that it had; and the raw text of those generated."""
    prompt, limit = yield from rendered(body) if chat else _tokens_and_limit(_prompt_of(body))
    if not limit:
        raise UnprovenError("the answer of /tokenize has no max_model_len")
    if digest_of(prompt) != tokens.prompt:
        raise UnprovenError("the unit's prompt has other tokens than that of the broken one")
    model = model_field(body)
    ids = list(tokens.ids)
    return SameTokens(model, prompt, ids, (yield from text_behind(model, prompt, ids)), limit - len(prompt))


def text_behind(
    model: dict[str, Any], prompt: list[int], ids: list[int]
) -> Generator[ProofRequest, dict[str, Any], str]:
    """The raw text of tokens behind a prompt."""
    context = prompt[-CONTEXT_TOKENS:]
    before = yield from text_of(model, context)
    both = yield from text_of(model, context + ids)
    if not both.startswith(before):
        raise UnprovenError("the tokens already sent are no text of their own")
    return both[len(before) :]


def resumed_by_ids(body: dict[str, Any], proven: SameTokens, left: dict[str, int]) -> dict[str, Any]:
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
