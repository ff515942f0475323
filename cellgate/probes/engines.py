"""The health endpoints and metrics of each inference engine.

Sources: vLLM 0.6 to 0.33, SGLang 0.4 to 0.5.23, Triton 2.x with its vLLM and TensorRT-LLM backends,
TensorRT-LLM's own server, llama.cpp's server (build 11549); `openai` stands for any other that speaks
OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from cellgate.router.hold_nouns import HoldKind


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


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine's surfaces.

    `ready` are paths in the order in which they are tried: the first that exists counts. Its 200 is good and
    its 5xx is bad; `unready` are the statuses below 500 that say "not ready" as well.
    `metrics` is a path at the port of the API, unless `metrics_port` names another one.
    `canaries` are APIs (see probes/apis.py) in the order in which they are tried.
    `version` is the page that shows its version, and the name of the version there.
    `closes_after_stream`: it ends a connection with a streamed reply, though its head says keep-alive.
    `holds` ask whether it stands still on purpose; `controls` are its operations: pause, resume, sleep, wake,
    and `retry`, which asks its own fault tolerance to recover it.
    """

    ready: tuple[str, ...]
    canaries: tuple[str, ...]
    unready: frozenset[int] = frozenset()
    metrics: str = "/metrics"
    metrics_port: int | None = None
    version: tuple[str, str] | None = None
    closes_after_stream: bool = False
    holds: tuple[HoldQuestion, ...] = ()
    controls: Mapping[str, EngineControl] = field(default_factory=dict)


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
        controls={
            "pause": EngineControl("/pause?mode={mode}", modes=_MODES),
            "resume": EngineControl("/resume"),
            "sleep": EngineControl("/sleep?level=1&mode={mode}", modes=_MODES),
            "wake": EngineControl("/wake_up"),
            "retry": EngineControl("/fault_tolerance/apply", '{"instruction":"retry"}'),
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
