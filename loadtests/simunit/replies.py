"""The shapes of answers: JSON bodies, SSE events, errors, as vLLM writes them. No I/O."""

import base64
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import orjson
import xxhash

from loadtests.simunit.agents import ShownCalls
from loadtests.simunit.blocks import BlockSpeaker
from loadtests.simunit.sequence import FinishReason, Sequence
from loadtests.simunit.text import WORDS, pieces_of, tokenize

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_CERTAIN, _UNLIKELY = -0.01, -5.0
_OTHER = WORDS[0]
"""The token that could have come instead, everywhere."""
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError"}


class AnyReply(Protocol):
    """Writes one answer."""

    def accepted(self) -> Items[bytes]:
        """The events before anything is computed."""

    def events(self, text: str, finish: FinishReason | None, said: str) -> Items[bytes]:
        """The events for a piece of text; `said` is what was generated for it."""

    def failed(self, message: str) -> bytes:
        """The event for a failure of the engine."""

    def rest(self, usage_of: Sequence | None) -> Items[bytes]:
        """The events after the text; after a failure too, as in vLLM."""

    def whole(self, sequence: Sequence, text: str, finish: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""


class BlockReply:
    """Of /v1/messages or /v1/responses; after its text it calls `tool`, if that has a name."""

    def __init__(self, speaker: BlockSpeaker, tool: str) -> None:
        self._speaker = speaker
        self._tool = tool
        self._said = 0

    def accepted(self) -> Items[bytes]:
        """The events before anything is computed."""
        return self._speaker.accept()

    def events(self, text: str, finish: FinishReason | None, _said: str) -> Items[bytes]:
        """The events for a piece of text."""
        events = [] if self._said else self._speaker.begin()
        self._said += 1
        events += self._speaker.word(text)
        if finish and self._tool:
            events += self._speaker.call(self._tool, ['{"city":', f' "{text.strip()}"}}'])
            events += self._speaker.end("tool_calls", self._said)
        elif finish:
            events += self._speaker.end(finish, self._said)
        return events

    def failed(self, message: str) -> bytes:
        """The event for a failure of the engine."""
        return b"event: error\n" + sse(error(500, message) | {"type": "error"})

    def rest(self, _usage_of: Sequence | None) -> Items[bytes]:
        """Nothing comes after the text."""
        return ()

    def whole(self, sequence: Sequence, text: str, finish: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""
        return self._speaker.whole(text, finish, sequence.generated)


@dataclass(slots=True)
class Reply:
    """What all parts of one answer share. `shown` splits raw text; `prompt` are token ids, if asked for."""

    chat: bool
    id: str
    created: int
    model: str
    shown: ShownCalls | None = None
    prompt: list[int] | None = None
    shows_logprobs: bool = False
    _is_begun: bool = False

    def accepted(self) -> Items[bytes]:
        """Nothing is sent before the first token."""
        return ()

    def events(self, text: str, finish: FinishReason | None, said: str) -> Items[bytes]:
        """The event for a piece of text, the role before the first."""
        role = [self.event("", None, role="assistant")] if self.chat and not self._is_begun else []
        found = [*role, self.event(text, finish, said=said)]
        self._is_begun = True
        return found

    def failed(self, message: str) -> bytes:
        """The event for a failure of the engine."""
        return sse(error(500, message))

    def rest(self, usage_of: Sequence | None) -> Items[bytes]:
        """The events after the text."""
        return [*([self.usage_event(usage_of)] if usage_of else []), DONE]

    def whole(self, sequence: Sequence, text: str, finish: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""
        choice: dict[str, object] = {
            "index": 0,
            "logprobs": _logprobs(text, chat=self.chat) if self.shows_logprobs else None,
            "finish_reason": finish,
            "stop_reason": None,
        }
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        answer = {"choices": [choice], "usage": usage(sequence), "kv_transfer_params": sequence.handed}
        return orjson.dumps(self._head(kind) | answer)

    def event(
        self, text: str, finish: FinishReason | None, *, role: str | None = None, said: str = ""
    ) -> bytes:
        """One SSE event with a piece of text; `said` is what was generated for it."""
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish}
        head = self._head(self._chunk_kind())
        if role is not None:
            choice["delta"] = {"role": role, "content": text}
            prompt = {} if self.prompt is None else {"prompt_token_ids": self.prompt}
            return sse(head | {"choices": [choice]} | prompt)
        if self.shown is not None:
            choice["delta"] = self.shown.delta(text)
            if finish == "stop" and self.shown.has_called:
                choice["finish_reason"] = "tool_calls"
        elif self.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if self.prompt is not None:
            choice["token_ids"] = tokenize(said)
            if not (self.chat or self._is_begun):
                choice["prompt_token_ids"] = self.prompt
        return sse(head | {"choices": [choice]})

    def usage_event(self, sequence: Sequence) -> bytes:
        """The SSE event that `stream_options.include_usage` asks for."""
        return sse(self._head(self._chunk_kind()) | {"choices": [], "usage": usage(sequence)})

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def sse(data: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def usage(sequence: Sequence) -> dict[str, object]:
    """OpenAI's `usage` object."""
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.generated,
        "total_tokens": sequence.prompt_tokens + sequence.generated,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens or 0},
    }


def error(status: int, message: str) -> dict[str, object]:
    """OpenAI's error object, with the type names that vLLM uses."""
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def models(name: str, created: int, max_model_len: int) -> dict[str, object]:
    """Body of /v1/models."""
    entry = {"id": name, "object": "model", "created": created, "owned_by": "vllm", "root": name}
    return {"object": "list", "data": [entry | {"parent": None, "max_model_len": max_model_len}]}


def embeddings(
    model: str, texts: Items[str], dimensions: int, prompt_tokens: int, *, as_base64: bool
) -> bytes:
    """Body of /v1/embeddings."""
    data = []
    for index, text in enumerate(texts):
        vector = _embedding(text, dimensions)
        packed = struct.pack(f"<{dimensions}f", *vector)
        value = base64.b64encode(packed).decode() if as_base64 else vector
        data.append({"index": index, "object": "embedding", "embedding": value})
    counts = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return orjson.dumps({"object": "list", "model": model, "data": data, "usage": counts})


def _embedding(text: str, dimensions: int) -> list[float]:
    """A unit vector that depends on the text alone."""
    raw = [xxhash.xxh3_64_intdigest(text.encode(), seed=index) / 2**63 - 1 for index in range(dimensions)]
    length = sum(value * value for value in raw) ** 0.5
    return [value / length for value in raw]


def _logprobs(text: str, *, chat: bool) -> dict[str, object]:
    """What vLLM shows of the tokens of a text: each was nearly certain, and there was one other."""
    tokens = pieces_of(text)
    tops = [{token: _CERTAIN, _OTHER: _UNLIKELY} for token in tokens]
    if not chat:
        return {"tokens": tokens, "token_logprobs": [_CERTAIN] * len(tokens), "top_logprobs": tops}
    content = [
        {
            "token": token,
            "logprob": _CERTAIN,
            "top_logprobs": [{"token": name, "logprob": value} for name, value in top.items()],
        }
        for token, top in zip(tokens, tops, strict=True)
    ]
    return {"content": content}
