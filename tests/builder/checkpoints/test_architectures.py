"""config.json in both forms, and the settings that are refused by name."""

import math

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Rotary
from pensieve.scheduler.types import SettingError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
OPT = {**LLAMA, "architectures": ["OPTForCausalLM"], "ffn_dim": 128}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "old, new",
    [
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        ),
    ],
)
def test_both_forms_of_rotary_settings_mean_the_same(old, new):
    assert decoder_config(LLAMA | old) == decoder_config(LLAMA | new)


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3},
        YARN | {"factor": 4.0},
        YARN | {"factor": 32.0, "truncate": False, "beta_fast": 30.0, "beta_slow": 2.0},
        YARN | {"factor": 0.5},
        YARN | {"factor": 4.0, "attention_factor": 1.25},
        YARN | {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9},
        YARN | {"factor": 4.0, "mscale": 0.7},
        YARN | {"factor": 4.0, "original_max_position_embeddings": 6},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(scaling):
    parameters = {"rope_theta": 5e5, **scaling}
    theirs, length = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        LlamaConfig(head_dim=64, rope_parameters=dict(parameters)), device="cpu"
    )
    ours = decoder_config(LLAMA | {"head_dim": 64, "rope_parameters": parameters}).rotary
    torch.testing.assert_close(torch.tensor(ours.frequencies()), theirs, rtol=1e-5, atol=0)
    assert ours.length == pytest.approx(length)


def test_a_length_of_the_original_training_beside_the_rotary_settings_wins_over_theirs():
    """Equal to transformers."""
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    config = LlamaConfig(
        head_dim=64, rope_parameters=parameters, original_max_position_embeddings=32
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    outside = {"head_dim": 64, "original_max_position_embeddings": 32}
    for inside in (
        parameters,
        {name: x for name, x in parameters.items() if not name.startswith("original")},
    ):
        ours = decoder_config(LLAMA | outside | {"rope_parameters": inside}).rotary.frequencies()
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=0)


def test_equal_rotary_settings_may_stand_in_both_forms():
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    once = decoder_config(LLAMA | {"rope_parameters": parameters})
    assert (
        decoder_config(LLAMA | {"rope_parameters": parameters, "rope_scaling": dict(parameters)})
        == once
    )


def test_what_config_json_leaves_out():
    llama = decoder_config(LLAMA)
    assert (llama.kv_heads, llama.head_dim, llama.qkv_bias, llama.tied_embeddings) == (
        4,
        16,
        False,
        False,
    )
    opt = decoder_config(OPT)
    assert (opt.embedding_size, opt.final_norm, opt.qkv_bias, opt.tied_embeddings) == (
        64,
        True,
        True,
        True,
    )
    qwen3 = decoder_config(
        LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    )
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": 512},
        {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "sliding_window": 64},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 2,
        },
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": ["full_attention"] * 2,
        },
    ],
)
def test_a_window_that_hides_nothing_is_none(change):
    assert decoder_config(LLAMA | change).windows == ()


MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 2}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"num_key_value_heads": 2}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN_MOE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 4,
}
QWEN_MOE |= {"num_experts_per_tok": 2}


WINDOW = {"use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    "change, windows",
    [
        (MISTRAL | {"sliding_window": 256}, (256, 256)),
        (MISTRAL | {"max_position_embeddings": 8192}, (4096, 4096)),
        (MIXTRAL | {"sliding_window": 256}, (256, 256)),
        (QWEN | WINDOW | {"max_window_layers": 1}, (0, 64)),
        (QWEN | WINDOW | {"max_window_layers": 1, "layer_types": None}, (0, 64)),
        (QWEN | WINDOW | {"max_window_layers": None}, (64, 64)),
        (QWEN | WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, (64, 0)),
        (
            QWEN
            | WINDOW
            | {"layer_types": ["full_attention", "full_attention"], "max_window_layers": 0},
            (),
        ),
        (QWEN_MOE | WINDOW | {"max_window_layers": 2}, (64, 64)),
    ],
)
def test_the_windows_of_the_layers(change, windows):
    assert decoder_config(LLAMA | change).windows == windows


@pytest.mark.parametrize(
    "change, named",
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"architectures": None}, "none"),
        ({"model_type": "opt"}, "model_type 'opt' contradicts LlamaForCausalLM"),
        (OPT | {"model_type": "llama"}, "model_type 'llama' contradicts OPTForCausalLM"),
        (QWEN | {"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (QWEN | {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types has 1 layers"),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported with experts"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts"),
        (
            MIXTRAL | {"num_experts_per_tok": 5},
            "num_experts_per_tok 5 is above the number of experts, 4",
        ),
        (QWEN_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (QWEN_MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
        (QWEN_MOE | {"num_experts": 0}, "num_experts"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 0.0}},
            "factor must be a positive number",
        ),
        (
            {"rope_parameters": YARN | {"original_max_position_embeddings": 1}},
            "original context of 1 tokens",
        ),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3 | {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (GEMMA3 | {"sliding_window": 0}, "sliding_window"),
        (GEMMA3 | {"sliding_window": None}, "sliding_window"),
        (GEMMA3 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        (GEMMA3 | {"model_type": "gemma2"}, "gemma2"),
        (GPT_OSS | {"swiglu_limit": 0}, "swiglu_limit"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported with experts"),
        (
            GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}},
            "Mxfp4Config(dequantize=True)",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_parameters": {"rope_theta": 5e5},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "rope_scaling",
        ),
        ({"rope_scaling": ["linear"]}, "rope_scaling"),
        (MISTRAL | {"sliding_window": "64"}, "sliding_window"),
        ({"is_causal": False}, "is_causal"),
        (OPT | {"is_causal": False}, "is_causal"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "even"),
        ({"hidden_act": "relu6"}, "relu6"),
    ],
)
def test_what_is_not_supported_is_named(change, named):
    with pytest.raises(SettingError, match="--checkpoint") as error:
        decoder_config(LLAMA | change)
    assert named in str(error.value)


