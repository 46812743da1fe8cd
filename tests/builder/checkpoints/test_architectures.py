"""config.json in both forms, and the settings that are refused by name."""

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pensieve.builder.checkpoints.architectures import decoder_config
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
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


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


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_frequencies_are_those_of_transformers(kind):
    parameters = {"rope_type": kind, "rope_theta": 5e5, **LLAMA3}
    theirs, _ = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(head_dim=64, rope_parameters=parameters), device="cpu")
    ours = decoder_config(LLAMA | {"head_dim": 64, "rope_parameters": parameters}).rotary.frequencies()
    torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=0)


def test_a_length_of_the_original_training_beside_the_rotary_settings_wins_over_theirs():
    """As in transformers."""
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    config = LlamaConfig(head_dim=64, rope_parameters=parameters, original_max_position_embeddings=32)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    outside = {"head_dim": 64, "original_max_position_embeddings": 32}
    for inside in (parameters, {name: x for name, x in parameters.items() if not name.startswith("original")}):
        ours = decoder_config(LLAMA | outside | {"rope_parameters": inside}).rotary.frequencies()
        torch.testing.assert_close(torch.tensor(ours), theirs, rtol=1e-5, atol=0)


def test_equal_rotary_settings_may_stand_in_both_forms():
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    once = decoder_config(LLAMA | {"rope_parameters": parameters})
    assert decoder_config(LLAMA | {"rope_parameters": parameters, "rope_scaling": dict(parameters)}) == once


def test_what_config_json_leaves_out():
    llama = decoder_config(LLAMA)
    assert (llama.kv_heads, llama.head_dim, llama.qkv_bias, llama.tied_embeddings) == (4, 16, False, False)
    opt = decoder_config(OPT)
    assert (opt.embedding_size, opt.final_norm, opt.qkv_bias, opt.tied_embeddings) == (64, True, True, True)
    qwen3 = decoder_config(LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2})
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
    ],
)
def test_a_window_that_hides_nothing_is_none(change):
    assert decoder_config(LLAMA | change).windows == ()


MISTRAL = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_MOE = QWEN | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 32, "num_experts": 4}
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
        (QWEN | WINDOW | {"layer_types": ["full_attention", "full_attention"], "max_window_layers": 0}, ()),
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
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the number of experts, 4"),
        (QWEN_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers [0]"),
        (QWEN_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (QWEN_MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
        (QWEN_MOE | {"num_experts": 0}, "num_experts"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
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
    published = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 96}
    qwen = decoder_config(LLAMA | QWEN_MOE | published)
    assert (qwen.experts, qwen.experts_per_token, qwen.experts_sum_to_1, qwen.mlp_size) == (4, 2, True, 32)
    assert decoder_config(LLAMA | QWEN_MOE | published | {"num_experts": None, "num_local_experts": 4}) == qwen
    assert not decoder_config(LLAMA | QWEN_MOE).experts_sum_to_1
    mixtral = decoder_config(LLAMA | MIXTRAL)
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.experts_sum_to_1, mixtral.mlp_size) == (4, 2, True, 128)
    assert (mixtral.rotary.theta, mixtral.norm_eps) == (1e6, 1e-5)


def test_opt_heads_must_divide_the_hidden_size():
    with pytest.raises(SettingError, match="num_attention_heads 5"):
        decoder_config(OPT | {"num_attention_heads": 5})


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "OPT"])
def test_the_model_type_that_transformers_writes_is_taken(architecture):
    change = QWEN_MOE | {"architectures": [f"{architecture}ForCausalLM"], "sliding_window": None}
    model_type = CONFIG_MAPPING[architecture.lower().replace("moe", "_moe")].model_type
    assert decoder_config(OPT | change | {"model_type": model_type}) == decoder_config(OPT | change)
