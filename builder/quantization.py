"""Supported quantised checkpoints, by the `quantization_config` of their config.json.

Their projections have FP8 (e4m3) weights with a scale for each output, or one for a whole tensor: `compressed-tensors`
in the formats float-quantized and (without scales of activations) naive-quantized, and `fbgemm_fp8` and `fp8` (without
blocks) of transformers and vLLM. The files show which tensors are in FP8. Activations always get their own scales,
token by token, even if the checkpoint has others or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..scheduler.types import SettingError

METHODS = ("compressed-tensors", "fbgemm_fp8", "fp8")
STRATEGIES = ("channel", "tensor")
FORMATS = ("float-quantized", "naive-quantized")  # with and without scales of activations
IN_BLOCKS = ("block", "group", "tensor_group")


def check_quantization(settings: Mapping[str, Any]) -> None:
    """Raises SettingError that names an unsupported setting."""
    method = settings.get("quant_method")
    if method not in METHODS:
        raise _refusal(f"quant_method {method!r} is not supported; known are {', '.join(METHODS)}")
    if settings.get("weight_block_size"):
        raise _blocks(f"weight_block_size {settings['weight_block_size']}")
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
        if not isinstance(group, Mapping):
            raise _refusal(f"group {name} is a preset; write its weights and input_activations")
        kind = group.get("format") or settings.get("format")
        weights = group.get("weights") or {}
        if kind not in FORMATS:
            raise _refusal(f"format {kind!r} of {name} is not supported; known are {', '.join(FORMATS)}")
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or not weights.get("symmetric", True):
            raise _refusal(f"weights of {name} are not symmetric floats of 8 bits")
        strategy = weights.get("strategy")
        if strategy in IN_BLOCKS:
            raise _blocks(f"strategy {strategy!r} of {name}")
        if strategy not in STRATEGIES:
            raise _refusal(f"strategy {strategy!r} of {name} is not supported; known are {', '.join(STRATEGIES)}")


def _blocks(setting: str) -> SettingError:
    return _refusal(
        f"{setting} is not supported: its scales are for blocks, and a product here has a scale for each output; take "
        "a checkpoint with a scale for each tensor or channel, or round the unquantised one: pensieve serve "
        "--quantization fp8, build_engine --weights fp8"
    )


def _refusal(message: str) -> SettingError:
    return SettingError("--checkpoint", f"config.json: quantization_config: {message}")
