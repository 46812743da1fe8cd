"""TensorRT-LLM's legacy checkpoints: a Hugging Face checkpoint converted to this format gives the
same engine."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, OPTConfig

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.checkpoints.hugging_face import read_json, read_weights
from pensieve.builder.checkpoints.tensorrt_llm import is_legacy, legacy_config, read_legacy_weights
from pensieve.builder.model import Decoder
from pensieve.builder.parity import random_batches
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.models import LLAMA_SHAPE, OPT_SHAPE, ScatteredRunner, save_random

CONFIGS = {
    # 4 heads, 2 KV heads
    "llama": LlamaConfig(**LLAMA_SHAPE | {"vocab_size": 157}, rms_norm_eps=1e-4),
    "llama, biases, head size": LlamaConfig(
        **LLAMA_SHAPE,
        attention_bias=True,
        mlp_bias=True,
        head_dim=32,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    ),
    "opt": OPTConfig(**OPT_SHAPE | {"ffn_dim": 256}),
    "opt, post norm": OPTConfig(**OPT_SHAPE | {"ffn_dim": 256}, do_layer_norm_before=False),
}


def divided(tensor, ranks, rank, dim=0):
    return tensor.chunk(ranks, dim)[rank].contiguous()


def qkv_of(tensors, name, config, ranks, rank, kind):
    """Queries, keys and values of a rank, one below the other."""
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    parts = {x: tensors[f"{name}.{x}_proj.{kind}"] for x in "qkv"}
    kept = [divided(parts["q"], ranks, rank)]
    kept += [
        divided(parts[x], min(ranks, kv_heads), rank * min(ranks, kv_heads) // ranks) for x in "kv"
    ]
    return torch.cat(kept)


def padded(tensor, ranks):
    """Pads with rows of zeros up to a multiple of the ranks."""
    return torch.cat((tensor, tensor.new_zeros(-len(tensor) % ranks, tensor.shape[1])))


def write_legacy(
    source,
    target,
    config,
    ranks,
    first_generation=False,
    parallel_embedding=False,
    shared_head=False,
):
    """Writes the output of TensorRT-LLM's converter for the checkpoint in `source` and this number
    of ranks."""
    tensors = load_file(source / "model.safetensors")
    target.mkdir()
    for rank in range(ranks):
        rank_tensors = legacy_rank(
            tensors, config, ranks, rank, first_generation, parallel_embedding, shared_head
        )
        save_file(rank_tensors, target / f"rank{rank}.safetensors")
    common = {
        "architecture": config.architectures[0],
        "dtype": "float32",
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "use_parallel_embedding": parallel_embedding,
        "embedding_sharding_dim": 0,
    }
    if config.model_type == "opt":
        own = {
            "hidden_act": "relu",
            "position_embedding_type": "learned_absolute",
            "do_layer_norm_before": config.do_layer_norm_before,
        }
    else:
        rope = config.rope_parameters
        own = {
            "num_key_value_heads": config.num_key_value_heads,
            "head_size": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "hidden_act": "silu",
            "norm_epsilon": config.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "rotary_base": rope["rope_theta"],
            "rotary_scaling": {"type": "linear", "factor": rope["factor"]}
            if "factor" in rope
            else None,
            "attn_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
        }
    (target / "config.json").write_text(json.dumps(common | own))


def legacy_rank(tensors, config, ranks, rank, first_generation, parallel_embedding, shared_head):
    opt = config.model_type == "opt"
    stem = "model.decoder" if opt else "model"
    embeddings = "transformer.embedding" if first_generation else "transformer"
    words = tensors[f"{stem}.embed_tokens.weight"]
    kept = divided(padded(words, ranks), ranks, rank) if parallel_embedding else words.clone()
    rank_tensors = {f"{embeddings}.vocab_embedding.weight": kept}
    if not shared_head:
        head = tensors.get("lm_head.weight", words)
        rank_tensors["lm_head.weight"] = divided(padded(head, ranks), ranks, rank).clone()
    if opt:
        rank_tensors[f"{embeddings}.position_embedding.weight"] = tensors[
            f"{stem}.embed_positions.weight"
        ][2:].contiguous()
    names = {
        "input_layernorm": ("self_attn_layer_norm" if opt else "input_layernorm", None),
        "post_layernorm": ("final_layer_norm" if opt else "post_attention_layernorm", None),
        "attention.dense": (f"self_attn.{'out' if opt else 'o'}_proj", 1),
        "mlp.fc": ("fc1" if opt else "mlp.gate_proj", 0),
        "mlp.proj": ("fc2" if opt else "mlp.down_proj", 1),
    }
    if not opt:
        names["mlp.gate"] = ("mlp.up_proj", 0)
        rank_tensors["transformer.layers.0.attention.rotary_inv_freq"] = torch.ones(4)
    for kind in ("weight", "bias"):
        final = tensors.get(f"{stem}.{'final_layer_norm' if opt else 'norm'}.{kind}")
        if final is not None:
            rank_tensors[f"transformer.ln_f.{kind}"] = final
        for i in range(config.num_hidden_layers):
            name = f"{stem}.layers.{i}"
            legacy = f"transformer.layers.{i}"
            if f"{name}.self_attn.q_proj.{kind}" in tensors:
                rank_tensors[f"{legacy}.attention.qkv.{kind}"] = qkv_of(
                    tensors, f"{name}.self_attn", config, ranks, rank, kind
                )
            for theirs, (ours, split) in names.items():
                tensor = tensors.get(f"{name}.{ours}.{kind}")
                if tensor is not None:
                    whole = split is None or (kind == "bias" and split == 1)
                    rank_tensors[f"{legacy}.{theirs}.{kind}"] = (
                        tensor if whole else divided(tensor, ranks, rank, split)
                    )
    return rank_tensors


@torch.inference_mode()
def logits(config, weights, prompt):
    shape = (16, config.layers, 2, config.kv_heads, 8, config.head_dim)
    runner = ScatteredRunner(Decoder.from_weights(config, weights), shape, [prompt], torch.float32)
    runner.step((0, 0, 20))
    runner.step((0, 20, 30))
    return runner.all_logits(0)


def read_both(source, target):
    """(decoder's config, weights) of the Hugging Face and of the legacy checkpoint."""
    config = decoder_config(read_json(source / "config.json"))
    legacy = decoder_config(legacy_config(target, read_json(target / "config.json")))
    whole = (config, read_weights(source, config, torch.float32))
    return whole, (legacy, read_legacy_weights(target, legacy, torch.float32))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_round_trip_gives_the_same_logits(name, ranks, tmp_path):
    config = CONFIGS[name]
    save_random(config, tmp_path / "hf")
    assert not is_legacy(tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", config, ranks)
    assert is_legacy(tmp_path / "legacy")
    (ours, weights), (theirs, again) = read_both(tmp_path / "hf", tmp_path / "legacy")
    for parameter, tensor in weights.items():
        skipped = 2 if parameter == "positions.weight" else 0
        assert torch.equal(again[parameter][skipped:], tensor[skipped:]), parameter
    prompt = torch.randint(3, ours.vocab_size, (30,))
    assert torch.equal(logits(theirs, again, prompt), logits(ours, weights, prompt))


@pytest.mark.parametrize("name, how", [
    ("opt", {"first_generation": True}),
    ("opt", {"shared_head": True, "parallel_embedding": True}),
    ("llama", {"parallel_embedding": True}),
])  # fmt: skip
def test_names_and_divisions_that_changed(name, how, tmp_path):
    config = CONFIGS[name]
    save_random(config, tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", config, 2, **how)
    (ours, weights), (theirs, again) = read_both(tmp_path / "hf", tmp_path / "legacy")
    assert theirs.tied_embeddings == how.get("shared_head", False)
    prompt = torch.randint(3, ours.vocab_size, (30,))
    assert torch.equal(logits(theirs, again, prompt), logits(ours, weights, prompt))


def test_a_checkpoint_of_two_ranks_serves_four(tmp_path):
    config = CONFIGS["llama, biases, head size"]
    save_random(config, tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", config, 2)
    (ours, _), (theirs, _) = read_both(tmp_path / "hf", tmp_path / "legacy")
    for rank in range(4):
        expected = read_weights(tmp_path / "hf", ours, torch.float32, rank, 4)
        read = read_legacy_weights(tmp_path / "legacy", theirs, torch.float32, rank, 4)
        assert (
            len(read) == len(expected)
            and read["layers.0.mlp.up.weight"].shape[0] == 2 * Shard(ours, 4).mlp_size
        )
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def legacy(tmp_path):
    save_random(CONFIGS["llama"], tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", CONFIGS["llama"], 2)
    return tmp_path / "legacy"


def read(directory, **changes):
    config = read_json(directory / "config.json") | changes
    (directory / "config.json").write_text(json.dumps(config))
    read_legacy_weights(directory, decoder_config(legacy_config(directory, config)), torch.float32)


@pytest.mark.parametrize("changes, message", [
    ({"architecture": "GPTForCausalLM"}, "'GPTForCausalLM' is not supported"),
    ({"mapping": {"tp_size": 2, "pp_size": 2}}, "pp_size"),
    ({"mapping": {"tp_size": 4}}, "tp_size is 4, but .* the files of 2 ranks"),
    ({"quantization": {"quant_algo": "FP8"}}, "quant_algo"),
    ({"position_embedding_type": "rope_gptj"}, "'rope_gptj' is not supported"),
    ({"moe": {"num_experts": 8}}, "mixtures of experts"),
    ({"num_hidden_layers": 3}, "missing tensors for LlamaForCausalLM: model.layers.2"),
    ({"num_hidden_layers": 1}, "unexpected tensors for LlamaForCausalLM: transformer.layers.1"),
    ({"intermediate_size": 130}, "has the shape"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(changes, message, legacy):
    with pytest.raises(SettingError, match=message) as error:
        read(legacy, **changes)
    assert error.value.setting == "--checkpoint"


def test_damaged_files_are_refused(legacy):
    read(legacy)
    tensors = load_file(legacy / "rank1.safetensors")
    del tensors["transformer.layers.0.mlp.fc.weight"]
    save_file(tensors, legacy / "rank1.safetensors")
    with pytest.raises(
        SettingError, match=r"layers\.0\.mlp\.fc\.weight is in rank0.* missing in another"
    ):
        read(legacy)
    (legacy / "rank1.safetensors").write_bytes(b"nothing")
    with pytest.raises(SettingError, match=r"rank1\.safetensors cannot be read"):
        read(legacy)


def test_opt_has_one_epsilon(tmp_path):
    save_random(CONFIGS["opt"], tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", CONFIGS["opt"], 1)
    with pytest.raises(SettingError, match="norm_epsilon"):
        read(tmp_path / "legacy", norm_epsilon=1e-6)


def test_what_a_legacy_config_leaves_out_is_as_tensorrt_llm_has_it(tmp_path):
    save_random(CONFIGS["llama"], tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", CONFIGS["llama"], 1)
    config = read_json(tmp_path / "legacy" / "config.json") | {"architecture": "MistralForCausalLM"}
    for key in ("norm_epsilon", "hidden_act", "num_key_value_heads"):
        del config[key]
    decoder = decoder_config(legacy_config(tmp_path / "legacy", config) | {"sliding_window": None})
    assert (decoder.norm_eps, decoder.activation, decoder.kv_heads) == (1e-5, "gelu", decoder.heads)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_checkpoints_give_the_same_engine(name, tmp_path):
    save_random(CONFIGS[name], tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", CONFIGS[name], 2)
    logits = []
    for kind in ("hf", "legacy"):
        build_engine(tmp_path / kind, tmp_path / "engine")
        engine = open_engine(tmp_path / "engine")
        batch = random_batches(engine.manifest.decoder, "cpu")[0]
        handle = register_pool(torch.zeros(engine.kv_shape(batch.block_table.numel(), 16)))
        logits.append(engine.forward(batch, handle))
        release_pool(handle)
    assert torch.equal(*logits)
