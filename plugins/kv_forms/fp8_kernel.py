"""Encodes chunks of KV into records of eight bits and decodes them, on a GPU, in Triton. Twins, and
the format, in `fp8_reference`.

Both run beside steps: a fixed number of programs processes the heads in strides. Each program is
large enough to keep its multiprocessor busy. Codes are computed with integer arithmetic, not with
the conversion that only newer GPUs have, so the bits are equal on all GPUs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_reference import SMALLEST_SCALE, layer_bytes, scales_offset

PROGRAMS = 64
"""16 programs are as fast as a link of 55 GB/s; with more, for a shorter time, steps are delayed
less."""

TILE = 16384
"""Numbers that a program processes at once: whole heads, with a warp for 1,024 numbers."""

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


def encode(pool: Tensor, slots: Tensor, layers: range, records: Tensor) -> None:
    """Writes `layers` of the pool's chunks in `slots` [n] int32 to `records` [n, layers,
    layer_bytes] uint8.

    pool [slots, layers, 2, kv_heads, chunk_tokens, head_dim]; both contiguous. Padding is not
    written.
    """
    _launch(_encode, pool, slots, layers, records)


def decode(records: Tensor, slots: Tensor, layers: range, pool: Tensor) -> None:
    """Writes records from `encode` to `layers` of the pool's chunks in `slots`, which are
    distinct."""
    _launch(_decode, pool, slots, layers, records, LARGEST=torch.finfo(pool.dtype).max)


def _launch(
    kernel: triton.JITFunction,
    pool: Tensor,
    slots: Tensor,
    layers: range,
    records: Tensor,
    **constants: float,
) -> None:
    heads, values = math.prod(pool.shape[2:4]), math.prod(pool.shape[4:])
    expected = (len(slots), len(layers), layer_bytes(pool.shape))
    if records.shape != expected or not (records.is_contiguous() and pool.is_contiguous()):
        raise ValueError(
            f"records must be contiguous and {list(expected)}, not {list(records.shape)}"
        )
    tasks = len(slots) * len(layers) * heads
    if not tasks:
        return
    block = triton.next_power_of_2(values)
    group = max(TILE // block, 1)
    kernel[(min(triton.cdiv(tasks, group), PROGRAMS),)](
        pool,
        slots,
        records,
        records.view(torch.float32),
        tasks,
        layers.start,
        len(layers),
        LAYERS=pool.shape[1],
        HEADS=heads,
        VALUES=values,
        LAYER_BYTES=expected[2],
        SCALES=scales_offset(pool.shape) // 4,
        BLOCK=block,
        GROUP=group,
        **constants,
        num_warps=min(group * block // 1024, 32),
        enable_fp_fusion=False,
    )


@triton.jit
def places(
    task,
    live,
    slots,
    first,
    layers,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    LAYER_BYTES: tl.constexpr,
):
    """A task is one head of a layer of a chunk. Returns the start of its numbers in the pool, its
    layer's place in the records' bytes, and its head."""
    head = task % HEADS
    piece = task // HEADS
    slot = tl.load(slots + piece // layers, mask=live, other=0).to(tl.int64)
    number = ((slot * LAYERS + first + piece % layers) * HEADS + head) * VALUES
    return number, piece.to(tl.int64) * LAYER_BYTES, head


@triton.jit
def to_codes(values):
    """Returns codes [n, m] of float32 numbers [n, m], and the exponents [n] of the rows' scales,
    both int32."""
    size = tl.abs(values)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), axis=1)
    # Adding 0x1FFFFF carries into the exponent if the mantissa is above that of 448 = 1.75 * 2**8.
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    exponent = tl.maximum(exponent, _SMALLEST_SCALE)
    scaled = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    size = tl.minimum(tl.abs(scaled), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # Rounds to three bits of mantissa, ties to even; then the bias of exponents changes from 127 to
    # 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are in steps of 2**-9, which is the last bit of numbers from 2**14 on.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(scaled != scaled, 0x7F, code)
    sign = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return code | sign, exponent


@triton.jit(do_not_specialize=["slots", "tasks", "first", "layers"])
def _encode(
    pool,
    slots,
    codes,
    scales,
    tasks,
    first,
    layers,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    LAYER_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    at = tl.arange(0, BLOCK)[None, :]
    for start in range(tl.program_id(0) * GROUP, tasks, tl.num_programs(0) * GROUP):
        task = start + tl.arange(0, GROUP)
        live = task < tasks
        mask = live[:, None] & (at < VALUES)
        number, byte, head = places(
            task, live, slots, first, layers, LAYERS, HEADS, VALUES, LAYER_BYTES
        )
        values = tl.load(pool + number[:, None] + at, mask=mask, other=0.0).to(tl.float32)
        code, exponent = to_codes(values)
        tl.store(codes + (byte + head * VALUES)[:, None] + at, code.to(tl.uint8), mask=mask)
        tl.store(
            scales + byte // 4 + SCALES + head,
            (exponent << 23).to(tl.float32, bitcast=True),
            mask=live,
        )


@triton.jit(do_not_specialize=["slots", "tasks", "first", "layers"])
def _decode(
    pool,
    slots,
    codes,
    scales,
    tasks,
    first,
    layers,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    LAYER_BYTES: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    at = tl.arange(0, BLOCK)[None, :]
    for start in range(tl.program_id(0) * GROUP, tasks, tl.num_programs(0) * GROUP):
        task = start + tl.arange(0, GROUP)
        live = task < tasks
        mask = live[:, None] & (at < VALUES)
        number, byte, head = places(
            task, live, slots, first, layers, LAYERS, HEADS, VALUES, LAYER_BYTES
        )
        code = tl.load(codes + (byte + head * VALUES)[:, None] + at, mask=mask, other=0).to(
            tl.int32
        )
        scale = tl.load(scales + byte // 4 + SCALES + head, mask=live, other=0.0)[:, None]
        size = code & 0x7F
        normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        # in steps of 2**-9 below code 8
        value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal) * scale
        value = tl.where(value > LARGEST, LARGEST, value)
        value = tl.where(size == 0x7F, float("nan"), value)
        bits = value.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
        kind = pool.dtype.element_ty
        tl.store(pool + number[:, None] + at, bits.to(tl.float32, bitcast=True).to(kind), mask=mask)
