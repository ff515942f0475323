"""Stop strings across the boundary between two units. Pure.

1. An engine looks for stop strings in its own output only. One may have begun in the text that was sent
   before (SGLang sends such text), so only the gate, which knows both parts, can see it end.
2. vLLM holds back text that may become a stop string, so the text may end within a token, where no model can
   continue as it would have. The next unit starts where a token began and must repeat exactly the text that
   was sent after that point.

Stop strings may be long: all here is linear in their length, and that is bounded (LIMITS.stop_bytes).

In this order: `BoundaryStops`, `why_not_resumed`, `FieldRules`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cellgate.proxy.config.limits import LIMITS

if TYPE_CHECKING:
    from cellgate.proxy.http.request import Request
    from cellgate.router.nouns import Ask

# Tokenizers of all kinds begin a token at a space between two words; this finds the last one.
_LAST_WORD = re.compile(r".*\S( )(?=[^\W\d_])", re.DOTALL)


def stops_of(body: dict[str, Any]) -> list[str]:
    """The stop strings that a request asks for."""
    stop = body.get("stop")
    if isinstance(stop, str):
        return [stop]
    return [each for each in stop if isinstance(each, str)] if isinstance(stop, list) else []


def token_start(shown: str, stops: Iterable[str]) -> int:
    """Where to resume: at the end of `shown`, or, with stop strings, where its last token began."""
    if all(len(stop) < 2 for stop in stops):
        return len(shown)
    found = _LAST_WORD.match(shown)
    return found.start(1) if found else 0


class StopMatch:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_borders", "size", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.size = 0
        """The longest beginning of `stop` that is an end of the text."""
        # Of each beginning of `stop`: the longest shorter one that is also an end of it.
        self._borders = [0]
        for char in stop[1:]:
            self.take(char)
            self._borders.append(self.size)
        self.size = 0

    def take(self, char: str) -> bool:
        """One more character of the text; True: it ends with the whole of `stop`."""
        size, stop, borders = self.size, self.stop, self._borders
        while size and (size == len(stop) or stop[size] != char):
            size = borders[size - 1]
        self.size = size = size + (stop[size] == char)
        return size == len(stop)


class BoundaryStops:
    """Watches the beginning of the second unit's text. `is_over`: no stop string can cross the boundary."""

    __slots__ = ("_begun", "_held", "stop")

    def __init__(self, shown: str, stops: Iterable[str]) -> None:
        self.stop = ""
        """The stop string that is complete."""
        self._held = ""
        self._begun = []
        for stop in stops:
            if len(stop) < 2:
                # It cannot be on both sides.
                continue
            match = StopMatch(stop)
            for char in shown[1 - len(stop) :]:
                match.take(char)
            if match.size:
                self._begun.append(match)

    @property
    def is_over(self) -> bool:
        return not self._begun

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be sent now, and, once a stop string is complete, its part after the boundary."""
        if not self._begun:
            return text, None
        begun, before = self._begun, len(self._held)
        self._held += text
        for behind, char in enumerate(text, before + 1):
            if complete := next((match for match in begun if match.take(char)), None):
                self.stop = complete.stop
                return "", self._held[:behind]
            # A match that is longer than the text after the boundary began before it.
            begun = [match for match in begun if match.size > behind]
            if not begun:
                break
        self._begun = begun
        return ("", None) if begun else (self.flush(), None)

    def flush(self) -> str:
        """What was held back, once nothing more can follow."""
        held, self._held, self._begun = self._held, "", []
        return held


# Which streams may be resumed by another unit, and how, judged by their request. Pure.
#
# It is a list of harmless fields, not of harmful ones: an unknown field might mean anything.
#
# OPEN: the unit gets the text shown as an open message, and continues it. So nothing may depend on what was
# generated, which it takes for the prompt. AGAIN: the unit gets the same request, and must repeat what was
# shown. So a repetition must be likely: the answer is greedy, or its sampling has a seed. Everything may
# depend on what was generated. TOKENS: the unit gets the tokens of the prompt and of what was shown, where
# the engine gives them (raw.py): only they tell how long an answer is. COUNTS is no way of its own: each
# event tells how many tokens there were, which the gate has asked for. Fields: OpenAI's API, vLLM 0.6 to
# 0.33, SGLang 0.4 to 0.5.23.


OPEN, AGAIN, TOKENS, COUNTS = 1, 2, 4, 8
"""Ways to resume a stream; they are added up."""

_SAMPLING = """temperature top_p top_k min_p seed logit_bias allowed_token_ids bad_words stop stop_token_ids
    include_stop_str_in_output no_stop_trim ignore_eos max_tokens max_completion_tokens min_tokens"""
_PROMPT_FIELDS = """model messages prompt chat_template chat_template_kwargs mm_processor_kwargs
    reasoning_effort continue_final_message lora_path"""
_HANDLING = """stream stream_options stream_interval user metadata store service_tier safety_identifier
    prompt_cache_key prompt_cache_retention priority cache_salt request_id rid session_id tools
    parallel_tool_calls separate_reasoning stream_reasoning"""
_HARMLESS = frozenset(f"{_SAMPLING} {_PROMPT_FIELDS} {_HANDLING}".split())
_ONLY_AS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    # These depend on the generated text, which another unit would take as part of the prompt.
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "suffix": ("",),
}
"""Fields that are harmless with one of these values, of just this type."""
_ANYTHING = """logprobs top_logprobs tool_choice functions response_format structured_outputs structural_tag
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    regex ebnf json_schema frequency_penalty presence_penalty repetition_penalty repetition_detection
    thinking_token_budget include_reasoning add_generation_prompt add_special_tokens skip_special_tokens
    spaces_between_special_tokens"""
_WITH_IDS = frozenset(("logprobs", "top_logprobs", "repetition_penalty"))
"""Fields for which the same tokens are enough: this penalty takes prompt and answer together."""
PENALTIES = frozenset(("frequency_penalty", "presence_penalty", "repetition_penalty"))
_COMPUTED = frozenset(_ANYTHING.split())
"""Fields with which a unit that computes the whole answer again computes the same answer."""
LONG_STOPS = f"its stop strings are longer than {LIMITS.stop_bytes} bytes together"
SAMPLED = "and its answer is sampled without a seed"
"""Why nothing can be repeated."""


def why_not_resumed(switched_off: Collection[str], request: Request, ask: Ask) -> str:
    """Why a stream must not be resumed, apart from its body and its events; empty when it may be.
    `switched_off`: the models whose streams are not (no_continuation).
    """
    if switched_off and ("*" in switched_off or ask.model in switched_off):
        return "the configuration forbids it (no_continuation)"
    if request.is_uncontinued:
        return "its client opted out"
    limit = LIMITS.json_bytes_on_loop
    return f"its request is larger than {limit} bytes" if request.body_size > limit else ""


def ways_of(body: dict[str, Any], *, chat: bool) -> int:
    """How the stream that `body` asks for may be resumed; 0: not at all."""
    if len(body) > LIMITS.fields or ("stop" in body and _has_long_stops(body)):
        return 0
    # Most requests name neither of them.
    may_repeat = "temperature" in body or "seed" in body
    ways = OPEN | AGAIN | TOKENS if may_repeat and is_deterministic(body) else OPEN | TOKENS
    if not body.keys() <= _HARMLESS:
        ways &= _ways_beside(body)
    if ways & ~AGAIN and (_why_not_messages(body) if chat else _why_not_prompt(body.get("prompt"))):
        return ways & AGAIN
    # Log probabilities of a completion tell where in the whole text they are.
    return ways if chat or ways & OPEN else ways & ~TOKENS


def _ways_beside(body: dict[str, Any]) -> int:
    """The ways that fields leave open which are not harmless whatever they say."""
    ways = OPEN | AGAIN | TOKENS
    for name in body.keys() - _HARMLESS:
        if not is_harmless(name, body):
            with_ids = TOKENS if name in _WITH_IDS else 0
            ways &= AGAIN | with_ids if name in _COMPUTED else 0
    return ways


def is_deterministic(body: dict[str, Any]) -> bool:
    """Whether the same request can be expected to get the same answer once more."""
    return body.get("temperature") == 0 or type(body.get("seed")) is int


def why_ineligible(body: dict[str, Any], *, chat: bool, has_ids: bool = False) -> str:
    """Why the stream that `body` asks for cannot be continued; empty: it can. `has_ids`: it has token ids."""
    if ways_of(body, chat=chat) & (OPEN | AGAIN | (TOKENS if has_ids else 0)):
        return ""
    if len(body) > LIMITS.fields:
        return f"the request has more than {LIMITS.fields} fields"
    if _has_long_stops(body):
        return LONG_STOPS
    harmful = [name for name in body if not is_harmless(name, body)]
    # One that forbids every way explains more.
    for name in sorted(harmful, key=_COMPUTED.__contains__):
        if name in _COMPUTED:
            return f"the request has {name}, {SAMPLED}"
        return f"the request has {name}" if name in _ONLY_AS else f"the request has {name}, unknown here"
    return _why_not_messages(body) if chat else _why_not_prompt(body.get("prompt"))


def is_harmless(name: str, body: dict[str, Any]) -> bool:
    """Whether a field changes nothing for whoever continues the text."""
    if name in _HARMLESS:
        return True
    value = body[name]
    # Compared and not serialised: a client may send values of any size and depth.
    if value is None or any(type(value) is type(each) and value == each for each in _ONLY_AS.get(name, ())):
        return True
    return name == "add_generation_prompt" and bool(body.get("continue_final_message"))


def _has_long_stops(body: dict[str, Any]) -> bool:
    return len("".join(stops_of(body)).encode()) > LIMITS.stop_bytes


def _why_not_messages(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "its messages are not a list of objects"
    if body.get("continue_final_message") and not isinstance(messages[-1].get("content"), str):
        return "the message that it continues is not plain text"
    return ""


def _why_not_prompt(prompt: object) -> str:
    return "" if isinstance(prompt, str) else "its prompt is not one string"


# Which fields of a request let its stream be resumed, and how. Pure.
#
# A table lists harmless fields, not harmful ones: an unknown field might mean anything.


@dataclass(frozen=True)
class FieldRules:
    """The fields of one API: those that are harmless, those that are so with one of these values, of just
    this type, and those with which a unit that computes the whole answer again computes the same answer.
    """

    harmless: frozenset[str]
    only_as: Mapping[str, tuple[object, ...]]
    computed: frozenset[str]

    def ways_of(self, body: dict[str, Any]) -> int:
        """How the stream that `body` asks for may be resumed (eligible.py); 0: not at all."""
        if len(body) > LIMITS.fields:
            return 0
        ways = OPEN | AGAIN if is_deterministic(body) else OPEN
        for name in body.keys() - self.harmless:
            if not self._is_harmless(name, body[name]):
                ways &= AGAIN if name in self.computed else 0
        return ways

    def why_none(self, body: dict[str, Any]) -> str:
        """Why there is no way to resume the stream that `body` asks for."""
        if len(body) > LIMITS.fields:
            return f"the request has more than {LIMITS.fields} fields"
        harmful = [
            name for name in body if not (name in self.harmless or self._is_harmless(name, body[name]))
        ]
        for name in sorted(harmful, key=self.computed.__contains__):
            if name in self.computed:
                return f"the request has {name}, {SAMPLED}"
            return (
                f"the request has {name}" if name in self.only_as else f"the request has {name}, unknown here"
            )
        return "its input is not plain text"

    def _is_harmless(self, name: str, value: object) -> bool:
        # Compared and not serialised: a client may send values of any size and depth.
        return value is None or any(
            type(value) is type(each) and value == each for each in self.only_as.get(name, ())
        )
