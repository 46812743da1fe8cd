"""Engines of several ranks: built, each rank opened in one process, and together the engine of one
rank."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.builder import parity
from pensieve.builder.build import build_engine, build_random_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import read_json, read_weights
from pensieve.builder.manifest import WEIGHTS, Manifest, weights_file
from pensieve.builder.model import Decoder
from pensieve.builder.parity import check_ranks, whole_weights
from pensieve.plugins import torch_ops
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.runtime.engine import open_engine
from pensieve.runtime.launch.assemble import assemble
from pensieve.runtime.launch.settings import ServeSettings
from pensieve.scheduler.types import SettingError
from pensieve.scripts.build_engine import main
from tests.compiled import needs_compiler
from tests.models import (
    GEMMA3_SHAPE,
    GPT_OSS_SHAPE,
    LLAMA_SHAPE,
    QWEN3_MOE_SHAPE,
    ScatteredRunner,
    save_random,
    tiny_checkpoint,
)

from .checkpoints.test_tensorrt_llm import CONFIGS as LEGACY_CONFIGS
from .checkpoints.test_tensorrt_llm import write_legacy

LENGTHS = (37, 60)
STEPS = (((0, 0, 10),), ((1, 0, 33), (0, 10, 11)), ((0, 11, 37), (1, 33, 34)), ((1, 34, 60),))
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"]} | GEMMA3_SHAPE
GPT_OSS = {"architectures": ["GptOssForCausalLM"]} | GPT_OSS_SHAPE
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"]} | QWEN3_MOE_SHAPE
# 4 heads, 2 KV heads
LLAMA = {"architectures": ["LlamaForCausalLM"]} | LLAMA_SHAPE | {"vocab_size": 157}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint("llama", directory)
    return directory


@pytest.fixture(scope="module")
def halves(checkpoint):
    """The engine of two ranks, to be left as it is."""
    directory = checkpoint / "engine"
    build_engine(checkpoint, directory, tensor_parallel=2)
    return directory


def logits_of(engine):
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, engine.vocab_size, (length,), generator=generator) for length in LENGTHS
    ]
    runner = ScatteredRunner(engine.forward, engine.kv_shape(64, 4), prompts, engine.kv_dtype)
    for spans in STEPS:
        runner.step(*spans)
    return torch.cat([runner.all_logits(seat) for seat in range(len(prompts))])


def logits_of_ranks(directory, kv_cache_dtype="auto"):
    """The logits of each rank of an engine."""
    ranks = Manifest.read(directory).tensor_parallel
    engines = [
        open_engine(directory, rank=rank, kv_cache_dtype=kv_cache_dtype) for rank in range(ranks)
    ]
    group = ThreadRanks(ranks)
    register_group(TENSOR_PARALLEL, group)
    try:
        return group.run(lambda rank: logits_of(engines[rank]))
    finally:
        release_group(TENSOR_PARALLEL)


def check_equal(outputs, expected, most=1e-5):
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert (outputs[0] - expected).norm() <= most * expected.norm()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_of_a_checkpoint_s_engine_are_one_rank_s(ranks, checkpoint, tmp_path):
    build_engine(checkpoint, tmp_path / "one")
    build_engine(checkpoint, tmp_path / "all", tensor_parallel=ranks)
    check_equal(logits_of_ranks(tmp_path / "all"), logits_of(open_engine(tmp_path / "one")))
    # A sum in another order may give a number the next code.
    in_eight_bits = logits_of(open_engine(tmp_path / "one", kv_cache_dtype="fp8"))
    check_equal(logits_of_ranks(tmp_path / "all", "fp8"), in_eight_bits, most=1e-3)


def test_the_ranks_of_a_random_engine_are_one_rank_s(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    build_random_engine(config, tmp_path / "one", seed=3)
    built = build_random_engine(config, tmp_path / "all", seed=3, tensor_parallel=4)
    assert built.manifest.random_seed == 3
    assert open_engine(tmp_path / "all", rank=3).parameters * 4 == built.manifest.weight_bytes
    check_equal(logits_of_ranks(tmp_path / "all"), logits_of(open_engine(tmp_path / "one")))


def test_a_legacy_checkpoint_s_ranks_are_cut_as_hugging_face_s(tmp_path):
    """With any number of ranks in the checkpoint."""
    save_random(LEGACY_CONFIGS["llama"], tmp_path / "hf")
    write_legacy(tmp_path / "hf", tmp_path / "legacy", LEGACY_CONFIGS["llama"], 2)
    hf = build_engine(
        tmp_path / "hf", tmp_path / "engine", tensor_parallel=4
    ).manifest.parts.weights
    assert len(set(hf)) == 4
    legacy = build_engine(
        tmp_path / "legacy", tmp_path / "engine", tensor_parallel=4
    ).manifest.parts.weights
    assert legacy == hf


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "model", [LLAMA, QWEN3_MOE, GEMMA3, GPT_OSS], ids=["llama", "qwen3-moe", "gemma3", "gpt-oss"]
)
def test_one_package_serves_all_ranks(model, tmp_path):
    """With a single layer, which contains every operation and compiles faster."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(model | {"num_hidden_layers": 1}))
    build_random_engine(config, tmp_path / "one")
    manifest = build_random_engine(
        config, tmp_path / "all", backend="inductor", tensor_parallel=2
    ).manifest
    assert 0 < manifest.compiled.parity.logits < 1e-5 and 0 < manifest.compiled.parity.kv < 1e-5
    check_equal(logits_of_ranks(tmp_path / "all"), logits_of(open_engine(tmp_path / "one")))


