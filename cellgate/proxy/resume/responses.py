"""Events of `/v1/responses`: what each does, and how those of a second unit become the first's. Pure.

https://platform.openai.com/docs/api-reference/responses-streaming, and vLLM 0.32
(entrypoints/openai/responses/streaming_events.py).
"""

from __future__ import annotations

from typing import Any, ClassVar

from cellgate.proxy.resume.blocks import (
    CALL,
    TEXT,
    THINKING,
    BlockEvent,
    BlockTranscript,
    UnexpectedEventError,
    What,
    field,
    number,
    piece,
)
from cellgate.proxy.resume.eligible import FieldRules
from cellgate.proxy.resume.messages import Chat, InexactError, more_than
from cellgate.proxy.resume.proof import Tokens

_RESPONSES_KINDS = {"message": TEXT, "function_call": CALL, "reasoning": THINKING}
_RESPONSES_DELTAS = {
    "response.output_text.delta",
    "response.function_call_arguments.delta",
    "response.reasoning_text.delta",
}
_RESPONSES_MARKS = {
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.done",
    "response.reasoning_part.added",
    "response.reasoning_part.done",
    "response.reasoning_text.done",
    "response.function_call_arguments.done",
}
_RESPONSES_WAITS = ("response.queued", "response.in_progress")
_RESPONSES_ENDS = ("response.completed", "response.incomplete")
_OF_THE_END = ("status", "incomplete_details", "error", "output", "usage", "completed_at", "metrics")
"""What the response in the last event has from the unit that ended it."""


