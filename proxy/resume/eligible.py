"""Which streams may be resumed by another unit, judged by their request. Pure.

It is a list of harmless fields, not of harmful ones: an unknown field might mean anything.
Fields: OpenAI's API, vLLM 0.6 to 0.33, SGLang 0.4 to 0.5.23.
"""

from __future__ import annotations

from typing import Any

from cellgate.proxy.config.limits import LIMITS
from cellgate.proxy.resume.stop_strings import stops_of

_SAMPLING = """temperature top_p top_k min_p seed logit_bias allowed_token_ids bad_words stop stop_token_ids
    include_stop_str_in_output no_stop_trim ignore_eos max_tokens max_completion_tokens min_tokens"""
_PROMPT = """model messages prompt chat_template chat_template_kwargs mm_processor_kwargs reasoning_effort
    continue_final_message lora_path"""
_HANDLING = """stream stream_options stream_interval user metadata store service_tier safety_identifier
    prompt_cache_key prompt_cache_retention priority cache_salt request_id rid session_id parallel_tool_calls
    include_reasoning separate_reasoning stream_reasoning"""
_HARMLESS = frozenset(f"{_SAMPLING} {_PROMPT} {_HANDLING}".split())
_ONLY_AS: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
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
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "suffix": ("",),
}
"""Fields that are harmless with one of these values, of just this type."""
LONG_STOPS = f"its stop strings are longer than {LIMITS.stop_bytes} bytes together"


def why_ineligible(body: dict[str, Any], *, chat: bool) -> str:
    """Why the stream that `body` asks for cannot be continued; empty when it can."""
    if len(body) > LIMITS.fields:
        return f"the request has more than {LIMITS.fields} fields"
    for name in body.keys() - _HARMLESS:
        value = body[name]
        if value is not None and not _is_one_of(value, _ONLY_AS.get(name, ())):
            if name == "add_generation_prompt" and body.get("continue_final_message"):
                continue
            return f"the request has {name}" if name in _ONLY_AS else f"the request has {name}, unknown here"
    if "stop" in body and len("".join(stops_of(body)).encode()) > LIMITS.stop_bytes:
        return LONG_STOPS
    return _why_not_messages(body) if chat else _why_not_prompt(body.get("prompt"))


def _is_one_of(value: object, known: tuple[object, ...]) -> bool:
    # Compared and not serialised: a client may send values of any size and depth.
    return any(type(value) is type(each) and value == each for each in known)


def _why_not_messages(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return "its messages are not a list of objects"
    if body.get("continue_final_message") and not isinstance(messages[-1].get("content"), str):
        return "the message that it continues is not plain text"
    return ""


def _why_not_prompt(prompt: object) -> str:
    return "" if isinstance(prompt, str) else "its prompt is not one string"
