"""Norms with the residual sum, and gates, on a GPU in Triton: one read and one write of each value.

Their twins in `norm_reference` round at the same places. Grids are bounded: programs process rows
in strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import Launch

MOST_SIZE = 16384  # of a normalised row: all of it is in registers
TILE = 2048  # values that a program processes at once if rows are short
MOST_PROGRAMS = 8192  # enough to fill any GPU several times


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> Tensor:
    """`norm_reference.norm` of x [T, size] or [T, heads, size], dense in its last dimension."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        launch(x, None, weight, bias, eps, rms, normed, None, plus_one).run()
    return normed


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_reference.add_norm`; x and y are contiguous."""
    if x.shape != y.shape or not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(
            f"x {list(x.shape)} and y {list(y.shape)} must be contiguous and of one shape"
        )
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        launch(x, y, weight, bias, eps, rms, normed, total, plus_one).run()
    return normed, total


def launch(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    normed: Tensor,
    total: Tensor | None,
    plus_one: bool = False,
) -> Launch:
    """The launch of `norm`, or of `add_norm` where there are y and total, for one token or more."""
    size = x.shape[-1]
    if x.dim() not in (2, 3) or size > MOST_SIZE or x.stride(-1) != 1:
        raise ValueError(
            f"x {list(x.shape)} must be [T, size] or [T, heads, size], dense, of size up to "
            f"{MOST_SIZE}"
        )
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    count = x.shape[0] * heads
    width = triton.next_power_of_2(size)
    rows = max(TILE // width, 1)
    arguments = (x, y, weight, bias, normed, total, count, heads, x.stride(0), head_stride, eps)
    settings = dict(
        SIZE=size, WIDTH=width, ROWS=rows, RMS=rms, PLUS_ONE=plus_one,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16, enable_fp_fusion=False,
    )  # fmt: skip
    return Launch(_norm, (min(triton.cdiv(count, rows), MOST_PROGRAMS),), arguments, settings)


def silu_gate(x: Tensor) -> Tensor:
    """`norm_reference.silu_gate` of a contiguous x."""
    if x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)} must be contiguous [T, 2 * width]")
    tokens = x.shape[0]
    width = x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        silu_gate_launch(x, out).run()
    return out


def silu_gate_launch(x: Tensor, out: Tensor) -> Launch:
    """The launch of `silu_gate` of one token or more."""
    tokens, width = out.shape
    block = min(triton.next_power_of_2(width), 1024)
    grid = (min(tokens, MOST_PROGRAMS), triton.cdiv(width, block))
    return Launch(
        _silu_gate,
        grid,
        (x, out, tokens, width),
        dict(BLOCK=block, num_warps=4, enable_fp_fusion=False),
    )


def clamped_gate(
    x: Tensor, bias: Tensor | None, experts: Tensor, limit: float, slope: float
) -> Tensor:
    """`norm_reference.clamped_gate` of contiguous x and bias."""
    if (
        x.dim() != 2
        or x.shape[1] % 2
        or not x.is_contiguous()
        or not (bias is None or bias.is_contiguous())
    ):
        raise ValueError(
            f"x {list(x.shape)} must be contiguous [T, 2 * width], and the bias contiguous"
        )
    tokens = x.shape[0]
    width = x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        block = min(triton.next_power_of_2(width), 1024)
        grid = (min(tokens, MOST_PROGRAMS), triton.cdiv(width, block))
        settings = dict(BLOCK=block, num_warps=4, enable_fp_fusion=False)
        Launch(
            _clamped_gate, grid, (x, bias, experts, out, tokens, width, limit, slope), settings
        ).run()
    return out


@triton.jit(do_not_specialize=["count"])
def _norm(x, y, weight, bias, normed, total, count, heads, row_stride, head_stride, eps,
          SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, RMS: tl.constexpr,
          PLUS_ONE: tl.constexpr):  # fmt: skip
    """ROWS rows at a time; row r of x is head r % heads of token r // heads. y, weight, bias, total
    may be None."""
    kind = normed.dtype.element_ty
    column = tl.arange(0, WIDTH)[None, :]
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        mask = (row < count) & (column < SIZE)
        source = x + (row // heads) * row_stride + (row % heads) * head_stride
        wide = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
        place = row * SIZE + column
        if y is not None:
            rounded = (wide + tl.load(y + place, mask=mask, other=0.0).to(tl.float32)).to(kind)
            tl.store(total + place, rounded, mask=mask)
            wide = rounded.to(tl.float32)
        if not RMS:
            wide = tl.where(mask, wide - (tl.sum(wide, axis=1) / SIZE)[:, None], 0.0)
        scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)[:, None]
        if RMS and not PLUS_ONE:
            scaled = scaled.to(kind).to(tl.float32)
        if weight is not None:
            factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
            scaled = scaled * (factor + 1.0 if PLUS_ONE else factor)
        if bias is not None:
            scaled = scaled + tl.load(bias + column, mask=column < SIZE, other=0.0).to(tl.float32)
        tl.store(normed + place, scaled.to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _silu_gate(x, out, tokens, width, BLOCK: tl.constexpr):
    """One program for some tokens and BLOCK columns; silu is rounded before the multiplication."""
    kind = out.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    stride = tl.full((), 1, tl.int64) * width  # 64 bits for places
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = x + token * stride * 2
        gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + width + column, mask=mask, other=0.0).to(tl.float32)
        opened = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(kind).to(tl.float32)
        tl.store(out + token * stride + column, (opened * up).to(kind), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _clamped_gate(x, bias, experts, out, tokens, width, limit, slope, BLOCK: tl.constexpr):
    """One program for some tokens and BLOCK columns; the sum with the bias is rounded. bias may be
    None."""
    kind = out.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    stride = tl.full((), 1, tl.int64) * width  # 64 bits for places
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = x + token * stride * 2
        gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + width + column, mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + tl.load(experts + token) * stride * 2
            gate += tl.load(own + column, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(own + width + column, mask=mask, other=0.0).to(tl.float32)
            gate = gate.to(kind).to(tl.float32)
            up = up.to(kind).to(tl.float32)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        gated = (up + 1.0) * gate * tl.div_rn(1.0, 1.0 + tl.exp(-slope * gate))
        tl.store(out + token * stride + column, gated.to(kind), mask=mask)
