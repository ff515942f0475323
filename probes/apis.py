"""Requests for one token through each API of engines, and the form of their answers.

Prompts are unique and shorter than a KV block, so that no cache can answer; no request carries a priority,
because vLLM refuses one by default. Shapes: OpenAI's API, Jina's rerank, vLLM's pooling, Triton's KServe v2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any
from urllib.parse import quote

import orjson

_ELEMENTS_MAX = 1 << 18
"""Larger tensors are not made: an image of 3 x 224 x 224 is well below."""

_TEXT_MAX = 128
"""Characters of a version or a fingerprint."""


@dataclass(frozen=True, slots=True)
class Api:
    """`body` makes a request from a model (empty: unknown) and a prompt; a reply that answers has `answer`.

    `{model}` in `path` and `about` stands for the model. `about` is a page that is read first and given to
    `body` (as None when it is no JSON), which returns None when no request can be made for such a model.
    """

    path: str
    body: Callable[[str, str, Any], dict[str, Any] | None]
    answer: str
    about: str = ""


def at(path: str, model: str) -> str:
    """`path` for `model`."""
    return path.replace("{model}", quote(model, safe=""))


def parsed(body: bytes) -> Any:
    """The JSON in `body`; None when there is none."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def fingerprint_of(body: bytes) -> str:
    """`system_fingerprint` in an answer of OpenAI's API; empty when there is none, or an absurd one."""
    reply = parsed(body)
    found = reply.get("system_fingerprint") if isinstance(reply, dict) else None
    return short_text(found)


def short_text(found: Any) -> str:
    """`found`, if it is a text of one short line, else empty."""
    is_short = isinstance(found, str) and len(found) <= _TEXT_MAX and found.isprintable()
    return found if is_short else ""


def has_answer(api: Api, body: bytes) -> bool:
    """True for a JSON object that has what this API answers with, and no error."""
    reply = parsed(body)
    if isinstance(reply, list):
        # SGLang's rerank has no object around its list.
        return api.answer == "results" and bool(reply) and isinstance(reply[0], dict) and "score" in reply[0]
    if not isinstance(reply, dict) or reply.get("error"):
        return False
    answer = reply.get(api.answer)
    return bool(answer) if isinstance(answer, list) else isinstance(answer, str)


def _named(model: str, **rest: Any) -> dict[str, Any]:
    # Without a known model the field is left out: engines then take their own.
    return {"model": model, **rest} if model else rest


def _chat(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, messages=[{"role": "user", "content": prompt}], max_tokens=1)


def _completion(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, prompt=prompt, max_tokens=1)


def _input(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, input=prompt)


def _rerank(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, query=prompt, documents=[prompt])


def _generate(_model: str, prompt: str, _: Any) -> dict[str, Any]:
    return {"text_input": prompt, "max_tokens": 1}


def _infer(_model: str, prompt: str, metadata: Any) -> dict[str, Any] | None:
    """The smallest tensors of zeros that fit the model's inputs; texts hold the prompt."""
    try:
        inputs = [_tensor(entry, prompt) for entry in metadata["inputs"]]
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    return {"inputs": inputs}


def _tensor(entry: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Raises TypeError, KeyError, ValueError or OverflowError for what is no tensor, or too large a one."""
    shape, datatype = [max(1, int(size)) for size in entry["shape"]], entry["datatype"]
    if prod(shape) > _ELEMENTS_MAX:
        raise ValueError(f"{prod(shape)} elements")
    zero = {"BYTES": prompt, "BOOL": False}.get(datatype, 0)
    return {"name": entry["name"], "shape": shape, "datatype": datatype, "data": [zero] * prod(shape)}


CANARIES: dict[str, Api] = {
    "chat": Api("/v1/chat/completions", _chat, "choices"),
    "completions": Api("/v1/completions", _completion, "choices"),
    "embeddings": Api("/v1/embeddings", _input, "data"),
    "rerank": Api("/v1/rerank", _rerank, "results"),
    "pooling": Api("/pooling", _input, "data"),
    "generate": Api("/v2/models/{model}/generate", _generate, "text_output"),
    "infer": Api("/v2/models/{model}/infer", _infer, "outputs", about="/v2/models/{model}"),
}
