"""Compiling in a separate process: after any failure there, the build reports the reason and leaves
no files behind."""

import errno
import hashlib
import json
import os
import stat
import sys
import threading
from collections import namedtuple

import pytest

from pensieve.builder import build as build_module
from pensieve.builder.build import build_engine
from pensieve.builder.inductor import compile_parent as compiler_module
from pensieve.builder.manifest import PACKAGE, Manifest
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

PARITY = {"logits": 1e-7, "logits_eager": 0.0, "kv": 1e-7, "kv_eager": 0.0}
DIGEST = hashlib.sha256(f"{PACKAGE} 5\ncode\n".encode()).hexdigest()
COMPILED = {
    "package": DIGEST,
    "package_bytes": 5,
    "compile_seconds": 1.5,
    "load_seconds": 0.1,
    "parity": PARITY,
}


@pytest.fixture(autouse=True)
def a_compiler_is_there(monkeypatch):
    """Any program will do: these tests compile nothing, and run on machines without a compiler
    too."""
    monkeypatch.setenv("CXX", "sh")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint("llama", directory)
    return directory


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Runs a shell script in place of Python; $engine is the directory of the unfinished engine."""
    (tmp_path / "bin").mkdir()

    def write(script):
        path = tmp_path / "bin" / "child"
        path.write_text(f"#!/bin/sh\nengine=$4\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(compiler_module.sys, "executable", str(path))

    return write


def says(**message):
    return f"echo '{json.dumps(message)}'"


def built(checkpoint, tmp_path, **options):
    return build_engine(checkpoint, tmp_path / "out" / "engine", "inductor", **options)


def nothing_left(tmp_path):
    return list((tmp_path / "out").iterdir()) == []


def test_what_the_compiler_brought_is_in_the_manifest_and_not_in_the_fingerprint(
    checkpoint, tmp_path, child
):
    script = f'test -e "$engine/manifest.json" && echo code > "$engine/{PACKAGE}" || exit 1'
    child("\n".join((script, says(stage="compiling"), says(compiled=COMPILED))))
    stages = []
    first = built(checkpoint, tmp_path, say=stages.append)
    assert stages == ["reading the weights", "writing the weights", "compiling"]
    manifest = Manifest.read(tmp_path / "out" / "engine")
    assert manifest == first.manifest and manifest.compiled.parity.logits == 1e-7
    assert manifest.backend == "inductor" and manifest.target
    assert manifest.compiled.compile_seconds == 1.5
    child("exit 1")
    again = built(checkpoint, tmp_path)
    assert again.outcome == "reused" and again.manifest == manifest


@pytest.mark.parametrize(
    "script, named",
    [
        (
            f'echo code > "$engine/{PACKAGE}"; kill -SEGV $$',
            r"crashes when it is loaded \(SIGSEGV\).*set CXX",
        ),
        ("kill -SEGV $$", r"compiling was killed \(SIGSEGV\)"),
        (
            "echo 'No space left on device' >&2; exit 1",
            r"compiling failed.*No space left on device",
        ),
        (f'echo code > "$engine/{PACKAGE}"; exit 1', "trying the compiled engine failed.*none"),
        (says(refused="the logits are off"), "--backend: the logits are off"),
        ("exit 0", "compiling failed"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_is_published(
    script, named, checkpoint, tmp_path, child
):
    child(script)
    with pytest.raises(SettingError, match=named):
        built(checkpoint, tmp_path)
    assert nothing_left(tmp_path)


def test_no_module_of_the_current_directory_runs(checkpoint, tmp_path, child, monkeypatch):
    """The child is Python with the first word that it was given."""
    (tmp_path / "stray.py").touch()
    monkeypatch.chdir(tmp_path)
    child(f'exec "{sys.executable}" "$1" -c "import stray"')
    with pytest.raises(SettingError, match="No module named 'stray'"):
        built(checkpoint, tmp_path)


def test_an_interrupted_build_ends_the_compiler(checkpoint, tmp_path, child):
    child(f'echo $$ > "{tmp_path}/pid"\n{says(stage="compiling")}\nexec sleep 100')

    def interrupt(stage):
        if stage == "compiling":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(checkpoint, tmp_path, say=interrupt)
    assert nothing_left(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_two_builds_at_once_compile_once(checkpoint, tmp_path, child):
    """The compiler is not done before the other build waits for it."""
    wait = f'for _ in $(seq 600); do [ -e "{tmp_path}/waiting" ] && break; sleep 0.1; done'
    child(
        f'echo once >> "{tmp_path}/log"; echo code > "$engine/{PACKAGE}"; '
        f"{wait}\n{says(compiled=COMPILED)}"
    )
    outcomes = []

    def say(stage):
        if "waiting for another build" in stage:
            (tmp_path / "waiting").touch()

    def build():
        outcomes.append(built(checkpoint, tmp_path, say=say).outcome)

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(outcomes) == ["built", "reused"]
    assert (tmp_path / "log").read_text() == "once\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["engine"]
    assert (tmp_path / "waiting").exists()


def test_what_a_killed_build_left_is_removed(checkpoint, tmp_path):
    left = tmp_path / "out" / ".engine.01234567.building"
    left.mkdir(parents=True)
    (left / "weights.safetensors").write_text("half")
    build_engine(checkpoint, tmp_path / "out" / "engine")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["engine"]


@pytest.mark.parametrize("name", ["no-such-compiler", ""])
def test_without_a_compiler(name, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", name or str(tmp_path))
    with pytest.raises(
        SettingError, match=r"--backend: inductor needs a C\+\+ compiler.*CXX.*--backend reference"
    ):
        built(checkpoint, tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_full_disk(checkpoint, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(build_module.shutil, "disk_usage", lambda path: usage(2**30, 2**30, 1000))
        with pytest.raises(
            SettingError,
            match=r"--output: the engine takes 64 MiB, and the disk of .* has 0 MiB free",
        ):
            built(checkpoint, tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, "save_weights", full)
    with pytest.raises(SettingError, match=r"--output: the disk of .* became full"):
        built(checkpoint, tmp_path)
    assert nothing_left(tmp_path)
