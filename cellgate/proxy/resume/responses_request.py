"""Requests of `/v1/responses`: which streams may be resumed, and the chat that engines make of them. Pure.

The conversion is that of vLLM 0.32 (entrypoints/openai/responses/utils.py, construct_input_messages) for
texts and functions. Whatever else there is, is not converted here.
"""

from __future__ import annotations

from typing import Any

from cellgate.proxy.resume.field_rules import FieldRules
from cellgate.proxy.resume.messages_request import Chat, InexactError, more_than

_HARMLESS = """model input instructions max_output_tokens metadata stream temperature top_p top_k min_p seed
    logit_bias tools parallel_tool_calls store user service_tier safety_identifier prompt_cache_key
    prompt_cache_retention priority cache_salt session_id ignore_eos stop_token_ids chat_template_kwargs"""
_COMPUTED = """text tool_choice stop reasoning truncation structured_outputs frequency_penalty
    presence_penalty repetition_penalty include_reasoning skip_special_tokens max_tool_calls include"""
FIELDS = FieldRules(
    harmless=frozenset(_HARMLESS.split()),
    only_as={
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "include_reasoning": (True,),
        "skip_special_tokens": (True,),
        "stop": ([], ""),
        "stream_options": ({"include_obfuscation": False},),
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    computed=frozenset(_COMPUTED.split()),
)
_OF_A_MESSAGE = frozenset(("type", "role", "content", "id", "status"))
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")
_PARTS = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}


def chat_of(body: dict[str, Any]) -> Chat:
    """The chat of a request, as `/tokenize` takes it. Raises InexactError."""
    messages: list[Chat] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add(item, messages)
    if not messages or messages[-1]["role"] == "assistant":
        raise InexactError("its last input is the assistant's")
    chat = {name: body[name] for name in ("model", "chat_template_kwargs") if body.get(name) is not None}
    if body.get("tools"):
        chat["tools"] = [_tool(each) for each in body["tools"]]
    return chat | {"messages": messages}


def _add(item: object, messages: list[Chat]) -> None:
    if not isinstance(item, dict):
        raise InexactError("an input that is not an object")
    match item.get("type", "message"):
        case "message":
            _add_message(item, messages)
        case "function_call":
            call = {name: item.get(name) for name in ("name", "arguments")}
            if item.get("namespace") or not all(isinstance(value, str) for value in call.values()):
                raise InexactError("a call in an unknown format")
            before = _last_of_assistant(messages, "tool_calls")
            before.setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": call}
            )
        case "function_call_output":
            if not isinstance(item.get("output"), str):
                raise InexactError("an output of a function that is not text")
            output = {"role": "tool", "content": item["output"], "tool_call_id": item.get("call_id")}
            messages.append(output)
        case _:
            raise InexactError("an input of an unknown type")


def _add_message(item: Chat, messages: list[Chat]) -> None:
    role = item.get("role")
    if role not in _PARTS or more_than(item, _OF_A_MESSAGE) or item.get("status") not in (None, "completed"):
        raise InexactError("a message in an unknown format")
    content = _content(item.get("content"), _PARTS[role])
    if role != "assistant":
        messages.append({"role": role, "content": content})
    elif isinstance(content, str):
        _last_of_assistant(messages, "content")["content"] = content
    else:
        raise InexactError("a message of an assistant with several parts")


def _last_of_assistant(messages: list[Chat], name: str) -> Chat:
    """The assistant's message that an item belongs to: the last one, unless it has such a thing already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (name == "content" and name in last):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: object, kind: str) -> str | list[Chat]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InexactError("a message without a content")
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == kind]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise InexactError("a content that is not text")
    if kind == "output_text" and len(texts) == 1:
        return str(texts[0])
    return [{"type": "text", "text": text} for text in texts]


def _tool(tool: object) -> Chat:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or more_than(tool, frozenset(("type", *_OF_A_FUNCTION)))
    ):
        raise InexactError("a tool that is not a function")
    return {"type": "function", "function": {name: tool[name] for name in _OF_A_FUNCTION if name in tool}}
