"""Projections in FP8 on a GPU: activations are rounded token by token in Triton, the product uses
cuBLAS or CUTLASS.

With few rows a product's time is that of reading the weights. cuBLAS's kernel without scales by row
is then faster than any with them, even with a second kernel that scales. Twin: `fp8.in_fp8`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_format import FP8, LEAST_SCALE, MOST

MOST_SIZE = 32768  # numbers of a row: all of them are in registers
MOST_PROGRAMS = 8192
# rows; 128 us against 133 for a layer of Llama-3-8B, and 206 against 192 at 512
MOST_SCALED_BEHIND = 256
SCALED_WIDTH = 1024  # numbers of a row that a program scales


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`fp8.in_fp8` of x [T, in] in bfloat16; both sizes of the weight [out, in] are multiples of
    16."""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    quantised, scales = quantise_rows(x)
    if len(x) <= MOST_SCALED_BEHIND:
        product = _product(quantised, weight, _one(x.device), _one(x.device), x.dtype)
        scale_rows(product, scales, scale)
    else:
        product = _product(quantised, weight, scales.unsqueeze(1), scale.unsqueeze(0), x.dtype)
    return product if bias is None else product.add_(bias)


def _product(
    quantised: Tensor, weight: Tensor, row_scale: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    scaled: dict[str, Any] = {"scale_a": row_scale, "scale_b": scale, "out_dtype": dtype}
    return torch._scaled_mm(quantised, weight.t(), **scaled, use_fast_accum=True)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(`rounded`, `row_scales`) of x [T, size], dense in its last dimension."""
    if x.dim() != 2 or x.shape[1] > MOST_SIZE or x.stride(1) != 1:
        raise ValueError(f"x {list(x.shape)} must be [T, size], dense, of size up to {MOST_SIZE}")
    tokens, size = x.shape
    quantised = torch.empty((tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        width = triton.next_power_of_2(size)
        warps = 4 if width <= 2048 else 8 if width <= 8192 else 16
        _quantise_rows[(min(tokens, MOST_PROGRAMS),)](
            x,
            x.stride(0),
            quantised,
            scales,
            tokens,
            size,
            MOST,
            LEAST_SCALE,
            WIDTH=width,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return quantised, scales


@triton.jit(do_not_specialize=["tokens"])
def _quantise_rows(
    x, row_stride, quantised, scales, tokens, size, most, least, WIDTH: tl.constexpr
):
    """One program for one row at a time."""
    column = tl.arange(0, WIDTH)
    mask = column < size
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        place = token + tl.full((), 0, tl.int64)  # 64 bits for places
        row = tl.load(x + place * row_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), axis=0), most), least)
        tl.store(
            quantised + place * size + column,
            tl.div_rn(row, scale).to(quantised.dtype.element_ty),
            mask=mask,
        )
        tl.store(scales + token, scale)


def scale_rows(product: Tensor, row_scales: Tensor, scale: Tensor) -> None:
    """product [rows, out] *= row_scales [rows] * scale [out], in place; contiguous, the scales
    float32."""
    rows, size = product.shape
    grid = (rows, triton.cdiv(size, SCALED_WIDTH))
    _scale_rows[grid](product, row_scales, scale, size, WIDTH=SCALED_WIDTH)


@triton.jit
def _scale_rows(product, row_scales, scale, size, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < size
    place = product + row.to(tl.int64) * size + column
    factor = tl.load(row_scales + row) * tl.load(scale + column, mask=mask, other=0.0)
    scaled = tl.load(place, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(place, scaled.to(product.dtype.element_ty), mask=mask)
