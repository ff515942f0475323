"""A tiny language model with random weights, as a GGUF file that llama.cpp loads: 2.7 MB, made in 0.3 s.

Its tokens are the printable ASCII characters and the line feed, so that what it says is read back as the same
tokens. Its template is ChatML, where an open last message is a prefix of the closed one. It never ends an
answer by itself, and what it says is nonsense that does not soon repeat itself.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

_CONTEXT_TOKENS = 16384
_WIDTH, _BLOCKS, _HEADS, _INNER = 128, 4, 4, 256
_ALIGNMENT = 32

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHARACTERS = ("\n", *map(chr, range(ord(" "), ord("~") + 1)))
# GPT-2's vocabularies spell a byte that is no visible character as another one.
_SPELLED = {"\n": "\u010a", " ": "\u0120"}
_TOKENS = (*_SPECIAL, *(_SPELLED.get(character, character) for character in _CHARACTERS))
_NORMAL, _CONTROL = 1, 3
_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_FACTS: dict[str, int | float | str | Sequence[int] | Sequence[str]] = {
    "general.architecture": "llama",
    "general.alignment": _ALIGNMENT,
    "llama.context_length": _CONTEXT_TOKENS,
    "llama.embedding_length": _WIDTH,
    "llama.block_count": _BLOCKS,
    "llama.feed_forward_length": _INNER,
    "llama.attention.head_count": _HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": _WIDTH // _HEADS,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.token_type": [_CONTROL] * len(_SPECIAL) + [_NORMAL] * len(_CHARACTERS),
    "tokenizer.ggml.merges": ["- -"],  # One that cannot apply: there may not be none.
    "tokenizer.ggml.bos_token_id": _SPECIAL.index("<|endoftext|>"),
    "tokenizer.ggml.eos_token_id": _SPECIAL.index("<|im_end|>"),
    "tokenizer.chat_template": _TEMPLATE,
}

_U32, _I32, _F32, _STRING, _ARRAY = 4, 5, 6, 8, 9
"""Types of values; 0 is the type of a tensor of 32-bit floats."""


def write_model(file: Path, seed: int = 1) -> None:
    """Write the model; with one seed it is the same each time, in the same bytes but for the weights."""
    tensors = _tensors(random.Random(seed))
    sizes = [-(-4 * prod(shape) // _ALIGNMENT) * _ALIGNMENT for _, shape, _ in tensors]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(_FACTS))
    head += b"".join(_string(key) + _value(value) for key, value in _FACTS.items())
    for (name, shape, _), offset in zip(tensors, accumulate(sizes, initial=0), strict=False):
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + dimensions + struct.pack("<IQ", 0, offset)
    with file.open("wb") as out:
        out.write(_padded(head))
        for _, _, weights in tensors:
            out.write(_padded(weights.tobytes()))


def _tensors(chance: random.Random) -> list[tuple[str, tuple[int, ...], array[float]]]:
    """Name, shape and weights of each. Tokens that are no text have zeros: others are always likelier."""

    def noise(name: str, spread: float, *shape: int) -> tuple[str, tuple[int, ...], array[float]]:
        return name, shape, array("f", (chance.gauss(0.0, spread) for _ in range(prod(shape))))

    def ones(name: str) -> tuple[str, tuple[int, ...], array[float]]:
        return name, (_WIDTH,), array("f", [1.0] * _WIDTH)

    vocabulary = len(_TOKENS), _WIDTH
    output = noise("output.weight", 0.3, *vocabulary)
    silent = len(_SPECIAL) * _WIDTH
    output[2][:silent] = array("f", [0.0] * silent)
    tensors = [noise("token_embd.weight", 1.0, *vocabulary), ones("output_norm.weight"), output]
    for block in range(_BLOCKS):
        tensors += [ones(f"blk.{block}.{name}_norm.weight") for name in ("attn", "ffn")]
        tensors += [
            noise(f"blk.{block}.{name}.weight", 0.15, rows, columns)
            for names, rows, columns in (
                (("attn_q", "attn_k", "attn_v", "attn_output"), _WIDTH, _WIDTH),
                (("ffn_gate", "ffn_up"), _INNER, _WIDTH),
                (("ffn_down",), _WIDTH, _INNER),
            )
            for name in names
        ]
    return tensors


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _strings(texts: Iterable[str]) -> bytes:
    return b"".join(map(_string, texts))


def _value(value: int | float | str | Sequence[int] | Sequence[str]) -> bytes:
    """A value with its type before it."""
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    texts = [each for each in value if isinstance(each, str)]
    if texts:
        return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + _strings(texts)
    return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _I32, len(value), *value)
