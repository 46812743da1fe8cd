"""Layers of decoders as TensorRT networks, built and run by a twin of our library: the same logits
for any batch."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, OPTConfig, Qwen3Config

pytest.importorskip("triton")
from pensieve.builder import build
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Rotary
from pensieve.builder.checkpoints.hugging_face import read_json, read_weights
from pensieve.builder.inductor.compile_worker import report
from pensieve.builder.layers.parts import LayerInputs
from pensieve.builder.manifest import PLAN, files_digest
from pensieve.builder.model import Decoder
from pensieve.builder.parity import CHUNK, check_parity, check_ranks, random_batches
from pensieve.builder.tensorrt import compile as compile_tensorrt
from pensieve.builder.tensorrt import installed
from pensieve.builder.tensorrt import package as tensorrt_package
from pensieve.plugins.attention import fp8_pool
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    RanksParted,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.plugins.torch_ops import pool_of, register_pool, release_pool
from pensieve.scheduler.types import InvariantError, SettingError
from tests.models import LLAMA_SHAPE, OPT_SHAPE, save_random, tiny_checkpoint, tiny_config
from tests.tensorrt.twin import COMPUTE, STREAM, TwinLibrary, values_at

CONFIGS = {
    "llama": LlamaConfig(**LLAMA_SHAPE),
    "llama, biases, tied, gelu_tanh": LlamaConfig(
        **LLAMA_SHAPE,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    ),
    "llama, relu": LlamaConfig(**LLAMA_SHAPE, hidden_act="relu"),
    "qwen3": Qwen3Config(**LLAMA_SHAPE, head_dim=32, tie_word_embeddings=True),
    "opt": OPTConfig(**OPT_SHAPE),
    "opt, gelu": OPTConfig(**OPT_SHAPE, activation_function="gelu"),
    "opt, post norm, projected": OPTConfig(
        **OPT_SHAPE, do_layer_norm_before=False, word_embed_proj_dim=32
    ),
}


@pytest.fixture
def library(monkeypatch):
    """The twin, in the place of the library; kernels and streams are not asked for."""
    twin = TwinLibrary()

    class Kernels:
        def __init__(self, library, kv, dtype, config, ranks, sums):
            self._pool = kv.tensor
            self._all_reduce = None if sums is None else sums.call
            twin.norms = config.norm_eps, config.norm == "rms"

        def of_step(self):
            twin.step.pool = self._pool
            twin.step.all_reduce = self._all_reduce
            return 1, None

    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(tensorrt_package, "_PoolKernels", Kernels)
    monkeypatch.setattr(tensorrt_package, "ALIGNMENT", 1)  # torch aligns to 64 bytes on the CPU
    monkeypatch.setattr(
        tensorrt_package, "memory_at", lambda place, shape, dtype: values_at(place, dtype, shape)
    )
    for module in (compile_tensorrt, tensorrt_package, installed):
        monkeypatch.setattr(module, "load_library", lambda: twin)
    original = tensorrt_package.TensorRTLayers.forward

    def forward(self, x, change, inputs):
        twin.step.segments = inputs.batch.segments  # the library has them in its work list
        return original(self, x, change, inputs)

    monkeypatch.setattr(tensorrt_package.TensorRTLayers, "forward", forward)
    return twin


def saved(name, directory, dtype):
    save_random(CONFIGS[name], directory)
    config = decoder_config(read_json(directory / "config.json"))
    return config, read_weights(directory, config, dtype)


def packed(directory, config, weights):
    """The package that runs a plan."""
    path = directory / PLAN
    path.write_bytes(compile_tensorrt.build_plan(config, weights))
    return tensorrt_package.load_decoder(path, config, weights)


@pytest.fixture
def llama(tmp_path):
    """(decoder's config, weights) of a tiny Llama."""
    return saved("llama", tmp_path, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_computes_what_the_decoder_does(name, dtype, library, tmp_path):
    config, weights = saved(name, tmp_path, dtype)
    parity = check_parity(packed(tmp_path, config, weights), config, weights)
    if dtype == torch.float32:
        assert parity.logits < 1e-5 and parity.kv < 1e-5


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_plan_works_in_a_pool_in_eight_bits(name, library, tmp_path):
    """The plan does not know the pool's form. One rounding of a code that differs moves few
    logits, and those little."""
    config, weights = saved(name, tmp_path, torch.float32)
    package = packed(tmp_path, config, weights)
    decoder = Decoder.from_weights(config, weights)
    batches = random_batches(config, "cpu")
    slots = max(int(batch.block_table.max()) for batch in batches) + 1
    width = fp8_pool.pool_width(config.head_dim, fp8_pool.DTYPE)
    shape = (slots, config.layers, 2, config.kv_heads, CHUNK, width)
    handles = [register_pool(torch.zeros(shape, dtype=fp8_pool.DTYPE)) for _ in range(2)]
    try:
        ours, exact = (
            torch.cat([run(batch, handle) for batch in batches])
            for run, handle in zip((package, decoder), handles, strict=True)
        )
        torch.testing.assert_close(ours, exact, rtol=0, atol=0.01 * exact.abs().max().item())
    finally:
        for handle in handles:
            release_pool(handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_plan_serves_all_ranks(name, dtype, library, tmp_path):
    save_random(CONFIGS[name], tmp_path)
    config = decoder_config(read_json(tmp_path / "config.json"))
    weights = [dict(read_weights(tmp_path, config, dtype, rank, 2)) for rank in range(2)]
    path = tmp_path / PLAN
    path.write_bytes(compile_tensorrt.build_plan(config, weights[0], ranks=2))
    decoders = [tensorrt_package.load_decoder(path, config, own, 2) for own in weights]
    parity = check_ranks(decoders, config, weights)
    if dtype == torch.float32:
        assert parity.logits < 1e-5 and parity.kv < 1e-5


@pytest.fixture
def halves(tmp_path):
    """(decoder's config, weights of each of two ranks) of a tiny Llama."""
    config, _ = saved("llama", tmp_path, torch.float32)
    return config, [dict(read_weights(tmp_path, config, torch.float32, i, 2)) for i in range(2)]


@pytest.mark.parametrize("built, loaded", [(1, 2), (2, 1)])
def test_a_plan_for_another_number_of_ranks_is_named(built, loaded, library, halves, tmp_path):
    config, parts = halves
    weights = {1: read_weights(tmp_path, config, torch.float32), 2: parts[0]}
    (tmp_path / PLAN).write_bytes(compile_tensorrt.build_plan(config, weights[built], ranks=built))
    with pytest.raises(RuntimeError, match=r"attention\.\w+\.weight .* another model or number of"):
        tensorrt_package.load_decoder(tmp_path / PLAN, config, weights[loaded], loaded)
    gc.collect()
    assert not library.contexts


def test_a_sum_that_fails_is_the_error_of_the_step(library, halves, tmp_path):
    config, parts = halves
    (tmp_path / PLAN).write_bytes(compile_tensorrt.build_plan(config, parts[0], ranks=2))
    decoder = tensorrt_package.load_decoder(tmp_path / PLAN, config, parts[0], 2)
    batch = random_batches(config, "cpu")[0]
    x = torch.zeros(len(batch.slots), config.hidden_size)
    pool = torch.zeros(batch.block_table.numel(), config.layers, 2, 1, 16, config.head_dim)
    handle = register_pool(pool)
    given = LayerInputs(batch, decoder.rotary(batch.positions), handle)

    class Parted(ThreadRanks):
        def all_reduce(self, x, out=None):
            raise RanksParted("of 2 ranks' call 0 there is: rank 0")

    try:
        with pytest.raises(InvariantError, match="need the step's stream, and a group of ranks"):
            decoder.layers[0](x, None, given)
        register_group(TENSOR_PARALLEL, Parted(2))
        with pytest.raises(RanksParted, match="there is: rank 0"):
            decoder.layers[0](x, None, given)
    finally:
        release_group(TENSOR_PARALLEL)
        release_pool(handle)


def run_once(package, config, batch):
    pool = torch.zeros(
        batch.block_table.numel(), config.layers, 2, config.kv_heads, 16, config.head_dim
    )
    handle = register_pool(pool)
    try:
        return package(batch, handle)
    finally:
        release_pool(handle)


def test_generation_and_prompts_have_profiles(library, llama, tmp_path):
    config, weights = llama
    package = packed(tmp_path, config, weights)
    batch = random_batches(config, "cpu")[0]
    run_once(package, config, batch)
    many = torch.zeros(300, dtype=torch.int32)
    run_once(package, config, replace(batch, token_ids=many, positions=many, slots=many - 1))
    assert [context.steps for context in library.contexts] == [config.layers, config.layers]
    too_many = torch.zeros(5000, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="up to 4096 tokens a step, not 5000"):
        run_once(
            package,
            config,
            replace(batch, token_ids=too_many, positions=too_many, slots=too_many - 1),
        )


def test_a_step_that_samples_nothing_has_no_logits(library, llama, tmp_path):
    config, weights = llama
    batch = random_batches(config, "cpu")[0]
    nothing = replace(batch, sample_rows=batch.sample_rows[:0])
    assert run_once(packed(tmp_path, config, weights), config, nothing).shape == (
        0,
        config.vocab_size,
    )


def test_contexts_are_freed_with_their_package(library, llama, tmp_path):
    config, weights = llama
    package = packed(tmp_path, config, weights)
    del package
    gc.collect()
    assert [context.freed for context in library.contexts] == [True, True]


def test_a_step_that_fails_raises(library, llama, tmp_path):
    config, weights = llama
    package = packed(tmp_path, config, weights)
    library.fails = frozenset(["enqueue_layers"])
    with pytest.raises(RuntimeError, match="TensorRT cannot do it"):
        run_once(package, config, random_batches(config, "cpu")[0])
    (tmp_path / PLAN).write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="TensorRT cannot do it"):
        tensorrt_package.load_decoder(tmp_path / PLAN, config, weights)


def test_times_are_kept_between_builds(library, llama, tmp_path):
    config, weights = llama
    cache = tmp_path / "deep" / "times"
    for builds in (1, 2):
        library.__init__()
        compile_tensorrt.build_plan(config, weights, workspace=2**30, cache=cache)
        assert cache.read_bytes() == b"one build;" * builds
    assert library.workspace == 2**30 and list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize(
    "function", ["network_new", "input", "constant", "layer", "plugin", "output", "build"]
)
def test_what_tensorrt_refuses_is_a_setting_error(function, library, tmp_path):
    library.fails = frozenset([function])
    with pytest.raises(SettingError, match=r"^--backend: TensorRT cannot do it"):
        compile_tensorrt.build_plan(*saved("qwen3", tmp_path, torch.float32))


def test_bfloat16_needs_tensorrt_10(library, llama):
    config, weights = llama
    narrow = {name: tensor.bfloat16() for name, tensor in weights.items()}
    with pytest.raises(
        SettingError,
        match=r"^--dtype: TensorRT 8\.5\.3 has no bfloat16: use float16, or install 10",
    ):
        compile_tensorrt.build_plan(config, narrow)
    library.version = (10, 0, 0)
    assert compile_tensorrt.build_plan(config, narrow)


def test_experts_are_refused(tmp_path):
    tiny_checkpoint("mixtral", tmp_path)
    with pytest.raises(
        SettingError,
        match=r"^--backend: tensorrt's engines with experts \(Mixtral.*do not exist yet",
    ):
        installed.check_decoder(decoder_config(read_json(tmp_path / "config.json")), "float16")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"windows": (16, 0)}, "sliding windows"),
        ({"windows": (16, 0), "sinks": True}, "sinks"),
        ({"norm_results": True}, "norms behind attention and MLP"),
        ({"norm_plus_one": True}, r"norms by 1 \+ weight"),
        ({"window_rotary": Rotary(16, 1e6)}, "several rotary embeddings"),
        ({"rotary": Rotary(16, 1e4, length=1.2)}, "scores scaled by YaRN"),
        ({"query_size": 24.0}, "scores scaled by query_pre_attn_scalar"),
    ],
)
def test_what_the_network_has_not_is_refused(change, named):
    config = decoder_config(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(
        SettingError, match=rf"^--backend: tensorrt's engines with {named} \(Llama.*do not exist"
    ):
        installed.check_decoder(replace(config, **change), "float16")


@pytest.mark.parametrize(
    ("weights", "quantised", "named"),
    [
        ("fp8", {}, "FP8"),
        ("same", {"quant_method": "fp8"}, "FP8"),
        ("same", {"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4"),
    ],
)
def test_weights_in_fewer_bits_are_refused_before_they_are_read(
    weights, quantised, named, library, tmp_path, monkeypatch
):
    """The checkpoint has no weights at all."""
    monkeypatch.setattr(build, "check_settings", lambda *_: None)  # this machine has no GPU
    config = tiny_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    if quantised:
        config.quantization_config = quantised
    config.save_pretrained(tmp_path / "hf")
    refused = rf"^--backend: tensorrt's engines with weights in {named} do not exist yet"
    with pytest.raises(SettingError, match=refused):
        build_engine(
            tmp_path / "hf",
            tmp_path / "engine",
            backend="tensorrt",
            dtype="float16",
            device="cuda",
            weights=weights,
        )


def test_an_old_tensorrt_is_refused(library):
    library.version = (8, 4, 1)
    with pytest.raises(
        SettingError, match=r"^--backend: TensorRT 8\.4\.1 is too old: install 8\.5 or later"
    ):
        installed.tensorrt_version()
    library.version = (8, 5, 0)
    assert installed.tensorrt_version() == "8.5.0"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_an_engine_in_the_making_is_compiled_tried_and_compared(
    kind, ranks, library, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_checkpoint(kind, tmp_path / "hf")
    build_engine(
        tmp_path / "hf",
        tmp_path / "engine",
        backend="reference",
        dtype="float16",
        tensor_parallel=ranks,
    )
    report(partial(compile_tensorrt.compile_engine, tmp_path / "engine", None))
    *stages, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [stage["stage"] for stage in stages] == [
        "compiling",
        "loading",
        "comparing with the reference",
    ]
    compiled = last["compiled"]
    path = tmp_path / "engine" / PLAN
    assert (
        compiled["package"] == files_digest([path])
        and compiled["package_bytes"] == path.stat().st_size
    )
    assert 0 < compiled["parity"]["logits"] <= 2 * compiled["parity"]["logits_eager"]
    assert (tmp_path / "cache" / "pensieve" / "tensorrt.timing").exists()


def test_an_engine_that_computes_something_else_is_refused(library, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(COMPUTE, "add", lambda x, y: torch.add(x, y, alpha=1.01))
    tiny_checkpoint("llama", tmp_path / "hf")
    build_engine(tmp_path / "hf", tmp_path / "engine", backend="reference")
    report(partial(compile_tensorrt.compile_engine, tmp_path / "engine", 2**20))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "logits are off by" in last["refused"]


def test_a_step_names_all_memory_that_the_library_works_in():
    """`PensieveStep`, field by field."""
    pool = torch.zeros(2, 3, 2, 1, 4, 16)
    from pensieve.plugins.attention.kernel import make_work_list
    from pensieve.plugins.attention.work_list import Capacity

    work = make_work_list(Capacity(64, 2, 128), 4, 2, 64, torch.float16, "cpu")
    step = tensorrt_package.step_of(pool, work, [0, 7, 0])
    assert (
        step.pool == pool.data_ptr()
        and step.covered == work.covered.data_ptr()
        and step.longest == 64
    )
    assert list(step.items) == [items.data_ptr() for items in work.items]
    assert list(step.arrivals) == [arrivals.data_ptr() for arrivals in work.arrivals]
    assert [step.gates[layer] for layer in range(3)] == [None, 7, None]
    assert not step.all_reduce  # of one rank


def test_a_pool_keeps_the_events_behind_its_gates():
    handle = register_pool(torch.zeros(2, 1, 2, 1, 4, 16), events={0: 5})
    assert pool_of(handle).events == {0: 5}
    release_pool(handle)
    with pytest.raises(KeyError):
        pool_of(handle)
