"""The health endpoints and metrics of each inference engine.

Sources: vLLM 0.6 to 0.33, SGLang 0.4 to 0.5.23, Triton 2.x with its vLLM and TensorRT-LLM backends,
TensorRT-LLM's own server, llama.cpp's server (build 11549); `openai` stands for any other that speaks
OpenAI's API.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any
from urllib.parse import quote

import orjson

from cellgate.probes.base import Reply
from cellgate.router.nouns import HoldKind


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's surfaces.

    `ready` are paths in the order in which they are tried: the first that exists counts. Its 200 is good and
    its 5xx is bad; `unready` are the statuses below 500 that say "not ready" as well.
    `metrics` is a path at the port of the API, unless `metrics_port` names another one.
    `canaries` are APIs (see probes/engines.py) in the order in which they are tried.
    `version` is the page that shows its version, and the name of the version there.
    `closes_after_stream`: it ends a connection with a streamed reply, though its head says keep-alive.
    `holds` ask whether it stands still on purpose, `faults` which of its ranks are not healthy (the newest
    path first; docs/ranks.md); `controls` are its operations: pause, resume, sleep, wake.
    """

    ready: tuple[str, ...]
    canaries: tuple[str, ...]
    unready: frozenset[int] = frozenset()
    metrics: str = "/metrics"
    metrics_port: int | None = None
    version: tuple[str, str] | None = None
    closes_after_stream: bool = False
    holds: tuple[HoldQuestion, ...] = ()
    faults: tuple[str, ...] = ()
    controls: Mapping[str, EngineControl] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HoldQuestion:
    """How an engine says that it stands still on purpose: `flag` is true in the object that it answers.

    `but` is for engines that have no such flag: they say so by a 503 at `path` and a 200 at `but`.
    `is_shown`: all paths answer 503 meanwhile, so that nobody has to ask as long as all is well.
    """

    kind: HoldKind
    method: str
    path: str
    flag: str = ""
    but: str = ""
    is_shown: bool = False


@dataclass(frozen=True, slots=True)
class EngineControl:
    """How an operation of an engine is requested: POST `path`, with `body`. `{mode}` in either is one of the
    values of `modes`, by the word for the operator.
    """

    path: str
    body: str = ""
    modes: Mapping[str, str] = field(default_factory=dict)


_OPENAI_CANARIES = ("chat", "completions", "embeddings", "rerank", "pooling")

_MODES = {"wait": "wait", "abort": "abort", "keep": "keep"}

ENGINES: dict[str, Engine] = {
    # Pausing and sleeping need VLLM_SERVER_DEV_MODE=1, its own fault tolerance --enable-fault-tolerance.
    "vllm": Engine(
        ready=("/health",),
        canaries=_OPENAI_CANARIES,
        version=("/version", "version"),
        holds=(
            HoldQuestion(HoldKind.PAUSED, "GET", "/is_paused", "is_paused"),
            HoldQuestion(HoldKind.ASLEEP, "GET", "/is_sleeping", "is_sleeping"),
            HoldQuestion(
                HoldKind.SCALING, "POST", "/is_scaling_elastic_ep", "is_scaling_elastic_ep", is_shown=True
            ),
        ),
        faults=("/v1/fault_tolerance/status", "/fault_tolerance/status"),
        controls={
            "pause": EngineControl("/pause?mode={mode}", modes=_MODES),
            "resume": EngineControl("/resume"),
            "sleep": EngineControl("/sleep?level=1&mode={mode}", modes=_MODES),
            "wake": EngineControl("/wake_up"),
        },
    ),
    # Its /health generates a token and takes up to 20 s of a busy engine; /ready came after /ping.
    "sglang": Engine(
        ready=("/ready", "/ping"),
        canaries=_OPENAI_CANARIES,
        version=("/server_info", "version"),
        holds=(HoldQuestion(HoldKind.PAUSED, "GET", "/ready", but="/ping"),),
        controls={
            "pause": EngineControl(
                "/pause_generation", '{"mode":"{mode}"}', {"abort": "abort", "keep": "in_place"}
            ),
            "resume": EngineControl("/continue_generation", "{}"),
        },
    ),
    "triton": Engine(
        ready=("/v2/health/ready",),
        unready=frozenset({400}),
        metrics_port=8002,
        canaries=("generate", "infer"),
        version=("/v2", "version"),
    ),
    # Its /metrics is a list in JSON.
    "trtllm": Engine(
        ready=("/health",),
        metrics="/prometheus/metrics",
        canaries=_OPENAI_CANARIES,
        version=("/version", "version"),
    ),
    # It answers every path with 503 while it loads its model.
    "llamacpp": Engine(
        ready=("/health",),
        canaries=_OPENAI_CANARIES,
        version=("/props", "build_info"),
        closes_after_stream=True,
    ),
    "openai": Engine(ready=("/health", "/v1/models"), canaries=_OPENAI_CANARIES),
}

