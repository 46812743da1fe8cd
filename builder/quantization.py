"""Supported quantised checkpoints, by the `quantization_config` of their config.json.

Their projections have FP8 (e4m3) weights with a scale for each output, or one for a whole tensor: float-quantized of
`compressed-tensors`, and `fbgemm_fp8` and `fp8` (without blocks) of transformers. The files show which tensors are in
FP8. Activations always get their own scales, token by token, even if the checkpoint has others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..scheduler.types import SettingError

METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
STRATEGIES = ("channel", "tensor")
FORMAT = "float-quantized"


def check_quantization(settings: Mapping[str, Any]) -> None:
    """Raises SettingError that names an unsupported setting."""
    method = settings.get("quant_method")
    if method not in METHODS:
        raise _refusal(f"quant_method {method!r} is not supported; known are {', '.join(METHODS)}")
    if settings.get("weight_block_size"):
        raise _refusal(f"weight_block_size {settings['weight_block_size']} is not supported, only a scale an output")
    if settings.get("kv_cache_scheme"):
        raise _refusal("a kv_cache_scheme is not supported")
    if method == "compressed-tensors":
        _check_compressed_tensors(settings)


def _check_compressed_tensors(settings: Mapping[str, Any]) -> None:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(f"sparsity_config of the format {sparsity['format']!r} is not supported")
    if settings.get("transform_config"):
        raise _refusal("a transform_config is not supported")
    groups = settings.get("config_groups") or {}
    for name, group in groups.items():
        kind = group.get("format") or settings.get("format")
        weights = group.get("weights") or {}
        if kind != FORMAT:
            raise _refusal(f"format {kind!r} of {name} is not supported, only {FORMAT}")
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or not weights.get("symmetric", True):
            raise _refusal(f"weights of {name} are not symmetric floats of 8 bits")
        if weights.get("strategy") not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise _refusal(f"strategy {weights.get('strategy')!r} of {name} is not supported; known are {known}")


def _refusal(message: str) -> SettingError:
    return SettingError("--checkpoint", f"config.json: quantization_config: {message}")
