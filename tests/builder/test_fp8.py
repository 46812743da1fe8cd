"""Weights rounded to FP8 when an engine is built: the stored tensors, the error, and that shards
are one model."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from pensieve.builder import parity as parity_module
from pensieve.builder.build import build_engine, build_random_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT, read_json, read_weights
from pensieve.builder.inductor.compile import Compilable, export
from pensieve.builder.inductor.package import laid_out
from pensieve.builder.manifest import WEIGHTS, Manifest
from pensieve.builder.model import Decoder
from pensieve.builder.parity import FP8_BOUND, random_batches, whole_weights
from pensieve.builder.quantised import (
    QuantisedWeights,
    dequantised,
    names_in_fp8,
    projections,
    stored_as,
)
from pensieve.builder.random_weights import random_weights
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.plugins.linear.fp8_format import FP8
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from pensieve.scripts.build_engine import main
from tests.compiled import needs_compiler
from tests.models import ScatteredRunner, tiny_checkpoint

from .inductor.test_compile import captured, logits_and_kv
from .test_random_weights import CONFIGS

KINDS = ("llama", "opt")


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint(request.param, directory)
    return directory


def logits(forward, kv_shape, dtype=torch.float32):
    prompt = torch.arange(3, 43)
    runner = ScatteredRunner(forward, kv_shape, [prompt], dtype)
    for start in (0, 25, 39):
        runner.step((0, start, {0: 25, 25: 39, 39: 40}[start]))
    return runner.all_logits(0)


def of_engine(directory):
    engine = open_engine(directory)
    return logits(engine.forward, engine.kv_shape(16, 4), engine.dtype)


def test_projections_are_halved_and_nothing_else_changes(checkpoint, tmp_path):
    plain = build_engine(checkpoint, tmp_path / "plain", dtype="bfloat16")
    built = build_engine(checkpoint, tmp_path / "fp8", dtype="bfloat16", weights="fp8")
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("plain", "fp8"))
    config = built.manifest.decoder
    in_fp8 = projections(config)
    assert len(in_fp8) == 4 * config.layers and names_in_fp8(after.keys()) == in_fp8
    for name, tensor in before.items():
        projection = name.removesuffix(".weight")
        if projection in in_fp8:
            assert (
                after[name].dtype == FP8 and after[f"{projection}.scale"].shape == tensor.shape[:1]
            )
            wide = dequantised(
                {name: after[name], f"{projection}.scale": after[f"{projection}.scale"]}
            )[name]
            assert (wide - tensor.float()).norm() < 0.04 * tensor.float().norm()
        else:
            assert torch.equal(after[name], tensor)
    stored = stored_as(config, torch.bfloat16, 1, in_fp8)
    assert {name: (tuple(x.shape), x.dtype) for name, x in after.items()} == stored
    size = sum(x.nbytes for x in after.values())
    assert built.manifest.weight_bytes == size < 0.75 * plain.manifest.weight_bytes
    assert open_engine(tmp_path / "fp8").weight_bytes == size


def test_the_manifest_says_what_it_cost(checkpoint, tmp_path):
    built = build_engine(checkpoint, tmp_path / "engine", weights="fp8")
    manifest = Manifest.read(tmp_path / "engine")
    assert manifest == built.manifest and manifest.fp8
    assert (
        0.005 < manifest.quantisation.logits < FP8_BOUND
        and 0.005 < manifest.quantisation.kv < FP8_BOUND
    )
    assert build_engine(checkpoint, tmp_path / "engine", weights="fp8").outcome == "reused"
    plain = build_engine(checkpoint, tmp_path / "engine")
    assert (
        plain.outcome == "replaced"
        and not plain.manifest.fp8
        and plain.manifest.quantisation is None
    )


def test_an_engine_computes_with_its_rounded_weights(checkpoint, tmp_path):
    manifest = build_engine(checkpoint, tmp_path / "engine", weights="fp8").manifest
    wide = dequantised(load_file(tmp_path / "engine" / WEIGHTS))
    decoder = Decoder.from_weights(manifest.decoder, wide)
    shape = open_engine(tmp_path / "engine").kv_shape(16, 4)
    torch.testing.assert_close(
        of_engine(tmp_path / "engine"), logits(decoder, shape), atol=1e-4, rtol=1e-4
    )


def test_too_much_is_not_published(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(parity_module, "FP8_BOUND", 0.004)
    with pytest.raises(
        SettingError, match=r"in fp8 this model's logits are off by .*0\.004 is allowed"
    ) as error:
        build_engine(checkpoint, tmp_path / "engine", weights="fp8")
    assert error.value.setting == "--weights" and list(tmp_path.iterdir()) == []


def test_a_wrong_scale_is_beyond_the_bound(checkpoint, tmp_path, monkeypatch):
    def wrong(self, name, read=QuantisedWeights.__getitem__):
        return read(self, name) * 2 if name.endswith("up.scale") else read(self, name)

    monkeypatch.setattr(QuantisedWeights, "__getitem__", wrong)
    with pytest.raises(SettingError, match=r"--weights.*off by"):
        build_engine(checkpoint, tmp_path / "engine", weights="fp8")


def test_experts_are_refused(tmp_path):
    tiny_checkpoint("mixtral", tmp_path / "hf")
    with pytest.raises(
        SettingError,
        match=r"^--weights: fp8 weights of experts \(MixtralForCausalLM\) are not supported",
    ):
        build_engine(tmp_path / "hf", tmp_path / "engine", weights="fp8")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_hold_the_same_model(ranks, checkpoint, tmp_path):
    config = decoder_config(read_json(checkpoint / "config.json"))
    read = partial(read_weights, checkpoint, config, torch.float32)
    whole = dequantised(QuantisedWeights(config, read(), read()))
    shards = [dict(QuantisedWeights(config, read(rank, ranks), read())) for rank in range(ranks)]
    for rank in range(ranks):
        stored = stored_as(config, torch.float32, ranks, projections(config))
        assert {name: (tuple(x.shape), x.dtype) for name, x in shards[rank].items()} == stored
    joined = whole_weights(config, shards)
    assert joined.keys() == whole.keys() and all(
        torch.equal(joined[name], whole[name]) for name in whole
    )


def test_ranks_of_an_engine_give_one_rank_s_logits(tmp_path):
    tiny_checkpoint("llama", tmp_path / "hf")
    build_engine(tmp_path / "hf", tmp_path / "one", weights="fp8")
    two = build_engine(tmp_path / "hf", tmp_path / "two", weights="fp8", tensor_parallel=2)
    assert two.manifest.quantisation.logits < FP8_BOUND
    group = ThreadRanks(2)
    register_group(TENSOR_PARALLEL, group)
    try:
        engines = [open_engine(tmp_path / "two", rank=rank) for rank in range(2)]
        outputs = group.run(
            lambda rank: logits(engines[rank].forward, engines[rank].kv_shape(16, 4))
        )
    finally:
        release_group(TENSOR_PARALLEL)
    for ours in outputs:
        torch.testing.assert_close(ours, of_engine(tmp_path / "one"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_weights_are_rounded_alike_on_any_number_of_ranks(name):
    config = decoder_config(CONFIGS[name])
    whole = dequantised(random_weights(config, torch.bfloat16, "cpu", 0, fp8=True))
    shards = [
        random_weights(config, torch.bfloat16, "cpu", 0, rank, 2, fp8=True) for rank in range(2)
    ]
    assert names_in_fp8(shards[0].keys()) == projections(config)
    joined = whole_weights(config, shards)
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


def test_a_random_engine(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    built = build_random_engine(tmp_path / "config.json", tmp_path / "engine", weights="fp8")
    engine = open_engine(tmp_path / "engine")
    assert built.manifest.fp8 and built.manifest.quantisation.logits < FP8_BOUND
    assert sum(x.nbytes for x in engine._decoder.state_dict().values()) == engine.weight_bytes
    assert of_engine(tmp_path / "engine").isfinite().all()


def test_the_command_says_what_it_cost(checkpoint, tmp_path, capsys):
    arguments = [
        "--checkpoint",
        str(checkpoint),
        "--output",
        str(tmp_path / "engine"),
        "--backend",
        "reference",
    ]
    assert main([*arguments, "--weights", "fp8"]) == 0
    output = capsys.readouterr().out
    assert (
        "projections in FP8" in output
        and "relative error of FP8 against the unquantised model" in output
    )
    assert main([*arguments, "--weights", "int8"]) == 2
    assert capsys.readouterr().err.startswith(
        "build_engine: --weights: 'int8' does not exist; there is same, fp8"
    )


@pytest.mark.slow
def test_the_compiler_gets_the_operation():
    config = decoder_config(CONFIGS["llama"])
    weights = laid_out(random_weights(config, torch.bfloat16, "cpu", 0, fp8=True))
    program = export(Compilable.from_weights(config, weights))
    calls = [str(node.target) for node in program.graph.nodes]
    assert calls.count("pensieve.fp8_linear.default") == 4 * config.layers
    assert set(program.state_dict) == set(weights)


@pytest.mark.slow
@needs_compiler
def test_a_compiled_engine_is_as_near_as_the_reference(tmp_path):
    tiny_checkpoint("llama", tmp_path / "hf")
    for backend in ("reference", "inductor"):
        built = build_engine(
            tmp_path / "hf", tmp_path / backend, backend, dtype="bfloat16", weights="fp8"
        )
    parity = built.manifest.compiled.parity
    assert (
        parity.logits <= 2 * parity.logits_eager and built.manifest.quantisation.logits < FP8_BOUND
    )
    expected = of_engine(tmp_path / "reference")
    assert (of_engine(tmp_path / "inductor") - expected).norm() < 0.05 * expected.norm()


def test_the_demo_model_loses_little(tmp_path):
    quantisation = build_engine(
        DEMO_CHECKPOINT, tmp_path / "engine", dtype="float32", weights="fp8"
    ).manifest.quantisation
    assert quantisation.logits < 0.05 and quantisation.kv < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_on_a_gpu_captured_steps_compute_what_the_reference_does(kind, tmp_path):
    """And the weights are there once. The products round activations too, which a tiny checkpoint's
    widely spread logits do not bear."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    settings = dict(dtype="bfloat16", device="cuda", weights="fp8")
    outputs = {}
    for backend in ("reference", "inductor"):
        built = build_random_engine(
            tmp_path / "config.json", tmp_path / backend, backend=backend, **settings
        )
        assert built.manifest.quantisation.logits < FP8_BOUND
        before = torch.cuda.memory_allocated()
        engine = open_engine(tmp_path / backend, "cuda")
        assert torch.cuda.memory_allocated() - before < 1.2 * engine.weight_bytes + 50_000
        config = built.manifest.decoder
        outputs[backend] = logits_and_kv(
            engine.forward, config, random_batches(config, "cuda"), torch.bfloat16, captured
        )
    for ours, expected in zip(outputs["inductor"], outputs["reference"], strict=True):
        assert (ours - expected).norm() < 0.1 * expected.norm()