def test_the_command_writes_a_file_for_each_rank(checkpoint, tmp_path, capsys):
    arguments = [
        "--checkpoint",
        str(checkpoint),
        "--output",
        str(tmp_path / "engine"),
        "--backend",
        "reference",
    ]
    arguments += ["--tensor-parallel", "2"]
    assert main(arguments) == 0 and "on each of 2 ranks" in capsys.readouterr().out
    assert main(arguments) == 0 and "reused" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "engine").glob("weights*")}
    assert names == {"weights.0.safetensors", "weights.1.safetensors"}
    manifest = Manifest.read(tmp_path / "engine")
    assert (manifest.tensor_parallel, manifest.kv_heads, len(set(manifest.parts.weights))) == (
        2,
        1,
        2,
    )
    assert main([*arguments[:-1], "1"]) == 0 and "replaced" in capsys.readouterr().out
    assert (tmp_path / "engine" / WEIGHTS).exists()


def test_an_opened_rank_is_its_shard(halves):
    engine = open_engine(halves, rank=1)
    stored = load_file(halves / weights_file(1, 2))
    assert engine.parameters == sum(tensor.numel() for tensor in stored.values())
    assert engine.kv_shape(10, 32) == (10, 2, 2, 1, 32, 16)
    weights = engine._decoder.state_dict()
    for name, tensor in stored.items():
        if not weights[name].is_mkldnn:  # packed: no operation compares it
            assert torch.equal(weights[name], tensor)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"no rank {rank} of 2"):
            open_engine(halves, rank=rank)


def test_a_rank_checks_its_own_weights(checkpoint, tmp_path):
    build_engine(checkpoint, tmp_path / "engine", tensor_parallel=2)
    path = tmp_path / "engine" / weights_file(0, 2)
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["norm.weight"][0] += 1
    save_file(weights, path)
    open_engine(tmp_path / "engine", rank=1)
    with pytest.raises(SettingError, match="digest of the weights differs"):
        open_engine(tmp_path / "engine", rank=0)
    path.unlink()
    with pytest.raises(SettingError, match=r"weights\.0\.safetensors cannot be read"):
        open_engine(tmp_path / "engine", rank=0)


def test_there_must_be_room_for_all_ranks(checkpoint, tmp_path, monkeypatch):
    needs = []
    monkeypatch.setattr(
        "pensieve.builder.build._check_room", lambda directory, needed: needs.append(needed)
    )
    monkeypatch.setattr("pensieve.builder.build.ROOM", 0)
    built = build_engine(checkpoint, tmp_path / "engine", tensor_parallel=2)
    assert needs == [2 * built.manifest.weight_bytes]


@pytest.mark.parametrize("ranks", [0, -1, 3, 8])
def test_what_does_not_divide_is_refused(ranks, checkpoint, tmp_path, capsys):
    for source in (
        ["--checkpoint", str(checkpoint)],
        ["--random-weights", "--config", str(checkpoint / "config.json")],
    ):
        arguments = [*source, "--output", str(tmp_path / "engine"), "--tensor-parallel", str(ranks)]
        assert main([*arguments, "--backend", "reference"]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith("build_engine: --tensor-parallel: ")
            and f"{ranks} ranks, only among 1 or 2 or 4" in error
        )
    assert not list(tmp_path.iterdir())


def test_what_needs_all_ranks_refuses_one(halves):
    with pytest.raises(
        SettingError, match=r"--engine: .* 2 ranks, which only `pensieve serve` starts"
    ):
        assemble(ServeSettings(str(halves)))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def shards(request, checkpoint):
    """(config, weights of each of four ranks, one rank's)."""
    config = decoder_config(read_json(checkpoint / "config.json"))
    parts = [dict(read_weights(checkpoint, config, request.param, rank, 4)) for rank in range(4)]
    return config, parts, read_weights(checkpoint, config, request.param)


def decoders(config, parts):
    return [Decoder.from_weights(config, part, len(parts)) for part in parts]


def test_the_whole_is_put_together_again(shards):
    config, parts, whole = shards
    joined = whole_weights(config, parts)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name].float()) for name in whole)


def test_the_reference_is_as_good_as_itself_on_ranks(shards):
    config, parts, _ = shards
    errors = check_ranks(decoders(config, parts), config, parts)
    assert 0 < errors.logits == errors.logits_eager and 0 < errors.kv == errors.kv_eager


@pytest.mark.parametrize("what", ["logits", "KV"])
def test_one_rank_that_is_off_is_refused(what, shards):
    """Though all others are right."""
    config, parts, _ = shards
    engines = decoders(config, parts)
    honest = engines[2]
    calls = []

    def wrong(*arguments):
        logits = honest(*arguments)
        calls.append(what)
        if calls == ["KV"] * (parity.STEPS + 1):  # no logits follow that would be off as well
            torch_ops._pools[arguments[-1]].tensor.mul_(1.5)
        return logits * 1.5 if what == "logits" else logits

    engines[2] = wrong
    with pytest.raises(SettingError, match=f"{what} are off by"):
        check_ranks(engines, config, parts)
