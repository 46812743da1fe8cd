"""Where TensorRT is: its library where pip puts it, then in TENSORRT_HOME, then where the loader
looks; its headers beside the library, or in the folder that TENSORRT_INCLUDE names.

What differs between its versions is in `native/versions.h`.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...scheduler.types import SettingError

Version = tuple[int, ...]

OLDEST = (8, 5)  # the first with addresses by name
NEWEST = 11  # the last major version whose headers are known
STRONGLY_TYPED = (10, 0)  # and with bfloat16

# folders of wheels: since 8.6, 10, 11; 8.5; 8.5 unpacked without a folder
PACKAGES = ("tensorrt_libs", "tensorrt_cu13_libs", "tensorrt_cu12_libs", "tensorrt", "")
BINDINGS = ("tensorrt_bindings", "tensorrt_cu13_bindings", "tensorrt_cu12_bindings")
LEAN = ("tensorrt_lean_libs", "tensorrt_lean_cu13_libs", "tensorrt_lean_cu12_libs")
DISTRIBUTIONS = (
    "tensorrt-cu13-libs",
    "tensorrt-cu12-libs",
    "tensorrt-libs",
    "tensorrt-cu13",
    "tensorrt-cu12",
    "tensorrt",
)
SYSTEM_HEADERS = ("/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu")

INSTALL = "pip install 'pensieve[tensorrt]', or set TENSORRT_HOME to a folder of TensorRT"
FETCH = (
    "pip must reach NVIDIA's index: pip install --extra-index-url https://pypi.nvidia.com "
    "tensorrt-cu13"
)
GET_HEADERS = (
    "they are in NVIDIA's public repository TensorRT on GitHub, in the folder include/ of the tag "
    "of this version: name that folder in TENSORRT_INCLUDE"
)


@dataclass(frozen=True)
class InstalledTensorRT:
    """`library`: libnvinfer's file. `source`: where it was found, for people. `version`: the
    library's as far as names tell it, at least its major version if any; () if they do not."""

    library: Path
    source: str
    version: Version
    headers: Path

    @property
    def headers_version(self) -> Version:
        return headers_version(self.headers)

    def check(self) -> None:
        """SettingError('--backend', ...) if our library cannot be compiled for it."""
        headers = self.headers_version
        if not headers:
            raise SettingError(
                "--backend",
                f"{self.headers}/NvInferVersion.h does not tell TensorRT's version: {GET_HEADERS}",
            )
        check_version(headers)
        if not fits(headers, self.version):
            raise SettingError(
                "--backend",
                f"the headers in {self.headers} are of TensorRT {text(headers)}, and "
                f"{self.library} is of {text(self.version)}: {GET_HEADERS}",
            )


def check_version(version: Version) -> None:
    """SettingError('--backend', ...) for a version that there are no plugins for."""
    if version[:2] < OLDEST:
        raise SettingError(
            "--backend", f"TensorRT {text(version)} is too old: install {text(OLDEST)} or later"
        )
    if version[0] > NEWEST:
        raise SettingError(
            "--backend",
            f"TensorRT {text(version)} is newer than the plugins: install {NEWEST} or older",
        )


def fits(headers: Version, library: Version) -> bool:
    """Whether what is compiled with these headers runs with this library: one major version, and no
    newer minor one. Numbers of the library that are not known are not compared."""
    count = min(2, len(library))
    return headers[:1] == library[:1] and headers[:count] <= library[:count] if library else True


def text(version: Version) -> str:
    return ".".join(map(str, version))


def find_tensorrt() -> InstalledTensorRT:
    """SettingError('--backend', ...) that says what is here and what is missing."""
    library, source = _library()
    headers = next((path for path in _headers(library) if (path / "NvInfer.h").exists()), None)
    version = _library_version(library)
    if headers is None:
        named = f" {text(version)}" if version else ""
        raise SettingError(
            "--backend", f"TensorRT{named} is here ({library}), its headers are not: {GET_HEADERS}"
        )
    return InstalledTensorRT(library, source, version, headers)


