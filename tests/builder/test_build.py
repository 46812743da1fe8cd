"""Building an engine directory: its contents, when it is replaced, and that no unfinished engine is
ever published."""

import errno
import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pensieve.builder import build as build_module
from pensieve.builder import weights as weights_module
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import (
    DEMO_CHECKPOINT,
    CheckpointWeights,
    parameter_shapes,
    read_json,
    read_weights,
)
from pensieve.builder.manifest import WEIGHTS, Manifest
from pensieve.builder.weights import weights_digest
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from pensieve.scripts.build_engine import main
from tests.models import ScatteredRunner, tiny_checkpoint
from tests.runtime.fake_loop import eventually


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint("llama", directory)
    return directory


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_directory_and_its_manifest(checkpoint, tmp_path):
    built = build_engine(checkpoint, tmp_path / "new" / "engine", dtype="bfloat16")
    engine = tmp_path / "new" / "engine"
    assert built.outcome == "built" and not built.has_tokenizer
    assert names(engine) == ["generation_config.json", "manifest.json", WEIGHTS]
    assert names(engine.parent) == ["engine"]
    weights = load_file(engine / WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.nbytes for tensor in weights.values()) == built.manifest.weight_bytes
    assert (engine / WEIGHTS).stat().st_mode == (engine / "manifest.json").stat().st_mode
    manifest = Manifest.read(engine)
    assert manifest == built.manifest and manifest.fingerprint == built.manifest.fingerprint
    assert (manifest.layers, manifest.kv_heads, manifest.head_dim) == (2, 2, 16)
    assert (manifest.vocab_size, manifest.max_model_len, manifest.stop_ids) == (160, 512, (2,))
    assert (manifest.backend, manifest.dtype, manifest.device) == ("reference", "bfloat16", "cpu")


def test_an_engine_that_is_there_needs_no_room(checkpoint, tmp_path, monkeypatch):
    built = build_engine(checkpoint, tmp_path / "engine")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert (
        built.outcome == "built"
        and build_engine(checkpoint, tmp_path / "engine").outcome == "reused"
    )


def test_the_same_engine_is_reused_and_another_replaced(checkpoint, tmp_path):
    engine = tmp_path / "engine"
    engine.mkdir()  # empty: as good as missing
    first = build_engine(checkpoint, engine)
    inode = engine.stat().st_ino
    again = build_engine(checkpoint, engine)
    assert (first.outcome, again.outcome) == ("built", "reused") and engine.stat().st_ino == inode
    other = build_engine(checkpoint, engine, dtype="float16")
    assert other.outcome == "replaced" and Manifest.read(engine).dtype == "float16"
    assert names(tmp_path) == ["engine"]


def test_other_weights_or_another_tokenizer_make_another_engine(checkpoint, tmp_path):
    first = build_engine(checkpoint, tmp_path / "a").manifest.fingerprint
    tiny_checkpoint("llama", tmp_path / "checkpoint", seed=1)
    other = build_engine(tmp_path / "checkpoint", tmp_path / "b")
    (tmp_path / "checkpoint" / "chat_template.jinja").write_text("{{ messages }}")
    templated = build_engine(tmp_path / "checkpoint", tmp_path / "b")
    assert len({first, other.manifest.fingerprint, templated.manifest.fingerprint}) == 3
    assert templated.outcome == "replaced" and (tmp_path / "b" / "chat_template.jinja").exists()


@pytest.mark.parametrize("step", ["copy_tokenizer", "save_weights", "_sync"])
@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupted_build_leaves_nothing_or_the_old_engine(
    step, existing, checkpoint, tmp_path, monkeypatch
):
    engine = tmp_path / "engine"
    if existing:
        build_engine(checkpoint, engine)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_engine(checkpoint, engine, dtype="bfloat16")
    assert names(tmp_path) == (["engine"] if existing else [])
    if existing:
        assert open_engine(engine).dtype == torch.float32


def test_the_old_engine_comes_back_if_the_new_one_cannot_take_its_place(
    checkpoint, tmp_path, monkeypatch
):
    engine = tmp_path / "engine"
    build_engine(checkpoint, engine)
    rename = build_module.os.rename

    def fail_for_the_new(source, target):
        if target == engine and source.suffix == ".building":
            raise OSError(errno.EIO, "the disk fails")
        rename(source, target)

    monkeypatch.setattr(build_module.os, "rename", fail_for_the_new)
    with pytest.raises(SettingError, match=r"--output: .*the disk fails"):
        build_engine(checkpoint, engine, dtype="bfloat16")
    assert names(tmp_path) == ["engine"] and open_engine(engine).dtype == torch.float32


def test_a_directory_of_other_things_is_never_touched(checkpoint, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SettingError, match=r"--output.*neither empty nor an engine"):
        build_engine(checkpoint, tmp_path)
    with pytest.raises(SettingError, match=r"--output.*is a file"):
        build_engine(checkpoint, tmp_path / "thesis.txt")
    with pytest.raises(SettingError, match=r"--output.*cannot be made"):
        build_engine(checkpoint, tmp_path / "thesis.txt" / "engine")
    assert names(tmp_path) == ["thesis.txt"]


