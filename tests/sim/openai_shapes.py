"""The bytes of OpenAI's API as vLLM writes them: events, errors, the model list, metrics."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
IDLE = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":""}}]}\n\n'


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": status}}


def error(status: int, message: str) -> bytes:
    return orjson.dumps(error_body(status, message))


def logprobs(tokens: list[str]) -> dict[str, Any]:
    """Log probabilities of completions; the next likely token is far behind."""
    return {
        "tokens": tokens,
        "token_logprobs": [-0.5] * len(tokens),
        "top_logprobs": [{token: -0.5, "<other>": -3.0, "<last>": -4.0} for token in tokens],
    }


def models(name: str, owner: str = "vllm") -> bytes:
    """Body of /v1/models."""
    return orjson.dumps({"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner}]})


def metrics(values: dict[str, float], model: str) -> bytes:
    """A Prometheus text page; vLLM's own names carry its labels."""
    labels = f'{{engine="0",model_name="{model}"}}'
    lines = [
        f"# HELP {name} simulated\n{name}{labels if ':' in name else ''} {value:f}\n"
        for name, value in values.items()
    ]
    return "".join(lines).encode()