def _library() -> tuple[Path, str]:
    """The library, and where it was found. SettingError if there is none."""
    for folder in _site_folders(*PACKAGES):
        if library := _newest(folder):
            return library, f"the package in {folder}"
    if home := os.environ.get("TENSORRT_HOME"):
        if library := _newest(Path(home, "lib")) or _newest(Path(home)):
            return library, f"TENSORRT_HOME {home}"
        raise SettingError(
            "--backend",
            f"TENSORRT_HOME has no {home}/lib/libnvinfer.so: TensorRT itself is missing",
        )
    for entry in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        if library := _newest(Path(entry)):
            return library, f"LD_LIBRARY_PATH {entry}"
    for line in _loader_cache().splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and name.startswith("libnvinfer.so"):
            return Path(path), "the loader's cache"
    raise SettingError("--backend", _missing_library())


def _newest(folder: Path) -> Path | None:
    """libnvinfer in this folder."""
    return max(folder.glob("libnvinfer.so*"), key=_file_version, default=None)


def _file_version(path: Path) -> Version:
    numbers = re.fullmatch(r"libnvinfer\.so\.?([\d.]*)", path.name)
    return tuple(map(int, numbers[1].split("."))) if numbers and numbers[1] else ()


def _library_version(library: Path) -> Version:
    """Of the file that a link leads to, or of the package that the library belongs to."""
    version = _file_version(library.resolve())
    if len(version) >= 2:
        return version
    for name in DISTRIBUTIONS:
        package, folder = _package_version(name) or ((), Path())
        if package[: len(version)] == version and library.is_relative_to(folder):
            return package
    return version


def _package_version(name: str) -> tuple[Version, Path] | None:
    """The version of a package, and the folder that it is installed in."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = re.match(r"[\d.]*\d", distribution.version)
    version = tuple(map(int, numbers[0].split("."))) if numbers else ()
    return version, Path(str(distribution.locate_file("")))


def _site_folders(*names: str) -> Iterator[Path]:
    """The folders of these names among the installed packages; of the first name first."""
    for name in names:
        for entry in filter(None, sys.path):
            if (folder := Path(entry, name)).is_dir():
                yield folder


def _loader_cache() -> str:
    """What ldconfig prints of the libraries that it knows."""
    try:
        done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout


def _headers(library: Path) -> Iterator[Path]:
    """Folders that the headers may be in; only the user's, if one is named."""
    if named := os.environ.get("TENSORRT_INCLUDE"):
        yield Path(named)
        return
    beside = library.parent
    yield from (beside / "include", beside.parent / "include")
    if home := os.environ.get("TENSORRT_HOME"):
        yield Path(home, "include")
    yield from map(Path, SYSTEM_HEADERS)


def headers_version(folder: Path) -> Version:
    """What NvInferVersion.h says; () if it says nothing."""
    try:
        lines = (folder / "NvInferVersion.h").read_text(errors="replace")
    except OSError:
        return ()
    values: dict[str, str] = dict(re.findall(r"^#define\s+(\w+)\s+(\w+)", lines, re.MULTILINE))
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        value = values.get(f"NV_TENSORRT_{part}", "")
        value = values.get(value, value)  # since 10.14 another macro has the number
        if not value.isdigit():
            break
        numbers.append(int(value))
    return tuple(numbers)


def _missing_library() -> str:
    """What is here of TensorRT if its library is not, and what to do."""
    for name in DISTRIBUTIONS:
        if package := _package_version(name):
            named = f"{name} {text(package[0])}"
            return f"the package {named} is a placeholder without the library: {FETCH}"
    if any(_site_folders(*BINDINGS)):
        return f"TensorRT's Python bindings are here alone, without the library: {FETCH}"
    if any(next(folder.glob("libnvinfer_lean.so*"), None) for folder in _site_folders(*LEAN)):
        return (
            "TensorRT's lean runtime is here alone; it only runs plans, and nothing can be built "
            f"with it: {FETCH}"
        )
    return f"TensorRT is not here: {INSTALL}"
