"""The cache of engines: a checkpoint is built once, again when it changes, and by one process of
several."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from pensieve.builder import engine_cache
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.engine_cache import BuildSettings, cache_directory, engine_for
from pensieve.builder.manifest import WEIGHTS, Manifest
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.gguf_files import write_gguf
from tests.models import tiny_checkpoint

KINDS = ("llama", "qwen3", "opt")


@pytest.fixture(autouse=True)
def builds(tmp_path, monkeypatch):
    """The outcomes of all calls of `build_engine`, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    outcomes = []

    def counted(*arguments, **options):
        built = build_engine(*arguments, **options)
        outcomes.append(built.outcome)
        return built

    monkeypatch.setattr(engine_cache, "build_engine", counted)
    return outcomes


@pytest.fixture
def checkpoint(tmp_path):
    tiny_checkpoint("llama", tmp_path / "tiny")
    return tmp_path / "tiny"


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    with file.open("r+b") as same:  # in place: the same file of the same size
        same.write(content)


def engines():
    return sorted(cache_directory().glob("*/*/manifest.json"))


def left_over():
    """Files that are neither in an engine's directory nor records."""
    return [*cache_directory().rglob(".*"), *cache_directory().glob("*.lock")]


class Heard:
    """Progress that remembers."""

    def __init__(self, on=None):
        self.stages = []
        self.done = {}
        self._on = on or {}

    def say(self, stage):
        self.stages.append(stage)
        self._on.get(stage, lambda: None)()

    def advance(self, done, total):
        assert 0 < done <= total
        self.done[self.stages[-1]] = done / total

    def close(self):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_built_once_and_again_when_a_weight_changes(kind, tmp_path, builds):
    checkpoint = tmp_path / f"tiny-{kind}"
    tiny_checkpoint(kind, checkpoint)
    first = engine_for(checkpoint)
    before = Manifest.read(first).fingerprint
    assert (builds, first.name) == (["built"], f"tiny-{kind}")
    heard = Heard()
    assert engine_for(str(checkpoint), progress=heard) == first
    assert builds == ["built"] and not heard.stages
    flip_a_bit(checkpoint / "model.safetensors")
    changed = engine_for(checkpoint)
    assert builds == ["built", "built"] and Manifest.read(changed).fingerprint != before
    open_engine(changed)
    assert engines() == [changed / "manifest.json"] and not left_over()


