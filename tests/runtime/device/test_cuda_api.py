"""Calls of the CUDA runtime, before a library that only pretends."""

import ctypes
import types

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")
from pensieve.runtime.device import cuda_api as cuda_runtime
from pensieve.runtime.device.cuda_api import CudaError, CudaRuntime
from pensieve.scheduler.types import SettingError


class Function:
    """Callable, with an attribute for ctypes' argument types."""

    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


def pretend(version=13000):
    """A library; `called` has the calls of the batched copy, which return `status`."""
    library = types.SimpleNamespace(called=[], status=0, cleared=0)

    def get_version(reference):
        reference._obj.value = version
        return 0

    def copy(*arguments):
        library.called.append(arguments)
        return library.status

    def clear():
        library.cleared += 1

    library.cudaRuntimeGetVersion = get_version
    library.cudaGetLastError = clear
    library.cudaMemcpyBatchAsync = Function(copy)
    return library


@pytest.fixture
def library(monkeypatch):
    pretended = pretend()
    monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", lambda path: pretended)
    return pretended


def some_copies(count):
    targets, sources = (np.arange(count, dtype=np.uint64) * 64 + first for first in (2**44, 2**45))
    return targets, sources, np.full(count, 64, np.uint64)


def test_the_second_runtime_in_the_process_is_told_its_device(library, monkeypatch):
    told = []
    monkeypatch.setattr(
        cuda_runtime.cuda, "cudaSetDevice", lambda device: (told.append(device) or 0,)
    )
    monkeypatch.setattr(cuda_runtime.cuda, "cudaHostAlloc", lambda size, flags: (0, 2**40))
    runtime = CudaRuntime("pretended")
    runtime.use_device(3)
    assert told == [3]
    assert runtime.allocate_pinned(100) == 2**40
    assert told == [3, 3], "the calling thread may be another"


def test_a_failed_call_says_what_was_called_and_what_the_status_means(library, monkeypatch):
    runtime = CudaRuntime("pretended")
    library.status = 2
    with pytest.raises(
        CudaError, match=r"^cudaMemcpyBatchAsync failed: cudaErrorMemoryAllocation, out of memory$"
    ):
        runtime.copy_batch(*some_copies(1), 7)
    assert library.cleared == 1, "or torch would blame its own next call"
    monkeypatch.setattr(cuda_runtime.cuda, "cudaSetDevice", lambda device: (0,))
    failed = cuda_runtime.cuda.cudaError_t.cudaErrorMemoryAllocation
    monkeypatch.setattr(cuda_runtime.cuda, "cudaHostAlloc", lambda size, flags: (failed, None))
    with pytest.raises(
        CudaError, match=r"^cudaHostAlloc failed: cudaErrorMemoryAllocation, out of memory$"
    ):
        runtime.allocate_pinned(100)


def test_an_old_runtime_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", lambda path: pretend(version=12080))
    with pytest.raises(SettingError, match=r"--device: .*CUDA 13 or newer, not 12\.8"):
        CudaRuntime("pretended")


def test_batches_are_cut_at_what_drivers_bear_and_the_twin_copies_the_same(library, monkeypatch):
    runtime = CudaRuntime("pretended")
    copies = some_copies(2500)
    runtime.copy_batch(*copies, 7)
    assert [arguments[3] for arguments in library.called] == [1024, 1024, 452]
    read = [
        np.ctypeslib.as_array((ctypes.c_uint64 * call[3]).from_address(call[0]))
        for call in library.called
    ]
    assert np.array_equal(np.concatenate(read), copies[0])

    each = []
    done = cuda_runtime.cuda.cudaError_t.cudaSuccess
    monkeypatch.setattr(
        cuda_runtime.cuda, "cudaMemcpyAsync", lambda *arguments: each.append(arguments) or (done,)
    )
    runtime.copy_each(*copies, 7)
    assert [call[:3] for call in each] == list(
        zip(*(array.tolist() for array in copies), strict=True)
    )
    assert {call[4] for call in each} == {7}
