"""How many bits a weight takes, by what config.json says of its type and quantization. Pure.

Beside its bits a group of weights has a scale, and often a zero point: they are spread over its weights here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
_GROUP = 128
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
            quantization.get("bits"), quantization.get("group_size", _GROUP), "bits", has_zero=True
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
