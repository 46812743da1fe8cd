"""The library of `native/launch.cpp` beside a driver that only writes down."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")
from pensieve.plugins.tensorrt.library import NATIVE, OPTIONS, cuda_headers

from ..kernel_cases import CUDA, INTERPRETED
from ..recording_driver import STREAM, Launched

HERE = Path(__file__).parent

needs_compilers = pytest.mark.skipif(
    CUDA or INTERPRETED or shutil.which("g++") is None,
    reason="needs g++ and Triton's compiler, and no driver",
)


class Library:
    """The library, loaded beside the fake driver."""

    def __init__(self, folder: Path):
        compile_cpp(
            HERE / "fake_cuda.cpp",
            folder / "libcuda.so.1",
            "-Wl,-soname,libcuda.so.1",
            "-fvisibility=default",
        )
        compile_cpp(
            HERE / "fake_cublas.cpp",
            folder / "libcublasLt.so.13",
            "-Wl,-soname,libcublasLt.so.13",
            "-fvisibility=default",
        )
        compile_cpp(NATIVE / "launch.cpp", folder / "liblaunch.so", str(NATIVE / "product.cpp"))
        self.cublas = ctypes.CDLL(str(folder / "libcublasLt.so.13"))
        # found by its name from here on
        self.fake = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
        self.fake.fake_record.restype = ctypes.c_char_p
        # the plugins call it
        self.library = ctypes.CDLL(str(folder / "liblaunch.so"), ctypes.RTLD_GLOBAL)
        self.library.pensieve_load_kernels.restype = ctypes.c_void_p
        self.library.pensieve_error.restype = ctypes.c_char_p
        self.images: list[bytes] = []

    def needs_fake_cublas(self) -> None:
        """Skips the test if PyTorch has brought cuBLAS: the library takes the one that the process
        has."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        if any("libcublasLt" in line and not line.endswith(self.cublas._name) for line in maps):
            pytest.skip("needs a PyTorch without cuBLAS")

    def load(
        self, folder: Path, refuse_cubins: bool = False, capturing: bool = False
    ) -> ctypes.c_void_p:
        """Kernels of a folder. RuntimeError with the library's reason."""
        self.fake.fake_reset(refuse_cubins, capturing)
        kernels = self.library.pensieve_load_kernels(str(folder).encode())
        if not kernels:
            raise RuntimeError(self.error())
        self.images = [
            path.read_bytes()
            for path in sorted(folder.glob("*.cubin"), key=lambda path: int(path.stem))
        ]
        for path in sorted(folder.glob("*.ptx"), key=lambda path: int(path.stem)):
            self.fake.fake_parameters(
                path.read_text().split(".entry")[1].split(")")[0].count(".param")
            )
        return ctypes.c_void_p(kernels)

    def error(self) -> str:
        return self.library.pensieve_error().decode()

    def record(self) -> list[str]:
        """What the driver was asked for since the last call."""
        return self.fake.fake_record().decode().splitlines()

    def write_kv(self, kernels, step, layer, qkv, rotary, slots, rotated) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (qkv, rotary, slots, rotated)]
        arguments = (
            kernels,
            ctypes.byref(step),
            layer,
            len(qkv),
            *pointers,
            ctypes.c_void_p(STREAM),
        )
        if self.library.pensieve_write_kv(*arguments):
            raise RuntimeError(self.error())

    def norm(self, kernels, x, y, weight, bias, normed, total) -> None:
        pointers = [
            None if x is None else ctypes.c_void_p(x.data_ptr())
            for x in (x, y, weight, bias, normed, total)
        ]
        if self.library.pensieve_norm(kernels, len(x), *pointers, ctypes.c_void_p(STREAM)):
            raise RuntimeError(self.error())

    def product(self, kind, x, weight, bias, relu, y, workspace) -> None:
        pointers = [
            None if x is None else ctypes.c_void_p(x.data_ptr())
            for x in (x, weight, bias, y, workspace)
        ]
        shape = (kind, *x.shape, len(weight))
        given = (*shape, *pointers[:3], relu, *pointers[3:], ctypes.c_void_p(STREAM))
        if self.library.pensieve_product(*given):
            raise RuntimeError(self.error())

    def silu_gate(self, kernels, x, out) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (x, out)]
        if self.library.pensieve_silu_gate(kernels, len(x), *pointers, ctypes.c_void_p(STREAM)):
            raise RuntimeError(self.error())

    def attend(self, kernels, step, layer, q, block_table, o) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, block_table, o)]
        arguments = (kernels, ctypes.byref(step), layer, len(q), block_table.shape[1], *pointers)
        if self.library.pensieve_attend(*arguments, ctypes.c_void_p(STREAM)):
            raise RuntimeError(self.error())

    def launched(self) -> list[Launched]:
        """The launches since the last call."""
        return [self._launched(line) for line in self.record() if line.startswith("launch")]

    def _launched(self, line: str) -> Launched:
        number, x, y, z, threads, shared, dependent, stream, *values = map(int, line.split()[1:])
        return Launched(
            self.images[number - 1],
            (x, y, z),
            threads,
            shared,
            bool(dependent),
            stream,
            tuple(values),
        )


def compile_cpp(source: Path, target: Path, *options: str) -> None:
    command = [
        "g++",
        *OPTIONS,
        "-Werror",
        "-isystem",
        str(cuda_headers()),
        *options,
        str(source),
        "-ldl",
    ]
    subprocess.run([*command, "-o", str(target)], check=True)


def headers() -> list[Path]:
    """Folders of TensorRT's headers: those in TENSORRT_HEADERS, separated by colons, and that of
    TENSORRT_HOME."""
    named = [
        Path(name) for name in os.environ.get("TENSORRT_HEADERS", "").split(os.pathsep) if name
    ]
    if home := os.environ.get("TENSORRT_HOME"):
        named.append(Path(home) / "include")
    return named


needs_headers = pytest.mark.skipif(
    not headers(), reason="needs TensorRT's headers: name folders in TENSORRT_HEADERS"
)
