"""The engine that is served and its state directory, if the options leave them open."""

from __future__ import annotations

import logging
from array import array
from pathlib import Path

import pytest

from pensieve.builder import model_names
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.manifest import Manifest
from pensieve.builder.model_names import Model
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import Transcript
from pensieve.runtime.launch import resolve
from pensieve.runtime.launch.checks import check_engine
from pensieve.runtime.launch.command import settled_words
from pensieve.runtime.launch.resolve import (
    resolved,
    state_directory,
    tokenizer_digest,
)
from pensieve.runtime.launch.settings import HISTORY_FILE, ServeSettings, default_state_dir
from pensieve.runtime.offline import settings as offline_settings
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

A_TURN = (Name("", "a"), Transcript((), array("i", [1]), "a", 1), 0.0)
ONE, OTHER = b"1" * 32, b"2" * 32


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines") / "engine"
    build_engine(DEMO_CHECKPOINT, directory)
    return directory


def earlier_histories(digest):
    """Makes directories of versions that had one state directory for all engines."""
    shared = default_state_dir()
    shared.mkdir(parents=True)
    store = HistoryStore(shared / HISTORY_FILE)
    if digest is not None:
        store.use_tokenizer(digest)
        store.commit(*A_TURN)
    store.close()
    return shared


def place(name, digest=ONE):
    return state_directory(name, f"/models/{name}", lambda: digest)


def test_each_engine_has_a_state_directory_of_its_own(engine):
    first = resolved(ServeSettings(str(engine)))
    assert first.engine == str(engine)
    assert first.state_dir.parent == default_state_dir() and first.state_dir.name.startswith(
        "engine-"
    )
    assert resolved(ServeSettings(str(engine))).state_dir == first.state_dir
    demo = resolved(ServeSettings("demo"))
    assert Manifest.read(demo.state_dir / "demo") and demo.engine == str(demo.state_dir / "demo")
    assert demo.state_dir.name.startswith("demo-")


def test_engines_of_one_name_in_different_places_do_not_meet():
    assert len({state_directory("engine", path, bytes) for path in ("/a/engine", "/b/engine")}) == 2


def test_a_state_directory_that_is_named_is_used(engine, tmp_path):
    assert (
        resolved(ServeSettings(str(engine), state_dir=tmp_path / "named")).state_dir
        == tmp_path / "named"
    )


def test_histories_of_earlier_versions_go_to_the_first_engine_with_their_tokenizer(caplog):
    caplog.set_level(logging.INFO)
    shared = earlier_histories(ONE)
    assert place("other", OTHER) == shared / place("other", OTHER).name
    assert "conversations of another model" in caplog.text
    assert place("first") == shared and f"found again in {shared}" in caplog.text
    assert place("second") != shared, "of the same tokenizer, but not the first"
    assert place("first") == shared, "and stays so"


def test_histories_without_a_tokenizer_go_to_the_first_engine():
    shared = earlier_histories(None)
    assert place("first", OTHER) == shared != place("second", OTHER)


def test_an_engine_that_has_a_state_directory_keeps_it():
    (own := place("first")).mkdir(parents=True)
    store = HistoryStore(default_state_dir() / HISTORY_FILE)
    store.use_tokenizer(ONE)
    store.commit(*A_TURN)
    store.close()
    assert place("first") == own


def test_histories_that_an_old_server_has_open_are_left_alone(caplog):
    shared = earlier_histories(ONE)
    running = HistoryStore(shared / HISTORY_FILE)
    assert place("first").parent == shared and "left alone" in caplog.text
    running.close()
    assert place("first") == shared


def test_an_engine_is_recognised_by_its_tokenizer(engine):
    shared = earlier_histories(tokenizer_digest(DEMO_CHECKPOINT))
    assert resolved(ServeSettings(str(engine))).state_dir == shared
    assert resolved(ServeSettings("demo")).state_dir != shared


