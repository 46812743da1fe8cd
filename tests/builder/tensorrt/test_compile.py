"""Decoders as TensorRT networks, built and run by a TensorRT twin in PyTorch: the same logits for any batch."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, OPTConfig, Qwen3Config

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.checkpoints.hugging_face import read_json, read_weights
from pensieve.builder.inductor.compile_worker import report
from pensieve.builder.manifest import WEIGHTS, files_digest
from pensieve.builder.model import Decoder
from pensieve.builder.parity import random_batches
from pensieve.builder.weights import load_weights
from pensieve.plugins.collectives.protocol import TENSOR_PARALLEL, ThreadRanks, register_group, release_group
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.engine import Engine
from pensieve.scheduler.types import SettingError
from tests.models import LLAMA_SHAPE, OPT_SHAPE, ScatteredRunner, save_random, tiny_checkpoint
from tests.tensorrt import twin

CONFIGS = {
    "llama": LlamaConfig(**LLAMA_SHAPE),
    "llama, biases, tied, gelu": LlamaConfig(
        **LLAMA_SHAPE | {"vocab_size": 157},
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, head_dim=32, tie_word_embeddings=True),
    "opt": OPTConfig(**OPT_SHAPE),
    "opt, post norm, projected": OPTConfig(
        **OPT_SHAPE | {"vocab_size": 157}, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
}
LENGTHS = (37, 60)
STEPS = (  # (seat, start, end) spans: prefill, appended pieces and single tokens, in any mixture
    ((0, 0, 10),),
    ((1, 0, 33), (0, 10, 11)),
    ((0, 11, 12), (1, 33, 50)),
    ((0, 12, 37), (1, 50, 51)),
    ((1, 51, 60),),
)


@pytest.fixture(scope="module", autouse=True)
def ours():
    """Our modules that import TensorRT: (compile_tensorrt, tensorrt_package)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with twin.install():
        from pensieve.builder.tensorrt import compile as compile_tensorrt
        from pensieve.builder.tensorrt import package as tensorrt_package
        from pensieve.plugins.tensorrt import plugins as tensorrt_plugins

        with twin.as_on_a_gpu(tensorrt_plugins), pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensorrt_package, "ALIGNMENT", twin.ALIGNMENT)
            yield compile_tensorrt, tensorrt_package
    torch.set_num_threads(threads)


@pytest.fixture
def llama(tmp_path):
    """(decoder's config, weights) of a tiny Llama."""
    return saved(CONFIGS["llama"], tmp_path)


def saved(config, directory, dtype=torch.float32):
    save_random(config, directory)
    config = decoder_config(read_json(directory / "config.json"))
    return config, read_weights(directory, config, dtype)


def packed(ours, directory, config, weights, ranks=1):
    """A plan in a file, and the package that runs it."""
    compile_tensorrt, tensorrt_package = ours
    path = directory / compile_tensorrt.PLAN
    path.write_bytes(compile_tensorrt.build_plan(config, weights, ranks))
    return path, tensorrt_package.TensorRTPackage(path, config, weights, "cpu")


@torch.inference_mode()
def logits(forward, config, prompts, dtype, ranks=1):
    """Logits of all positions of all prompts, computed in STEPS over a new pool."""
    shape = (64, config.layers, 2, Shard(config, ranks).kv_heads, 4, config.head_dim)
    runner = ScatteredRunner(forward, shape, prompts, dtype)
    for spans in STEPS:
        runner.step(*spans)
    return torch.cat([runner.all_logits(seat) for seat in range(len(prompts))])


def prompts_for(config):
    return [torch.randint(3, config.vocab_size, (length,)) for length in LENGTHS]


def close(ours, theirs):
    return (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_computes_what_the_decoder_computes(name, ours, tmp_path):
    config, weights = saved(CONFIGS[name], tmp_path)
    prompts = prompts_for(config)
    expected = logits(Decoder.from_weights(config, weights), config, prompts, torch.float32)
    _, package = packed(ours, tmp_path, config, weights)
    said = logits(package, config, prompts, torch.float32)
    assert said.shape == (sum(LENGTHS), config.vocab_size) and close(said, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "opt, post norm, projected"])
