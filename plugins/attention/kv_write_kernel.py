"""`write_kv` on a GPU, in Triton: rotary fused with scattering K and V. Its twin is
`reference.write_kv`.

Keys are rounded to their dtype before a pool in eight bits (`fp8_pool`) rounds them again, as in
the twin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_forms.fp8_kernel import to_codes
from ..triton_launch import Launch

HEADS = 8  # heads of a program


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, slots: Tensor, pool: Tensor, layer: int
) -> Tensor:
    """Writes the keys, rotated, and values of T tokens into `layer` of the pool; returns the
    rotated queries.

    q [T, heads, head_dim], k and v [T, kv_heads, head_dim], dense in a head; rotary [T, R] float32,
    R/2 cosines then R/2 sines, R = 0 for none; slots [T] int32, places in the pool or -1: that
    token is not written. The result is new.
    """
    tokens, heads, head_dim = q.shape
    if any(x.stride(2) != 1 for x in (q, k, v)) or rotary.stride(-1) != 1:
        raise ValueError("q, k, v and rotary must be dense in their last dimension")
    rotated = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if tokens:
        launch(q, k, v, rotary, slots, pool, layer, rotated).run()
    return rotated


def launch(q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, slots: Tensor, pool: Tensor, layer: int,
           rotated: Tensor) -> Launch:  # fmt: skip
    """The launch of `write_kv` of one token or more."""
    tokens, heads, head_dim = q.shape
    _, _, _, kv_heads, chunk_tokens, _ = pool.shape
    dims = rotary.shape[1]
    q_blocks, kv_blocks = triton.cdiv(heads, HEADS), triton.cdiv(kv_heads, HEADS)
    arguments = (
        q,
        k,
        v,
        rotary,
        slots,
        pool,
        rotated,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        rotary.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        heads,
        kv_heads,
        q_blocks,
    )
    settings = dict(
        HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), HALF=dims // 2,
        HALF_DIM=triton.next_power_of_2(max(dims // 2, 1)), CHUNK=chunk_tokens, HEADS=HEADS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Launch(_write_kv, (tokens, q_blocks + kv_blocks), arguments, settings)


@triton.jit
def _turn(source, target, row, kept, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
          HALF_DIM: tl.constexpr):  # fmt: skip
    """Copies heads from `source` to `target` (pointers, one per head), and rotates their first 2
    HALF dimensions by `row`.

    Uses no fused multiply-adds, so that every implementation rounds equally.
    """
    if HALF > 0:
        half = tl.arange(0, HALF_DIM)
        angle = half < HALF
        mask = kept[:, None] & angle[None, :]
        cos = tl.load(row + half, mask=angle, other=0.0)[None, :]
        sin = tl.load(row + HALF + half, mask=angle, other=0.0)[None, :]
        first = tl.load(source[:, None] + half[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source[:, None] + (HALF + half)[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        kind = target.dtype.element_ty
        tl.store(target[:, None] + half[None, :], (first * cos - second * sin).to(kind), mask=mask)
        tl.store(
            target[:, None] + (HALF + half)[None, :],
            (second * cos + first * sin).to(kind),
            mask=mask,
        )
    if 2 * HALF < HEAD_DIM:
        dim = tl.arange(0, DIM)
        mask = kept[:, None] & ((dim >= 2 * HALF) & (dim < HEAD_DIM))[None, :]
        tl.store(
            target[:, None] + dim[None, :],
            tl.load(source[:, None] + dim[None, :], mask=mask),
            mask=mask,
        )


@triton.jit
def _encode(
    source,
    codes,
    exponents,
    row,
    kept,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Does what `_turn` does, for a pool in eight bits. All dimensions of a head are in one tensor,
    because they share an exponent."""
    dim = tl.arange(0, DIM)
    mask = kept[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(source[:, None] + dim[None, :], mask=mask, other=0.0)
    if HALF > 0:
        angle = dim < 2 * HALF
        cos = tl.load(row + dim % HALF, mask=angle, other=0.0)[None, :]
        sin = tl.load(row + HALF + dim % HALF, mask=angle, other=0.0)
        sin = tl.where(dim < HALF, -sin, sin)[None, :]
        pair = tl.where(dim < HALF, dim + HALF, dim - HALF)
        other = tl.load(
            source[:, None] + pair[None, :], mask=kept[:, None] & angle[None, :], other=0.0
        )
        turned = values.to(tl.float32) * cos + other.to(tl.float32) * sin
        values = tl.where(angle[None, :], turned.to(values.dtype), values)
    code, exponent = to_codes(values.to(tl.float32))
    tl.store(codes[:, None] + dim[None, :], code.to(tl.uint8), mask=mask)
    tl.store(exponents, exponent.to(tl.uint8), mask=kept)


@triton.jit
def _write_kv(
    q,
    k,
    v,
    rotary,
    slots,
    pool,
    rotated,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    rotary_stride,
    slot_stride,
    layer_offset,
    heads,
    kv_heads,
    q_blocks,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program for each token and HEADS heads: of q below q_blocks, of k and v from there on."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = rotary + token * rotary_stride
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        source = q + token * q_stride + head * q_head
        _turn(
            source,
            rotated + (token * heads + head) * HEAD_DIM,
            row,
            head < heads,
            HEAD_DIM,
            DIM,
            HALF,
            HALF_DIM,
        )
    else:
        place = tl.load(slots + token)
        if place >= 0:
            head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            kept = head < kv_heads
            record = pool + (place // CHUNK).to(tl.int64) * slot_stride + layer_offset
            keys = record + (head * CHUNK + place % CHUNK) * HEAD_DIM
            values = keys + kv_heads * CHUNK * HEAD_DIM
            if pool.dtype.element_ty == tl.uint8:
                exponents = record + 2 * kv_heads * CHUNK * HEAD_DIM + head * CHUNK + place % CHUNK
                _encode(
                    k + token * k_stride + head * k_head,
                    keys,
                    exponents,
                    row,
                    kept,
                    HEAD_DIM,
                    DIM,
                    HALF,
                )
                exponents += kv_heads * CHUNK
                _encode(
                    v + token * v_stride + head * v_head,
                    values,
                    exponents,
                    row,
                    kept,
                    HEAD_DIM,
                    DIM,
                    0,
                )
            else:
                _turn(
                    k + token * k_stride + head * k_head,
                    keys,
                    row,
                    kept,
                    HEAD_DIM,
                    DIM,
                    HALF,
                    HALF_DIM,
                )
                _turn(v + token * v_stride + head * v_head, values, row, kept, HEAD_DIM, DIM, 0, 1)
