"""Projections with int4 weights, and a scale and a zero for each group of inputs, as a torch
operation:

    torch.ops.pensieve.int4_linear(x, weight, scales_zeros, bias) -> y      y = x w^T + bias

    x             [T, in]
    weight        [out / 8, in / 128, 32, 4] int32, the numbers q of `packed`
    scales_zeros  [in / group, out, 2] in x's dtype; w = (q - 8) * scale + zero
    bias          [out], or None

The layout is that of PyTorch's int4 product for GPUs, which `int4_kernel` calls. Elsewhere weights
are converted before an ordinary product (`widening`), which saves memory and no time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .int4_format import MIDDLE, TILE_INPUTS, TILE_OUTPUTS, packed_shape

# A tile is [8 outputs, 4 blocks of 32 inputs], and a block [4 parts, 4 pairs, 2]. A word has one
# pair of each part: first the even input of the four parts, then the odd one.
_TILE = (4, 4, 4, 2)
_SHIFTS = tuple(range(0, 32, 4))


def packed(numbers: Tensor) -> Tensor:
    """The words [out / 8, in / 128, 32, 4] int32 of numbers [out, in], integers from 0 to 15."""
    outputs, inputs = numbers.shape
    tiles = numbers.view(outputs // TILE_OUTPUTS, TILE_OUTPUTS, inputs // TILE_INPUTS, *_TILE)
    in_words = tiles.permute(0, 2, 1, 5, 3, 6, 4).reshape(*packed_shape(outputs, inputs), 8)
    words = torch.zeros(in_words.shape[:-1], dtype=torch.int32, device=numbers.device)
    for place, shift in enumerate(_SHIFTS):
        words |= in_words[..., place].int() << shift
    return words


def unpacked(words: Tensor) -> Tensor:
    """The numbers [out, in] uint8 of `packed` words."""
    numbers = torch.stack([(words >> shift & 15).to(torch.uint8) for shift in _SHIFTS], dim=-1)
    tiles = numbers.view(*words.shape[:2], TILE_OUTPUTS, 4, 4, 2, 4).permute(0, 2, 1, 4, 6, 3, 5)
    return tiles.reshape(words.shape[0] * TILE_OUTPUTS, words.shape[1] * TILE_INPUTS)


def scales_and_zeros(scales: Tensor, zero_points: Tensor, dtype: torch.dtype) -> Tensor:
    """[in / group, out, 2] of scales and zero points [out, in / group]: a zero point is the number
    of the weight 0."""
    scales = scales.to(dtype)
    zeros = (MIDDLE - zero_points.float()) * scales.float()
    return torch.stack((scales, zeros.to(dtype)), dim=-1).transpose(0, 1).contiguous()


def widened(weight: Tensor, scales_zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [out, in] in `dtype`, computed in float32 and rounded once, as the product
    does."""
    scales, zeros = scales_zeros.float().transpose(0, 1).unsqueeze(-1).unbind(-2)
    numbers = unpacked(weight).unflatten(1, (scales_zeros.shape[0], -1)).float()
    return numbers.sub_(MIDDLE).mul_(scales).add_(zeros).flatten(1).to(dtype)


def widening(x: Tensor, weight: Tensor, scales_zeros: Tensor, bias: Tensor | None) -> Tensor:
    """The product in x's dtype."""
    return F.linear(x, widened(weight, scales_zeros, x.dtype), bias)


torch.library.define(
    "pensieve::int4_linear",
    "(Tensor x, Tensor weight, Tensor scales_zeros, Tensor? bias) -> Tensor",
)
torch.library.impl("pensieve::int4_linear", "cpu", widening)


@torch.library.impl("pensieve::int4_linear", "cuda")
def _int4_linear_cuda(
    x: Tensor, weight: Tensor, scales_zeros: Tensor, bias: Tensor | None
) -> Tensor:
    from . import int4_kernel  # imported here because only CUDA installations have Triton

    return int4_kernel.linear(x, weight, scales_zeros, bias)


@torch.library.register_fake("pensieve::int4_linear")
def _(x: Tensor, weight: Tensor, scales_zeros: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * TILE_OUTPUTS)