def test_half_precision_is_as_near_to_float32_as_the_decoder(name, dtype, ours, tmp_path):
    config, exact_weights = saved(CONFIGS[name], tmp_path)
    weights = {name: tensor.to(dtype) for name, tensor in exact_weights.items()}
    prompts = prompts_for(config)
    exact = logits(Decoder.from_weights(config, exact_weights), config, prompts, torch.float32)
    naive = logits(Decoder.from_weights(config, weights), config, prompts, dtype)
    _, package = packed(ours, tmp_path, config, weights)
    said = logits(package, config, prompts, dtype)
    assert said.dtype == torch.float32 and (said - exact).norm() <= 2 * (naive - exact).norm()


@pytest.mark.parametrize("name", ["llama", "llama, biases, tied, gelu", "opt, post norm, projected"])
def test_one_plan_serves_two_ranks(name, ours, tmp_path):
    config, weights = saved(CONFIGS[name], tmp_path)
    prompts = prompts_for(config)
    expected = logits(Decoder.from_weights(config, weights), config, prompts, torch.float32)
    shards = [read_weights(tmp_path, config, torch.float32, rank, 2) for rank in range(2)]
    path, first = packed(ours, tmp_path, config, shards[0], ranks=2)
    packages = (first, ours[1].TensorRTPackage(path, config, shards[1], "cpu"))
    group = ThreadRanks(2)
    register_group(TENSOR_PARALLEL, group)
    try:
        said = group.run(lambda rank: logits(packages[rank], config, prompts, torch.float32, 2))
    finally:
        release_group(TENSOR_PARALLEL)
    assert all(close(one, expected) for one in said)


def test_a_plan_takes_other_weights_of_the_same_names(ours, llama, tmp_path):
    config, weights = llama
    path, _ = packed(ours, tmp_path, config, weights)
    others = {name: tensor.flip(0) for name, tensor in weights.items()}
    prompts = prompts_for(config)
    expected = logits(Decoder.from_weights(config, others), config, prompts, torch.float32)
    assert close(logits(ours[1].TensorRTPackage(path, config, others, "cpu"), config, prompts, torch.float32), expected)
    assert set(twin.PLANS[-1].named) == set(weights)
    with pytest.raises(RuntimeError, match=r"take the weight norm\.weight"):
        ours[1].TensorRTPackage(path, config, others | {"norm.weight": torch.ones(7)}, "cpu")


def test_a_plan_that_lost_a_weight_is_refused(ours, tmp_path, monkeypatch):
    config, weights = saved(CONFIGS["opt"], tmp_path)
    kept = [name for name in weights if name != "layers.0.mlp.up.bias"]
    monkeypatch.setattr(twin.Refitter, "get_all_weights", lambda self: kept)
    with pytest.raises(RuntimeError, match=r"does not take layers\.0\.mlp\.up\.bias"):
        packed(ours, tmp_path, config, weights)


def run_once(package, config, batch):
    pool = torch.zeros(batch.block_table.numel(), config.layers, 2, config.kv_heads, 16, config.head_dim)
    handle = register_pool(pool)
    try:
        return package(*batch, handle)
    finally:
        release_pool(handle)


def test_each_size_of_batch_has_a_context(ours, llama, tmp_path, monkeypatch):
    config, weights = llama
    _, package = packed(ours, tmp_path, config, weights)
    batches = random_batches(config, "cpu")
    contexts = package._engine._contexts
    run_once(package, config, batches[0])
    run_once(package, config, batches[0])
    assert [context._steps for context in contexts] == [2]
    nothing = batches[0]._replace(sample_rows=batches[0].sample_rows[:0])
    assert run_once(package, config, nothing).shape == (0, config.vocab_size)
    assert [context._steps for context in contexts] == [2, 1]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ours[1], "MOST_RECENT", 2)
    for batch in batches[1:4]:
        run_once(package, config, batch)
    assert len(contexts) == 5 and list(package._recent.values()) == contexts[-2:]


def test_a_captured_context_is_the_graph_s_alone(ours, llama, tmp_path, monkeypatch):
    config, weights = llama
    _, package = packed(ours, tmp_path, config, weights)
    first, second = random_batches(config, "cpu")[:2]
    run_once(package, config, first)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run_once(package, config, first)
    with pytest.raises(RuntimeError, match="must have run lately"):
        run_once(package, config, second)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run_once(package, config, first)
    assert [context._steps for context in package._engine._contexts] == [2, 1]


