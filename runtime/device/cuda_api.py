"""The few functions of the CUDA runtime that torch does not offer. Their status is checked only
here.

They are called through cuda-python, except the batched copy. That one takes numpy arrays of
addresses, without a Python object for each entry. It is called by ctypes in the library that torch
has loaded, and other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime as cuda

from ...scheduler.types import SettingError

MOST_ENTRIES = 1024  # entries of a batched copy; with tens of thousands, some drivers hang
OLDEST_CAPABILITY = (8, 0)  # Ampere
_OLDEST = 13000  # the first version whose cudaMemcpyBatchAsync has this signature
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH_SIGNATURE: list[Any] = [
    _ADDRESS,
    _ADDRESS,
    _ADDRESS,
    _SIZE,
    _ADDRESS,
    _ADDRESS,
    _SIZE,
    _ADDRESS,
]
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes: source access order, locations of source and target as (type, id; 0:
    found by the driver), flags."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("order", "source", "source_id", "target", "target_id", "flags")
    ]


def check_gpu() -> None:
    """SettingError if torch finds no GPU, or an older one than the kernels need."""
    if not torch.cuda.is_available():
        raise SettingError(
            "--device", "torch finds no NVIDIA GPU here, or has none of its libraries; use cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        wanted, actual = (
            ".".join(map(str, version)) for version in (OLDEST_CAPABILITY, capability)
        )
        name = torch.cuda.get_device_name()
        raise SettingError(
            "--device", f"cuda needs compute capability {wanted} or newer, and {name} has {actual}"
        )


class CudaRuntime:
    """Functions of the runtime. Streams and events are given by their handles, memory by its
    address."""

    def __init__(self, path: str | None = None):
        """SettingError if the runtime library (by default, torch's own) is older than CUDA 13."""
        self._library = ctypes.CDLL(path or _loaded_library())
        version = ctypes.c_int()
        _check("cudaRuntimeGetVersion", self._library.cudaRuntimeGetVersion(ctypes.byref(version)))
        if version.value < _OLDEST:
            actual = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise SettingError(
                "--device", f"cuda needs a torch made for CUDA 13 or newer, not {actual}"
            )
        self._library.cudaMemcpyBatchAsync.argtypes = _BATCH_SIGNATURE
        self._attributes = _CopyAttributes(order=_IN_STREAM_ORDER)
        self._device = 0
        self._first = np.zeros(1, np.uint64)  # the attributes apply from the first entry on

    def use_device(self, device: int) -> None:
        """Sets the GPU, of the calling thread and of threads that pin, to torch's: cuda-python has
        its own runtime, which starts with GPU 0 in each thread."""
        self._device = device
        _call("cudaSetDevice", device)

    def allocate_pinned(self, size: int) -> int:
        """Returns the address of `size` bytes of page-locked host memory, for `free_pinned`. Any
        thread may call it."""
        _call("cudaSetDevice", self._device)
        return int(_call("cudaHostAlloc", size, 0))

    def free_pinned(self, address: int) -> None:
        _call("cudaFreeHost", address)

    def wait_external(self, stream: int, event: int) -> None:
        """Captures a wait for the last record of `event` before the graph's launch.

        The stream must be capturing, and the event must have been recorded before.
        """
        _call("cudaStreamWaitEvent", stream, event, cuda.cudaEventWaitExternal)

    def copy_batch(
        self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int
    ) -> None:
        """Copies sizes[i] bytes from sources[i] to targets[i], in any order; uint64 arrays, free
        once this returns."""
        for first in range(0, len(sizes), MOST_ENTRIES):
            part = slice(first, first + MOST_ENTRIES)
            status = self._library.cudaMemcpyBatchAsync(
                targets[part].ctypes.data,
                sources[part].ctypes.data,
                sizes[part].ctypes.data,
                len(sizes[part]),
                ctypes.addressof(self._attributes),
                self._first.ctypes.data,
                1,
                stream,
            )
            if status:
                # otherwise torch finds it and blames its own next call
                self._library.cudaGetLastError()
            _check("cudaMemcpyBatchAsync", status)

    def copy_each(
        self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int
    ) -> None:
        """The slow twin of `copy_batch`."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            _call("cudaMemcpyAsync", target, source, size, kind, stream)


def _call(name: str, *arguments: Any) -> Any:
    """Calls a function of cuda-python. Returns its result without the status."""
    status, *values = getattr(cuda, name)(*arguments)
    _check(name, int(status))
    return values[0] if values else None


def _check(name: str, status: int) -> None:
    if status:
        error = cuda.cudaError_t(status)
        title = cuda.cudaGetErrorName(error)[1].decode()
        words = cuda.cudaGetErrorString(error)[1].decode()
        raise CudaError(f"{name} failed: {title}, {words}")


def _loaded_library() -> str:
    """The runtime library's file in this process; its name depends on torch's packaging."""
    torch.cuda.init()
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    for path in mapped:
        if Path(path).name.startswith("libcudart"):
            return path
    raise SettingError(
        "--device", "this torch has no CUDA runtime of its own to share (libcudart is not loaded)"
    )
