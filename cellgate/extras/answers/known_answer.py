"""The known answer: one fixed greedy prompt, always the same, and what the unit says to it.

It proves nothing by itself: wrong_answers.py compares it with what the unit and others have said. Only
an idle unit is asked, because the batch that a prompt is computed in changes the last digits.
The API of completions is preferred, because a chat template may have the date in it.
Wire formats: OpenAI's API; log probabilities of completions in OpenAI's own form (vLLM, SGLang), and in that
of chat (llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from cellgate.probes.base import Fetch, FetchError, ProbeContext, Reply, is_in_use
from cellgate.probes.canary import idle_s, is_half, model_of
from cellgate.probes.engines import engine, fingerprint_of, parsed
from cellgate.router.known_answers import KNOWN_RETRY_S
from cellgate.router.nouns import (
    BUSY_STATUSES,
    USABLE,
    Answered,
    AnswerToken,
    Build,
    Built,
    Finding,
    Unit,
    Urgency,
)

PROMPT = "The capital of France is Paris. The capital of Japan is"
"""Shorter than a block of most KV caches, so that it is computed each time."""
TOKENS = 8
"""Steps of decoding."""
LIKELY = 5
"""Likely tokens of each step that the engine is asked for; what OpenAI allows."""
_KNOWN_PROMPT_APIS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""In the order in which they are tried."""
_KNOWN_PROMPT_NOT_SERVED = frozenset({400, 401, 403, 404, 405, 422, 501})
CANARY_TAKES_S = 0.5
"""An idle unit has answered its canary within this time, mostly."""
KNOWN_PROMPT_FRESH_S = 2.5
"""Only a unit that has shown life so lately is asked: it is well, and so what it does with the prompt
explains a canary that waits behind it."""

_KNOWN_PROMPT_LIMIT_BYTES = 64 << 10

_STATE = "state"
"""Note: whether the last run got an answer (True), was not possible (False), or cannot be (None)."""
_TOOK_S = "took_s"
"""Note: how long the last answer took."""
_KNOWN_PROMPT_USUAL_TIMES = 3.0
"""For so many times as long a canary may have to wait behind the next one."""
_FAILED_NOTE = "failed"
"""Note: whether the last one was not answered in time; the next one explains nothing."""
_LACKING = "lacking"
"""Note: the engine and model with which the unit does not serve the API that is preferred."""
_API = "api"
"""Note: the API that has answered, with its engine and model."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Asks an idle, usable unit every `every_s`; every `retry_s` until it is idle, or while the answer is
    awaited; after `absent_s` one that serves neither API.
    """

    name: ClassVar[str] = "known_answer"
    every_s: float = 60.0
    retry_s: float = KNOWN_RETRY_S
    absent_s: float = 600.0
    timeout_s: float = 10.0

    def limit_s(self, _context: ProbeContext) -> float:
        return self.timeout_s * len(_KNOWN_PROMPT_APIS)

    def due_at(self, context: ProbeContext, last_at: float) -> float:
        """A period after an answer; soon while it is wanted, or the unit was not idle."""
        state = context.notes.get(_STATE, False)
        if state is None:
            return last_at + self.absent_s
        is_done = state and context.urgency is Urgency.ROUTINE
        due = last_at + (self.every_s if is_done else self.retry_s)
        if not context.is_calm or context.urgency is Urgency.NOW:
            return due
        if due <= context.progress_at + KNOWN_PROMPT_FRESH_S:
            return due
        # It rests: nothing shows life before its next canary.
        return max(due, context.progress_at + idle_s(context) + CANARY_TAKES_S)

    async def look(self, context: ProbeContext) -> AsyncGenerator[Finding, None]:
        """The answer, or nothing: other probes say whether the unit is healthy."""
        context.notes[_STATE] = False
        if not _may_ask(context):
            return
        model = model_of(context)
        asked_at = context.now()
        took_s = context.notes.get(_TOOK_S)
        if not context.notes.get(_FAILED_NOTE):
            context.occupied_until(
                asked_at + (self.timeout_s if took_s is None else _KNOWN_PROMPT_USUAL_TIMES * took_s)
            )
        try:
            api, reply = await self._ask(context, model)
        except FetchError:
            context.notes[_FAILED_NOTE] = True
            context.occupied_until(0.0)
            return
        context.notes[_FAILED_NOTE] = False
        context.occupied_until(context.now())
        context.notes[_TOOK_S] = context.now() - asked_at
        if reply.status in _KNOWN_PROMPT_NOT_SERVED:
            context.notes[_STATE] = None
            return
        if reply.status in BUSY_STATUSES:
            return
        known, tokens = f"{api} {context.engine} {model}", _tokens(reply)
        if tokens:
            context.notes[_API] = known
        elif context.notes.get(_API) != known:
            return
        context.notes[_STATE] = True
        if fingerprint := fingerprint_of(reply.body):
            yield Built(context.unit.name, Build(fingerprint), context.now())
        yield Answered(context.unit.name, f"{api} {model}", tokens, context.now())

    async def _ask(self, context: ProbeContext, model: str) -> tuple[str, Reply]:
        """The first API that the unit serves, and its reply. Raises FetchError."""
        apis, lacking = _apis(context), (context.engine, model)
        # The answer of the other one is a question of its own: which one is asked must not change back.
        is_lacking = context.notes.get(_LACKING) == lacking and len(apis) > 1
        for api in apis[is_lacking:]:
            reply = await context.fetch(
                "POST",
                _KNOWN_PROMPT_APIS[api],
                body=orjson.dumps(_body(api, model, context.engine)),
                request_id=f"cellgate-canary-known-{context.new_id()}",
                timeout_s=self.timeout_s,
                max_bytes=_KNOWN_PROMPT_LIMIT_BYTES,
            )
            if reply.status not in _KNOWN_PROMPT_NOT_SERVED:
                break
        if reply.status == 200 and api != apis[0]:
            context.notes[_LACKING] = lacking
        return api, reply


