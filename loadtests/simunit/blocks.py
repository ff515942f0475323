"""The bytes of `/v1/messages` and `/v1/responses` as vLLM 0.32 writes them: a text, then a call."""

from typing import Any, Protocol

import orjson

FINISHES = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use", "abort": None}


def named(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), orjson.dumps(document))


class BlockSpeaker(Protocol):
    """Writes one answer. Each method returns the events for what it says."""

    def accept(self) -> list[bytes]:
        """Before anything is computed."""

    def begin(self) -> list[bytes]:
        """With the first token."""

    def word(self, word: str) -> list[bytes]:
        """A piece of text."""

    def call(self, name: str, pieces: list[str]) -> list[bytes]:
        """The call of a tool, its arguments in pieces."""

    def end(self, finish: str, said: int) -> list[bytes]:
        """How it ended, after so many tokens."""

    def whole(self, text: str, finish: str, said: int) -> bytes:
        """The body of an answer that is no stream."""


class MessagesSpeaker:
    """`unit` is part of all names that it gives."""

    def __init__(self, unit: str, model: str, prompt: int) -> None:
        self._unit, self._model, self._prompt = unit, model, prompt
        self._index = -1
        self._is_text = False

    def accept(self) -> list[bytes]:
        return []

    def begin(self) -> list[bytes]:
        message = self._message([]) | {"usage": {"input_tokens": self._prompt, "output_tokens": 0}}
        return [named({"type": "message_start", "message": message})]

    def word(self, word: str) -> list[bytes]:
        events = [] if self._is_text else self._open({"type": "text", "text": ""})
        self._is_text = True
        return [*events, self._delta({"type": "text_delta", "text": word})]

    def call(self, name: str, pieces: list[str]) -> list[bytes]:
        call = {"type": "tool_use", "id": f"call-{self._unit}", "name": name, "input": {}}
        events = [*self._closed(), *self._open(call)]
        self._is_text = False
        return [
            *events,
            *(self._delta({"type": "input_json_delta", "partial_json": each}) for each in pieces),
        ]

    def end(self, finish: str, said: int) -> list[bytes]:
        delta = {"stop_reason": FINISHES[finish], "stop_sequence": None}
        usage = {"input_tokens": self._prompt, "output_tokens": said}
        last = {"type": "message_delta", "delta": delta, "usage": usage}
        return [*self._closed(), named(last), named({"type": "message_stop"})]

    def whole(self, text: str, finish: str, said: int) -> bytes:
        usage = {"input_tokens": self._prompt, "output_tokens": said}
        message = self._message([{"type": "text", "text": text}]) | {"usage": usage}
        return orjson.dumps(message | {"stop_reason": FINISHES[finish]})

    def _message(self, content: list[Any]) -> dict[str, Any]:
        about = {"id": f"chatcmpl-{self._unit}", "type": "message", "role": "assistant", "content": content}
        return {**about, "model": self._model, "stop_reason": None, "stop_sequence": None}

    def _open(self, block: dict[str, Any]) -> list[bytes]:
        self._index += 1
        return [named({"type": "content_block_start", "content_block": block, "index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named({"type": "content_block_delta", "delta": delta, "index": self._index})

    def _closed(self) -> list[bytes]:
        if self._index < 0:
            return []
        return [named({"type": "content_block_stop", "index": self._index})]


class ResponsesSpeaker:
    """`unit` is part of all names that it gives."""

    def __init__(self, unit: str, model: str, prompt: int, limit: int | None = None) -> None:
        self._unit, self._model, self._prompt, self._limit = unit, model, prompt, limit
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""

    def accept(self) -> list[bytes]:
        response = self._response("in_progress")
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def begin(self) -> list[bytes]:
        return []

    def word(self, word: str) -> list[bytes]:
        events = [] if self._open else self._begin_text()
        self._text += word
        return [*events, self._of_text("response.output_text.delta", delta=word, logprobs=[])]

    def call(self, name: str, pieces: list[str]) -> list[bytes]:
        events = self._closed()
        at = {"item_id": f"fc-{self._unit}", "output_index": len(self._output)}
        item = {"id": at["item_id"], "type": "function_call", "call_id": f"call-{self._unit}", "name": name}
        item |= {"arguments": "", "status": "in_progress"}
        events.append(self._event("response.output_item.added", item=item, output_index=at["output_index"]))
        for each in pieces:
            events.append(self._event("response.function_call_arguments.delta", delta=each, **at))
        item = item | {"arguments": "".join(pieces), "status": "completed"}
        events.append(
            self._event("response.function_call_arguments.done", arguments=item["arguments"], name=name, **at)
        )
        events.append(self._event("response.output_item.done", item=item, output_index=at["output_index"]))
        self._output.append(item)
        return events

    def end(self, finish: str, said: int) -> list[bytes]:
        events = self._closed()
        return [*events, self._event("response.completed", response=self._ended(finish, said))]

    def whole(self, text: str, finish: str, said: int) -> bytes:
        self.word(text)
        self._closed()
        return orjson.dumps(self._ended(finish, said))

    def _ended(self, finish: str, said: int) -> dict[str, Any]:
        is_cut = finish == "length"
        ended = self._response("incomplete" if is_cut else "completed")
        usage = {
            "input_tokens": self._prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt + said,
        }
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return ended | {"usage": usage, "incomplete_details": reason, "output": list(self._output)}

    def _response(self, status: str) -> dict[str, Any]:
        about = {"id": f"resp-{self._unit}", "object": "response", "created_at": 0, "model": self._model}
        about |= {"max_output_tokens": self._limit, "parallel_tool_calls": True, "tool_choice": "auto"}
        return {
            **about,
            "tools": [],
            "status": status,
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named({**fields, "sequence_number": self._number, "type": kind})

    def _of_text(self, kind: str, **fields: Any) -> bytes:
        at = {"item_id": f"msg-{self._unit}", "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **at, **fields)

    def _begin_text(self) -> list[bytes]:
        self._open = {"id": f"msg-{self._unit}", "type": "message", "role": "assistant", "content": []}
        item = self._open | {"status": "in_progress"}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("response.output_item.added", item=item, output_index=len(self._output)),
            self._of_text("response.content_part.added", part=part),
        ]

    def _closed(self) -> list[bytes]:
        if self._open is None:
            return []
        part: dict[str, Any] = {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": None,
        }
        item = self._open | {"status": "completed", "content": [part]}
        events = [
            self._of_text("response.output_text.done", text=self._text, logprobs=[]),
            self._of_text("response.content_part.done", part=part),
            self._event("response.output_item.done", item=item, output_index=len(self._output)),
        ]
        self._output.append(item)
        self._open = None
        return events