class Responses:
    """The dialect."""

    name = "responses"
    limit = "max_output_tokens"
    unstored: ClassVar[dict[str, Any]] = {"store": False}

    def act_of(self, document: dict[str, Any]) -> BlockEvent:
        """What the event with this object does. Raises UnexpectedEventError."""
        kind = piece(document, "type")
        if document.get("content_index"):
            raise UnexpectedEventError("a second part of a message")
        if kind in _RESPONSES_DELTAS:
            if document.get("logprobs"):
                raise UnexpectedEventError("logprobs")
            return BlockEvent(What.GROW, number(document, "output_index"), text=piece(document, "delta"))
        if kind in _RESPONSES_MARKS:
            return BlockEvent(What.MARK, number(document, "output_index"), kind)
        if kind in _RESPONSES_ENDS:
            return BlockEvent(What.END, finish=piece(field(document, "response"), "status"))
        match kind:
            case "response.created":
                return BlockEvent(What.BEGIN)
            case "response.output_item.added":
                return _opened(document)
            case "response.output_item.done":
                return BlockEvent(What.CLOSE, number(document, "output_index"))
        if kind in _RESPONSES_WAITS:
            return BlockEvent(What.NOTHING)
        raise UnexpectedEventError("an event of an unknown type")

    def head_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """The object that a BEGIN, OPEN or CLOSE carries."""
        return document.get("response") or document.get("item") or {}

    def prompt_tokens(self, frame: dict[str, Any]) -> int | None:
        """How many tokens the prompt has, as far as the object of an answer tells: not at its beginning."""
        usage = frame.get("usage")
        counted = usage.get("input_tokens") if isinstance(usage, dict) else None
        return counted if type(counted) is int else None

    # -- what the client gets ------------------------------------------------------------------------------

    def placed(self, document: dict[str, Any], block: int, shown: BlockTranscript) -> dict[str, Any]:
        """An event of this block of the answer. Texts in it are those of the whole block."""
        placed = document | {"output_index": block}
        if block == len(shown.blocks):
            # It begins the block: its names are this unit's.
            return placed
        head, text = shown.blocks[block].head, str(shown.blocks[block].text)
        if "item_id" in placed:
            placed["item_id"] = head.get("id")
        for name in ("text", "arguments"):
            if name in placed:
                placed[name] = text
        if placed["type"].endswith("_part.done"):
            placed["part"] = field(placed, "part") | {"text": text}
        if "item" in placed:
            placed["item"] = _whole(field(placed, "item"), head, text)
        return placed

    def with_text(self, document: dict[str, Any], text: str) -> dict[str, Any]:
        return document | {"delta": text}

    def closing(self, block: int, shown: BlockTranscript) -> list[dict[str, Any]]:
        """The events that end an open block of text."""
        open_block = shown.blocks[block]
        at = {"item_id": open_block.head.get("id"), "output_index": block, "content_index": 0}
        text = str(open_block.text)
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        item = open_block.head | {"status": "completed", "content": [part] if text else []}
        events: list[dict[str, Any]] = [
            {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
            {"type": "response.output_item.done", "output_index": block, "item": item},
        ]
        return [event for event in events if event["type"] not in open_block.marks]

    def finished(
        self, document: dict[str, Any], shown: BlockTranscript, tokens: Tokens | None
    ) -> dict[str, Any]:
        """The END of the whole answer. `tokens` were generated by others, if not all were by this unit."""
        response = document["response"]
        whole = shown.frame | {name: response[name] for name in _OF_THE_END if name in response}
        whole["output"] = [block.item for block in shown.blocks]
        if tokens is not None:
            whole["usage"] = _summed(response.get("usage"), tokens)
        return document | {"response": whole}

    def end(self, shown: BlockTranscript, tokens: Tokens | None) -> list[dict[str, Any]]:
        """The events after the last block, of an answer that has reached its limit of `tokens`."""
        assert tokens is not None
        response = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return [self.finished({"type": "response.completed", "response": response}, shown, tokens)]


def _opened(document: dict[str, Any]) -> BlockEvent:
    item = field(document, "item")
    kind = _RESPONSES_KINDS.get(piece(item, "type"))
    if kind is None or item.get("content") or item.get("arguments") or item.get("summary"):
        raise UnexpectedEventError("an item of an unknown kind")
    name = piece(item, "name") if kind is CALL else ""
    return BlockEvent(What.OPEN, number(document, "output_index"), kind, name)


def _whole(item: dict[str, Any], head: dict[str, Any], text: str) -> dict[str, Any]:
    """An item that has ended, under the names that the client knows it by."""
    whole = item | {name: head[name] for name in ("id", "call_id") if name in head}
    if "arguments" in whole:
        whole["arguments"] = text
    parts = whole.get("content")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
        whole["content"] = [parts[0] | {"text": text}]
    return whole


def _summed(usage: object, tokens: Tokens) -> dict[str, Any]:
    """The usage of both parts; what the second unit took for the prompt was generated."""
    counts = usage if isinstance(usage, dict) else {}
    said, prompt = (counts.get("output_tokens") or 0) + tokens.shown, tokens.prompt or 0
    of_input = counts.get("input_tokens_details") or {}
    cached = min(of_input.get("cached_tokens") or 0, prompt)
    return {
        "output_tokens_details": {"reasoning_tokens": 0},
        **counts,
        "input_tokens": prompt,
        "input_tokens_details": of_input | {"cached_tokens": cached},
        "output_tokens": said,
        "total_tokens": prompt + said,
    }


# Requests of `/v1/responses`: which streams may be resumed, and the chat that engines make of them. Pure.
#
# The conversion is that of vLLM 0.32 (entrypoints/openai/responses/utils.py, construct_input_messages) for
# texts and functions. Whatever else there is, is not converted here.


_HARMLESS_FIELDS = """model input instructions max_output_tokens metadata stream temperature top_p top_k min_p
    seed logit_bias tools parallel_tool_calls store user service_tier safety_identifier prompt_cache_key
    prompt_cache_retention priority cache_salt session_id ignore_eos stop_token_ids chat_template_kwargs"""
_RESPONSES_COMPUTED = """text tool_choice stop reasoning truncation structured_outputs frequency_penalty
    presence_penalty repetition_penalty include_reasoning skip_special_tokens max_tool_calls include"""
RESPONSES_FIELDS = FieldRules(
    harmless=frozenset(_HARMLESS_FIELDS.split()),
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
    computed=frozenset(_RESPONSES_COMPUTED.split()),
)
_RESPONSES_OF_A_MESSAGE = frozenset(("type", "role", "content", "id", "status"))
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
    if (
        role not in _PARTS
        or more_than(item, _RESPONSES_OF_A_MESSAGE)
        or item.get("status") not in (None, "completed")
    ):
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
