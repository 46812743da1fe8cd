"""Supported quantised checkpoints, by the `quantization_config` of their config.json.

FP8: projections have e4m3 weights with a scale for each output, or one for a whole tensor:
`compressed-tensors` in the formats float-quantized and (without scales of activations)
naive-quantized, and `fbgemm_fp8` and `fp8` of transformers and vLLM, this one also with a scale for
each block of outputs and inputs. The files
show which tensors are in FP8. Activations always get their own scales, token by token, even if the
checkpoint has others or none.

Int4: projections have a scale and a zero point for each group of inputs, as in `int4_formats`:
`awq` (version gemm), `gptq` (without act-order), and `compressed-tensors` in the format
pack-quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plugins.linear.int4_format import GROUPS
from ..scheduler.types import SettingError
from .int4_formats import AWQ, COMPRESSED, GPTQ, Int4

METHODS = ("awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq")
STRATEGIES = ("channel", "tensor")
FORMATS = ("float-quantized", "naive-quantized")  # with and without scales of activations
IN_INT4 = "pack-quantized"
IN_BLOCKS = ("block", "group", "tensor_group")
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}  # with the number that is missing in stored zero points
ACT_ORDER = (
    "the int4 product needs inputs in the order of their groups; take a checkpoint without "
    "act-order (desc_act false)"
)
# act-order that leaves inputs in the order of their groups
NATURAL_ORDERS = (None, False, "weight", "static")


def check_quantization(settings: Mapping[str, Any] | None) -> Int4 | None:
    """Returns how the projections in int4 are stored; None: the checkpoint has none.

    `settings`: the quantization_config, if there is one. Raises SettingError that names an
    unsupported setting.
    """
    if not settings:
        return None
    method = settings.get("quant_method")
    if method == "mxfp4":
        raise _refusal(
            "weights in mxfp4 are not supported; load the checkpoint with transformers, "
            "quantization_config="
            "Mxfp4Config(dequantize=True) and dtype bfloat16, and save it with save_pretrained"
        )
    if method not in METHODS:
        raise _refusal(f"quant_method {method!r} is not supported; known are {', '.join(METHODS)}")
    if settings.get("kv_cache_scheme"):
        raise _refusal("a kv_cache_scheme is not supported")
    if method == "awq":
        return _check_awq(settings)
    if method == "gptq":
        return _check_gptq(settings)
    return _check_compressed_tensors(settings) if method == "compressed-tensors" else None


def fp8_block(settings: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """The outputs and inputs of a block of weights in FP8 that has a scale; None: there are no such
    blocks. SettingError for a block that is no pair of sizes."""
    block = (settings or {}).get("weight_block_size")
    if not block:
        return None
    if not (
        isinstance(block, list) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)
    ):
        raise _refusal(f"weight_block_size must be two sizes, not {block!r}")
    return block[0], block[1]


def _check_awq(settings: Mapping[str, Any]) -> Int4:
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise _refusal(
            f"version {version!r} of awq is not supported: its words have another order; known is "
            "gemm"
        )
    return Int4(AWQ, _group_size(settings, "bits"))


def _check_gptq(settings: Mapping[str, Any]) -> Int4:
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if kind not in GPTQ_FORMATS:
        raise _refusal(
            f"checkpoint_format {kind!r} is not supported; known are {', '.join(GPTQ_FORMATS)}"
        )
    if settings.get("desc_act"):
        raise _refusal(f"desc_act true is not supported: {ACT_ORDER}")
    if settings.get("dynamic"):
        raise _refusal("dynamic, which is settings for single modules, is not supported")
    return Int4(GPTQ, _group_size(settings, "bits"), zero_offset=GPTQ_FORMATS[kind])


def _group_size(settings: Mapping[str, Any], bits: str) -> int:
    if settings.get(bits) != 4:
        raise _refusal(
            f"{bits} {settings.get(bits)} is not supported: of integers, only those of 4 bits are"
        )
    size = settings.get("group_size")
    if size not in GROUPS:
        sizes = ", ".join(map(str, GROUPS))
        raise _refusal(
            f"group_size {size} is not supported: the int4 product takes groups of {sizes} inputs"
        )
    return int(size)


def _check_compressed_tensors(settings: Mapping[str, Any]) -> Int4 | None:
    sparsity = settings.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(f"sparsity_config of the format {sparsity['format']!r} is not supported")
    if settings.get("transform_config"):
        raise _refusal("a transform_config is not supported")
    groups = settings.get("config_groups") or {}
    in_int4 = set()
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise _refusal(f"group {name} is a preset; write its weights and input_activations")
        kind = group.get("format") or settings.get("format")
        weights = group.get("weights") or {}
        if kind == IN_INT4:
            in_int4.add(_check_packed(name, group, weights))
        elif kind not in FORMATS:
            raise _refusal(
                f"format {kind!r} of {name} is not supported; known are "
                f"{', '.join((*FORMATS, IN_INT4))}"
            )
        else:
            _check_floats(name, weights)
    if len(in_int4) > 1:
        raise _refusal(
            f"groups in {IN_INT4} differ in group_size or symmetric, and that is not supported"
        )
    return in_int4.pop() if in_int4 else None


def _check_floats(name: str, weights: Mapping[str, Any]) -> None:
    if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or not weights.get(
        "symmetric", True
    ):
        raise _refusal(f"weights of {name} are not symmetric floats of 8 bits")
    strategy = weights.get("strategy")
    if strategy in IN_BLOCKS:
        raise _blocks(f"strategy {strategy!r} of {name}")
    if strategy not in STRATEGIES:
        raise _refusal(
            f"strategy {strategy!r} of {name} is not supported; known are {', '.join(STRATEGIES)}"
        )


def _check_packed(name: str, group: Mapping[str, Any], weights: Mapping[str, Any]) -> Int4:
    if weights.get("type", "int") != "int":
        raise _refusal(
            f"weights of {name} are in {IN_INT4} and of type {weights['type']!r}; only int is "
            "supported"
        )
    if group.get("input_activations"):
        raise _refusal(
            f"input_activations of {name}, in {IN_INT4}, are not supported: no product has int4 "
            "and those"
        )
    if weights.get("strategy") != "group":
        raise _refusal(
            f"strategy {weights.get('strategy')!r} of {name}, in {IN_INT4}, is not supported; "
            "known is group"
        )
    if weights.get("actorder") not in NATURAL_ORDERS:
        raise _refusal(f"actorder {weights['actorder']!r} of {name} is not supported: {ACT_ORDER}")
    return Int4(
        COMPRESSED, _group_size(weights, "num_bits"), zero_points=not weights.get("symmetric", True)
    )


def _blocks(setting: str) -> SettingError:
    return _refusal(
        f"{setting} is not supported; take a checkpoint with a scale for each tensor or channel, "
        "one with the quant_method fp8 and a weight_block_size, or the unquantised one"
    )


def _refusal(message: str) -> SettingError:
    return SettingError("--checkpoint", f"config.json: quantization_config: {message}")
