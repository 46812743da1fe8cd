"""The library in `native/`: our plugins, and TensorRT's builder and runtime behind C functions. It
is compiled here, once for each TensorRT, with the user's compiler and TensorRT's headers, and kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import replace
from pathlib import Path

from ...scheduler.types import SettingError
from .installation import find_tensorrt

NATIVE = Path(__file__).parent / "native"
OPTIONS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra",
           "-Wno-deprecated-declarations")  # fmt: skip
MOST_CLASSES = 3
# of TensorRT's severities
LEVELS = (logging.CRITICAL, logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)
CALLS_OF_ITS_OWN = b"ICudaEngine::getProfileDimensions"
"""TensorRT 8.5 warns of its own calls whenever a profile other than the first is given a shape."""
log = logging.getLogger(__name__)


AllReduce = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_void_p)
"""`PensieveAllReduce`."""


class Step(ctypes.Structure):
    """`PensieveStep`."""

    _fields_ = (
        *((name, c_void_p) for name in ("pool", "partial", "lse", "counters", "covered")),
        ("items", c_void_p * MOST_CLASSES),
        ("arrivals", c_void_p * MOST_CLASSES),
        ("gates", POINTER(c_void_p)),
        ("longest", c_int32),
        ("all_reduce", AllReduce),
    )


class Bytes(ctypes.Structure):
    """`PensieveBytes`."""

    _fields_ = (("data", c_void_p), ("size", c_size_t), ("owner", c_void_p))


Hear = ctypes.CFUNCTYPE(None, c_int, c_char_p)
SIZES = POINTER(c_int64)
FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {  # (what it returns, its arguments)
    "load_kernels": (c_void_p, (c_char_p,)),
    "unload_kernels": (None, (c_void_p,)),
    "error": (c_char_p, ()),
    "register_plugins": (c_int, ()),
    "hear": (None, (Hear,)),
    "tensorrt_version": (c_int, ()),
    "network_new": (c_void_p, ()),
    "network_free": (None, (c_void_p,)),
    "input": (c_int, (c_void_p, c_char_p, c_int, c_int, SIZES)),
    "constant": (c_int, (c_void_p, c_char_p, c_int, c_int, SIZES, c_void_p)),
    "layer": (c_int, (c_void_p, c_char_p, c_int, c_int, c_int, POINTER(c_int), c_int, SIZES)),
    "plugin": (c_int, (c_void_p, c_char_p, c_char_p, c_void_p, c_int, c_int, POINTER(c_int))),
    "output": (c_int, (c_void_p, c_int, c_int, c_char_p)),
    "profile": (c_int, (c_void_p,)),
    "profile_input": (c_int, (c_void_p, c_char_p, c_int, SIZES, SIZES, SIZES)),
    "bytes_free": (None, (POINTER(Bytes),)),
    "build": (c_int, (c_void_p, c_size_t, c_char_p, c_size_t, POINTER(Bytes), POINTER(Bytes))),
    "engine_load": (c_void_p, (c_char_p, c_size_t)),
    "engine_free": (None, (c_void_p,)),
    "engine_shape": (c_int, (c_void_p, c_char_p, c_int, SIZES)),
    "engine_memory": (c_size_t, (c_void_p,)),
    "context_new": (c_void_p, (c_void_p, c_int, c_void_p, c_void_p)),
    "context_free": (None, (c_void_p,)),
    "set_shape": (c_int, (c_void_p, c_char_p, c_int, SIZES)),
    "set_address": (c_int, (c_void_p, c_char_p, c_void_p)),
    "enqueue_layers": (
        c_int,
        (
            c_void_p,
            c_void_p,
            POINTER(Step),
            c_int,
            c_int,
            POINTER(c_char_p),
            POINTER(c_void_p),
            *(c_void_p,) * 3,
        ),
    ),
}


class Library:
    """The C functions without their prefix, and what is made of their failures."""

    def __init__(self, path: Path):
        self._functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self._functions, f"pensieve_{name}")
            function.restype = result
            function.argtypes = arguments
        self._hear = Hear(_hear)  # held as long as TensorRT may call it
        self._functions.pensieve_hear(self._hear)
        if not self._functions.pensieve_register_plugins():
            raise RuntimeError("TensorRT does not take our plugins; its log says why")
        self.version = _version(self._functions.pensieve_tensorrt_version())

    def call(self, name: str, *arguments: object) -> int:
        """What a function returns that cannot fail."""
        return getattr(self._functions, f"pensieve_{name}")(*arguments)

    def do(self, name: str, *arguments: object) -> None:
        """RuntimeError if the function returns 1."""
        if self.call(name, *arguments):
            raise RuntimeError(self.error())

    def make(self, name: str, *arguments: object) -> int:
        """The address that a function returns. RuntimeError if it is null."""
        handle = self.call(name, *arguments)
        if not handle:
            raise RuntimeError(self.error())
        return handle

    def error(self) -> str:
        return str(self._functions.pensieve_error().decode(errors="replace"))


def _hear(severity: int, text: bytes) -> None:
    if severity <= 2 and CALLS_OF_ITS_OWN not in text:
        log.log(LEVELS[severity], "TensorRT: %s", text.decode(errors="replace"))


def _version(number: int) -> tuple[int, int, int]:
    """8503 is 8.5.3, and 100100 is 10.1.0."""
    major, rest = divmod(number, 10000) if number >= 100000 else divmod(number, 1000)
    return major, *divmod(rest, 100)


def sizes(shape: tuple[int, ...]) -> ctypes.Array[c_int64]:
    return (c_int64 * len(shape))(*shape)


@functools.cache
def load_library() -> Library:
    """The library for the TensorRT that is here. SettingError('--backend', ...) that says what to
    install."""
    tensorrt = find_tensorrt()
    tensorrt.check()
    path = compile_library(tensorrt.headers, tensorrt.library)
    try:
        library = Library(path)
    except OSError as error:
        raise SettingError("--backend", f"tensorrt's library cannot be loaded: {error}") from None
    replace(tensorrt, version=library.version).check()  # now its version is known in full
    return library


def compile_library(headers: Path, tensorrt: Path) -> Path:
    """The compiled library, from the cache of this user if it is there. SettingError if it cannot
    be compiled."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise SettingError("--backend", "tensorrt needs a C++ compiler: install g++")
    sources = sorted(NATIVE.glob("*.cpp"))
    digest = hashlib.sha256(str(tensorrt.resolve()).encode())
    for path in (*sources, *sorted(NATIVE.glob("*.h")), headers / "NvInferVersion.h"):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "pensieve" / "tensorrt" / digest.hexdigest()[:16] / "libpensieve_tensorrt.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.{os.getpid()}")
    includes = [f"-isystem{path}" for path in (headers, cuda_headers())]
    command = [
        compiler,
        *OPTIONS,
        *includes,
        *map(str, sources),
        str(tensorrt),
        f"-Wl,-rpath,{tensorrt.parent}",
        "-Wl,--allow-shlib-undefined",
        "-ldl",
        "-o",
        str(aside),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        log.error("%s", done.stderr)
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), "its log says why"
        )
        raise SettingError("--backend", f"tensorrt's library cannot be compiled: {first}")
    os.replace(aside, target)
    return target


def cuda_headers() -> Path:
    """The folder of cuda.h that comes with Triton."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "include"