UNKNOWN = Engine(ready=("/v1/models",), canaries=_OPENAI_CANARIES)
"""Until the engine is known: endpoints that harm none of them."""

CLOSING = frozenset(name for name, surfaces in ENGINES.items() if surfaces.closes_after_stream)
"""Engines that end a connection with a streamed reply."""

OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "llamacpp": "llamacpp"}
"""Engine by the `owned_by` in its list of models."""


def engine(name: str) -> Engine:
    """The surfaces of the engine `name`; common ones for an unknown name."""
    return ENGINES.get(name, UNKNOWN)


class MetricRole(Enum):
    """The meaning of a metric."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USE = "kv use"
    STEPS = "steps"
    """Grows with every step of the engine."""
    PROGRESS = "progress"
    """Grows now and then while the engine works: when a request has finished, or once in many steps."""
    BORN = "born"
    KV_TOKENS = "kv tokens"
    """How many tokens the KV cache holds."""
    KV_SHAPE = "kv shape"
    """The same, as blocks and tokens a block, in its labels."""
    ADAPTERS = "adapters"
    """The LoRA adapters in use, in its labels; its value is when that was so."""
    CORRUPTED = "corrupted"
    """Counts requests whose numbers were none (NaN)."""

    __hash__ = object.__hash__


# A family with several meanings is named with the label that distinguishes them. Only counters of the engine
# are here: a front end counts requests even while its engine is frozen.
METRICS: dict[str, MetricRole] = {
    "process_start_time_seconds": MetricRole.BORN,
    "vllm:num_requests_running": MetricRole.RUNNING,
    "vllm:num_requests_waiting": MetricRole.WAITING,
    "vllm:kv_cache_usage_perc": MetricRole.KV_USE,
    "vllm:gpu_cache_usage_perc": MetricRole.KV_USE,  # Before 0.10.
    "vllm:iteration_tokens_total_count": MetricRole.STEPS,
    "vllm:generation_tokens_total": MetricRole.STEPS,
    "vllm:prompt_tokens_total": MetricRole.STEPS,
    "vllm:cache_config_info": MetricRole.KV_SHAPE,
    "vllm:lora_requests_info": MetricRole.ADAPTERS,
    # Counted only where VLLM_COMPUTE_NANS_IN_LOGITS is set.
    "vllm:corrupted_requests_total": MetricRole.CORRUPTED,
    "sglang:max_total_num_tokens": MetricRole.KV_TOKENS,
    "sglang:num_running_reqs": MetricRole.RUNNING,
    "sglang:num_queue_reqs": MetricRole.WAITING,
    "sglang:token_usage": MetricRole.KV_USE,
    # The first two move every few dozen steps, the others when a request finishes.
    "sglang:realtime_tokens_total": MetricRole.PROGRESS,
    "sglang:forward_execution_seconds_total": MetricRole.PROGRESS,
    "sglang:generation_tokens_total": MetricRole.PROGRESS,
    "sglang:prompt_tokens_total": MetricRole.PROGRESS,
    "nv_inference_pending_request_count": MetricRole.WAITING,
    "nv_inference_exec_count": MetricRole.PROGRESS,
    "nv_inference_count": MetricRole.PROGRESS,
    "nv_inference_request_success": MetricRole.PROGRESS,
    "nv_trt_llm_request_metrics{request_type=scheduled}": MetricRole.RUNNING,
    "nv_trt_llm_request_metrics{request_type=waiting}": MetricRole.WAITING,
    "nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}": MetricRole.KV_USE,
    "nv_trt_llm_general_metrics{general_type=iteration_counter}": MetricRole.PROGRESS,
    "trtllm_num_requests_running": MetricRole.RUNNING,
    "trtllm_num_requests_waiting": MetricRole.WAITING,
    "trtllm_kv_cache_utilization": MetricRole.KV_USE,
    "trtllm_generation_tokens_total": MetricRole.PROGRESS,
    "trtllm_prompt_tokens_total": MetricRole.PROGRESS,
    "trtllm_kv_cache_gen_alloc_blocks_total": MetricRole.PROGRESS,
    "llamacpp:requests_processing": MetricRole.RUNNING,
    "llamacpp:requests_deferred": MetricRole.WAITING,
    "llamacpp:kv_cache_usage_ratio": MetricRole.KV_USE,  # Until the middle of 2025.
    "llamacpp:n_decode_total": MetricRole.STEPS,
    # These move when a prompt, or a request, is done.
    "llamacpp:prompt_tokens_total": MetricRole.PROGRESS,
    "llamacpp:tokens_predicted_total": MetricRole.PROGRESS,
}


# Requests for one token through each API of engines, and what a good answer to them is.
#
# Prompts are unique and shorter than a KV block, so that no cache can answer; no request carries a priority,
# because vLLM refuses one by default. Shapes: OpenAI's API, Anthropic's messages, Jina's rerank, vLLM's
# pooling, Triton's KServe v2; audio as a second of silence (WAV, 8 kHz, 16 bits).


_ELEMENTS_MAX = 1 << 18
"""Larger tensors are not made: an image of 3 x 224 x 224 is well below."""

_ENGINE_TEXT_MAX = 128
"""Characters of a version or a fingerprint."""


@dataclass(frozen=True, slots=True)
class Api:
    """`body` makes a request from a model (empty: unknown) and a prompt; a reply that answers has `answer`.

    `{model}` in `path` and `about` stands for the model. `about` is a page that is read first and given to
    `body` (as None when it is no JSON), which returns None when no request can be made for such a model.
    `generates`: something must have been generated; `streams`: it has a stream as well. `is_form`: a form
    with a file, whose other fields are the body; `is_file`: the answer is one, and no JSON. `is_costly`: even
    the smallest request is work for seconds.
    """

    path: str
    body: Callable[[str, str, Any], dict[str, Any] | None]
    answer: str
    about: str = ""
    generates: bool = False
    streams: bool = False
    is_form: bool = False
    is_file: bool = False
    is_costly: bool = False


def at(path: str, model: str) -> str:
    return path.replace("{model}", quote(model, safe=""))


def parsed(text: bytes | bytearray | str) -> Any:
    """The JSON in `text`; None when there is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def object_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object in `text`; None when there is none."""
    found = parsed(text)
    return found if isinstance(found, dict) else None


def fingerprint_of(body: bytes) -> str:
    """`system_fingerprint` in an answer of OpenAI's API; empty when there is none, or an absurd one."""
    return short_text((object_of(body) or {}).get("system_fingerprint"))