@pytest.mark.parametrize(
    "source, options",
    [
        ("--checkpoint", []),
        ("--checkpoint", ["--backend", "reference"]),
        ("--checkpoint", ["--weights", "fp8"]),
        ("--random-weights", []),
    ],
)
def test_an_engine_for_a_gpu_is_built_on_a_machine_with_one(
    source, options, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = str(checkpoint / "config.json")
    model = [source, str(checkpoint)] if source == "--checkpoint" else [source, "--config", config]
    assert main([*model, *options, "--device", "cuda", "--output", str(tmp_path / "engine")]) == 2
    assert capsys.readouterr().err.startswith(
        "build_engine: --device: cuda needs an NVIDIA GPU in this machine"
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "setting, options, named",
    [
        ("--backend", {"backend": "onnx"}, "reference"),
        ("--device", {"device": "tpu"}, "cpu"),
        ("--dtype", {"dtype": "int8"}, "bfloat16"),
        ("--tensor-parallel", {"tensor_parallel": 3}, "only among 1 or 2 or 4"),
        ("--checkpoint", {"checkpoint": "nowhere"}, "config.json"),
    ],
)
def test_wrong_settings_are_named(setting, options, named, checkpoint, tmp_path):
    with pytest.raises(SettingError, match=named) as error:
        build_engine(**{"checkpoint": checkpoint, "output": tmp_path / "engine"} | options)
    assert error.value.setting == setting and names(tmp_path) == []


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": [7, 9]}, 2, (7, 9)),
        ({}, 2, (2,)),
        (None, [3, 4], (3, 4)),
        (None, None, ()),
    ],
)
def test_stop_ids(generation, config, expected, checkpoint, tmp_path):
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    (copy / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    hf_config = json.loads((checkpoint / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(hf_config | {"eos_token_id": config}))
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    assert build_engine(copy, tmp_path / "engine").manifest.stop_ids == expected


@pytest.mark.parametrize("ids", ["2", 2.0, [[2]], [2, "3"], True])
def test_stop_ids_that_no_token_equals_are_refused(ids, tmp_path):
    """A reply would never end."""
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ids})
    )
    with pytest.raises(SettingError, match=r"--checkpoint: .*eos_token_id"):
        build_engine(tmp_path / "checkpoint", tmp_path / "engine")


def test_the_command_says_what_it_did(checkpoint, tmp_path, capsys):
    arguments = [
        "--checkpoint",
        str(checkpoint),
        "--output",
        str(tmp_path / "engine"),
        "--dtype",
        "bfloat16",
    ]
    arguments += ["--backend", "reference"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert (
        "built" in output
        and "LlamaForCausalLM" in output
        and "MiB" in output
        and "token ids" in output
    )
    assert main(arguments) == 0
    assert "reused" in capsys.readouterr().out
    assert main([*arguments, "--backend", "tensorrt"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("build_engine: --backend:") and error.count("\n") == 1


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_the_weights_are_a_safetensors_file_as_the_library_writes_them(kind, tmp_path):
    tiny_checkpoint(kind, tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine", dtype="bfloat16")
    decoder = decoder_config(read_json(tmp_path / "checkpoint" / "config.json"))
    expected = read_weights(tmp_path / "checkpoint", decoder, torch.bfloat16)
    stored = load_file(tmp_path / "engine" / WEIGHTS)
    assert {name: tensor.shape for name, tensor in stored.items()} == parameter_shapes(decoder)
    assert all(torch.equal(stored[name], expected[name]) for name in expected)
    assert weights_digest(stored) == weights_digest(expected)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in stored.values())


def test_the_digest_names_contents_and_places(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(10, 30, generator=generator) for name in "ab"}
    digest = weights_digest(weights)
    assert weights_digest(dict(reversed(weights.items()))) == digest
    assert weights_digest({"a": weights["b"], "b": weights["a"]}) != digest
    assert weights_digest(weights | {"b": weights["b"].view(30, 10)}) != digest
    assert weights_digest(weights | {"b": weights["b"].view(torch.int32)}) != digest
    monkeypatch.setattr(weights_module, "PIECE", 64)  # so that pieces wait for each other
    monkeypatch.setattr(weights_module, "AHEAD", 3)
    small = weights_digest(weights)
    assert small == weights_digest(weights)
    swapped = torch.cat(
        (weights["a"].view(-1)[16:32], weights["a"].view(-1)[:16], weights["a"].view(-1)[32:])
    )
    # two whole pieces have changed places
    assert weights_digest(weights | {"a": swapped.view(10, 30)}) != small


def test_building_holds_one_tensor_at_a_time(checkpoint, tmp_path, monkeypatch):
    alive = []

    def watched(self, target, read=CheckpointWeights.__getitem__):
        tensor = read(self, target)
        alive.append(weakref.ref(tensor))
        # the last one, until it is replaced; a thread lets go of a piece just after its hash
        eventually(lambda: sum(reference() is not None for reference in alive) <= 2)
        return tensor

    monkeypatch.setattr(CheckpointWeights, "__getitem__", watched)
    monkeypatch.setattr(weights_module, "AHEAD", 0)
    build_engine(checkpoint, tmp_path / "engine")
    assert len(alive) > 20


def test_the_demo_goes_the_ordinary_road(tmp_path):
    built = build_engine(DEMO_CHECKPOINT, tmp_path / "engine", dtype="float32")
    engine = open_engine(tmp_path / "engine")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "engine")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Grüße 👋"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nGrüße 👋<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert built.has_tokenizer and engine.manifest.max_model_len == 4096
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in engine.manifest.stop_ids

    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()
    runner = ScatteredRunner(
        engine.forward, engine.kv_shape(8, 32), [torch.tensor(ids)], engine.dtype
    )
    runner.step((0, 0, len(ids)))
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(runner.all_logits(0), expected, atol=1e-4, rtol=1e-4)