ASKED_AGAIN_S = 10.0
"""So long the answer to a question that is asked again is awaited."""


async def ask_again(fetch: Fetch, question: str, of_engine: str) -> tuple[AnswerToken, ...] | None:
    """What a unit says to a question that a unit has answered before; None: it does not answer it now."""
    api, _, model = question.partition(" ")
    try:
        reply = await fetch(
            "POST",
            _KNOWN_PROMPT_APIS[api],
            body=orjson.dumps(_body(api, model, of_engine)),
            timeout_s=ASKED_AGAIN_S,
            max_bytes=_KNOWN_PROMPT_LIMIT_BYTES,
        )
    except FetchError:
        return None
    return _tokens(reply) if reply.status == 200 else None


def _may_ask(context: ProbeContext) -> bool:
    """Whether it can be asked now: not while it is silent, on hold, or down for another reason than its
    answers. One that only does its part of a pair has no answer of its own.
    """
    if context.is_on_hold or is_half(context) or not _apis(context):
        return False
    if context.verdict not in USABLE:
        return context.urgency is not Urgency.ROUTINE
    is_well = context.now() - context.progress_at <= KNOWN_PROMPT_FRESH_S
    return context.urgency is Urgency.NOW or (is_well and not is_in_use(context))


def _apis(context: ProbeContext) -> list[str]:
    return known_prompt_apis(context.unit, context.engine)


def known_prompt_apis(unit: Unit, of_engine: str) -> list[str]:
    """The APIs with the known prompt that the unit may serve."""
    names = (unit.canary,) if unit.canary else engine(of_engine).canaries
    return [api for api in _KNOWN_PROMPT_APIS if api in names]


def _body(api: str, model: str, of_engine: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model} if model else {}
    body |= {"max_tokens": TOKENS, "temperature": 0, "seed": 0}
    if of_engine == "llamacpp":
        # It would take the prompt from what it has computed before.
        body["cache_prompt"] = False
    if api == "chat":
        messages = [{"role": "user", "content": PROMPT}]
        return body | {"messages": messages, "logprobs": True, "top_logprobs": LIKELY}
    return body | {"prompt": PROMPT, "logprobs": LIKELY}


def _tokens(reply: Reply) -> tuple[AnswerToken, ...]:
    """The tokens of an answer; without log probabilities its whole text is one; empty: it has no answer."""
    answer: Any = parsed(reply.body) if reply.status == 200 else None
    try:
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        logprobs = choice.get("logprobs") or {}
        if logprobs.get("content"):
            return tuple(_token_of_chat(token) for token in logprobs["content"][:TOKENS])
        if logprobs.get("tokens"):
            return _tokens_of_completions(logprobs)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError):
        return ()
    return (AnswerToken(text),) if isinstance(text, str) and text else ()


def _token_of_chat(token: dict[str, Any]) -> AnswerToken:
    likely = {str(other["token"]): _number(other["logprob"]) for other in token.get("top_logprobs") or ()}
    return _token(str(token["token"]), _number(token["logprob"]), likely)


def _tokens_of_completions(logprobs: dict[str, Any]) -> tuple[AnswerToken, ...]:
    """OpenAI's form: a list for each field; `top_logprobs` has the likely tokens of each step."""
    tokens, values = logprobs["tokens"][:TOKENS], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return tuple(
        _token(str(token), _number(value), {str(name): _number(its) for name, its in (top or {}).items()})
        for token, value, top in zip(tokens, values, tops, strict=False)
    )


def _token(token: str, logprob: float, likely: dict[str, float]) -> AnswerToken:
    others = sorted((-value, name) for name, value in likely.items() if name != token)
    return AnswerToken(token, logprob, tuple((name, -value) for value, name in others[:LIKELY]))


def _number(value: object) -> float:
    """NaN for what is no number: engines write null where they computed none."""
    return float(value) if isinstance(value, int | float) else math.nan