def short_text(found: Any) -> str:
    """`found`, if it is a text of one short line, else empty."""
    is_short = isinstance(found, str) and len(found) <= _ENGINE_TEXT_MAX and found.isprintable()
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


def any_of(names: Iterable[bytes]) -> bytes:
    """An expression for each of `names` that decides byte by byte: most of what is read fails at once."""
    rests: dict[bytes, list[bytes]] = {}
    for name in names:
        rests.setdefault(name[:1], []).append(name[1:])
    branches = [
        re.escape(head) + any_of(rests[head]) if head else b"" for head in sorted(rests, reverse=True)
    ]
    return branches[0] if len(branches) == 1 else b"(?:%b)" % b"|".join(branches)


_A_TEXT, _A_LIST = rb'"\s*:\s*"(?!")', rb'"\s*:\s*\[\s*[^\s\]]'
# All of it is behind one quote, to which `re` jumps, and then each first letter is there once: an alternative
# at the top, or one that begins with a group, would be tried at each byte, or quote.
GENERATED = re.compile(
    rb'"(?:c(?:ontent%(text)b|ompletion_tokens"(?P<counted>\s*:\s*[1-9]))'
    rb"|t(?:ext%(text)b|ext_output%(text)b|hinking%(text)b|oken_ids%(list)b|op_logprobs%(list)b"
    rb'|ool_calls%(list)b|ool_use%(list)b|ype"\s*:\s*"(?:function_call|tool_use)")'
    rb"|r(?:eas(?:oning|oning_content)%(text)b|efusal%(text)b)"
    rb"|o(?:utput_text%(text)b|utput_ids%(list)b|utput_tokens\"(?P<counted_too>\s*:\s*[1-9]))"
    rb"|arguments%(text)b|partial_json%(text)b|generated_text%(text)b|d(?:elta|ata)%(text)b"
    rb'|f(?:unction_call"\s*:\s*\{|inish_reason"\s*:\s*"content_filter")|stop_reason"\s*:\s*"refusal")'
    % {b"text": _A_TEXT, b"list": _A_LIST}
)
"""What was generated, in any of the APIs: text, reasoning, a tool call, a refusal, or (groups `counted…`) a
count of tokens."""
# An answer of one token may have one that is not shown.
_CUT_SHORT = re.compile(
    rb'"(?:finish_reason|stop_reason)"\s*:\s*"(?:length|max_tokens)"|"status"\s*:\s*"incomplete"'
)

