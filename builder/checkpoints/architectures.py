"""Reads a Hugging Face config.json as a DecoderConfig: the Llama family, its mixtures of experts,
Gemma 3, gpt-oss, Qwen3.5, Qwen3-Next, and OPT.

Unknown settings are refused by name; no value is guessed.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...scheduler.types import SettingError
from ..quantization import check_quantization
from .config import FULL, LINEAR, DecoderConfig, LinearAttention, Rotary

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
    """The differences between models of the Llama architecture, and the defaults of their
    config.json."""

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
    activation: str = "hidden_act"  # the key of the MLP's activation
    # None: all of a head's dimensions are rotated, and a config.json that says less is refused
    partial_rotary: float | None = None
    shared_expert: bool = False


GEMMA3, GPT_OSS, OPT = "Gemma3ForCausalLM", "GptOssForCausalLM", "OPTForCausalLM"
GEMMA3_OF_IMAGES = "Gemma3ForConditionalGeneration"
QWEN3_5, QWEN3_5_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
QWEN3_NEXT = "Qwen3NextForCausalLM"
HYBRIDS = {
    QWEN3_5: QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    QWEN3_5_MOE: QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5_MOE,
    QWEN3_NEXT: QWEN3_NEXT,
}
"""Models with linear attention, and the part of each that takes text."""

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
    "Qwen3MoeForCausalLM": LlamaFlavour(
        kv_heads=4, qk_norm=True, expert_size="moe_intermediate_size"
    ),
    GEMMA3: LlamaFlavour(qk_norm=True, theta=1e6, activation="hidden_activation"),
    GPT_OSS: LlamaFlavour(
        kv_heads=8,
        mlp_bias=True,
        norm_eps=1e-5,
        theta=150000.0,
        expert_size="intermediate_size",
        norm_topk_prob=True,
    ),
    QWEN3_5: LlamaFlavour(kv_heads=4, head_dim=256, qk_norm=True, partial_rotary=0.25),
    **dict.fromkeys(
        (QWEN3_5_MOE, QWEN3_NEXT),
        LlamaFlavour(
            kv_heads=2,
            head_dim=256,
            qk_norm=True,
            partial_rotary=0.25,
            expert_size="moe_intermediate_size",
            norm_topk_prob=True,
            shared_expert=True,
        ),
    ),
}
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
"""Of settings that published config.json files leave out."""

GPT_OSS_DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LINEAR_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
OF_WHOLE_MODEL = ("architectures", "model_type", "tie_word_embeddings")
SLIDING = "sliding_attention"


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a config.json of transformers 4 (`rope_theta`, `rope_scaling`) or 5
    (`rope_parameters`).

    Raises SettingError that names an unsupported setting.
    """
    names = config.get("architectures") or ["none"]
    check_quantization(config.get("quantization_config"))
    if config.get("is_causal") is False:  # an embedding model, whose tokens see later tokens
        raise refusal("config.json: is_causal false is not supported")
    if config.get("per_layer_config"):
        raise refusal("config.json: per_layer_config is not supported: layers must be alike")
    supported = [*{**LLAMA_FLAVOURS, **HYBRIDS}, GEMMA3_OF_IMAGES, OPT]
    if names[0] not in supported:
        raise refusal(
            f"architecture {names[0]!r} is not supported; known are {', '.join(supported)}"
        )
    kind = config.get("model_type")
    wanted = names[0].removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    # models use either of the two names
    if kind is not None and _bare(kind).removesuffix("text") != _bare(wanted):
        raise refusal(f"config.json: model_type {kind!r} contradicts {names[0]}, its architecture")
    own = {
        OPT: _opt_config,
        GEMMA3: _gemma3_config,
        GEMMA3_OF_IMAGES: _gemma3_config,
        GPT_OSS: _gpt_oss_config,
    }
    if names[0] in HYBRIDS:
        return _hybrid_config(HYBRIDS[names[0]], config)
    return own[names[0]](config) if names[0] in own else _llama_config(names[0], config)


