"""GGUF files: an engine of one computes what transformers computes with the same values, and a file
that cannot be read is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.gguf_file import open_gguf
from pensieve.runtime.engine import open_engine
from tests.gguf_files import write_gguf
from tests.models import (
    GEMMA3_SHAPE,
    GPT_OSS_SHAPE,
    LLAMA_SHAPE,
    QWEN3_MOE_SHAPE,
    save_random,
)

from ..test_fp8 import logits

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
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
NO_SCALING = {"rope_type": "default", "rope_theta": 10000.0}
QUERY_SIZE = {"query_pre_attn_scalar": 32}  # a file has none, and it is the size of a head
CONFIGS = {
    "llama": LlamaConfig(**LLAMA_SHAPE, rms_norm_eps=1e-4),
    "llama, biases, head size, tied": LlamaConfig(
        **LLAMA_SHAPE, attention_bias=True, mlp_bias=True, head_dim=32, tie_word_embeddings=True
    ),
    "llama 3": LlamaConfig(**LLAMA_SHAPE, rope_parameters=LLAMA3_SCALING),
    "llama, linear": LlamaConfig(**LLAMA_SHAPE, rope_parameters=LINEAR_SCALING),
    "mistral": MistralConfig(**LLAMA_SHAPE, sliding_window=None),
    "mixtral": MixtralConfig(**LLAMA_SHAPE, num_local_experts=4, rope_parameters=NO_SCALING),
    "qwen2": Qwen2Config(**LLAMA_SHAPE),
    "qwen2, yarn": Qwen2Config(**LLAMA_SHAPE, rope_parameters=YARN_SCALING),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, head_dim=32),
    "qwen3moe": Qwen3MoeConfig(**QWEN3_MOE_SHAPE),
    "gemma3": Gemma3TextConfig(**GEMMA3_SHAPE | QUERY_SIZE, rope_parameters=GEMMA3_ROTARY),
    "gpt-oss": GptOssConfig(**GPT_OSS_SHAPE),
}
WIDE = LLAMA_SHAPE | {"hidden_size": 256, "intermediate_size": 512}
QUANTISED = [
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q2_K,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_XS,
    Kind.MXFP4,
]
PROMPT = torch.arange(3, 43)


def tiny_file(config, tmp_path, kind=Kind.F32, **changes) -> Path:
    """A random model's GGUF file, beside a checkpoint with its values."""
    save_random(config, tmp_path / "checkpoint")
    write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind, **changes)
    return tmp_path / "model.gguf"


def expected_logits(checkpoint: Path):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return model(PROMPT.unsqueeze(0)).logits[0]


def engine_logits(directory: Path):
    engine = open_engine(directory)
    return logits(engine.forward, engine.kv_shape(16, 4), engine.dtype)


def check_equal(file: Path, tmp_path):
    build_engine(file, tmp_path / "engine", dtype="float32")
    expected = expected_logits(tmp_path / "checkpoint")
    torch.testing.assert_close(engine_logits(tmp_path / "engine"), expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_computes_what_transformers_computes(name, tmp_path):
    file = tiny_file(CONFIGS[name], tmp_path, Kind.Q8_0)
    assert any(tensor.kind == Kind.Q8_0 for tensor in open_gguf(file).tensors.values())
    check_equal(file, tmp_path)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_each_quantisation_gives_its_values(kind, tmp_path):
    file = tiny_file(LlamaConfig(**WIDE), tmp_path, kind)
    matrices = [t for t in open_gguf(file).tensors.values() if len(t.shape) == 2]
    assert {tensor.kind for tensor in matrices} == {kind}
    check_equal(file, tmp_path)
