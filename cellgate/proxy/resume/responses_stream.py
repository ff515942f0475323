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
    StrangeError,
    What,
    field,
    number,
    piece,
)
from cellgate.proxy.resume.proof import Tokens

_KINDS = {"message": TEXT, "function_call": CALL, "reasoning": THINKING}
_DELTAS = {
    "response.output_text.delta",
    "response.function_call_arguments.delta",
    "response.reasoning_text.delta",
}
_MARKS = {
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.done",
    "response.reasoning_part.added",
    "response.reasoning_part.done",
    "response.reasoning_text.done",
    "response.function_call_arguments.done",
}
_WAITS = ("response.queued", "response.in_progress")
_ENDS = ("response.completed", "response.incomplete")
_OF_THE_END = ("status", "incomplete_details", "error", "output", "usage", "completed_at", "metrics")
"""What the response in the last event has from the unit that ended it."""


class Responses:
    """The dialect."""

    name = "responses"
    limit = "max_output_tokens"
    unstored: ClassVar[dict[str, Any]] = {"store": False}

    def act_of(self, document: dict[str, Any]) -> BlockEvent:
        """What the event with this object does. Raises StrangeError."""
        kind = piece(document, "type")
        if document.get("content_index"):
            raise StrangeError("a second part of a message")
        if kind in _DELTAS:
            if document.get("logprobs"):
                raise StrangeError("logprobs")
            return BlockEvent(What.GROW, number(document, "output_index"), text=piece(document, "delta"))
        if kind in _MARKS:
            return BlockEvent(What.MARK, number(document, "output_index"), kind)
        if kind in _ENDS:
            return BlockEvent(What.END, finish=piece(field(document, "response"), "status"))
        match kind:
            case "response.created":
                return BlockEvent(What.BEGIN)
            case "response.output_item.added":
                return _opened(document)
            case "response.output_item.done":
                return BlockEvent(What.CLOSE, number(document, "output_index"))
        if kind in _WAITS:
            return BlockEvent(What.NOTHING)
        raise StrangeError("an event of an unknown type")

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
        """A GROW that adds only this."""
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
    kind = _KINDS.get(piece(item, "type"))
    if kind is None or item.get("content") or item.get("arguments") or item.get("summary"):
        raise StrangeError("an item of an unknown kind")
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
