"""Building over existing files: a damaged engine, the rest of a killed build, a link, another
build."""

import errno
import json
import os

import pytest

from pensieve.builder import build as build_module
from pensieve.builder.build import build_engine
from pensieve.builder.manifest import MANIFEST, WEIGHTS, Manifest
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint("llama", directory)
    return directory


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def edit_manifest(engine, decoder):
    value = json.loads((engine / MANIFEST).read_text())
    value["decoder"] = value["decoder"] | decoder if isinstance(decoder, dict) else decoder
    (engine / MANIFEST).write_text(json.dumps(value))


def flip_a_bit(engine):
    content = bytearray((engine / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (engine / WEIGHTS).write_bytes(content)


DAMAGES = {
    "a number in the manifest": lambda engine: edit_manifest(engine, {"layers": 3}),
    "a list for the decoder": lambda engine: edit_manifest(engine, []),
    "a text for the decoder": lambda engine: edit_manifest(engine, "llama"),
    "no weights": lambda engine: (engine / WEIGHTS).unlink(),
    "half of the weights": lambda engine: (engine / WEIGHTS).write_bytes(
        (engine / WEIGHTS).read_bytes()[:5000]
    ),
    "a flipped bit": flip_a_bit,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_engine_that_cannot_be_opened_any_more_is_built_again(damage, checkpoint, tmp_path):
    """Follows the refusal's advice: "build the engine again"."""
    engine = tmp_path / "engine"
    build_engine(checkpoint, engine)
    damage(engine)
    with pytest.raises(SettingError, match="--engine"):
        open_engine(engine)
    assert build_engine(checkpoint, engine).outcome == "replaced"
    assert build_engine(checkpoint, engine).outcome == "reused"
    open_engine(engine)


def test_a_tokenizer_that_was_changed_is_put_right(checkpoint, tmp_path):
    engine = tmp_path / "engine"
    build_engine(checkpoint, engine)
    (engine / "chat_template.jinja").write_text("{{ messages }}")
    assert build_engine(checkpoint, engine).outcome == "replaced"
    assert not (engine / "chat_template.jinja").exists()


def test_a_build_leaves_builds_of_outputs_with_longer_names_alone(
    checkpoint, tmp_path, monkeypatch
):
    """`llama.v2` in the making is no rubbish of `llama`."""
    save = build_module.save_weights
    others = [tmp_path / "llama"]

    def build_the_other_first(*arguments):
        if others:
            build_engine(checkpoint, others.pop())
        save(*arguments)

    monkeypatch.setattr(build_module, "save_weights", build_the_other_first)
    assert build_engine(checkpoint, tmp_path / "llama.v2").outcome == "built"
    assert names(tmp_path) == ["llama", "llama.v2"]


def test_what_killed_builds_left_goes_away(checkpoint, tmp_path):
    build_engine(checkpoint, tmp_path / "engine [1]")
    for left in ("01234567.building", "89abcdef.replaced"):
        (tmp_path / f".engine [1].{left}").mkdir()
    assert build_engine(checkpoint, tmp_path / "engine [1]").outcome == "reused"
    assert names(tmp_path) == ["engine [1]"]


def test_an_engine_that_had_stepped_aside_when_its_successor_was_killed_comes_back(
    checkpoint, tmp_path
):
    build_engine(checkpoint, tmp_path / "engine")
    (tmp_path / "engine").rename(tmp_path / ".engine.01234567.replaced")
    assert build_engine(checkpoint, tmp_path / "engine").outcome == "reused"
    assert names(tmp_path) == ["engine"]


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "an engine"])
def test_a_link_stays_and_leads_to_the_new_engine(there, checkpoint, tmp_path):
    link = tmp_path / "current"
    real = tmp_path / "elsewhere" / "engine"
    link.symlink_to(real)
    if there == "an engine":
        build_engine(checkpoint, real)
    elif there == "an empty directory":
        real.mkdir(parents=True)
    build_engine(checkpoint, link, dtype="float16")
    assert link.is_symlink() and Manifest.read(link).dtype == "float16"
    assert names(tmp_path) == ["current", "elsewhere"] and names(real.parent) == ["engine"]


def test_a_mount_point_is_refused_before_the_work_is_done(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "is_mount", lambda path: path == tmp_path)
    with pytest.raises(SettingError, match=r"--output.*mount point"):
        build_engine(checkpoint, tmp_path)
    assert names(tmp_path) == []


def test_the_root_of_all_is_no_place_for_an_engine(checkpoint):
    with pytest.raises(SettingError, match=r"^--output: .*/ "):
        build_engine(checkpoint, "/")


@pytest.mark.parametrize(
    "number, message",
    [
        (errno.EDQUOT, "the disk of .* became full"),
        (errno.EACCES, r"cannot be made: .*'\.engine\.lock'"),
        (errno.EFBIG, "cannot be made: .*File too large"),
    ],
)
def test_what_the_system_refuses_is_said_in_a_line(
    number, message, checkpoint, tmp_path, monkeypatch
):
    """A quota, files of another user's build of the same directory, or a limit of the file system
    or the user."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), ".engine.lock")

    monkeypatch.setattr(build_module, "_clear_up", refuse)
    with pytest.raises(SettingError, match=f"--output: {message}"):
        build_engine(checkpoint, tmp_path / "engine")


def test_what_is_not_the_systems_is_not_blamed_on_the_output(checkpoint, tmp_path, monkeypatch):
    """The words in which ctypes and torch say that a library cannot be loaded."""

    def load(*_, **__):
        raise OSError("libmade.so: cannot open shared object file")

    monkeypatch.setattr(build_module, "_clear_up", load)
    with pytest.raises(OSError, match=r"^libmade\.so"):
        build_engine(checkpoint, tmp_path / "engine")