def test_generation_and_prompts_have_profiles(ours, llama, tmp_path):
    config, weights = llama
    _, package = packed(ours, tmp_path, config, weights)
    for batch in random_batches(config, "cpu")[:2]:
        run_once(package, config, batch)
    many = torch.zeros(300, dtype=torch.int32)
    wide = random_batches(config, "cpu")[0]._replace(token_ids=many, positions=many, slots=many - 1)
    run_once(package, config, wide)
    assert [context._profile for context in package._engine._contexts] == [0, 0, 1]
    too_many = torch.zeros(5000, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="up to 4096 tokens a step, not 5000"):
        run_once(package, config, wide._replace(token_ids=too_many, positions=too_many, slots=too_many - 1))


def test_a_step_that_fails_raises(ours, llama, tmp_path, monkeypatch):
    config, weights = llama
    path, package = packed(ours, tmp_path, config, weights)
    monkeypatch.setattr(twin.IExecutionContext, "execute_async_v3", lambda self, stream_handle: False)
    with pytest.raises(RuntimeError, match="cannot run the step"):
        run_once(package, config, random_batches(config, "cpu")[0])
    path.write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="cannot read the plan"):
        ours[1].TensorRTPackage(path, config, weights, "cpu")


def test_times_are_kept_between_builds(ours, llama, tmp_path):
    config, weights = llama
    cache = tmp_path / "deep" / "times"
    for builds in (1, 2):
        ours[0].build_plan(config, weights, workspace=2**30, cache=cache)
        assert cache.read_bytes() == b"one build;" * builds
    limits = {twin.real.MemoryPoolType.WORKSPACE: 2**30}
    assert twin.BUILT[-1][1]._limits == limits
    cache.write_bytes(twin.IBuilderConfig.OTHER_GPU)
    ours[0].build_plan(config, weights, cache=cache)
    assert cache.read_bytes() == b"one build;" and list(cache.parent.iterdir()) == [cache]
    assert twin.BUILT[-1][1]._limits == {}


def test_what_tensorrt_refuses_is_a_setting_error(ours, llama, monkeypatch):
    config, weights = llama
    for cls, name, returned in (
        (twin.Builder, "build_serialized_network", None),
        (twin.IBuilderConfig, "add_optimization_profile", -1),
        (twin.INetworkDefinition, "add_reduce", None),
        (twin.INetworkDefinition, "set_weights_name", False),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, lambda *args, returned=returned: returned)
            with pytest.raises(SettingError, match=r"^--backend: TensorRT"):
                ours[0].build_plan(config, weights)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_an_engine_in_the_making_is_compiled_tried_and_compared(kind, ours, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_checkpoint(kind, tmp_path / "hf")
    manifest = build_engine(tmp_path / "hf", tmp_path / "engine", backend="reference", dtype="bfloat16").manifest
    report(partial(ours[0].compile_engine, tmp_path / "engine", None))
    *stages, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [stage["stage"] for stage in stages] == ["compiling", "loading", "comparing with the reference"]
    compiled, path = last["compiled"], tmp_path / "engine" / ours[0].PLAN
    assert compiled["package"] == files_digest([path]) and compiled["package_bytes"] == path.stat().st_size
    assert 0 < compiled["parity"]["logits"] <= 2 * compiled["parity"]["logits_eager"]
    assert (tmp_path / "cache" / "pensieve" / "tensorrt.timing").exists()

    weights = load_weights(tmp_path / "engine" / WEIGHTS)
    engine = Engine(manifest, ours[1].TensorRTPackage(path, manifest.decoder, weights, "cpu"))
    batch = random_batches(manifest.decoder, "cpu")[0]
    handle = register_pool(torch.zeros(engine.kv_shape(batch.block_table.numel(), 16), dtype=engine.dtype))
    assert engine.forward(*batch, handle).shape == (len(batch.sample_rows), engine.vocab_size)
    release_pool(handle)


def test_an_engine_that_computes_something_else_is_refused(ours, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(twin.ELEMENTWISE, twin.ET.SUM, lambda x, y: torch.add(x, y, alpha=1.01))
    tiny_checkpoint("llama", tmp_path / "hf")
    build_engine(tmp_path / "hf", tmp_path / "engine", backend="reference")
    report(partial(ours[0].compile_engine, tmp_path / "engine", 2**20))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "logits are off by" in last["refused"]
