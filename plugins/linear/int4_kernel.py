"""Projections in int4 on a GPU. For few rows PyTorch's int4 product reads the weights once for
every 16 rows. For more, a kernel in Triton widens the weights once, before an ordinary product.
Twin: `int4.widening`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .int4_format import MIDDLE, TILE_INPUTS, TILE_OUTPUTS

MOST_ROWS = 16
"""Most rows for PyTorch's product: one read of the weights. At 64 rows its steps of Llama-3-8B took
34 ms on an H200, at 128 rows 67, and widening adds 8 ms to any step."""

BLOCK = 32  # outputs of a program


def linear(x: Tensor, weight: Tensor, scales_zeros: Tensor, bias: Tensor | None) -> Tensor:
    """`int4.widening` of x [T, in]."""
    if x.dtype != torch.bfloat16 or not 0 < len(x) <= MOST_ROWS:
        return F.linear(x, widen(weight, scales_zeros, x.dtype), bias)
    group = x.shape[1] // scales_zeros.shape[0]
    product = torch.ops.aten._weight_int4pack_mm(x.contiguous(), weight, group, scales_zeros)
    return product if bias is None else product.add_(bias)


def widen(weight: Tensor, scales_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """`int4.widened`."""
    outputs = weight.shape[0] * TILE_OUTPUTS
    inputs = weight.shape[1] * TILE_INPUTS
    group = inputs // scales_zeros.shape[0]
    width = min(group, TILE_INPUTS)
    wide = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(outputs, BLOCK), inputs // width)
    _widen[grid](
        weight,
        scales_zeros,
        wide,
        outputs,
        inputs,
        group,
        MIDDLE,
        TILE_OUTPUTS,
        TILE_INPUTS,
        width,
        BLOCK,
    )
    return wide


@triton.jit
def _widen(
    weight,
    scales_zeros,
    wide,
    outputs,
    inputs,
    group,
    MIDDLE: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """WIDTH inputs, of one tile and one group, of BLOCK outputs. `int4.packed` describes the
    words."""
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    there = n < outputs
    first = tl.program_id(1) * WIDTH
    # a word has an even input and the next one
    even = (first % TILE_INPUTS + tl.arange(0, WIDTH // 2) * 2)[None, :]
    tile = n // TILE_OUTPUTS * (inputs // TILE_INPUTS) + first // TILE_INPUTS
    place = (tile * 32 + n % TILE_OUTPUTS * 4 + even % 8 // 2) * 4 + even // 32
    words = tl.load(weight + place, there, 0) >> even % 32 // 8 * 4
    numbers = tl.interleave(words & 15, words >> 16 & 15)
    pair = scales_zeros + (first // group * outputs + n) * 2
    scale = tl.load(pair, there, 0).to(tl.float32)
    zero = tl.load(pair + 1, there, 0).to(tl.float32)
    values = ((numbers - MIDDLE).to(tl.float32) * scale + zero).to(wide.dtype.element_ty)
    tl.store(wide + n * inputs + first + tl.arange(0, WIDTH)[None, :], values, there)
