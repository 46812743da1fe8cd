"""How the library is found and compiled, and how a missing part is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
from pensieve.plugins.tensorrt import installation
from pensieve.plugins.tensorrt.library import (
    NATIVE,
    OPTIONS,
    compile_library,
    cuda_headers,
    load_library,
)
from pensieve.scheduler.types import SettingError

from .launching import headers, needs_headers

NO_COMPILER = shutil.which("g++") is None


@pytest.mark.skipif(NO_COMPILER, reason="needs g++")
@needs_headers
@pytest.mark.parametrize("folder", headers(), ids=str)
def test_it_compiles_without_warnings_with_the_headers_of(folder):
    for source in NATIVE.glob("*.cpp"):
        includes = [f"-isystem{path}" for path in (folder, cuda_headers())]
        subprocess.run(
            ["g++", *OPTIONS, "-Werror", *includes, "-c", str(source), "-o", "/dev/null"],
            check=True,
        )


def test_one_file_has_what_differs_between_versions():
    files = [path.name for path in NATIVE.iterdir() if "NV_TENSORRT" in path.read_text()]
    assert files == ["versions.h"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of TensorRT that is empty. Nothing else is here of it."""
    monkeypatch.setattr(installation, "_site_folders", lambda *names: iter(()))
    monkeypatch.delenv("TENSORRT_INCLUDE", raising=False)
    monkeypatch.setattr(installation, "SYSTEM_HEADERS", ())
    monkeypatch.setenv("TENSORRT_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_library.cache_clear()
    yield tmp_path
    load_library.cache_clear()


def file(path, content=""):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def version_file(major, minor):
    return f"#define NV_TENSORRT_MAJOR {major}\n#define NV_TENSORRT_MINOR {minor}\n"


def test_a_missing_compiler_is_named(home, monkeypatch):
    file(home / "include" / "NvInfer.h")
    file(home / "include" / "NvInferVersion.h", version_file(8, 5))
    file(home / "lib" / "libnvinfer.so.8")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        SettingError, match=r"^--backend: tensorrt needs a C\+\+ compiler: install g\+\+"
    ):
        load_library()


@pytest.mark.parametrize(
    ("major", "minor", "words"),
    [
        (8, 4, r"TensorRT 8\.4 is too old: install 8\.5 or later"),
        (12, 0, r"TensorRT 12\.0 is newer than the plugins: install 11 or older"),
        (
            10,
            0,
            r"the headers in .* are of TensorRT 10\.0, and .*libnvinfer\.so\.8\.5\.3 is of 8\.5",
        ),
    ],
)
def test_a_version_that_does_not_fit_is_refused_before_it_is_compiled(home, major, minor, words):
    file(home / "include" / "NvInfer.h")
    file(home / "include" / "NvInferVersion.h", version_file(major, minor))
    file(home / "lib" / "libnvinfer.so.8.5.3")
    with pytest.raises(SettingError, match=rf"^--backend: {words}"):
        load_library()


@pytest.mark.skipif(NO_COMPILER, reason="needs g++")
def test_a_compiler_that_fails_says_why(home):
    file(home / "include" / "NvInfer.h", "#error these are no headers\n")
    file(home / "include" / "NvInferVersion.h", version_file(8, 5))
    file(home / "lib" / "libnvinfer.so.8")
    with pytest.raises(
        SettingError, match=r"^--backend: tensorrt's library cannot be compiled: .*no headers"
    ):
        load_library()


def test_what_was_compiled_is_kept(home, monkeypatch):
    version, tensorrt = (
        file(home / "include" / "NvInferVersion.h", "8"),
        file(home / "lib" / "libnvinfer.so.8"),
    )
    compiled = []

    def run(command, **_):
        compiled.append(Path(command[-1]))
        compiled[-1].touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    paths = [compile_library(version.parent, tensorrt) for _ in range(2)]
    version.write_text("9")  # another TensorRT in the same place
    paths.append(compile_library(version.parent, tensorrt))
    assert (
        len(compiled) == 2
        and paths[0] == paths[1] != paths[2]
        and all(path.exists() for path in paths)
    )