def test_a_changed_tokenizer_or_template_is_built_again(checkpoint, builds):
    engine_for(checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert (engine_for(checkpoint) / "chat_template.jinja").read_text() == "{{ messages }}"
    assert builds == ["built", "built"] and len(engines()) == 1


def test_weights_that_were_touched_are_read_and_not_built(checkpoint, builds):
    engine = engine_for(checkpoint)
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    heard = Heard()
    assert engine_for(checkpoint, progress=heard) == engine
    assert builds == ["built", "reused"] and "reading the checkpoint" in heard.stages
    engine_for(checkpoint)
    assert builds == ["built", "reused"]


def test_a_time_that_is_set_back_hides_no_change(checkpoint, builds):
    engine_for(checkpoint)
    weights = checkpoint / "model.safetensors"
    state = weights.stat()
    flip_a_bit(weights)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    engine_for(checkpoint)
    assert builds == ["built", "built"]


def test_another_program_lets_the_build_decide(checkpoint, builds, monkeypatch):
    engine = engine_for(checkpoint)
    monkeypatch.setattr(engine_cache, "_program_digest", lambda: "another")
    heard = Heard()
    assert engine_for(checkpoint, progress=heard) == engine
    assert builds == ["built", "reused"] and "reading the checkpoint" not in heard.stages


def test_settings_have_engines_of_their_own(checkpoint, builds):
    own = engine_for(checkpoint, dtype="auto")
    half = engine_for(checkpoint, dtype="half")
    rounded = engine_for(checkpoint, quantization="fp8", dtype="bfloat16")
    divided = engine_for(checkpoint, tensor_parallel=2)
    assert [Manifest.read(one).dtype for one in (own, half, rounded)] == [
        "float32",
        "float16",
        "bfloat16",
    ]
    assert Manifest.read(rounded).fp8 and Manifest.read(divided).tensor_parallel == 2
    assert builds == ["built"] * 4 and len(engines()) == 4
    assert engine_for(checkpoint, dtype="float") == own and len(builds) == 4


def test_a_checkpoint_that_has_moved_keeps_its_engine(checkpoint, tmp_path, builds):
    engine = engine_for(checkpoint)
    (tmp_path / "elsewhere").mkdir()
    moved = checkpoint.rename(tmp_path / "elsewhere" / checkpoint.name)
    assert engine_for(moved) == engine and builds == ["built", "reused"]
    flip_a_bit(moved / "model.safetensors")
    changed = engine_for(moved)
    assert engines() == [changed / "manifest.json"]


def test_an_engine_that_another_checkpoint_has_too_is_kept(checkpoint, tmp_path):
    other = tmp_path / "other" / checkpoint.name
    tiny_checkpoint("llama", other)
    shared = engine_for(checkpoint)
    assert engine_for(other) == shared
    flip_a_bit(other / "model.safetensors")
    assert engine_for(other) != shared and engine_for(checkpoint) == shared
    assert len(engines()) == 2


def test_a_name_replaces_that_of_the_directory(checkpoint, tmp_path, builds):
    """Snapshots of the Hub are named by their commits."""
    engine = engine_for(checkpoint, name="org/chat")
    snapshot = checkpoint.rename(tmp_path / "0123abcd")
    assert engine.name == "chat" and engine_for(snapshot, name="org/chat") == engine
    assert builds == ["built", "reused"]
    assert engine_for(snapshot).name == "0123abcd" and len(engines()) == 2
    assert engine_for(snapshot, name="org/chat") == engine and len(builds) == 3


def records():
    return sorted(cache_directory().glob("*.json"))


@pytest.mark.parametrize("is_deleted", [True, False])
def test_an_earlier_snapshot_keeps_its_engine_until_it_is_deleted(is_deleted, tmp_path):
    for commit in ("first", "second"):
        tiny_checkpoint("llama", tmp_path / commit)
    flip_a_bit(tmp_path / "second" / "model.safetensors")
    engine_for(tmp_path / "first", name="org/chat")
    if is_deleted:
        shutil.rmtree(tmp_path / "first")
    engine_for(tmp_path / "second", name="org/chat")
    assert len(engines()) == len(records()) == 2 - is_deleted


@pytest.mark.parametrize("name", [None, "org/chat"])
@pytest.mark.parametrize("changed", [True, False])
def test_a_record_of_the_version_before_names_is_taken_over(name, changed, checkpoint, builds):
    engine_for(checkpoint)
    (record,) = records()
    settings = asdict(BuildSettings("reference", "float32", 1, "cpu", "same"))
    record.rename(record.with_stem(engine_cache._digest([str(checkpoint), settings])))
    if changed:
        flip_a_bit(checkpoint / "model.safetensors")
    heard = Heard()
    engine = engine_for(checkpoint, name=name, progress=heard)
    assert builds == ["built", "built" if changed else "reused"]
    assert ("reading the checkpoint" in heard.stages) == changed
    assert engines() == [engine / "manifest.json"] and len(records()) == 1


def test_a_damaged_record_of_another_checkpoint_hinders_no_build(checkpoint, tmp_path):
    engine_for(checkpoint)
    (record,) = records()
    record.write_text("{")
    tiny_checkpoint("llama", tmp_path / "other")
    assert engine_for(tmp_path / "other").exists()


def test_a_damaged_engine_is_built_again(checkpoint, builds):
    engine = engine_for(checkpoint)
    flip_a_bit(engine / WEIGHTS)
    assert engine_for(checkpoint) == engine and builds == ["built", "replaced"]
    (engine / WEIGHTS).unlink()
    assert engine_for(checkpoint) == engine and builds == ["built", "replaced", "replaced"]
    open_engine(engine)


def test_two_starts_at_once_build_once(checkpoint, builds):
    """The first one writes no weights before the second one waits for it."""
    building, waiting = threading.Event(), threading.Event()
    opened = []

    def start(progress):
        opened.append(engine_for(checkpoint, progress=progress))

    def first_goes_on():
        building.set()
        assert waiting.wait(120)

    first = threading.Thread(target=start, args=(Heard({"writing the weights": first_goes_on}),))
    first.start()
    assert building.wait(120) and not engines()
    second = threading.Thread(
        target=start, args=(Heard({"waiting for another start to build it": waiting.set}),)
    )
    second.start()
    for thread in (first, second):
        thread.join(120)
    assert builds == ["built"] and len(opened) == 2 and opened[0] == opened[1] and not left_over()


KILLED = """
import os, signal, sys
from pensieve.builder.engine_cache import engine_for
from pensieve.builder.progress import Progress

class Killed(Progress):
    def say(self, stage):
        if stage == "writing the weights":
            os.kill(os.getpid(), signal.SIGKILL)

engine_for(sys.argv[1], progress=Killed("killed"))
"""


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_build_leaves_no_engine_and_the_next_start_builds(changed, checkpoint, builds):
    assert subprocess.run([sys.executable, "-c", KILLED, checkpoint]).returncode == -signal.SIGKILL
    assert not engines() and left_over()
    if changed:
        flip_a_bit(checkpoint / "model.safetensors")
    open_engine(engine_for(checkpoint))
    assert builds == ["built"] and len(engines()) == 1 and not left_over()


@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt, SettingError("--output", "the disk became full")]
)
def test_an_interrupted_or_failed_build_leaves_nothing(fault, checkpoint, builds):
    def fail():
        raise fault

    with pytest.raises(BaseException) as raised:
        engine_for(checkpoint, progress=Heard({"writing the weights": fail}))
    assert "XDG_CACHE_HOME: the disk became full" in str(raised.value) or fault is KeyboardInterrupt
    assert not engines() and not left_over()
    engine_for(checkpoint)
    assert builds == ["built"]