_ENGINE_ENDED = re.compile(
    rb'"(?:completion_tokens|output_tokens)"\s*:\s*0|"(?:finish_reason|stop_reason)"\s*:\s*"(?:stop|end_turn)"'
)


NOTHING_GENERATED = "nothing generated"


def why_no_answer(api: Api, reply: Reply, *, stream: bool) -> str:
    """What is wrong with a 200; empty when it is a good answer."""
    said = reply.headers.get("content-type", "").lower()
    if "html" in said or reply.body.lstrip()[:1] == b"<":
        return "a page of HTML"
    if api.is_file:
        return "no file" if "json" in said or not reply.body else ""
    is_shown = not api.generates or any(found.search(reply.body) for found in (GENERATED, _CUT_SHORT))
    if stream:
        if said and "event-stream" not in said:
            return "no event stream"
        if any(_is_error(line[5:]) for line in reply.body.splitlines() if line.startswith(b"data:")):
            return "an error in the stream"
        return "" if is_shown else NOTHING_GENERATED
    if not has_answer(api, reply.body):
        return "no token"
    # A token may be one that is not shown; but an end without any is an answer of nothing.
    return NOTHING_GENERATED if not is_shown and _ENGINE_ENDED.search(reply.body) else ""


def _is_error(data: bytes) -> bool:
    return bool((object_of(data.strip()) or {}).get("error"))


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


def _response(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, input=prompt, max_output_tokens=1, store=False)


def _speech(model: str, _prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, input="a", voice="alloy")


def _image(model: str, prompt: str, _: Any) -> dict[str, Any]:
    return _named(model, prompt=prompt, n=1, size="256x256")


def _silence(model: str, _prompt: str, _: Any) -> dict[str, Any]:
    return _named(model)


def encoded(api: Api, body: dict[str, Any]) -> tuple[bytes, str]:
    """A body as it is sent, and its content type."""
    if not api.is_form:
        return orjson.dumps(body), "application/json"
    fields = "".join(
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in body.items()
    )
    file = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="silence.wav"\r\n'
        "content-type: audio/wav\r\n\r\n"
    )
    end = f"\r\n--{_BOUNDARY}--\r\n"
    return (fields + file).encode() + _WAV + end.encode(), f"multipart/form-data; boundary={_BOUNDARY}"


_BOUNDARY = "cellgate-canary"
_RATE = 8000
_ENGINE_SAMPLES = bytes(2 * _RATE)
_WAV = (
    struct.pack(
        "<4sI4s4sIHHIIHH",
        b"RIFF",
        36 + len(_ENGINE_SAMPLES),
        b"WAVE",
        b"fmt ",
        16,
        1,
        1,
        _RATE,
        2 * _RATE,
        2,
        16,
    )
    + struct.pack("<4sI", b"data", len(_ENGINE_SAMPLES))
    + _ENGINE_SAMPLES
)


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
    "chat": Api("/v1/chat/completions", _chat, "choices", generates=True, streams=True),
    "completions": Api("/v1/completions", _completion, "choices", generates=True, streams=True),
    "embeddings": Api("/v1/embeddings", _input, "data"),
    "rerank": Api("/v1/rerank", _rerank, "results"),
    "pooling": Api("/pooling", _input, "data"),
    "generate": Api("/v2/models/{model}/generate", _generate, "text_output"),
    "infer": Api("/v2/models/{model}/infer", _infer, "outputs", about="/v2/models/{model}"),
}
"""By the name that `canary:` has in the configuration."""
APIS: dict[str, Api] = {
    **CANARIES,
    "messages": Api("/v1/messages", _chat, "content", generates=True, streams=True),
    "responses": Api("/v1/responses", _response, "output", generates=True, streams=True),
    "audio": Api("/v1/audio/transcriptions", _silence, "text", is_form=True),
    "speech": Api("/v1/audio/speech", _speech, "", is_file=True),
    "images": Api("/v1/images/generations", _image, "data", is_costly=True),
}
"""All that canaries can ask for, by the name that the gate has for the path (proxy/request/routes.py)."""
MEDIA = ("audio", "speech")
"""APIs of engines that serve no text."""
