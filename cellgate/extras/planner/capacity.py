"""Plans memory: how much fits beside the weights: tokens, sequences, and what to write into the gate's file.
Pure.

In this order: `MemoryPlan`, `dtype_bits`, `Shape`, `parameters`, `LiveCache`, `snapshot`.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cellgate.proxy.config.load_process import ConfigError

GIB = 1 << 30
TOKENS_OF_WEIGHT_1 = 1_000_000


def plan_memory(shape: Shape, devices: Devices, workload: Workload, scale: float = 1.0) -> MemoryPlan:
    """What fits on the fullest stage. `scale` is by how much the real weights are larger than reckoned."""
    usable = devices.memory_bytes * devices.utilization - devices.reserve_bytes
    made = []
    for layers in stages(shape.layers, devices.pipeline):
        weights = weight_bytes(shape, layers, devices.tensor) * scale
        sequence = kv_bytes_per_sequence(
            shape, layers, workload.context, devices.tensor, workload.kv_bits, workload.block
        )
        made.append(MemoryPlan(weights, usable - weights, sequence, workload))
    return min(made, key=lambda each: each.kv_bytes / each.sequence_bytes)


@dataclass(frozen=True, slots=True)
class Devices:
    """A unit's devices: `tensor` x `pipeline` of them, each with `memory_bytes`, of which the engine takes
    the share `utilization` (0 to 1); `reserve_bytes` of that are for activations, graphs and communication.
    """

    memory_bytes: float
    tensor: int = 1
    pipeline: int = 1
    utilization: float = 0.9
    reserve_bytes: float = 2 * GIB


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences are `context` tokens long, prompt and answer; the engine computes `max_seqs` at once."""

    context: int = 4096
    max_seqs: int = 256
    kv_bits: int = 16
    block: int = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of the stage that has the least room: weights and room for KV cache on each of its devices, and what a
    sequence takes there.
    """

    weight_bytes: float
    kv_bytes: float
    sequence_bytes: float
    workload: Workload

    @property
    def fits(self) -> bool:
        """Whether at least one sequence does."""
        return self.kv_bytes >= self.sequence_bytes

    @property
    def sequences(self) -> int:
        """Sequences of the workload that fit at the same time."""
        return max(int(self.kv_bytes / self.sequence_bytes), 0)

    @property
    def tokens(self) -> int:
        """Tokens that fit, in sequences of the workload."""
        return max(int(self.kv_bytes / self.sequence_bytes * self.workload.context), 0)

    @property
    def max_in_flight(self) -> int:
        """No more than are computed at a time: what waits is better kept at the gate, which can still send it
        elsewhere.
        """
        return max(1, min(self.sequences, self.workload.max_seqs))

    @property
    def weight(self) -> float:
        """1 for each million tokens, so that unlike units planned one by one compare."""
        return float(f"{max(self.tokens, 1) / TOKENS_OF_WEIGHT_1:.2g}")


# How many bits a weight takes, by what config.json says of its type and quantization. Pure.
#
# Beside its bits a group of weights has a scale, and often a zero point: they are spread over its weights
# here.


_DTYPES = {
    # Engines read float32 as 16 bits unless told otherwise (vLLM's --dtype auto).
    "float32": 16,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "fp8": 8,
    "auto": 16,
}
_SCALE_BITS = 16
_PLANNER_GROUP = 128
# mxfp4: 4 bits and a scale of 8 bits for 32 weights (OCP Microscaling Formats 1.0). NVFP4: one for 16.
_MXFP4 = 4 + 8 / 32
_NVFP4 = 4 + 8 / 16


def dtype_bits(dtype: object) -> int:
    """Bits of a number of this type; None, where nothing is said, is 16. Raises ValueError."""
    name = str(dtype).removeprefix("torch.") if dtype is not None else "auto"
    if name not in _DTYPES:
        raise ValueError(f"dtype: {name} is not known here; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def weight_bits(quantization: Mapping[str, Any]) -> float:
    """Bits of a quantized weight, by `quantization_config`. Raises ValueError."""
    method = str(quantization.get("quant_method", ""))
    if method in ("gptq", "awq", "auto-round"):
        return _grouped(
            quantization.get("bits"), quantization.get("group_size", _PLANNER_GROUP), "bits", has_zero=True
        )
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0
    if method == "mxfp4":
        return _MXFP4
    if method == "modelopt":
        return _NVFP4 if "FP4" in str(quantization.get("quant_algo", "")) else 8.0
    if method == "bitsandbytes":
        # One scale of 32 bits for 64 weights.
        return 4 + 32 / 64 if quantization.get("load_in_4bit") else 8.0
    if method == "compressed-tensors":
        groups = quantization.get("config_groups") or {}
        weights = next((group.get("weights") or {} for group in groups.values()), {})
        name = "config_groups.*.weights.num_bits"
        return _grouped(
            weights.get("num_bits"),
            weights.get("group_size"),
            name,
            has_zero=not weights.get("symmetric", True),
        )
    raise ValueError(
        f"quantization_config.quant_method: {method or 'nothing'} is not known here; give the bits of a "
        "weight with --weight-bits"
    )


def _grouped(bits: object, group: object, name: str, *, has_zero: bool) -> float:
    if not isinstance(bits, int):
        raise ValueError(f"quantization_config.{name} is missing (how many bits a weight takes)")
    if not isinstance(group, int) or group <= 0:
        # One scale for a whole row or matrix: nothing to speak of.
        return float(bits)
    return bits + (_SCALE_BITS + bits * has_zero) / group


# The parts of a model's config.json that determine its memory. Pure.
#
# The keys are those of Hugging Face's `transformers` (configuration_*.py of each model) as engines read them.
# What is missing or makes no sense is named, all at once; nothing that decides is guessed.


T = TypeVar("T")

_WITHOUT_GATE = frozenset({"gpt_neox", "nemotron", "opt", "phi", "starcoder2"})
"""Their MLPs have two matrices where others have three."""
_FULL_EACH = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
"""Every so-many-th layer sees everything, the others a window, where the file has no `layer_types`."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): `kv_rank + rope_dim` numbers are cached for a
    token and layer, for all heads together. `q_rank` 0: queries are not compressed.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_rank: int


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` MLPs of `size`, and one of `shared_size` for every token; in the layers listed."""

    count: int
    size: int
    shared_size: int
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers. `windows` has for each layer how many tokens back it looks (None: all).

    `weight_bits` are those of quantized matrices, `dtype_bits` those of all else and of the KV cache,
    `file_bits` those of the files, where they are not quantized.
    """

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    mlp_matrices: int
    vocabulary: int
    is_tied: bool
    windows: tuple[int | None, ...]
    dtype_bits: int
    file_bits: int
    weight_bits: float
    quantizes_experts_only: bool
    latent: Latent | None
    experts: Experts | None

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.windows)


def read_shape(config: Mapping[str, Any], name: str = "config.json", bits: float | None = None) -> Shape:
    """The shape of the model that a config.json tells of; a weight takes `bits` (None: as the file says).

    Raises ConfigError, a line for each problem.
    """
    # Models that see or hear as well have their language model in a part of its own; the rest stands outside.
    inner = config.get("text_config")
    keys = _Keys({**config, **inner} if isinstance(inner, Mapping) else config, name)
    kind = str(keys.get("model_type", ""))
    layers = keys.number("num_hidden_layers", "how many layers")
    experts = _experts(keys, kind, layers)
    quantization = keys.mapping("quantization_config")
    dtype = keys.get("dtype", keys.get("torch_dtype"))
    own_bits = keys.checked(dtype_bits, dtype, 16)
    if bits is None:
        bits = keys.checked(weight_bits, quantization, 16.0) if quantization else float(own_bits)
    heads = keys.number("num_attention_heads", "how many heads of attention")
    hidden = keys.number("hidden_size", "how wide a layer is")
    shape = Shape(
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.number("num_key_value_heads", "", heads),
        head_dim=keys.number("head_dim", "", max(hidden // heads, 1)),
        mlp_size=_mlp_size(keys, experts, layers),
        mlp_matrices=2 if kind in _WITHOUT_GATE else 3,
        vocabulary=keys.number("vocab_size", "how many tokens there are"),
        is_tied=bool(keys.get("tie_word_embeddings", kind.startswith("gemma"))),
        windows=_windows(keys, kind, layers),
        dtype_bits=own_bits,
        file_bits=32 if "float32" in str(dtype) else own_bits,
        weight_bits=bits,
        quantizes_experts_only=quantization.get("quant_method") == "mxfp4",
        latent=_latent(keys) if keys.get("kv_lora_rank") else None,
        experts=experts,
    )
    if keys.problems:
        raise ConfigError(keys.problems)
    return shape


class _Keys:
    """Reads keys, and takes note of those that are missing or wrong."""

    def __init__(self, found: Mapping[str, Any], name: str) -> None:
        self._found = found
        self.name = name
        self.problems: list[str] = []

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value, as it is; null is as good as not there."""
        value = self._found.get(key)
        return otherwise if value is None else value

    def number(self, key: str, what: str, otherwise: int | None = None) -> int:
        """A whole number above 0; `what` it says, for who has to add it. 1 where there is a problem."""
        value = self.get(key, otherwise)
        if value is None:
            self.problems.append(f"{self.name}: {key} is missing ({what})")
        elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.problems.append(f"{self.name}: {key}: expected a whole number above 0, found {value!r}")
        else:
            return value
        return 1

    def count(self, key: str, otherwise: int = 0) -> int:
        """A whole number that may be missing, or 0."""
        return self.number(key, "") if self.get(key, 0) else otherwise

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty where there is none."""
        value = self.get(key, {})
        if isinstance(value, Mapping):
            return value
        self.problems.append(f"{self.name}: {key}: expected an object, found {value!r}")
        return {}

    def checked(self, read: Callable[[Any], T], value: Any, otherwise: T) -> T:
        """What `read` makes of a value; its ValueError is a problem."""
        try:
            return read(value)
        except ValueError as error:
            self.problems.append(f"{self.name}: {error}")
            return otherwise


def _mlp_size(keys: _Keys, experts: Experts | None, layers: int) -> int:
    """How wide the MLP is of layers that have no experts; Llama 4 has a key of its own for that."""
    if experts is not None and len(experts.layers) == layers:
        return experts.size
    own = "intermediate_size_mlp"
    return keys.number(own if keys.get(own) else "intermediate_size", "how wide the MLP of a layer is")


def _latent(keys: _Keys) -> Latent:
    return Latent(
        keys.number("kv_lora_rank", "how many numbers are cached for a token"),
        keys.number("qk_rope_head_dim", "the part of a key that carries its position"),
        keys.number("qk_nope_head_dim", "the part of a key that does not"),
        keys.number("v_head_dim", "the width of a head's value"),
        keys.count("q_lora_rank"),
    )


def _experts(keys: _Keys, kind: str, layers: int) -> Experts | None:
    """Mixtral, Qwen, DeepSeek and Llama 4 each have names of their own for the same."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    named = next((name for name in names if keys.get(name)), None)
    if named is None:
        return None
    key = "moe_intermediate_size" if keys.get("moe_intermediate_size") else "intermediate_size"
    size = keys.number(key, "how wide an expert is")
    n_shared = 1 if kind.startswith("llama4") else keys.count("n_shared_experts")
    dense = keys.count("first_k_dense_replace")
    left_out = {*range(dense), *keys.get("mlp_only_layers", ())}
    step = keys.count("decoder_sparse_step", 1) * keys.count("interleave_moe_layer_step", 1)
    every = keys.count("moe_layer_freq", 1)
    sparse = (at for at in range(layers) if at % every == 0 and (at + 1) % step == 0 and at not in left_out)
    return Experts(
        keys.number(named, ""),
        size,
        keys.count("shared_expert_intermediate_size") or size * n_shared,
        frozenset(sparse),
    )


def _windows(keys: _Keys, kind: str, layers: int) -> tuple[int | None, ...]:
    """How far back each layer looks."""
    window = keys.get("sliding_window")
    if window is None or keys.get("use_sliding_window", True) is False:
        window = None
    types = keys.get("layer_types")
    if types is None and window is not None:
        every = keys.get("sliding_window_pattern", _FULL_EACH.get(kind))
        begin = keys.get("max_window_layers", 0) if kind.startswith("qwen") else 0
        return tuple(
            None if at < begin or (every and (at + 1) % every == 0) else window for at in range(layers)
        )
    known = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": keys.get("attention_chunk_size"),
    }
    strange = sorted({str(each) for each in types or ()} - known.keys())
    if types and len(types) != layers:
        keys.problems.append(f"{keys.name}: layer_types has {len(types)} entries for {layers} layers")
    if strange:
        keys.problems.append(
            f"{keys.name}: layer_types: {', '.join(strange)}: what such layers take is not known here; "
            f"known are {', '.join(known)}"
        )
    return tuple(known.get(each) for each in types) if types else (None,) * layers


# Bytes of weights and of KV cache on one device, by the shape of the model and how it is split. Pure.
#
# Sources: the matrices are those of the models' code in `transformers`; how they are split, and what is
# whole on every device, is that of vLLM (Megatron's tensor parallelism; heads of keys and values as in
# vllm/config/model.py; what a token takes in the cache as in vllm/v1/kv_cache_interface.py).


BITS = 8


def parameters(shape: Shape) -> int:
    """How many the model has; biases and norms, some hundredths of a percent, are left out."""
    layers = sum(sum(_attention(shape, 1)) + sum(_mlp(shape, at, 1)) for at in range(shape.layers))
    return round(layers + _embeddings(shape))


def stages(layers: int, pipeline: int) -> list[range]:
    """The layers of each stage of a pipeline, as evenly as can be."""
    ends = [layers * number // pipeline for number in range(pipeline + 1)]
    return [range(*pair) for pair in pairwise(ends)]


def weight_bytes(shape: Shape, layers: Sequence[int], tensor: int) -> float:
    """Weights on each device of the stage that has these layers, split among `tensor` devices.

    The first stage has the embeddings, the last one the head; both are kept as they are by all quantizations.
    """
    bits = sum(_layer_bits(shape, at, tensor) for at in layers)
    tables = (layers[0] == 0) + (layers[-1] == shape.layers - 1 and not (shape.is_tied and layers[0] == 0))
    table = shape.vocabulary * shape.hidden * shape.dtype_bits / tensor
    return (bits + tables * table) / BITS


def kv_bytes_per_token(shape: Shape, tensor: int, kv_bits: int) -> float:
    """What one token takes in the cache of one layer, on each device.

    Grouped-query attention (Ainslie et al., 2023): a key and a value for each of its heads, split by heads;
    with more devices than heads each still keeps one. Latent attention: one vector, whole on every device.
    """
    if shape.latent is not None:
        return (shape.latent.kv_rank + shape.latent.rope_dim) * kv_bits / BITS
    return 2 * _kv_heads(shape, tensor) * shape.head_dim * kv_bits / BITS


def kv_bytes_per_sequence(
    shape: Shape, layers: Sequence[int], tokens: int, tensor: int, kv_bits: int, block: int
) -> float:
    """What a sequence of so many tokens takes in the layers of a stage, in whole blocks.

    A layer with a window keeps the window alone, and one block more, for a window seldom begins with a block.
    """
    blocks = sum(_blocks(shape.windows[at], tokens, block) for at in layers)
    return blocks * block * kv_bytes_per_token(shape, tensor, kv_bits)


def _blocks(window: int | None, tokens: int, block: int) -> int:
    if window is None or window >= tokens:
        return ceil(tokens / block)
    return min(ceil(window / block) + 1, ceil(tokens / block))


def _layer_bits(shape: Shape, at: int, tensor: int) -> float:
    """Bits of one layer's weights on each device."""
    is_sparse = shape.experts is not None and at in shape.experts.layers
    quantized = shape.weight_bits
    attention_bits = shape.dtype_bits if shape.quantizes_experts_only else quantized
    mlp_bits = shape.dtype_bits if shape.quantizes_experts_only and not is_sparse else quantized
    split, whole = _attention(shape, tensor)
    mlp, router = _mlp(shape, at, tensor)
    return (split + whole) * attention_bits + mlp * mlp_bits + router * shape.dtype_bits


def _attention(shape: Shape, tensor: int) -> tuple[float, float]:
    """Weights of one layer's attention on each device: those that are split, and those that every one has."""
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        queries_and_output = 2 * hidden * heads * shape.head_dim / tensor
        return queries_and_output, 2 * hidden * _kv_heads(shape, tensor) * shape.head_dim
    key = latent.nope_dim + latent.rope_dim
    queries = (latent.q_rank or hidden) * heads * key
    values = latent.kv_rank * heads * (latent.nope_dim + latent.value_dim)
    output = heads * latent.value_dim * hidden
    whole = hidden * (latent.q_rank + latent.kv_rank + latent.rope_dim)
    return (queries + values + output) / tensor, whole


def _mlp(shape: Shape, at: int, tensor: int) -> tuple[float, float]:
    """Weights of one layer's MLP or experts on each device, and of the router among them."""
    matrix = shape.mlp_matrices * shape.hidden / tensor
    experts = shape.experts
    if experts is None or at not in experts.layers:
        return matrix * shape.mlp_size, 0.0
    return matrix * (experts.count * experts.size + experts.shared_size), shape.hidden * experts.count


def _embeddings(shape: Shape) -> float:
    return shape.vocabulary * shape.hidden * (1 if shape.is_tied else 2)


def _kv_heads(shape: Shape, tensor: int) -> int:
    return max(1, shape.kv_heads // tensor)


def windows(shape: Shape) -> Iterator[tuple[int, int]]:
    """Each window that layers have, and how many have it."""
    for window in sorted({window for window in shape.windows if window is not None}):
        yield window, shape.windows.count(window)


# How large the KV cache of a running unit is, as its engine says on /metrics.


TIMEOUT_S = 5.0
_MAX_BYTES = 8 << 20
_INFO, _LABELS = "vllm:cache_config_info", ("block_size", "num_gpu_blocks")
"""Of vLLM: the metric whose labels tell the tokens of a block, and how many blocks there are."""
_GAUGES = ("sglang:page_size", "sglang:num_pages")
"""Of SGLang (0.5.23): the gauges that tell the same, for each data parallel rank."""


class LiveError(Exception):
    """The unit did not report it. `str()` is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class LiveCache:
    """`engines` is how many told of theirs: a unit that is data parallel has several."""

    block: int
    blocks: int
    engines: int

    @property
    def tokens(self) -> int:
        """All together."""
        return self.block * self.blocks


def ask_cache(url: str) -> LiveCache:
    """Ask a unit's engine. Raises LiveError."""
    metrics = f"{url.rstrip('/')}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics, timeout=TIMEOUT_S) as response:
            page = response.read(_MAX_BYTES).decode(errors="replace")
        return read_cache(text_string_to_metric_families(page), metrics)
    except urllib.error.HTTPError as error:
        error.close()
        raise LiveError(f"{metrics} answers {error.code}: give the URL of the unit's own API") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise LiveError(f"nothing answers at {metrics} ({reason}): does the unit run?") from None
    except ValueError as error:
        raise LiveError(f"{metrics} is not a page of Prometheus metrics ({error})") from None


def read_cache(families: Iterable[Metric], where: str) -> LiveCache:
    """Parse a page of metrics. Raises LiveError."""
    samples = defaultdict[str, list[Sample]](list)
    for family in families:
        samples[family.name] += family.samples
    found = [
        (int(sample.labels[_LABELS[0]]), int(sample.labels[_LABELS[1]]))
        for sample in samples[_INFO]
        if all(sample.labels.get(label, "").isdigit() for label in _LABELS)
    ] or _ranks(*(samples[gauge] for gauge in _GAUGES))
    if not found:
        names = ", ".join((_INFO, *_GAUGES))
        raise LiveError(f"{where} has none of {names} with the size of the KV cache")
    return LiveCache(found[0][0], sum(blocks for _, blocks in found), len(found))


def _ranks(sizes: Iterable[Sample], counts: Iterable[Sample]) -> list[tuple[int, int]]:
    """The tokens of a block, and the blocks, of each data parallel rank. Its other ranks share their work."""
    by_rank = (
        {sample.labels.get("dp_rank"): int(sample.value) for sample in each} for each in (sizes, counts)
    )
    size, count = by_rank
    return [(size[rank], count[rank]) for rank in size if rank in count]


# Where the hub's client keeps the files of a model that it has downloaded. Nothing is asked of the network.
#
# Layout: `HUB/models--ORG--NAME/snapshots/COMMIT/`, and the commit of a branch in `refs/BRANCH`
# (huggingface_hub, "Understand caching").


MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def snapshot(model: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the model's branch `main`, or of the commit fetched last; None: not in the cache."""
    if not MODEL_ID.fullmatch(model):
        return None
    folder = hub(environ) / f"models--{model.replace('/', '--')}"
    branch = folder / "refs" / "main"
    if branch.is_file() and (found := folder / "snapshots" / branch.read_text().strip()).is_dir():
        return found
    commits = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    return max(commits, key=lambda path: path.stat().st_mtime, default=None)


def hub(environ: Mapping[str, str] = os.environ) -> Path:
    """The cache, as `HF_HUB_CACHE`, `HF_HOME` and `XDG_CACHE_HOME` say, in this order."""
    if given := environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or f"{caches}/huggingface").expanduser() / "hub"
