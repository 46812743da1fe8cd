"""Paths and names of models: a path wins, what looks like one is not looked up, and no check takes
long."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.builder.engine_cache import engine_for
from pensieve.builder.model_names import Model, check_local, check_name, find_model
from pensieve.scheduler.types import SettingError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("checkpoint/config.json", "org/name/config.json", "engine/manifest.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    (tmp_path / "quantised").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "quantised" / "x.gguf").touch()
    (tmp_path / "tiny-Q4_1-00001-of-00002.gguf").write_bytes(b"GGUF...")
    (tmp_path / "sha256-12").write_bytes(b"GGUF")  # as Ollama keeps them
    (tmp_path / "notes.txt").touch()
    (tmp_path / "link").symlink_to("engine")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "name", "real"),
    [
        ("checkpoint", "checkpoint", "checkpoint"),
        ("./checkpoint/", "checkpoint", "checkpoint"),
        ("org/name", "name", "org/name"),
        ("quantised", "quantised", "quantised"),
        ("tiny-Q4_1-00001-of-00002.gguf", "tiny-Q4_1", "tiny-Q4_1-00001-of-00002.gguf"),
        ("sha256-12", "sha256-12", "sha256-12"),
        ("link", "engine", "engine"),
    ],
)
def test_a_path_that_exists_is_the_model(text, name, real, here):
    path = here / text
    assert find_model(text, pytest.fail) == Model(path, name, str(here / real))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nowhere/at/all", "/nowhere/at/all does not exist$"),
        ("./a/b", "./a/b does not exist$"),
        ("../a", "../a does not exist$"),
        ("~/model", "~/model does not exist$"),
        ("a/b/c", "a/b/c does not exist$"),
        ("a/b.gguf", "a/b.gguf does not exist$"),
        ("gpt2", "gpt2 does not exist; a model of the Hugging Face Hub is named as ORG/NAME"),
        ("https://huggingface.co/a/b", "a model of the Hugging Face Hub is named as ORG/NAME"),
        ("hf://gpt2", "a model of the Hugging Face Hub is named as ORG/NAME"),
        ("empty", r"empty is no engine .* and no checkpoint \(it has neither config.json nor"),
        ("notes.txt", "notes.txt is a file, and no GGUF file"),
    ],
)
def test_a_path_without_a_model_is_an_error_of_the_path(text, message):
    with pytest.raises(SettingError, match=f"^PATH: .*{message}"):
        find_model(text, pytest.fail)


def test_a_path_that_cannot_be_read_is_an_error_of_the_path(here, monkeypatch):
    name = "x" * 300
    for text in (name, f"org/{name}"):
        with pytest.raises(SettingError, match=f"^PATH: {text} cannot be read: File name too long"):
            check_name(text)
    own_stat = Path.stat

    def stat(path, **options):
        if path.name == "config.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return own_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    for check in (check_name, check_local, engine_for):
        with pytest.raises(SettingError, match=r"^PATH: .*cannot be read: Permission"):
            check("checkpoint")


@pytest.mark.parametrize("text", ["a/b", "a/b:Q4_K_M", "hf://a/b:refs/pr/1", "smollm2"])
def test_a_name_is_not_looked_up_when_it_is_checked(text):
    check_name(text)


PYTHON = [sys.executable, "-X", "importtime", "-m"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pensieve", "serve", "/nowhere"], "pensieve serve: PATH: /nowhere does not exist"),
        (["pensieve", "serve", "demo", "--prot", "1"], "did you mean --port?"),
        (["pensieve", "serve", "demo", "--gpu-kv-bytes", "0"], "--gpu-kv-bytes: must be at least"),
        (["pensieve", "serve", "demo", "--chat-template", "/no"], "--chat-template: cannot read"),
        (["pensieve", "serve", "demo", "--generation-config", "/no"], "--generation-config: "),
        (["pensieve", "serve", "demo", "--tool-call-parser", "no"], "--tool-call-parser: must be"),
        (["pensieve", "profile", "--engine", "/nowhere"], "--engine: "),
        (["build_engine", "--checkpoint", "/no", "--output", "x"], "--checkpoint: /no does not"),
        (["build_engine", "--random-weights", "--config", "/no", "--output", "x"], "--config: /no"),
    ],
)
def test_a_mistake_is_answered_before_anything_large_is_imported(words, message):
    program, *rest = words
    done = subprocess.run(
        [*PYTHON, f"pensieve.scripts.{program}", *rest],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2 and message in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pensieve.scheduler.types" in imported
    assert not imported & {"torch", "fastapi", "transformers", "huggingface_hub", "gguf"}
