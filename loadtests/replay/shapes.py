"""What a unit of the replay writes: OpenAI's answers and vLLM's metrics."""

from functools import cache

import orjson

from loadtests.gym.engine import Engine
from loadtests.gym.kv import BLOCK_TOKENS
from loadtests.gym.sequences import Sequence
from loadtests.replay.texts import ANSWER_WORD
from loadtests.wire.messages import chunk, whole

MODEL = "replay"
DONE = b"data: [DONE]\n\n"
MODELS = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})
_METRICS = """\
process_start_time_seconds {born:.2f}
vllm:num_requests_running{{model_name="{model}",engine="0"}} {running}
vllm:num_requests_waiting{{model_name="{model}",engine="0"}} {waiting}
vllm:kv_cache_usage_perc{{model_name="{model}",engine="0"}} {kv_use:.6f}
vllm:prompt_tokens_total{{model_name="{model}",engine="0"}} {prompt}
vllm:generation_tokens_total{{model_name="{model}",engine="0"}} {answers}
vllm:iteration_tokens_total_count{{model_name="{model}",engine="0"}} {steps}
vllm:prefix_cache_queries_total{{model_name="{model}",engine="0"}} {prompt}
vllm:prefix_cache_hits_total{{model_name="{model}",engine="0"}} {cached}
vllm:cache_config_info{{block_size="{block_size}",num_gpu_blocks="{blocks}",engine="0"}} 1
"""


def refusal(status: bytes, message: str) -> bytes:
    """An error in OpenAI's shape."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": int(status[:3])}
    return whole(orjson.dumps({"error": error}), status=status)


@cache
def event(unit: str, chat: bool, tokens: int, *, last: bool) -> bytes:
    """One SSE event in one HTTP chunk, with so many tokens of text."""
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length" if last else None}
    text = (ANSWER_WORD * tokens).decode()
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return chunk(_sse(_head(unit, kind) | {"choices": [choice]}))


def usage_event(unit: str, chat: bool, sequence: Sequence) -> bytes:
    """The event that `stream_options.include_usage` asks for."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    return chunk(_sse(_head(unit, kind) | {"choices": [], "usage": _usage(sequence)}))


def whole_answer(unit: str, chat: bool, sequence: Sequence) -> bytes:
    """The response to a request that does not stream."""
    text = (ANSWER_WORD * sequence.answer_tokens).decode()
    choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    head = _head(unit, "chat.completion" if chat else "text_completion")
    return whole(orjson.dumps(head | {"choices": [choice], "usage": _usage(sequence)}))


def metrics(engine: Engine, born: float) -> bytes:
    """The page of /metrics."""
    page = _METRICS.format(
        born=born,
        model=MODEL,
        running=len(engine.running),
        waiting=len(engine.waiting),
        kv_use=engine.kv_use,
        prompt=engine.asked_tokens,
        answers=engine.answered,
        steps=engine.steps,
        cached=engine.hit_tokens,
        block_size=BLOCK_TOKENS,
        blocks=engine.model.kv_tokens // BLOCK_TOKENS,
    )
    return whole(page.encode(), kind=b"text/plain; version=0.0.4; charset=utf-8")


def _head(unit: str, kind: str) -> dict[str, object]:
    # The unit's name comes back where engines tell their configuration apart: clients learn who answered.
    return {"id": "cmpl-replay", "object": kind, "created": 0, "model": MODEL, "system_fingerprint": unit}


def _usage(sequence: Sequence) -> dict[str, object]:
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.answer_tokens,
        "total_tokens": sequence.prompt_tokens + sequence.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sequence.cached_tokens},
    }


def _sse(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
