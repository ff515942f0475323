"""The shapes of answers: JSON bodies, SSE events, errors, as vLLM writes them. No I/O."""

import base64
import struct
from collections.abc import Sequence as Items
from dataclasses import dataclass

import orjson
import xxhash

from loadtests.simunit.sequence import FinishReason, Sequence

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError"}


@dataclass(frozen=True, slots=True)
class Reply:
    """What all parts of one answer share."""

    chat: bool
    id: str
    created: int
    model: str

    def whole(self, sequence: Sequence, text: str, finish: FinishReason) -> bytes:
        """The body of an answer that is not streamed."""
        choice: dict[str, object] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
        }
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return orjson.dumps(self._head(kind) | {"choices": [choice], "usage": usage(sequence)})

    def event(self, text: str, finish: FinishReason | None, *, role: str | None = None) -> bytes:
        """One SSE event with a piece of text."""
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.chat:
            choice["delta"] = {"content": text} if role is None else {"role": role, "content": text}
        else:
            choice["text"] = text
        return sse(self._head(self._chunk_kind()) | {"choices": [choice]})

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