def _bare(name: str) -> str:
    return name.replace("_", "").lower()


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
        raise refusal(
            f"config.json: {name} {value!r} is not supported; known are "
            f"{', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[value]


def _check_heads(hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads:
        raise refusal(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    if head_dim % 2:
        raise refusal(
            f"config.json: the head size must be even, not {head_dim} (hidden_size {hidden}, "
            f"{heads} heads)"
        )


def _llama_config(architecture: str, config: Mapping[str, Any]) -> DecoderConfig:
    flavour = LLAMA_FLAVOURS[architecture]
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", flavour.kv_heads or heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    if flavour.head_dim and "head_dim" not in config:
        head_dim = flavour.head_dim
    _check_heads(hidden, heads, kv_heads, head_dim)
    layers, max_positions = (
        _size(config, "num_hidden_layers"),
        _size(config, "max_position_embeddings"),
    )
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
        rotary=_rotary(config, head_dim, max_positions, flavour.theta, flavour.partial_rotary),
        position_offset=0,
        norm="rms",
        norm_eps=_number(config, "rms_norm_eps", flavour.norm_eps),
        norm_affine=True,
        norm_first=True,
        final_norm=True,
        qk_norm=flavour.qk_norm,
        activation=_activation(config, flavour.activation, "silu"),
        gated=True,
        qkv_bias=attention_bias if flavour.qkv_bias is None else flavour.qkv_bias,
        attention_out_bias=attention_bias if flavour.out_bias is None else flavour.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False))
        if flavour.mlp_bias is None
        else flavour.mlp_bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(architecture, config, layers, max_positions),
        **(_experts(flavour, config) if flavour.expert_size else {}),
    )


def _gemma3_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = _with(text_settings(config), GEMMA3_DEFAULTS)
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        if config.get(name):
            raise refusal(f"config.json: {name} {config[name]!r} is not supported")
    of_all, of_windows = _gemma3_rotary_settings(config)
    decoder = _llama_config(GEMMA3, _with(of_all, config))
    head_dim, max_positions = decoder.head_dim, decoder.max_positions
    return replace(
        decoder,
        window_rotary=_rotary(of_windows, head_dim, max_positions, 10000.0),
        norm_plus_one=True,
        norm_results=True,
        embedding_factor=math.sqrt(decoder.hidden_size),
        query_size=_number(config, "query_pre_attn_scalar"),
    )


def _gemma3_rotary_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings for `_rotary` of layers without and with a window."""
    by_kind = config.get("rope_parameters")
    if by_kind is None:
        return {}, {"rope_theta": _number(config, "rope_local_base_freq")}
    if not isinstance(by_kind, Mapping) or set(by_kind) != {SLIDING, FULL}:
        raise refusal(f"config.json: rope_parameters must be an object with {SLIDING} and {FULL}")
    return {"rope_parameters": by_kind[FULL]}, {"rope_parameters": by_kind[SLIDING]}


def _gpt_oss_config(config: Mapping[str, Any]) -> DecoderConfig:
    config = _with(config, GPT_OSS_DEFAULTS)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = _with({"rope_scaling": GPT_OSS_SCALING}, config)
    decoder = _llama_config(GPT_OSS, config)
    return replace(
        decoder,
        sinks=True,
        router_bias=True,
        gate_limit=_number(config, "swiglu_limit"),
        gate_slope=_number(config, "swiglu_alpha"),
    )


def _hybrid_config(architecture: str, config: Mapping[str, Any]) -> DecoderConfig:
    """Of a model that also takes images, the part that takes text."""
    config = _with(text_settings(config), LINEAR_DEFAULTS)
    if config.get("attn_output_gate") is False:
        raise refusal("config.json: attn_output_gate false is not supported")
    if (state := config.get("mamba_ssm_dtype") or "float32") != "float32":
        raise refusal(f"config.json: mamba_ssm_dtype {state!r}: only float32 is supported")
    if architecture == QWEN3_5_MOE and config.get("norm_topk_prob") is False:
        raise refusal("config.json: norm_topk_prob false is not supported")
    decoder = _llama_config(architecture, config)
    if decoder.activation != "silu":  # the convolution's and the gates' too
        raise refusal(f"config.json: hidden_act {config['hidden_act']!r} is not supported")
    kinds = config.get("layer_types")
    if kinds is None:
        period = _size(config, "full_attention_interval")
        kinds = [LINEAR if (i + 1) % period else FULL for i in range(decoder.layers)]
    _check_layer_types(kinds, (LINEAR, FULL), decoder.layers)
    if FULL not in kinds:
        raise refusal("config.json: layer_types without full_attention are not supported")
    linear = LinearAttention(
        key_heads=_size(config, "linear_num_key_heads"),
        value_heads=_size(config, "linear_num_value_heads"),
        key_dim=_size(config, "linear_key_head_dim"),
        value_dim=_size(config, "linear_value_head_dim"),
        conv_width=_size(config, "linear_conv_kernel_dim"),
    )
    if linear.conv_width < 2:
        raise refusal("config.json: linear_conv_kernel_dim must be at least 2")
    if linear.value_heads % linear.key_heads:
        raise refusal(
            f"config.json: linear_num_value_heads {linear.value_heads} is no multiple of "
            f"linear_num_key_heads {linear.key_heads}"
        )
    return replace(
        decoder,
        norm_plus_one=True,
        gated_attention=True,
        kinds=tuple(kinds) if LINEAR in kinds else (),
        linear=linear if LINEAR in kinds else None,
    )


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a model that also takes images, the settings of the part that takes text; else all. The
    whole model's architecture, and whether its head is tied, come first."""
    text: dict[str, Any] | None = config.get("text_config")
    if not text:
        return config
    whole = {name: config[name] for name in OF_WHOLE_MODEL if name in config}
    others = {name: value for name, value in config.items() if name != "text_config"}
    return others | text | whole


