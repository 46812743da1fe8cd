"""Projections with FP8 (e4m3) weights and a scale for each output, or for each output and group of
inputs, as a torch operation:

    torch.ops.pensieve.fp8_linear(x, weight, scale, bias) -> y   y = x (weight * scale)^T + bias

On a GPU of compute capability 9.0 or newer, in bfloat16, the product with a scale for each output
itself runs in FP8: each token's activations are rounded to e4m3 with their own scale (`in_fp8`).
Elsewhere weights are converted before an ordinary product (`widening`), which saves memory and no
time.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .fp8_format import FP8, LEAST_SCALE, MOST, widened

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MOST_WIDENED_ROWS = 64
"""Tokens up to which weights with scales of groups are widened by the product itself."""
OLDEST_CAPABILITY = (9, 0)
DIVISOR = 16  # both dimensions of a weight for FP8 products must be multiples of it


def row_scales(x: Tensor) -> Tensor:
    """[rows] float32 of x [rows, size]: divided by them, the largest value of each row becomes
    448."""
    return (x.abs().amax(dim=1).float() / MOST).clamp_min(LEAST_SCALE)


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """x / scale in e4m3; scales [rows] float32, none smaller than the row's own."""
    return (x.float() / scales.unsqueeze(1)).to(FP8)


def widening(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The product in x's dtype; x [T, in], weight [out, in] e4m3, scale [out] or [out, groups]
    float32, bias [out]."""
    return F.linear(x, widened(weight, scale, x.dtype), bias)


def in_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The exact product in FP8, rounded at the end: the twin of `fp8_kernel.linear`."""
    scales = row_scales(x)
    product = rounded(x, scales).float() @ weight.float().t() * scales.unsqueeze(1) * scale
    return (product if bias is None else product + bias.float()).to(x.dtype)


torch.library.define(
    "pensieve::fp8_linear", "(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor"
)
torch.library.impl("pensieve::fp8_linear", "cpu", widening)


@torch.library.impl("pensieve::fp8_linear", "cuda")
def _fp8_linear_cuda(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    if scale.dim() > 1:
        if not runs_in_kernels(x.dtype) or len(x) > MOST_WIDENED_ROWS:
            return widening(x, weight, scale, bias)
        from . import expert_kernel  # imported here because only CUDA installations have Triton

        return expert_kernel.linear(x.contiguous(), weight, scale, bias)
    divided = weight.shape[0] % DIVISOR == weight.shape[1] % DIVISOR == 0
    if not (divided and x.dtype == torch.bfloat16 and runs_in_kernels(x.dtype)):
        return widening(x, weight, scale, bias)
    # imported here because only CUDA installations have Triton
    from . import fp8_kernel as fp8_linear_kernel

    return fp8_linear_kernel.linear(x, weight, scale, bias)


@torch.library.register_fake("pensieve::fp8_linear")
def _(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def runs_in_kernels(dtype: torch.dtype) -> bool:
    """Whether there are kernels for weights in FP8 on this GPU, in a step of this dtype."""
    return dtype in KERNEL_DTYPES and capability() >= OLDEST_CAPABILITY


@cache
def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
