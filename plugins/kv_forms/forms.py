"""The forms that KV may take below the GPU (`--lower-tier-kv`): each a reference and kernels, its
twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from . import fp8_reference as kv_fp8_reference
from . import packed_reference as kv_packed_reference


class Kernels(Protocol):
    """Kernels on a GPU: copy `layers` of the pool's chunks in `slots` [n] int32 to or from
    `records` [n, layers, layer_bytes]."""

    def encode(self, pool: Tensor, slots: Tensor, layers: range, records: Tensor) -> None: ...

    def decode(self, records: Tensor, slots: Tensor, layers: range, pool: Tensor) -> None: ...


class Form(NamedTuple):
    """layer_bytes  of a layer of a record, by the pool's shape (`ForwardPass.kv_shape`)
    encode, decode  the reference: chunks [n, layers, 2, kv_heads, chunk_tokens, head_dim] to
                    records [n, layers, layer_bytes] uint8, and back with the pool's shape and dtype
    kernels         imports the kernels: only CUDA installations have Triton
    is_exact        returns whether a record ([bytes] uint8, by the pool's shape) has its chunk's
                    KV; None: every record has it. A record that is not exact is a failed copy, and
                    must never be decoded for use
    """

    layer_bytes: Callable[[tuple[int, ...]], int]
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]
    kernels: Callable[[], Kernels]
    is_exact: Callable[[np.ndarray, tuple[int, ...]], bool] | None = None


def _fp8_kernels() -> Kernels:
    from . import fp8_kernel as kv_fp8_kernel

    return kv_fp8_kernel


def _packed_kernels() -> Kernels:
    from . import packed_kernel as kv_packed_kernel

    return kv_packed_kernel


FP8 = Form(
    kv_fp8_reference.layer_bytes, kv_fp8_reference.encode, kv_fp8_reference.decode, _fp8_kernels
)
PACKED = Form(
    kv_packed_reference.layer_bytes,
    kv_packed_reference.encode,
    kv_packed_reference.decode,
    _packed_kernels,
    kv_packed_reference.is_exact,
)


def record_bytes(shape: tuple[int, ...], dtype: torch.dtype, form: Form | None = None) -> int:
    """Bytes of one chunk in a pool of `shape`, as `ForwardPass.kv_shape`: in the GPU's form, or in
    `form`."""
    if form is not None:
        return shape[1] * form.layer_bytes(shape)
    return math.prod(shape[1:]) * dtype.itemsize
