"""Requests of `/v1/messages`: which streams may be resumed, and the chat that engines make of them. Pure.

The conversion is that of vLLM 0.32 (entrypoints/anthropic/serving.py, to_chat_completion_request) for texts
and tools. Whatever else there is, is not converted here.
"""

from __future__ import annotations

import json
from typing import Any

from cellgate.proxy.resume.field_rules import FieldRules

_HARMLESS = """model messages system max_tokens metadata stream temperature top_p top_k tools service_tier
    cache_salt chat_template_kwargs"""
FIELDS = FieldRules(
    harmless=frozenset(_HARMLESS.split()),
    only_as={"tool_choice": ({"type": "auto"},), "stop_sequences": ([],)},
    computed=frozenset(("tool_choice", "stop_sequences", "thinking", "output_config")),
)
_BILLING = "x-anthropic-billing-header"
"""vLLM leaves out a system text that begins so."""
_OF_A_TOOL = frozenset(("name", "description", "input_schema", "type", "cache_control"))
_OF_A_MESSAGE = frozenset(("role", "content"))
_OF_A_TEXT = frozenset(("type", "text", "cache_control"))

Chat = dict[str, Any]


class InexactError(Exception):
    """Engines may convert this in several ways."""


def chat_of(body: dict[str, Any]) -> Chat:
    """The chat of a request, as `/tokenize` takes it. Raises InexactError."""
    messages: list[Chat] = []
    if system := "".join(_texts(body.get("system") or "", leave_out=_BILLING)):
        messages.append({"role": "system", "content": system})
    for message in _list(body.get("messages")):
        role, content = message.get("role"), message.get("content")
        if more_than(message, _OF_A_MESSAGE) or role not in _ROLES:
            raise InexactError("a message that is not one of a user or an assistant")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            messages.extend(_ROLES[role](_list(content)))
    if not messages or messages[-1]["role"] == "assistant":
        raise InexactError("its last message is the assistant's")
    chat = {name: body[name] for name in ("model", "chat_template_kwargs") if body.get(name) is not None}
    if body.get("tools"):
        chat["tools"] = [_tool(each) for each in _list(body["tools"])]
    return chat | {"messages": messages}


def more_than(thing: dict[str, Any], known: frozenset[str]) -> bool:
    """Whether an object has other fields than these; one that is null is none."""
    return any(thing[name] is not None for name in thing.keys() - known)


def _of_a_user(blocks: list[Chat]) -> list[Chat]:
    """Results of tools come before the text."""
    results = [_result(block) for block in blocks if block.get("type") == "tool_result"]
    texts = _texts([block for block in blocks if block.get("type") != "tool_result"])
    return [*results, {"role": "user", "content": _content(texts)}] if texts else results


def _of_an_assistant(blocks: list[Chat]) -> list[Chat]:
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    texts = _texts([block for block in blocks if block.get("type") != "tool_use"])
    if not (texts or calls):
        raise InexactError("a message without a content")
    message: Chat = {"role": "assistant"}
    if calls:
        message["tool_calls"] = calls
    if texts:
        message["content"] = _content(texts)
    return [message]


_ROLES = {"user": _of_a_user, "assistant": _of_an_assistant}


def _content(texts: list[str]) -> str | list[Chat]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _texts(content: object, *, leave_out: str = "") -> list[str]:
    """The texts of a content that has nothing else."""
    if isinstance(content, str):
        return [content]
    texts = []
    for block in _list(content):
        text = block.get("text")
        if block.get("type") != "text" or not isinstance(text, str) or more_than(block, _OF_A_TEXT):
            raise InexactError("a content that is not text")
        if text and not (leave_out and text.startswith(leave_out)):
            texts.append(text)
    return texts


def _call(block: Chat) -> Chat:
    called, name = block.get("id"), block.get("name")
    if not (
        isinstance(called, str) and called and isinstance(name, str) and isinstance(block.get("input"), dict)
    ):
        raise InexactError("a tool_use in an unknown format")
    function = {"name": name, "arguments": json.dumps(block["input"])}
    return {"id": called, "type": "function", "function": function}


def _result(block: Chat) -> Chat:
    content = block.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(_all_texts(content))
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}


def _all_texts(content: object) -> list[str]:
    """Empty ones count here."""
    if any(block.get("type") != "text" or not isinstance(block.get("text"), str) for block in _list(content)):
        raise InexactError("a tool_result that is not text")
    return [block["text"] for block in _list(content)]


def _tool(tool: Chat) -> Chat:
    schema = tool.get("input_schema")
    if (
        more_than(tool, _OF_A_TOOL)
        or tool.get("type") not in (None, "custom")
        or not isinstance(schema, dict)
    ):
        raise InexactError("a tool in an unknown format")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": {**schema, **_type_of(schema)}}}


def _type_of(schema: Chat) -> Chat:
    return {} if "type" in schema else {"type": "object"}


def _list(value: object) -> list[Chat]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InexactError("something else than a list of objects")
    return value
