"""Every algorithm that cuBLASLt's heuristic proposes for a product, through the library that torch has loaded.

`Algorithms(...)` asks once; `run(i, ...)` multiplies with the i-th of them, which the library puts the quickest first.
Signatures, structures and numbers are those of NVIDIA's cublasLt.h (CUDA 12 and 13).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p

import torch
from torch import Tensor

BF16, FLOAT32 = 14, 0  # cudaDataType: CUDA_R_16BF, CUDA_R_32F
COMPUTE_FLOAT32 = 68  # cublasComputeType_t: CUBLAS_COMPUTE_32F
DESC_TRANSA = 3  # cublasLtMatmulDescAttributes_t
PREF_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
TRANSPOSED = 1  # cublasOperation_t: CUBLAS_OP_T
SUCCESS = 0


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t"""

    _fields_ = [("data", c_uint64 * 8)]


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


SIGNATURES = {
    "cublasLtCreate": [POINTER(c_void_p)],
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulAlgoGetHeuristic": [c_void_p] * 7 + [c_int, POINTER(Proposal), POINTER(c_int)],
    "cublasLtMatmul": [
        *[c_void_p] * 2,  # handle, what is multiplied
        *[c_void_p] * 5,  # alpha, A and its layout, B and its layout
        *[c_void_p] * 5,  # beta, C and its layout, D and its layout
        *[c_void_p] * 2,  # algorithm, workspace
        c_size_t,
        c_void_p,  # stream
    ],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The one that torch has loaded: the loader finds it by its name."""
    assert torch.version.cuda is not None
    loaded = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int
    return loaded


def call(name: str, *arguments: object) -> None:
    status = getattr(library(), name)(*arguments)
    if status != SUCCESS:
        raise RuntimeError(f"{name} returned status {status}")


def created(name: str, *arguments: object) -> c_void_p:
    """Handles and descriptions live as long as the process."""
    made = c_void_p()
    call(name, byref(made), *arguments)
    return made


@functools.cache
def handle() -> c_void_p:
    return created("cublasLtCreate")


class Algorithms:
    """For out = x W^T of x [rows, inputs] and W [outputs, inputs], all contiguous, in bf16 with float32 sums.

    To cuBLAS, which counts by columns, these are W transposed and x: D [outputs, rows] = W^T [outputs, inputs] x.
    """

    def __init__(self, rows: int, outputs: int, inputs: int, workspace: Tensor, most: int = 16):
        self._workspace = workspace
        self._product = created("cublasLtMatmulDescCreate", COMPUTE_FLOAT32, FLOAT32)
        transposed = c_int(TRANSPOSED)
        call("cublasLtMatmulDescSetAttribute", self._product, DESC_TRANSA, byref(transposed), 4)
        self._a = created("cublasLtMatrixLayoutCreate", BF16, inputs, outputs, inputs)
        self._b = created("cublasLtMatrixLayoutCreate", BF16, inputs, rows, inputs)
        self._d = created("cublasLtMatrixLayoutCreate", BF16, outputs, rows, outputs)
        preference = created("cublasLtMatmulPreferenceCreate")
        limit = c_uint64(workspace.nbytes)
        call("cublasLtMatmulPreferenceSetAttribute", preference, PREF_MAX_WORKSPACE_BYTES, byref(limit), 8)
        proposals, count = (Proposal * most)(), c_int()
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            handle(), self._product, self._a, self._b, self._d, self._d, preference, most, proposals, byref(count),
        )  # fmt: skip
        self.proposals = [proposal for proposal in proposals[: count.value] if proposal.state == SUCCESS]

    def run(self, index: int, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """On the current stream, also while it is captured."""
        one, zero = c_float(1.0), c_float(0.0)
        call(
            "cublasLtMatmul",
            handle(), self._product, byref(one), weight.data_ptr(), self._a, x.data_ptr(), self._b, byref(zero),
            out.data_ptr(), self._d, out.data_ptr(), self._d, byref(self.proposals[index].algorithm),
            self._workspace.data_ptr(), self._workspace.nbytes, torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
