"""The parts of a model's config.json that determine its memory. Pure.

The keys are those of Hugging Face's `transformers` (configuration_*.py of each model) as engines read them.
What is missing or makes no sense is named, all at once; nothing that decides is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cellgate.proxy.capacity.quantization import dtype_bits, weight_bits
from cellgate.proxy.config.load_process import ConfigError

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
