"""Bytes of weights and of KV cache on one device, by the shape of the model and how it is split. Pure.

Sources: the matrices are those of the models' code in `transformers`; how they are split, and what is
whole on every device, is that of vLLM (Megatron's tensor parallelism; heads of keys and values as in
vllm/config/model.py; what a token takes in the cache as in vllm/v1/kv_cache_interface.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil

from cellgate.proxy.capacity.shape import Shape

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
