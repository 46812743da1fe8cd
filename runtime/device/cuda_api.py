"""The few functions of the CUDA runtime that torch does not offer, and the one place that reads their status.

They are called through cuda-python, all but the batched copy: that takes arrays of addresses as numpy makes them,
without a Python object an entry, by ctypes from the library that torch has loaded, and other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime as cuda

from ...scheduler.types import SettingError

MOST_ENTRIES = 1024  # of a batched copy; with tens of thousands, drivers are known to hang
_OLDEST = 13000  # whose cudaMemcpyBatchAsync has the signature used here
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_BATCH_SIGNATURE: list[Any] = [_ADDRESS, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS]
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class _CopyAttributes(ctypes.Structure):
    """cudaMemcpyAttributes: source access order, where source and target are (type, id; 0: see for yourself), flags."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "source", "source_id", "target", "target_id", "flags")]


class CudaRuntime:
    """Streams and events are given by their handles, memory by its address."""

    def __init__(self, path: str | None = None):
        """SettingError if the runtime library (by default, torch's own) is older than CUDA 13."""
        self._library = ctypes.CDLL(path or _loaded_library())
        version = ctypes.c_int()
        _check("cudaRuntimeGetVersion", self._library.cudaRuntimeGetVersion(ctypes.byref(version)))
        if version.value < _OLDEST:
            found = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise SettingError("--device", f"cuda needs a torch made for CUDA 13 or newer, not {found}")
        self._library.cudaMemcpyBatchAsync.argtypes = _BATCH_SIGNATURE
        self._attributes = _CopyAttributes(order=_IN_STREAM_ORDER)
        self._first = np.zeros(1, np.uint64)  # the attributes hold from the first entry on

    def use_device(self, device: int) -> None:
        """The calling thread's GPU, as torch's is: cuda-python has a runtime of its own, which begins with GPU 0."""
        _call("cudaSetDevice", device)

    def allocate_pinned(self, size: int) -> int:
        """Address of so many bytes of page-locked host memory, for `free_pinned`."""
        return int(_call("cudaHostAlloc", size, 0))

    def free_pinned(self, address: int) -> None:
        _call("cudaFreeHost", address)

    def wait_external(self, stream: int, event: int) -> None:
        """Captures a wait for the record of `event` that is the last when the graph is launched.

        The stream must be capturing and the event have been recorded before.
        """
        _call("cudaStreamWaitEvent", stream, event, cuda.cudaEventWaitExternal)

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """Copies sizes[i] bytes from sources[i] to targets[i], in any order; uint64 arrays, free once this returns."""
        for first in range(0, len(sizes), MOST_ENTRIES):
            part = slice(first, first + MOST_ENTRIES)
            status = self._library.cudaMemcpyBatchAsync(
                targets[part].ctypes.data, sources[part].ctypes.data, sizes[part].ctypes.data, len(sizes[part]),
                ctypes.addressof(self._attributes), self._first.ctypes.data, 1, stream,
            )  # fmt: skip
            if status:
                self._library.cudaGetLastError()  # or torch finds it and blames its own next call
            _check("cudaMemcpyBatchAsync", status)

    def copy_each(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """The slow twin of `copy_batch`."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDefault
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            _call("cudaMemcpyAsync", target, source, size, kind, stream)


def _call(name: str, *arguments: Any) -> Any:
    """What a function of cuda-python returns beside its status."""
    status, *values = getattr(cuda, name)(*arguments)
    _check(name, int(status))
    return values[0] if values else None


def _check(name: str, status: int) -> None:
    if status:
        error = cuda.cudaError_t(status)
        title, words = cuda.cudaGetErrorName(error)[1].decode(), cuda.cudaGetErrorString(error)[1].decode()
        raise CudaError(f"{name} failed: {title}, {words}")


def _loaded_library() -> str:
    """The file of the runtime in this process; its name varies with how torch was packaged."""
    torch.cuda.init()
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    for path in mapped:
        if Path(path).name.startswith("libcudart"):
            return path
    raise SettingError("--device", "this torch has no CUDA runtime of its own to share (libcudart is not loaded)")
