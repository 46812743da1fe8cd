"""Translates the metadata of a GGUF file into a Hugging Face config.json.

Metadata that changes the model and is not read here is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .architectures import GEMMA3, GPT_OSS, GPT_OSS_SCALING, SLIDING, refusal
from .config import FULL, Rotary
from .gguf_file import GgufFile

MIXTRAL = "MixtralForCausalLM"
ARCHITECTURES = {  # llama.cpp's name: Hugging Face's
    "llama": "LlamaForCausalLM",  # Mistral's too, and with experts Mixtral's
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
}
NEEDED = {  # the file's key behind the architecture's name: that of config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
SCALING_TYPE = "rope.scaling.type"
PATTERN = "attention.sliding_window_pattern"
HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
WITH_ONE_VALUE = {
    "attention.causal": True,
    "pooling_type": 0,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
}
"""Metadata that is supported with one value only."""

OF_WINDOWS = (GEMMA3, GPT_OSS)
"""The architectures with `attention.sliding_window` in llama.cpp."""

EMBEDDINGS = "token_embd.weight"
FREQUENCY_FACTORS = "rope_freqs.weight"
"""The tensor [head size / 2] that divides the frequencies of Llama 3's rotary embedding."""

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192
"""The frequency factors' settings in all published models: `low_freq_factor`, `high_freq_factor`
and `original_max_position_embeddings`. Only `factor` differs."""

GEMMA3_PERIOD = 6  # layers from one without a window to the next
GEMMA3_27B_LAYERS = 62
"""Gemma 3's model of 27 billion parameters divides attention scores by another size. llama.cpp
recognises it by its layers."""


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Raises SettingError that names what is not supported."""
    name = file.fields.get("general.architecture")
    if name not in ARCHITECTURES:
        raise refusal(
            f"{file.path}: architecture {name!r} is not supported in GGUF files; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    fields = {
        key.removeprefix(f"{name}."): value
        for key, value in file.fields.items()
        if key.startswith(f"{name}.")
    }
    architecture = ARCHITECTURES[name]
    if name == "llama" and fields.get("expert_count"):
        architecture = MIXTRAL
    missing = [f"{name}.{key}" for key in NEEDED if key not in fields]
    missing += [EMBEDDINGS] if EMBEDDINGS not in file.tensors else []
    if missing:
        raise refusal(f"{file.path} lacks {', '.join(missing)}")
    for key in _unsupported(fields, architecture):
        raise refusal(f"{file.path}: {name}.{key} {fields[key]!r} is not supported")
    config = {
        ours: _of_all_layers(file, f"{name}.{key}", fields[key])
        for key, ours in (NEEDED | OPTIONAL).items()
        if key in fields
    }
    config |= {
        "architectures": [architecture],
        "vocab_size": file.tensors[EMBEDDINGS].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": _dtype(file, architecture),
    }
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    _check_head_size(file, fields, config["head_dim"])
    if scaling := _scaling(file, fields, config):
        config["rope_scaling"] = scaling
    if architecture == GEMMA3:
        config |= _gemma3(fields, config)
    if architecture == GPT_OSS:
        config["intermediate_size"] = config.pop("moe_intermediate_size", None)
    if architecture == "Qwen3MoeForCausalLM":
        config.setdefault("norm_topk_prob", True)  # as llama.cpp does
    return config


def _unsupported(fields: Mapping[str, Any], architecture: str) -> list[str]:
    read = {*NEEDED, *OPTIONAL, *SCALING, *HARMLESS, SCALING_TYPE, PATTERN}
    read |= {"attention.value_length", "rope.dimension_count"}
    if architecture not in OF_WINDOWS:
        read -= {"attention.sliding_window", PATTERN, "rope.freq_base_swa"}
    return [
        key
        for key, value in fields.items()
        if key not in read and not (key in WITH_ONE_VALUE and value == WITH_ONE_VALUE[key])
    ]


def _of_all_layers(file: GgufFile, key: str, value: Any) -> Any:
    """A value, or the only one of a list with one for each layer."""
    values = value if isinstance(value, list) else [value]
    if any(one != values[0] for one in values):
        raise refusal(f"{file.path}: {key} differs between layers, and that is not supported")
    return values[0]


def _check_head_size(file: GgufFile, fields: Mapping[str, Any], head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise refusal(
                f"{file.path}: {key} {fields[key]} is not supported: the size of a head is "
                f"{head_dim}"
            )


def _scaling(
    file: GgufFile, fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The rope_scaling of config.json."""
    kind = fields.get(SCALING_TYPE, "none")
    if FREQUENCY_FACTORS in file.tensors:
        return _llama3_scaling(file, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise refusal(f"{file.path}: {SCALING_TYPE} {kind!r} is not supported")
    given = {ours: fields[key] for key, ours in SCALING.items() if key in fields}
    if config["architectures"] == [GPT_OSS]:
        return GPT_OSS_SCALING | given
    return {"rope_type": kind} | given


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """The file has the result of Llama 3's scaling, and this finds its settings. SettingError if
    there are none."""
    factors = file.tensors[FREQUENCY_FACTORS].values().tolist()
    dims = config["head_dim"]
    theta = config.get("rope_theta", 10000.0)
    factor = max(factors)
    rotary = Rotary(dims, theta, factor, LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
    plain = Rotary(dims, theta).frequencies()
    expected = [before / after for before, after in zip(plain, rotary.frequencies(), strict=True)]
    if len(factors) != len(expected) or not all(
        math.isclose(stored, value, rel_tol=1e-4)
        for stored, value in zip(factors, expected, strict=True)
    ):
        raise refusal(
            f"{file.path}: the frequency factors in {FREQUENCY_FACTORS} are not those of Llama 3, "
            "and others are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def _gemma3(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    pattern = fields.get(PATTERN, GEMMA3_PERIOD)
    if "sliding_window" not in config:
        kinds = [FULL] * layers
    elif isinstance(pattern, list):
        kinds = [SLIDING if windowed else FULL for windowed in pattern]
    else:
        kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    size = config["head_dim"]
    if layers == GEMMA3_27B_LAYERS:
        size = config["hidden_size"] // config["num_attention_heads"]
    return {"layer_types": kinds, "query_pre_attn_scalar": size}


def _dtype(file: GgufFile, architecture: str) -> str:
    """The dtype of an engine: the file's if its matrices have one, else bfloat16, which most models
    were trained in.

    Gemma 3's activations are too large for float16.
    """
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F16", "F32"} and architecture != GEMMA3 else "bfloat16"
