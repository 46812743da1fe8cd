"""Opening an engine: the fingerprint guards it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.builder.build import build_engine
from pensieve.builder.inductor.host_target import this_target
from pensieve.builder.manifest import PACKAGE, WEIGHTS, Compiled, Manifest, Parity, files_digest
from pensieve.plugins.linear import fp8
from pensieve.runtime import engine as engine_module
from pensieve.runtime.engine import open_engine, widened_values
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint


@pytest.fixture
def directory(tmp_path):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    return tmp_path / "engine"


def refusal(directory, device="cpu"):
    with pytest.raises(SettingError, match="--engine") as error:
        open_engine(directory, device)
    return str(error.value)


def test_an_engine_says_what_its_pools_look_like(directory):
    engine = open_engine(directory)
    assert engine.kv_shape(10, 32) == (10, 2, 2, 2, 32, 16)
    assert engine.dtype == engine.kv_dtype == torch.float32 and engine.manifest.vocab_size == 160
    for name in ("fp8", "fp8_e4m3"):
        engine = open_engine(directory, kv_cache_dtype=name)
        assert (
            engine.kv_shape(10, 32) == (10, 2, 2, 2, 32, 17)
            and engine.chunk_bytes(32) == 2 * 2 * 2 * 32 * 17
        )
        assert (
            engine.dtype == torch.float32
            and engine.kv_dtype == torch.uint8
            and engine.kv_cache_dtype == "fp8"
        )


def test_changed_weights(directory):
    weights = load_file(directory / WEIGHTS)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights["norm.weight"][0] += 1
    save_file(weights, directory / WEIGHTS)
    assert "digest of the weights differs" in refusal(directory)


def test_truncated_or_missing_weights(directory):
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-1])
    assert "cannot be read" in refusal(directory)
    (directory / WEIGHTS).unlink()
    assert "cannot be read" in refusal(directory)


def test_other_code(directory, monkeypatch):
    monkeypatch.setattr(engine_module, "code_digest", lambda: "f" * 64)
    message = refusal(directory)
    assert "code of the forward pass differs" in message and "build the engine again" in message


@pytest.mark.parametrize("package", ["torch", "pensieve"])
def test_other_versions(package, directory, monkeypatch):
    here = engine_module.versions()
    monkeypatch.setattr(engine_module, "versions", lambda: here | {package: "99.0"})
    message = refusal(directory)
    assert (
        f"version of {package} differs" in message
        and "99.0" in message
        and here[package] in message
    )


@pytest.fixture
def compiled(directory):
    """An engine as if it had been compiled here."""
    (directory / PACKAGE).write_bytes(b"machine code" * 1000)
    digest = files_digest([directory / PACKAGE])
    parity = Compiled(digest, 12_000, 10.0, 0.1, Parity(0.0, 0.0, 0.0, 0.0))
    manifest = replace(
        Manifest.read(directory), backend="inductor", target=this_target("cpu"), compiled=parity
    )
    manifest.write(directory)
    return directory


def test_a_truncated_or_missing_package(compiled):
    content = (compiled / PACKAGE).read_bytes()
    (compiled / PACKAGE).write_bytes(content[:-1])
    assert "digest of the compiled code differs" in refusal(compiled)
    (compiled / PACKAGE).unlink()
    assert "cannot be read" in refusal(compiled)


def test_a_package_that_is_none(compiled):
    assert f"{PACKAGE} cannot be loaded" in refusal(compiled)


def test_code_for_another_processor_is_never_loaded(compiled, monkeypatch):
    monkeypatch.setattr(engine_module, "Package", None)
    manifest = Manifest.read(compiled)
    replace(manifest, target=f"{manifest.target} avx9000").write(compiled)
    message = refusal(compiled)
    assert "a processor with avx9000" in message and "build the engine again, here" in message


def test_an_engine_that_was_never_compiled(compiled):
    replace(Manifest.read(compiled), compiled=None).write(compiled)
    assert "never compiled" in refusal(compiled)


def test_another_device(directory):
    assert "device cpu, not cuda" in refusal(directory, "cuda")


def test_weights_that_do_not_fit_the_gpu(tmp_path, monkeypatch):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match=r"--device.*no usable NVIDIA GPU"):
        open_engine(tmp_path / "engine", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100_000, 2**30))
    assert "take 0.0 GiB, but 0.0 GiB of the GPU are free" in refusal(tmp_path / "engine", "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_weights_go_to_the_gpu_once(kind, tmp_path):
    tiny_checkpoint(kind, tmp_path / "checkpoint")
    for device in ("cpu", "cuda"):
        build_engine(tmp_path / "checkpoint", tmp_path / device, dtype="bfloat16", device=device)
    expected = load_file(tmp_path / "cpu" / WEIGHTS)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = open_engine(tmp_path / "cuda", "cuda")
    # blocks of 512 bytes; the frequencies
    most = sum(tensor.nbytes + 512 for tensor in expected.values()) + 4096
    assert torch.cuda.max_memory_allocated() - before <= most
    weights = engine._decoder.state_dict()
    assert all(
        weights[name].is_cuda and torch.equal(weights[name].cpu(), expected[name])
        for name in expected
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": "bfloat16"}, "changed after the build"),
        ({"format": 99}, "not of format"),
        ({"stop_ids": None}, "damaged"),
        ({"unheard_of": 1}, "damaged"),
    ],
)
def test_a_manifest_that_is_not_as_it_was_written(change, message, directory):
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refusal(directory)


def test_no_manifest(directory):
    path = directory / "manifest.json"
    path.write_text("{")
    assert "cannot be read" in refusal(directory)
    path.unlink()
    assert "is no engine" in refusal(directory)
    assert "is no engine" in refusal(directory / "nowhere")


SHAPES = {
    "embedding.weight": (1000, 64),
    "layers.0.attention.out.weight": (10, 3),
    "layers.0.mlp.up.weight": (40, 5),
    "layers.0.mlp.down.weight": (30, 5),
}


@pytest.mark.parametrize(
    ("capability", "in_fp8", "group", "dtype", "values"),
    [
        ((9, 0), False, 0, "bfloat16", 0),
        ((9, 0), True, 0, "bfloat16", 0),
        ((9, 0), True, 0, "float16", 30),
        ((9, 0), True, 8, "bfloat16", 30),
        ((9, 0), True, 8, "float32", 350),
        ((8, 0), True, 0, "bfloat16", 350),
        ((8, 0), True, 8, "bfloat16", 350),
    ],
)
def test_memory_is_kept_for_weights_that_a_step_widens(
    monkeypatch, capability, in_fp8, group, dtype, values
):
    """The experts' kernel widens none, and elsewhere both of a layer are widened."""
    monkeypatch.setattr(fp8, "capability", lambda: capability)
    manifest = SimpleNamespace(
        fp8=in_fp8,
        group=group,
        int4=0,
        dtype=dtype,
        device="cuda",
        decoder=SimpleNamespace(experts=4),
    )
    assert widened_values(manifest, SHAPES) == values
