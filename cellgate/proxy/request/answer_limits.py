"""How long answers may be: which fields of a body each engine reads, on which route. Pure.

A client may name several limits, and engines read different ones. Read in November 2026:

- vLLM 0.33, vllm/entrypoints/openai/chat_completion/protocol.py: `max_completion_tokens` unless it is null,
  then `max_tokens`; completions, messages and responses have one field each; `/inference/v1/generate` has
  `sampling_params.max_tokens`, the older `/generate` the same at the top.
- SGLang 0.5.23, sglang/srt/entrypoints/openai/protocol.py: `max_completion_tokens or max_tokens`;
  `/generate` has `sampling_params.max_new_tokens`, where `sampling_params` may be a list, one each prompt.
- llama.cpp 11549, tools/server/server-task.cpp: `n_predict`, then `max_completion_tokens`, then
  `max_tokens`; `n_cmpl`, then `n`. What it does not know of a response or message it passes on to the same.
- TGI 3.3, router/src/lib.rs: `max_tokens` in chat and completions, `parameters.max_new_tokens` in
  `/generate`.
- TensorRT-LLM 1.2, tensorrt_llm/serve/openai_protocol.py: `max_completion_tokens`, or `max_tokens` as another
  name of it.
- Triton 2.73, its vLLM and TensorRT-LLM backends: `max_tokens` as an input, in `parameters`, or in
  `sampling_parameters`, which may be JSON in a string; `request_output_len` for tensors.

Where the engine is not known, the largest of all that one of them would read counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cellgate.probes.engines import parsed

ANSWERS_MAX = 1 << 16
"""More answers of one request are not reckoned with."""
ANSWER_TOKENS_MAX = 1 << 17
"""No answer is expected to be longer, whatever its request allows: hardly a model can give one."""
_STRING_CHARS = 4096
"""Parameters in a string that are longer are not read."""
_TOP = ""
_SAMPLING, _PARAMETERS, _TRITONS = "sampling_params", "parameters", "sampling_parameters"
NESTED = (_SAMPLING, _PARAMETERS, _TRITONS)
"""Objects of a body that may hold limits as well."""

LimitPlace = tuple[str, str]
"""The object that holds a field (empty: the body itself), and its name."""


def _limits_at_top(*names: str) -> tuple[LimitPlace, ...]:
    return tuple((_TOP, name) for name in names)


_LIMIT_OPENAI = {
    "chat": _limits_at_top("max_completion_tokens", "max_tokens"),
    "completions": _limits_at_top("max_tokens"),
    "responses": _limits_at_top("max_output_tokens"),
    "messages": _limits_at_top("max_tokens"),
    "invocations": _limits_at_top("max_completion_tokens", "max_tokens"),
}
RULES: Mapping[str, Mapping[str, tuple[LimitPlace, ...]]] = {
    "vllm": _LIMIT_OPENAI | {"generate": ((_SAMPLING, "max_tokens"), (_TOP, "max_tokens"))},
    "sglang": _LIMIT_OPENAI | {"generate": ((_SAMPLING, "max_new_tokens"),)},
    "llamacpp": {
        "chat": _limits_at_top("n_predict", "max_completion_tokens", "max_tokens"),
        "completions": _limits_at_top("n_predict", "max_completion_tokens", "max_tokens"),
        "responses": _limits_at_top("n_predict", "max_completion_tokens", "max_output_tokens", "max_tokens"),
        "messages": _limits_at_top("n_predict", "max_completion_tokens", "max_tokens"),
    },
    "tgi": {
        "chat": _limits_at_top("max_tokens"),
        "completions": _limits_at_top("max_tokens"),
        "generate": ((_PARAMETERS, "max_new_tokens"),),
        "invocations": (*_limits_at_top("max_tokens"), (_PARAMETERS, "max_new_tokens")),
    },
    "trtllm": _LIMIT_OPENAI,
    "triton": {
        "triton": (
            *_limits_at_top("max_tokens", "request_output_len"),
            (_PARAMETERS, "max_tokens"),
            (_TRITONS, "max_tokens"),
        )
    },
}
"""By engine and route: where the limit of an answer stands; the first that is set counts."""
_EACH_ROUTE = {route for rules in RULES.values() for route in rules}
_PLACES_OF_ROUTES = {
    route: tuple({place: None for rules in RULES.values() for place in rules.get(route, ())})
    for route in _EACH_ROUTE
}
_ANYWHERE = tuple({place: None for places in _PLACES_OF_ROUTES.values() for place in places})
"""For routes of which no engine's rule is known."""
LIMIT_NAMES = frozenset(name for _, name in _ANYWHERE)
COUNT_NAMES = ("n", "best_of", "n_cmpl", "num_return_sequences", "beam_width")
"""How many answers a prompt gets: the largest of them counts, for all engines."""
_PROMPTS = ("prompt", "text", "text_input", "input_ids", "prompt_embeds")
"""A list of several prompts gets answers to each."""
MULTIPLIES = frozenset((*COUNT_NAMES, *_PROMPTS, *NESTED))
"""Fields that may ask for several answers, or bound them in another place."""
ONLY_LIMIT = {
    "max_tokens": frozenset(("chat", "completions", "messages")),
    "max_completion_tokens": frozenset(("chat",)),
    "max_output_tokens": frozenset(("responses",)),
}
"""The one limit that a usual request has, and the routes where that is all there is to read."""


def limits_of(data: dict[str, Any], route: str) -> tuple[int, int]:
    """The longest answer that any engine would give to a body (0: no limit that one would read is set), and
    how many answers there may be.
    """
    held = _held(data)
    limit = max(
        (_whole(part.get(name)) for part, name in _found(held, _PLACES_OF_ROUTES.get(route, _ANYWHERE))),
        default=0,
    )
    return max(limit, 0), _answers(data, held)


def limit_of(engine: str, data: dict[str, Any], route: str) -> int:
    """The longest answer that this engine gives to a body; 0: it reads no limit there, or nobody knows."""
    rule = RULES.get(engine, {}).get(route)
    if rule is None:
        return 0
    held = _held(data)
    for place in rule:
        found = max((_whole(part.get(name)) for part, name in _found(held, (place,))), default=0)
        if found > 0:
            return found
    return 0


def _held(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The objects that may hold limits, by their names."""
    held = {_TOP: [data]}
    for name in NESTED:
        if name in data:
            value = data[name]
            if type(value) is str and len(value) <= _STRING_CHARS:
                value = parsed(value)
            held[name] = [
                each for each in (value if isinstance(value, list) else [value]) if type(each) is dict
            ]
    return held


def _found(
    held: dict[str, list[dict[str, Any]]], places: tuple[LimitPlace, ...]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Those of these places that are there."""
    return ((part, name) for holder, name in places for part in held.get(holder, ()))


def _answers(data: dict[str, Any], held: dict[str, list[dict[str, Any]]]) -> int:
    each = 1
    for parts in held.values():
        for part in parts:
            for name in COUNT_NAMES:
                if name in part and (count := _whole(part[name])) > each:
                    each = count
    prompts = 1
    for name in _PROMPTS:
        if isinstance(found := data.get(name), list) and found and not isinstance(found[0], int):
            prompts = max(prompts, len(found))
    return min(each * prompts, ANSWERS_MAX)


def _whole(value: object) -> int:
    """A number as engines read it: pydantic takes "64" and 64.0 for 64. 0: it is none."""
    if isinstance(value, int):
        return value
    if not isinstance(value, (str, float)):
        return 0
    try:
        number = float(value)
    except ValueError:
        return 0
    return int(number) if number.is_integer() else 0