def test_a_checkpoint_that_changes_while_it_is_built_is_refused(checkpoint, builds):
    template = checkpoint / "chat_template.jinja"
    with pytest.raises(SettingError, match=r"PATH: .* changed while it was built"):
        engine_for(
            checkpoint, progress=Heard({"writing the weights": lambda: template.write_text("new")})
        )
    assert (engine_for(checkpoint) / "chat_template.jinja").read_text() == "new" and len(
        engines()
    ) == 1


def test_an_engine_is_returned_as_it_is(checkpoint, tmp_path, monkeypatch, builds):
    build_engine(checkpoint, tmp_path / "engine", dtype="bfloat16")
    monkeypatch.chdir(tmp_path)
    assert engine_for("engine") == Path("engine") and not builds
    assert engine_for("engine", dtype="bfloat16", tensor_parallel=1, backend="reference") == Path(
        "engine"
    )
    wrong = dict(dtype="half", tensor_parallel=2, backend="inductor", quantization="fp8")
    settings = ("--dtype", "--tensor-parallel-size", "--backend", "--quantization")
    for setting, (name, value) in zip(settings, wrong.items(), strict=True):
        with pytest.raises(SettingError, match="was built with") as refused:
            engine_for("engine", **{name: value})
        assert refused.value.setting == setting


@pytest.mark.parametrize("named", ["folder/model.gguf", "folder"])
def test_a_gguf_file_is_built_once_and_again_when_it_changes(named, checkpoint, tmp_path, builds):
    file = tmp_path / "folder" / "model.gguf"
    file.parent.mkdir()
    write_gguf(checkpoint, file)
    engine = engine_for(tmp_path / named)
    assert engine.name == Path(named).stem
    assert engine_for(tmp_path / named) == engine and builds == ["built"]
    flip_a_bit(file)
    assert engine_for(tmp_path / named) != engine and builds == ["built", "built"]
    assert len(engines()) == 1


@pytest.mark.parametrize(
    "path, message",
    [
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
        ("empty", r"empty is no engine .* and no checkpoint"),
        ("model.bin", "model.bin is a file, and no GGUF file"),
    ],
)
def test_a_path_that_is_no_model_says_what_to_do(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").touch()
    with pytest.raises(SettingError, match=f"PATH: .*{message}"):
        engine_for(path)


@pytest.mark.parametrize(
    "options, setting",
    [
        ({"dtype": "int4"}, "--dtype"),
        ({"quantization": "awq"}, "--quantization"),
        ({"tensor_parallel": 3}, "--tensor-parallel-size"),
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda"}, "--device"),
        ({"backend": "onnx"}, "--backend"),
    ],
)
def test_wrong_settings_are_named_as_the_user_knows_them(
    options, setting, checkpoint, monkeypatch, builds
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError) as refused:
        engine_for(checkpoint, **options)
    assert refused.value.setting == setting and str(refused.value).startswith(f"{setting}: ")
    assert not builds and not engines()


def test_a_quantised_checkpoint_is_taken_by_its_method(checkpoint):
    config = {"quantization_config": {"quant_method": "fbgemm_fp8"}}
    assert engine_cache._weights("fbgemm_fp8", config) == "same"
    with pytest.raises(SettingError, match=r"--quantization: 'awq' .* possible is fbgemm_fp8"):
        engine_cache._weights("awq", config)


def test_a_cache_that_cannot_be_written_is_named(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SettingError, match=r"XDG_CACHE_HOME: .*cannot keep the engine"):
        engine_for(checkpoint)


def test_a_record_that_is_damaged_is_made_anew(checkpoint, builds):
    engine = engine_for(checkpoint)
    (record,) = cache_directory().glob("*.json")
    for damaged in ("{", "[]", ""):
        record.write_text(damaged)
        assert engine_for(checkpoint) == engine
    assert builds == ["built", "reused", "reused", "reused"]
    assert json.loads(record.read_text())["checkpoint"] == str(checkpoint)


def test_progress_is_heard_and_goes_to_the_log_without_a_terminal(caplog):
    heard = Heard()
    engine_for(DEMO_CHECKPOINT, progress=heard)
    stages = ["reading the checkpoint", "reading the weights", "writing the weights"]
    assert heard.stages == stages and heard.done == dict.fromkeys(stages, 1.0)
    with caplog.at_level(logging.INFO, "pensieve"):
        engine_for(DEMO_CHECKPOINT, dtype="float16")
    assert [record.getMessage() for record in caplog.records][:3] == [
        f"llama: {stage}" for stage in stages
    ]
