"""What a unit of the benchmark's engine shows beside its answers: what vLLM does, and a gate asks for.

The page of metrics is as large as vLLM's, for whoever reads it pays for its length.
"""

import json
import time
from array import array
from collections.abc import Callable

import orjson

from loadtests.bench import payload

_METRICS_KB = 50
"""As large as the page of vLLM 0.32 after its first requests."""
# A KV cache of 8 million tokens: 10,000 streams have room in two units.
_METRICS = """\
process_start_time_seconds %.2f
vllm:num_requests_running{engine="0",model_name="bench"} %d
vllm:num_requests_waiting{engine="0",model_name="bench"} 0
vllm:kv_cache_usage_perc{engine="0",model_name="bench"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="524288",engine="0"} 1
vllm:generation_tokens_total{engine="0",model_name="bench"} %d
vllm:iteration_tokens_total_count{engine="0",model_name="bench"} %d
"""
_OTHERS = "".join(
    f'vllm:request_time_seconds_bucket{{engine="0",le="{n}",model_name="bench"}} 0\n' for n in range(1000)
)[: _METRICS_KB * 1000].rpartition("\n")[0]
_MODEL = {"id": payload.MODEL, "object": "model", "created": payload.CREATED_S, "owned_by": "vllm"}
_MODELS = json.dumps({"object": "list", "data": [_MODEL | {"root": payload.MODEL, "max_model_len": 1 << 20}]})
_STARTED_AT = time.time()


class Counters:
    """What one unit of the engine reports about itself."""

    def __init__(self) -> None:
        self.running = 0
        self.tokens = 0


Page = Callable[[Counters, bytes], tuple[bytes, bytes]]


def _metrics(counters: Counters, _: bytes) -> tuple[bytes, bytes]:
    page = _METRICS % (_STARTED_AT, counters.running, counters.tokens, counters.tokens)
    return b"text/plain; version=0.0.4", f"{page}{_OTHERS}\n".encode()


def _tokenize(_: Counters, body: bytes) -> tuple[bytes, bytes]:
    """A token for each byte; a chat is its messages, the last one open if it is the assistant's."""
    given = json.loads(body)
    text = given.get("prompt") or _rendered(given.get("messages", ()))
    tokens = list(text.encode())
    answer = {"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens}
    return b"application/json", json.dumps(answer).encode()


def _rendered(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{each['role']}>{each['content']}" for each in messages) + (
        "" if messages and messages[-1]["role"] == "assistant" else "<assistant>"
    )


def _detokenize(_: Counters, body: bytes) -> tuple[bytes, bytes]:
    text = bytes(json.loads(body)["tokens"]).decode(errors="replace")
    return b"application/json", json.dumps({"prompt": text}).encode()


def _render(_: Counters, body: bytes) -> tuple[bytes, bytes]:
    """What vllm-router's cache_aware asks for before each request. A token for each four bytes."""
    given = orjson.loads(body)
    text = _rendered(given["messages"]).encode()
    tokens = array("I", text[: len(text) // 4 * 4]).tolist()
    answer = {"request_id": "render", "token_ids": tokens, "model": payload.MODEL, "sampling_params": {}}
    return b"application/json", orjson.dumps(answer)


PAGES: dict[bytes, Page] = {
    b"/health": lambda *_: (b"text/plain", b""),
    b"/v1/models": lambda *_: (b"application/json", _MODELS.encode()),
    b"/metrics": _metrics,
    b"/tokenize": _tokenize,
    b"/detokenize": _detokenize,
    b"/v1/chat/completions/render": _render,
}