def test_experts_by_their_published_names_and_by_those_of_transformers_5():
    published = {
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "intermediate_size": 96,
    }
    qwen = decoder_config(LLAMA | QWEN_MOE | published)
    assert (qwen.experts, qwen.experts_per_token, qwen.experts_sum_to_1, qwen.mlp_size) == (
        4,
        2,
        True,
        32,
    )
    assert (
        decoder_config(LLAMA | QWEN_MOE | published | {"num_experts": None, "num_local_experts": 4})
        == qwen
    )
    assert not decoder_config(LLAMA | QWEN_MOE).experts_sum_to_1
    mixtral = decoder_config(LLAMA | MIXTRAL)
    assert (
        mixtral.experts,
        mixtral.experts_per_token,
        mixtral.experts_sum_to_1,
        mixtral.mlp_size,
    ) == (4, 2, True, 128)
    assert (mixtral.rotary.theta, mixtral.norm_eps) == (1e6, 1e-5)


def test_gemma3_by_its_published_names_and_by_those_of_transformers_5():
    published = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    published |= {"sliding_window": 64, "sliding_window_pattern": 2, "model_type": "gemma3_text"}
    gemma = decoder_config(LLAMA | GEMMA3 | published)
    assert gemma.windows == (64, 0)
    assert gemma.rotaries == (Rotary(256, 5e5, 8.0), Rotary(256, 2e4))
    assert gemma.rotary_of(0) == gemma.window_rotary and gemma.rotary_of(1) == gemma.rotary
    assert (gemma.query_size, gemma.embedding_factor, gemma.tied_embeddings) == (256.0, 8.0, True)
    assert gemma.activation == "gelu_tanh" and gemma.gated and not gemma.silu_gated
    by_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    assert decoder_config(LLAMA | GEMMA3 | kinds | {"rope_parameters": by_kind}) == gemma
    # windows beyond the longest context
    left_out = decoder_config(LLAMA | GEMMA3 | {"num_hidden_layers": 7})
    assert left_out.windows == (4096,) * 5 + (0, 4096) and left_out.rotaries == (
        Rotary(256, 1e6),
        Rotary(256, 1e4),
    )


def test_the_part_of_gemma3_that_takes_text():
    text = LLAMA | GEMMA3 | {"architectures": None, "model_type": "gemma3_text"}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    assert decoder_config(whole) == decoder_config(LLAMA | GEMMA3)


def test_gpt_oss_by_its_published_names():
    published = {
        "rope_theta": 150000,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "attention_bias": True,
    }
    published |= {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        }
    }
    published["rope_scaling"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    published |= {"layer_types": ["sliding_attention", "full_attention"]}
    gpt_oss = decoder_config(LLAMA | GPT_OSS | published)
    assert gpt_oss == decoder_config(LLAMA | GPT_OSS)
    assert (gpt_oss.windows, gpt_oss.sinks, gpt_oss.head_dim) == ((128, 0), True, 64)
    assert (
        gpt_oss.qkv_bias and gpt_oss.attention_out_bias and gpt_oss.mlp_bias and gpt_oss.router_bias
    )
    assert (gpt_oss.gate_limit, gpt_oss.gate_slope) == (7.0, 1.702)
    assert gpt_oss.scale(0) == pytest.approx((0.1 * math.log(32) + 1) ** 2 / 8)


def test_opt_heads_must_divide_the_hidden_size():
    with pytest.raises(SettingError, match="num_attention_heads 5"):
        decoder_config(OPT | {"num_attention_heads": 5})


MODEL_TYPES = {
    **{name: name.lower() for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "OPT")},
    "Qwen3Moe": "qwen3_moe",
    "Gemma3": "gemma3_text",
    "GptOss": "gpt_oss",
}


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_the_model_type_that_transformers_writes_is_taken(architecture):
    change = QWEN_MOE | {"architectures": [f"{architecture}ForCausalLM"], "sliding_window": 512}
    model_type = CONFIG_MAPPING[MODEL_TYPES[architecture]].model_type
    assert decoder_config(OPT | change | {"model_type": model_type}) == decoder_config(OPT | change)