def test_a_checkpoint_is_built_once_and_keeps_its_state_when_it_changes(tmp_path):
    checkpoint = tmp_path / "my-model"
    tiny_checkpoint("llama", checkpoint)
    first = resolved(ServeSettings(str(checkpoint), dtype="bfloat16"))
    assert Manifest.read(tmp_path / first.engine).dtype == "bfloat16"
    assert resolved(ServeSettings(str(checkpoint), dtype="bfloat16")) == first
    other = resolved(ServeSettings(str(checkpoint), dtype="float32"))
    assert other.engine != first.engine and other.state_dir == first.state_dir


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            "--tensor-parallel-size: .* was built with 1; leave the option out",
        ),
        ({"dtype": "float16"}, "--dtype: .* was built with bfloat16"),
        ({"quantization": "fp8"}, "--quantization: .* was built with none"),
    ],
)
def test_an_engine_is_what_it_was_built_as(engine, options, message):
    with pytest.raises(SettingError, match=message):
        resolved(ServeSettings(str(engine), **options))
    name = "--" + next(iter(options)).replace("_", "-")
    with pytest.raises(
        SettingError, match=f"{name}: is for a checkpoint; the demo engine is always the same"
    ):
        check_engine(ServeSettings("demo", **options))


def named(monkeypatch, model):
    """Lets every name be that of `model`, or refuses it."""

    def find(text, say):
        if isinstance(model, SettingError):
            raise model
        return model

    monkeypatch.setattr(resolve, "find_model", find)


def small(monkeypatch, path):
    """Lets the small model be at the path, or refuses it."""

    def find(say):
        if isinstance(path, SettingError):
            raise path
        return path

    monkeypatch.setattr(model_names, "small_model", find)


def test_a_model_of_the_hub_is_served_by_its_name(tmp_path, monkeypatch):
    checkpoint = tmp_path / "0123abcd"  # as snapshots are named
    tiny_checkpoint("llama", checkpoint)
    named(monkeypatch, Model(checkpoint, "org/tiny", "hf://org/tiny:v1"))
    settings = resolved(ServeSettings("org/tiny:v1"))
    assert settings.served_model_name == ("org/tiny",)
    assert settings.state_dir.name.startswith("tiny:v1-")
    own = ServeSettings("org/tiny:v1", served_model_name=("mine",))
    assert resolved(own).served_model_name == ("mine",)
    assert settled_words(settings)[2:] == ["--served-model-name", "org/tiny"]


def test_a_new_commit_of_the_hub_that_changes_no_needed_file_keeps_its_engine(
    tmp_path, monkeypatch
):
    default = dict(dtype=None, quantization=None, backend=None, device="cpu")
    engines = set()
    for commit in ("0123abcd", "4567ef01"):
        tiny_checkpoint("llama", tmp_path / commit)
        model = Model(tmp_path / commit, "org/tiny", "hf://org/tiny")
        for module in (resolve, offline_settings):
            monkeypatch.setattr(module, "find_model", lambda text, say, model=model: model)
        engines.add(Path(resolved(ServeSettings("org/tiny")).engine))
        engines.add(offline_settings.model_engine("org/tiny", **default))
    (engine,) = engines
    assert engine.name == "tiny"


def test_without_a_name_the_small_model_is_served(tmp_path, monkeypatch):
    checkpoint = tmp_path / "small"
    tiny_checkpoint("llama", checkpoint)
    small(monkeypatch, checkpoint)
    tiny_checkpoint("llama", tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    assert Path(resolved(ServeSettings(None)).engine).name == "small"
    assert Path(resolved(ServeSettings("smollm2")).engine).name == "smollm2", "a path wins"


def test_a_small_model_that_cannot_be_downloaded_is_replaced_by_the_demo(monkeypatch, caplog):
    small(monkeypatch, SettingError("PATH", "pip says no"))
    settings = resolved(ServeSettings(None))
    assert Path(settings.engine).name == "demo" and settings.served_model_name is None
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "serving the tiny demo model instead of smollm2: pip says no"
    ]
    with pytest.raises(SettingError, match="PATH: pip says no"):
        resolved(ServeSettings("smollm2"))
    with pytest.raises(SettingError, match="--dtype: is for a checkpoint"):
        resolved(ServeSettings(None, dtype="float16"))
