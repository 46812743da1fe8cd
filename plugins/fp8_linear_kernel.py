"""Projections in FP8 on a GPU: activations are rounded token by token in Triton, the product is cuBLAS's or CUTLASS's.

Twin: `fp8_linear.in_fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_linear import FP8, LEAST_SCALE, MOST

MOST_SIZE = 32768  # of a row: all of it is in registers
MOST_PROGRAMS = 8192


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`fp8_linear.in_fp8` of x [T, in] in bfloat16; both sizes of the weight [out, in] are multiples of 16."""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    quantised, scales = quantise_rows(x)
    scaled = {"scale_a": scales.unsqueeze(1), "scale_b": scale.unsqueeze(0), "out_dtype": x.dtype}
    product = torch._scaled_mm(quantised, weight.t(), **scaled, use_fast_accum=True)
    return product if bias is None else product.add_(bias)


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
def _quantise_rows(x, row_stride, quantised, scales, tokens, size, most, least, WIDTH: tl.constexpr):
    """One program one row at a time."""
    column = tl.arange(0, WIDTH)
    mask = column < size
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        place = token + tl.full((), 0, tl.int64)  # places are counted in 64 bits
        row = tl.load(x + place * row_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(row), axis=0), most), least)
        tl.store(quantised + place * size + column, tl.div_rn(row, scale).to(quantised.dtype.element_ty), mask=mask)
        tl.store(scales + token, scale)
