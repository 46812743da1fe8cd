"""Shards of a decoder on the threads of one process: together they are the decoder, however they
are cut."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.export import Dim
from torch.fx.experimental import _config
from transformers import LlamaConfig, MixtralConfig, OPTConfig, Qwen3Config, Qwen3MoeConfig

from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.checkpoints.hugging_face import parameter_shapes, read_json, read_weights
from pensieve.builder.inductor.compile import traced_batch
from pensieve.builder.model import Decoder
from pensieve.builder.random_weights import random_weights
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.scheduler.types import SettingError
from tests.models import (
    LLAMA_SHAPE,
    OPT_SHAPE,
    QWEN3_MOE_SHAPE,
    ScatteredRunner,
    save_random,
    tiny_config,
)

from .test_random_weights import CONFIGS as RANDOM_CONFIGS

CONFIGS = {
    "llama": LlamaConfig(**LLAMA_SHAPE),  # 4 heads, 2 KV heads
    "llama, 8 heads, odd vocabulary": LlamaConfig(
        **LLAMA_SHAPE | {"num_attention_heads": 8, "vocab_size": 157}
    ),
    "llama, biases, tied": LlamaConfig(
        **LLAMA_SHAPE | {"vocab_size": 157},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "llama, gelu": LlamaConfig(**LLAMA_SHAPE, hidden_act="gelu_pytorch_tanh"),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, head_dim=32, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**LLAMA_SHAPE, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**QWEN3_MOE_SHAPE),
    "gemma3": tiny_config("gemma3"),
    "gpt-oss": tiny_config("gpt-oss"),
    "opt": OPTConfig(**OPT_SHAPE),
    "opt, untied": OPTConfig(**OPT_SHAPE, tie_word_embeddings=False),
    "opt, post norm, projected": OPTConfig(
        **OPT_SHAPE | {"vocab_size": 157}, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "head_dim": 16} | LLAMA_SHAPE
LENGTHS = (37, 60)
STEPS = (  # (seat, start, end) spans: prefill, appended pieces and single tokens, in any mixture
    ((0, 0, 10),),
    ((1, 0, 33), (0, 10, 11)),
    ((0, 11, 12), (1, 33, 50)),
    ((0, 12, 37), (1, 50, 51)),
    ((1, 51, 60),),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[2, 4])
def group(request):
    """A registered group of this many ranks on threads."""
    ranks = ThreadRanks(request.param)
    register_group(TENSOR_PARALLEL, ranks)
    yield ranks
    release_group(TENSOR_PARALLEL)


def saved(config, directory):
    save_random(config, directory)
    return decoder_config(read_json(directory / "config.json"))


def kv_shape(config, ranks):
    return (64, config.layers, 2, Shard(config, ranks).kv_heads, 4, config.head_dim)


@torch.inference_mode()
def logits(forward, kv_shape, prompts, dtype):
    """Logits of all positions of all prompts, computed in STEPS over a new pool."""
    runner = ScatteredRunner(forward, kv_shape, prompts, dtype)
    for spans in STEPS:
        runner.step(*spans)
    return torch.cat([runner.all_logits(seat) for seat in range(len(prompts))])


def logits_of_one(config, weights, prompts, dtype):
    return logits(Decoder.from_weights(config, weights), kv_shape(config, 1), prompts, dtype)


def logits_of_all(group, config, weights_of, prompts, dtype):
    """The logits of each rank, with weights from weights_of(rank)."""

    def work(rank):
        decoder = Decoder.from_weights(config, weights_of(rank), group.ranks)
        return logits(decoder, kv_shape(config, group.ranks), prompts, dtype)

    return group.run(work)


def prompts_for(config):
    return [torch.randint(3, config.vocab_size, (length,)) for length in LENGTHS]


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_together_give_one_rank_s_logits(name, group, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    prompts = prompts_for(config)
    expected = logits_of_one(
        config, read_weights(tmp_path, config, torch.float32), prompts, torch.float32
    )

    def weights_of(rank):
        return read_weights(tmp_path, config, torch.float32, rank, group.ranks)

    outputs = logits_of_all(group, config, weights_of, prompts, torch.float32)
    assert outputs[0].shape == (sum(LENGTHS), config.vocab_size) and outputs[0].is_contiguous()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert (outputs[0] - expected).norm() <= 1e-5 * expected.norm()
    assert (outputs[0] - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt, post norm, projected"])
def test_bfloat16_is_as_near_to_float32_as_one_rank_s(name, group, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    prompts = prompts_for(config)
    exact = logits_of_one(
        config, read_weights(tmp_path, config, torch.float32), prompts, torch.float32
    )
    naive = logits_of_one(
        config, read_weights(tmp_path, config, torch.bfloat16), prompts, torch.bfloat16
    )

    def weights_of(rank):
        return read_weights(tmp_path, config, torch.bfloat16, rank, group.ranks)

    for logits in logits_of_all(group, config, weights_of, prompts, torch.bfloat16):
        assert logits.dtype == torch.float32
        assert (logits - exact).norm() <= 2 * (naive - exact).norm()


@pytest.mark.parametrize("name", RANDOM_CONFIGS)
def test_random_weights_are_the_same_model_on_any_number_of_ranks(name, group):
    config = decoder_config(RANDOM_CONFIGS[name] | {"vocab_size": 157})
    prompts = prompts_for(config)
    expected = logits_of_one(
        config, random_weights(config, torch.float32, "cpu", 3), prompts, torch.float32
    )

    def weights_of(rank):
        return random_weights(config, torch.float32, "cpu", 3, rank, group.ranks)

    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(1).items()}
    assert shapes == parameter_shapes(config, group.ranks)
    # nothing whole is kept
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in weights_of(1).values())
    for logits in logits_of_all(group, config, weights_of, prompts, torch.float32):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_ranks_hold_the_sinks_of_their_heads(group):
    config = replace(decoder_config(LLAMA), windows=(6, 0), sinks=True)
    whole = random_weights(config, torch.float32, "cpu", 3)
    whole |= {
        f"layers.{i}.attention.sinks": torch.randn(config.heads) for i in range(config.layers)
    }
    prompts = prompts_for(config)
    expected = logits_of_one(config, whole, prompts, torch.float32)
    for change in ({"windows": ()}, {"windows": (6, 6)}):
        other = logits_of_one(replace(config, **change), whole, prompts, torch.float32)
        assert (other - expected).norm() > 1e-2 * expected.norm()

    def weights_of(rank):
        own = random_weights(config, torch.float32, "cpu", 3, rank, group.ranks)
        sinks = {
            name: whole[name].chunk(group.ranks)[rank] for name in own if name.endswith("sinks")
        }
        assert len(sinks) == config.layers and all(
            own[name].shape == one.shape for name, one in sinks.items()
        )
        return own | sinks

    for logits in logits_of_all(group, config, weights_of, prompts, torch.float32):
        assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_what_each_rank_reads(tmp_path):
    config = saved(CONFIGS["llama, biases, tied"], tmp_path)  # heads of 16
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1"
    q, k, v = (stored[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (stored[f"{layer}.mlp.{x}_proj.bias"] for x in ("gate", "up"))
    for rank in range(4):
        read = read_weights(tmp_path, config, torch.float32, rank, 4)
        assert {name: tuple(tensor.shape) for name, tensor in read.items()} == parameter_shapes(
            config, 4
        )
        assert all(tensor.is_contiguous() for tensor in read.values())
        heads, kv = slice(16 * rank, 16 * rank + 16), slice(rank // 2 * 16, rank // 2 * 16 + 16)
        wide = slice(32 * rank, 32 * rank + 32)
        assert torch.equal(
            read["layers.1.attention.qkv.weight"], torch.cat((q[heads], k[kv], v[kv]))
        )
        assert torch.equal(read["layers.1.mlp.up.bias"], torch.cat((gate[wide], up[wide])))
        out, down = (stored[f"{layer}.{x}.weight"] for x in ("self_attn.o_proj", "mlp.down_proj"))
        assert torch.equal(read["layers.1.attention.out.weight"], out[:, heads])
        assert torch.equal(read["layers.1.mlp.down.weight"], down[:, wide])
        bias = stored[f"{layer}.self_attn.o_proj.bias"]
        assert torch.equal(
            read["layers.1.attention.out.bias"], bias if rank == 0 else torch.zeros_like(bias)
        )
        tokens = stored["model.embed_tokens.weight"][40 * rank : 40 * rank + 40]
        assert torch.equal(read["embed.weight"][: len(tokens)], tokens)
        assert (
            read["embed.weight"].shape == (40, 64) and not read["embed.weight"][len(tokens) :].any()
        )
        assert torch.equal(read["norm.weight"], stored["model.norm.weight"])


def test_the_columns_of_each_expert_that_a_rank_reads(tmp_path):
    config = saved(CONFIGS["mixtral"], tmp_path)  # experts 128 wide
    stored = load_file(tmp_path / "model.safetensors")
    gates, downs, ups = (
        [stored[f"model.layers.1.block_sparse_moe.experts.{i}.w{n}.weight"] for i in range(4)]
        for n in (1, 2, 3)
    )
    for rank in range(2):
        read = read_weights(tmp_path, config, torch.float32, rank, 2)
        wide = slice(64 * rank, 64 * rank + 64)
        fused = [part[wide] for pair in zip(gates, ups, strict=True) for part in pair]
        assert torch.equal(read["layers.1.mlp.up.weight"], torch.cat(fused))
        assert torch.equal(
            read["layers.1.mlp.down.weight"], torch.cat([down[:, wide] for down in downs])
        )
        assert torch.equal(
            read["layers.1.mlp.router.weight"],
            stored["model.layers.1.block_sparse_moe.gate.weight"],
        )


def test_more_ranks_than_the_vocabulary_fills(tmp_path):
    config = saved(LlamaConfig(**LLAMA_SHAPE | {"vocab_size": 5, "pad_token_id": None}), tmp_path)
    read = [
        read_weights(tmp_path, config, torch.float32, rank, 4)["head.weight"] for rank in range(4)
    ]
    assert [int(rows.any(dim=1).sum()) for rows in read] == [2, 2, 1, 0] and {
        len(rows) for rows in read
    } == {2}


@pytest.mark.parametrize(
    "change, ranks, possible",
    [
        ({}, 3, "1 or 2 or 4"),
        ({}, 8, "1 or 2 or 4"),
        ({}, 0, "1 or 2 or 4"),
        (
            {
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "intermediate_size": 96,
                "head_dim": 16,
            },
            3,
            "1 or 2 or 4",
        ),
        ({"intermediate_size": 130}, 4, "1 or 2"),
    ],
)
def test_what_does_not_divide_is_refused(change, ranks, possible):
    config = decoder_config(LLAMA | change)
    with pytest.raises(SettingError, match=rf"{ranks} ranks.*only among {possible}") as error:
        Decoder(config, ranks)
    assert error.value.setting == "--tensor-parallel"
    with pytest.raises(SettingError, match=f"{ranks} ranks"):
        random_weights(config, torch.float32, "cpu", 0, 0, ranks)
    with pytest.raises(ValueError, match="no rank 1 of 1"):
        Shard(config, 1, 1)


def exported(decoder):
    """Shapes with which engines are compiled: one token, one sample or none are nothing special."""
    batch, differing = traced_batch(torch.device("cpu"))
    with _config.patch(backed_size_oblivious=True):
        return torch.export.export(decoder, (batch, 12345), dynamic_shapes=(differing, Dim.DYNAMIC))


def calls_of(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "name",
    [
        "llama, 8 heads, odd vocabulary",
        "qwen3-moe",
        "gemma3",
        "gpt-oss",
        "opt, post norm, projected",
    ],
)
def test_one_traced_graph_serves_all_ranks(name, group, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    prompts = prompts_for(config)
    weights = [
        read_weights(tmp_path, config, torch.float32, rank, group.ranks)
        for rank in range(group.ranks)
    ]
    expected = logits_of_one(
        config, read_weights(tmp_path, config, torch.float32), prompts, torch.float32
    )
    program = exported(Decoder.from_weights(config, weights[0], group.ranks))
    calls = calls_of(program)
    counts = [
        calls.count(f"pensieve.{name}.default")
        for name in ("vocabulary_embed", "all_reduce", "all_gather")
    ]
    assert counts == [1, 1 + 2 * config.layers, 1]
    modules = [program.module() for _ in weights]  # of rank 0
    for module, own in zip(modules, weights, strict=True):
        module.load_state_dict(dict(own), assign=True)

    def work(rank):
        return logits(modules[rank], kv_shape(config, group.ranks), prompts, torch.float32)

    for rank_logits in group.run(work):
        assert (rank_logits - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_one_rank_calls_no_collective(name, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    calls = calls_of(
        exported(Decoder.from_weights(config, read_weights(tmp_path, config, torch.float32)))
    )
    ours = {call for call in calls if call.startswith("pensieve.")}
    of_the_layers = {
        f"pensieve.{call}.default"
        for call in ("write_kv", "multi_token_attention", "add_norm", "norm")
    }
    assert ours - {"pensieve.silu_gate.default"} == of_the_layers
    assert calls.count("aten.embedding.default") == (1 if config.rotary else 2)
    assert not [call for call in calls if "contiguous" in call or "clone" in call]
