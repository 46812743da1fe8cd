"""The decoder gives the logits of transformers' models, with any division into pieces, slots and
other requests."""

from dataclasses import replace

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import read_json
from pensieve.builder.inductor.compile import traced_batch
from pensieve.builder.manifest import WEIGHTS
from pensieve.builder.model import Decoder
from pensieve.builder.weights import load_weights
from pensieve.runtime.engine import open_engine
from tests.models import (
    GEMMA3_SHAPE,
    GPT_OSS_SHAPE,
    LLAMA_SHAPE,
    OPT_SHAPE,
    QWEN3_MOE_SHAPE,
    ScatteredRunner,
    save_random,
    tiny_config,
)

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_SCALING = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN_SCALING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
GEMMA3_ROTARY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}

CONFIGS = {
    "llama": LlamaConfig(**LLAMA_SHAPE),
    "llama, many heads": LlamaConfig(**LLAMA_SHAPE | {"num_key_value_heads": 4}),
    "llama, one kv head, biases": LlamaConfig(
        **LLAMA_SHAPE | {"num_key_value_heads": 1}, attention_bias=True, mlp_bias=True
    ),
    "llama, head_dim, tied": LlamaConfig(
        **LLAMA_SHAPE, head_dim=24, tie_word_embeddings=True, rms_norm_eps=1e-3
    ),
    "llama 3 scaling": LlamaConfig(**LLAMA_SHAPE, rope_parameters=LLAMA3_SCALING),
    "llama, linear scaling": LlamaConfig(**LLAMA_SHAPE, rope_parameters=LINEAR_SCALING),
    "llama, yarn": LlamaConfig(**LLAMA_SHAPE, rope_parameters=YARN_SCALING),
    "llama, gelu": LlamaConfig(**LLAMA_SHAPE, hidden_act="gelu_pytorch_tanh"),
    "mistral": MistralConfig(**LLAMA_SHAPE, sliding_window=None, head_dim=32),
    "mistral-window": tiny_config("mistral-window"),
    "qwen2, late windows": Qwen2Config(
        **LLAMA_SHAPE, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3-windows": tiny_config("qwen3-windows"),
    "qwen3-moe, window": Qwen3MoeConfig(
        **QWEN3_MOE_SHAPE, use_sliding_window=True, sliding_window=5
    ),
    "qwen2": Qwen2Config(**LLAMA_SHAPE),
    "qwen2, tied": Qwen2Config(**LLAMA_SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, head_dim=32),
    "qwen3, biases": Qwen3Config(**LLAMA_SHAPE, head_dim=32, attention_bias=True),
    "mixtral": MixtralConfig(**LLAMA_SHAPE, num_local_experts=4),
    "mixtral, one expert": MixtralConfig(**LLAMA_SHAPE, num_local_experts=4, num_experts_per_tok=1),
    "qwen3-moe": Qwen3MoeConfig(**QWEN3_MOE_SHAPE),
    "qwen3-moe, weights as they are": Qwen3MoeConfig(**QWEN3_MOE_SHAPE | {"norm_topk_prob": False}),
    "gemma3": Gemma3TextConfig(**GEMMA3_SHAPE),
    "gemma3, scaled": Gemma3TextConfig(**GEMMA3_SHAPE, rope_parameters=GEMMA3_ROTARY),
    "gemma3, untied, a window in both layers": Gemma3TextConfig(
        **GEMMA3_SHAPE, layer_types=["sliding_attention"] * 2, tie_word_embeddings=False
    ),
    "gpt-oss": GptOssConfig(**GPT_OSS_SHAPE),
    # no near choice of a few
    "gpt-oss, every expert": GptOssConfig(**GPT_OSS_SHAPE | {"num_experts_per_tok": 8}),
    "gpt-oss, other gates, no biases of attention": GptOssConfig(
        **GPT_OSS_SHAPE, attention_bias=False, swiglu_alpha=0.8, swiglu_limit=0.5
    ),
    "opt": OPTConfig(**OPT_SHAPE),
    "opt, post norm, projected": OPTConfig(
        **OPT_SHAPE, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
    "opt, projected": OPTConfig(**OPT_SHAPE, word_embed_proj_dim=32),
    "opt, no final norm": OPTConfig(**OPT_SHAPE, _remove_final_layer_norm=True),
    "opt, no biases, gelu": OPTConfig(**OPT_SHAPE, enable_bias=False, activation_function="gelu"),
    "opt, plain norms": OPTConfig(**OPT_SHAPE, layer_norm_elementwise_affine=False),
    "opt, untied": OPTConfig(**OPT_SHAPE, tie_word_embeddings=False),
}


def runner_beside(config: PretrainedConfig, tmp_path, lengths, dtype="float32"):
    model = save_random(config, tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", dtype=dtype)
    engine = open_engine(tmp_path / "engine")
    prompts = [torch.randint(3, config.vocab_size, (length,)) for length in lengths]
    expected = [model(prompt.unsqueeze(0)).logits[0] for prompt in prompts]
    return ScatteredRunner(engine.forward, engine.kv_shape(64, 4), prompts, engine.dtype), expected


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name, tmp_path):
    runner, expected = runner_beside(CONFIGS[name], tmp_path, lengths=(37, 90))
    runner.step((0, 0, 10))
    runner.step((1, 0, 33), (0, 10, 11))  # mixed: a prompt's piece beside one token
    runner.step((0, 11, 12), (1, 33, 80))
    runner.step((0, 12, 37), (1, 80, 81))
    runner.step((1, 81, 90))
    for seat, logits in enumerate(expected):
        torch.testing.assert_close(runner.all_logits(seat), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3-windows", "mistral-window", "qwen3-moe", "gemma3", "gpt-oss", "opt"]
)
def test_dropped_chunks_are_recomputed_as_disjoint_spans_of_one_batch(name, tmp_path):
    runner, expected = runner_beside(CONFIGS[name], tmp_path, lengths=(40, 8))
    runner.step((0, 0, 30), (1, 0, 7))
    for block in (0, 1, 4):
        runner.drop(0, block)
    runner.logits[0].clear()
    runner.step((0, 0, 8), (1, 7, 8), (0, 16, 20), (0, 30, 40))
    for position, logits in runner.logits[0].items():
        torch.testing.assert_close(logits, expected[0][position], atol=1e-4, rtol=1e-4)
    assert sorted(runner.logits[0]) == [*range(8), *range(16, 20), *range(30, 40)]
    torch.testing.assert_close(runner.all_logits(1), expected[1], atol=1e-4, rtol=1e-4)


def test_a_suppressed_write_reads_the_cache_and_leaves_it_alone(tmp_path):
    runner, expected = runner_beside(CONFIGS["llama"], tmp_path, lengths=(16,))
    runner.step((0, 0, 16))
    before = runner.pool.clone()
    runner.step((0, 15, 16), unwritten=((0, 15),))
    torch.testing.assert_close(runner.logits[0][15], expected[0][15], atol=1e-4, rtol=1e-4)
    assert torch.equal(runner.pool.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    "name", ["llama 3 scaling", "qwen3-moe", "gemma3", "gpt-oss, every expert", "opt"]
)
def test_bfloat16_stays_near_float32(name, tmp_path):
    runner, expected = runner_beside(CONFIGS[name], tmp_path, lengths=(50,), dtype="bfloat16")
    runner.step((0, 0, 31))
    runner.step((0, 31, 50))
    logits = runner.all_logits(0)
    assert logits.dtype == torch.float32
    assert (logits - expected[0]).abs().mean() < 0.03 * expected[0].std()


@pytest.mark.parametrize("dtype, factor", [("float32", 1152**0.5), ("bfloat16", 34.0)])
def test_the_factor_of_embeddings_is_rounded_to_the_dtype(dtype, factor, tmp_path):
    runner_beside(CONFIGS["gemma3"], tmp_path, lengths=(1,), dtype=dtype)
    config = decoder_config(read_json(tmp_path / "checkpoint" / "config.json"))
    config = replace(config, embedding_factor=1152**0.5)
    decoder = Decoder.from_weights(config, load_weights(tmp_path / "engine" / WEIGHTS))
    assert decoder.embedding_factor == pytest.approx(factor, rel=1e-6)


def test_the_decoder_is_exported_once_for_any_batch(tmp_path):
    runner, expected = runner_beside(CONFIGS["qwen3"], tmp_path, lengths=(24, 12))
    config = decoder_config(read_json(tmp_path / "checkpoint" / "config.json"))
    decoder = Decoder.from_weights(config, load_weights(tmp_path / "engine" / WEIGHTS))
    batch, differing = traced_batch(torch.device("cpu"))
    program = torch.export.export(decoder, (batch, runner.handle), dynamic_shapes=(differing, None))

    calls = [
        str(node.target) for node in program.graph.nodes if str(node.target).startswith("pensieve")
    ]
    of_the_pool = ["pensieve.write_kv.default", "pensieve.multi_token_attention.default"]
    assert [call for call in calls if call in of_the_pool] == of_the_pool * 2
    assert {calls.count(f"pensieve.{name}.default") for name in ("add_norm", "silu_gate")} == {4, 2}
    runner.forward = program.module()
    runner.step((0, 0, 17), (1, 0, 4))
    runner.step((0, 17, 24), (1, 4, 12))
    for seat, logits in enumerate(expected):
        torch.testing.assert_close(runner.all_logits(seat), logits, atol=1e-4, rtol=1e-4)
