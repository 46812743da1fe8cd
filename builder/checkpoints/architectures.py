"""Reads a Hugging Face config.json as a DecoderConfig: the Llama family, its mixtures of experts, and OPT.

Unknown settings are refused by name; no value is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...scheduler.types import SettingError
from ..quantization import check_quantization
from .config import DecoderConfig, Rotary

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def refusal(message: str) -> SettingError:
    return SettingError("--checkpoint", message)


class LlamaFlavour(NamedTuple):
    """The differences between models of the Llama architecture, and the defaults of their config.json."""

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    qkv_bias: bool | None = None  # None: as in attention_bias
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    theta: float = 10000.0
    expert_size: str | None = None  # the key of the experts' width; None: no experts
    norm_topk_prob: bool = False


LLAMA_FLAVOURS = {
    "LlamaForCausalLM": LlamaFlavour(mlp_bias=None),
    "MistralForCausalLM": LlamaFlavour(kv_heads=8, qkv_bias=False, out_bias=False),
    "Qwen2ForCausalLM": LlamaFlavour(kv_heads=32, qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": LlamaFlavour(kv_heads=32, head_dim=128, qk_norm=True),
    "MixtralForCausalLM": LlamaFlavour(
        kv_heads=8,
        qkv_bias=False,
        out_bias=False,
        norm_eps=1e-5,
        theta=1e6,
        expert_size="intermediate_size",
        norm_topk_prob=True,
    ),
    "Qwen3MoeForCausalLM": LlamaFlavour(kv_heads=4, qk_norm=True, expert_size="moe_intermediate_size"),
}
OPT = "OPTForCausalLM"


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`).

    Raises SettingError that names an unsupported setting.
    """
    names = config.get("architectures") or ["none"]
    check_quantization(config.get("quantization_config"))
    if config.get("is_causal") is False:  # an embedding model, whose tokens see later tokens
        raise refusal("config.json: is_causal false is not supported")
    if config.get("per_layer_config"):
        raise refusal("config.json: per_layer_config is not supported: layers must be alike")
    known = [*LLAMA_FLAVOURS, OPT]
    if names[0] not in known:
        raise refusal(f"architecture {names[0]!r} is not supported; known are {', '.join(known)}")
    kind = config.get("model_type")
    wanted = names[0].removesuffix("ForCausalLM").lower()
    if kind is not None and kind.replace("_", "").lower() != wanted:  # models use either of the two names
        raise refusal(f"config.json: model_type {kind!r} contradicts {names[0]}, its architecture")
    return _opt_config(config) if names[0] == OPT else _llama_config(names[0], config)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refusal(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise refusal(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)


def _activation(config: Mapping[str, Any], name: str, default: str) -> str:
    value = config.get(name, default)
    if value not in ACTIVATION_NAMES:
        raise refusal(f"config.json: {name} {value!r} is not supported; known are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[value]


def _check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise refusal(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2:
        raise refusal(f"config.json: the head size must be even, not {head_dim} (hidden_size {hidden}, {heads} heads)")


def _llama_config(architecture: str, config: Mapping[str, Any]) -> DecoderConfig:
    flavour = LLAMA_FLAVOURS[architecture]
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", flavour.kv_heads or heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    if flavour.head_dim and "head_dim" not in config:
        head_dim = flavour.head_dim
    _check_heads(hidden, heads, kv_heads, head_dim)
    layers, max_positions = _size(config, "num_hidden_layers"), _size(config, "max_position_embeddings")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=_size(config, flavour.expert_size or "intermediate_size"),
        max_positions=max_positions,
        embedding_size=hidden,
        rotary=_rotary(config, head_dim, max_positions, flavour.theta),
        position_offset=0,
        norm="rms",
        norm_eps=_number(config, "rms_norm_eps", flavour.norm_eps),
        norm_affine=True,
        norm_first=True,
        final_norm=True,
        qk_norm=flavour.qk_norm,
        activation=_activation(config, "hidden_act", "silu"),
        gated=True,
        qkv_bias=attention_bias if flavour.qkv_bias is None else flavour.qkv_bias,
        attention_out_bias=attention_bias if flavour.out_bias is None else flavour.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if flavour.mlp_bias is None else flavour.mlp_bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(architecture, config, layers, max_positions),
        **(_experts(flavour, config) if flavour.expert_size else {}),
    )


ONLY_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": 0}
"""Settings, and their values if each layer has experts, and no MLP for all tokens."""


def _experts(flavour: LlamaFlavour, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DecoderConfig that are about experts."""
    for name, plain in ONLY_EXPERTS.items():
        if (value := config.get(name) or plain) != plain:
            raise refusal(f"config.json: {name} {value!r} is not supported: a router must choose among all MLPs")
    if _activation(config, "hidden_act", "silu") != "silu":
        raise refusal(f"config.json: hidden_act {config['hidden_act']!r} is not supported with experts, only silu")
    experts = _size(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    per_token = _size(config, "num_experts_per_tok")
    if per_token > experts:
        raise refusal(f"config.json: num_experts_per_tok {per_token} is above the number of experts, {experts}")
    sum_to_1 = bool(config.get("norm_topk_prob", flavour.norm_topk_prob))
    return {"experts": experts, "experts_per_token": per_token, "experts_sum_to_1": sum_to_1}


def _windows(architecture: str, config: Mapping[str, Any], layers: int, max_positions: int) -> tuple[int, ...]:
    """The window of each layer, 0 for none; empty if no layer has one that hides anything."""
    if architecture == "LlamaForCausalLM":
        return ()
    window = config.get("sliding_window", None if architecture == "MixtralForCausalLM" else 4096)
    kinds = config.get("layer_types")
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        late = config.get("max_window_layers", 28) or 0
        kinds = kinds or ["full_attention"] * min(late, layers) + ["sliding_attention"] * (layers - late)
        others = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
        if others:
            raise refusal(f"config.json: layer_types {', '.join(others)} are not supported")
        if len(kinds) != layers:
            raise refusal(f"config.json: layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
    elif window is not None and "full_attention" in (kinds or []):
        raise refusal(f"config.json: layer_types are not supported with sliding_window and {architecture}")
    else:
        kinds = ["sliding_attention"] * layers
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        return ()
    if window is None or "sliding_attention" not in kinds or _size(config, "sliding_window", window) >= max_positions:
        return ()
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rotary(config: Mapping[str, Any], head_dim: int, max_positions: int, theta: float) -> Rotary:
    parameters, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if parameters and scaling and parameters != scaling:
        raise refusal("config.json: rope_parameters and rope_scaling differ; one of them must go")
    parameters = parameters or scaling
    if not isinstance(parameters, dict):
        raise refusal(f"config.json: rope_parameters or rope_scaling must be an object, not {parameters!r}")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise refusal("config.json: rope parameters that differ between layers are not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", theta))
    partial = _number(parameters, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise refusal(f"config.json: partial_rotary_factor {partial} is not supported")
    match kind:
        case "default":
            return Rotary(head_dim, theta)
        case "linear":
            return Rotary(head_dim, theta, _number(parameters, "factor"))
        case "llama3":
            low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
            if low >= high:
                raise refusal(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
            original = _size(parameters, "original_max_position_embeddings", max_positions)
            original = _size(config, "original_max_position_embeddings", original)  # this key takes precedence
            return Rotary(head_dim, theta, _number(parameters, "factor"), low, high, original)
    raise refusal(f"config.json: rope type {kind!r} is not supported; known are default, linear, llama3")


def _opt_config(config: Mapping[str, Any]) -> DecoderConfig:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if hidden % heads:
        raise refusal(f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    norm_first = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    return DecoderConfig(
        architecture=OPT,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        mlp_size=_size(config, "ffn_dim"),
        max_positions=_size(config, "max_position_embeddings"),
        embedding_size=_size(config, "word_embed_proj_dim", hidden),
        rotary=None,
        position_offset=2,
        norm="layer",
        norm_eps=1e-5,
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
        norm_first=norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", False),
        qk_norm=False,
        activation=_activation(config, "activation_function", "relu"),
        gated=False,
        qkv_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