def _with(*configs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of all; those of an earlier one take precedence."""
    return ChainMap(*configs)  # type: ignore[arg-type]  # nothing is written


ONLY_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Settings, and their values if each layer has experts."""


def _experts(flavour: LlamaFlavour, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DecoderConfig that are about experts."""
    shared = "shared_expert_intermediate_size"
    only = ONLY_EXPERTS if flavour.shared_expert else {**ONLY_EXPERTS, shared: 0}
    for name, plain in only.items():
        if (value := config.get(name) or plain) != plain:
            raise refusal(
                f"config.json: {name} {value!r} is not supported: a router must choose among all "
                "MLPs"
            )
    if _activation(config, "hidden_act", "silu") != "silu":
        raise refusal(
            f"config.json: hidden_act {config['hidden_act']!r} is not supported with experts, only "
            "silu"
        )
    experts = _size(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    per_token = _size(config, "num_experts_per_tok")
    if per_token > experts:
        raise refusal(
            f"config.json: num_experts_per_tok {per_token} is above the number of experts, "
            f"{experts}"
        )
    sum_to_1 = bool(config.get("norm_topk_prob", flavour.norm_topk_prob))
    return {
        "experts": experts,
        "experts_per_token": per_token,
        "experts_sum_to_1": sum_to_1,
        "shared_expert_size": _size(config, shared) if flavour.shared_expert else 0,
    }


def _windows(
    architecture: str, config: Mapping[str, Any], layers: int, max_positions: int
) -> tuple[int, ...]:
    """The window of each layer, 0 for none; empty if no layer has one that matters."""
    if architecture == "LlamaForCausalLM":
        return ()
    window = config.get("sliding_window", None if architecture == "MixtralForCausalLM" else 4096)
    kinds = config.get("layer_types")
    unused = architecture.startswith("Qwen") and not config.get("use_sliding_window", False)
    if architecture in (GEMMA3, GPT_OSS, "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        kinds = kinds or _layer_types(architecture, config, layers)
        _check_layer_types(kinds, (FULL, SLIDING), layers)
    elif window is not None and not unused and FULL in (kinds or []):
        raise refusal(
            f"config.json: layer_types are not supported with sliding_window and {architecture}"
        )
    else:
        kinds = [SLIDING] * layers
    if unused or SLIDING not in kinds or (window is None and architecture != GEMMA3):
        return ()
    # One as long as the longest context hides nothing, but Gemma 3's have their own rotary
    # embedding.
    if _size(config, "sliding_window", window) >= max_positions and architecture != GEMMA3:
        return ()
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _check_layer_types(kinds: Sequence[str], supported: Sequence[str], layers: int) -> None:
    others = sorted({kind for kind in kinds if kind not in supported})
    if others:
        raise refusal(f"config.json: layer_types {', '.join(others)} are not supported")
    if len(kinds) != layers:
        raise refusal(
            f"config.json: layer_types has {len(kinds)} layers, num_hidden_layers is {layers}"
        )


def _layer_types(architecture: str, config: Mapping[str, Any], layers: int) -> list[str]:
    """Of a config.json without `layer_types`."""
    if architecture in (GEMMA3, GPT_OSS):
        period = _size(config, "sliding_window_pattern") if architecture == GEMMA3 else 2
        return [SLIDING if (i + 1) % period else FULL for i in range(layers)]
    late = config.get("max_window_layers", 28) or 0
    return [FULL] * min(late, layers) + [SLIDING] * (layers - late)


def _rotary(
    config: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    theta: float,
    partial_rotary: float | None = None,
) -> Rotary:
    """`partial_rotary`: as in `LlamaFlavour`."""
    parameters, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if parameters and scaling and parameters != scaling:
        raise refusal("config.json: rope_parameters and rope_scaling differ; one of them must go")
    parameters = parameters or scaling
    if not isinstance(parameters, dict):
        raise refusal(
            f"config.json: rope_parameters or rope_scaling must be an object, not {parameters!r}"
        )
    if any(isinstance(value, dict) for value in parameters.values()):
        raise refusal("config.json: rope parameters that differ between layers are not supported")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", theta))
    partial = _number(
        parameters,
        "partial_rotary_factor",
        _number(config, "partial_rotary_factor", partial_rotary or 1.0),
    )
    dims = int(head_dim * partial)
    if partial != 1.0 and (partial_rotary is None or dims % 2 or not 0 < dims <= head_dim):
        raise refusal(f"config.json: partial_rotary_factor {partial} is not supported")
    match kind:
        case "default":
            return Rotary(dims, theta)
        case "linear":
            return Rotary(dims, theta, _number(parameters, "factor"))
        case "llama3":
            low, high = (
                _number(parameters, "low_freq_factor"),
                _number(parameters, "high_freq_factor"),
            )
            if low >= high:
                raise refusal(
                    f"config.json: low_freq_factor {low} must be below high_freq_factor {high}"
                )
            original = _size(parameters, "original_max_position_embeddings", max_positions)
            # this key takes precedence
            original = _size(config, "original_max_position_embeddings", original)
            return Rotary(dims, theta, _number(parameters, "factor"), low, high, original)
        case "yarn":
            original = _size(parameters, "original_max_position_embeddings", max_positions)
            original = _size(config, "original_max_position_embeddings", original)
            return _yarn(parameters, dims, theta, original, max_positions)
    raise refusal(
        f"config.json: rope type {kind!r} is not supported; known are default, linear, llama3, yarn"
    )


def _yarn(
    parameters: Mapping[str, Any], dims: int, theta: float, original: int, max_positions: int
) -> Rotary:
    """A pair's frequency is scaled if the pair turns less than `beta_slow` times over the context
    of the original training. It stays as it is if the pair turns more than `beta_fast` times."""
    factor = _number(parameters, "factor", max_positions / original)

    def pair(turns: float) -> float:
        return dims / 2 * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    def length(weight: float) -> float:
        return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0

    low, high = (
        pair(_number(parameters, "beta_fast", 32.0)),
        pair(_number(parameters, "beta_slow", 1.0)),
    )
    if parameters.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0.0)
    high = min(high, dims - 1.0)
    if low > high:
        raise refusal(
            f"config.json: yarn for an original context of {original} tokens is not supported"
        )
    high = high if low < high else low + 0.001
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    default = length(mscale) / length(mscale_all) if mscale and mscale_all else length(1.0)
    return Rotary(
        dims,
        theta,
        factor,
        unscaled_to=low,
        scaled_from=high,
        length=_number(parameters, "attention_factor", default),
    )


def _opt_config(config: Mapping[str, Any]) -> DecoderConfig:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if hidden % heads:
        raise refusal(
            f"config.json: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
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
