"""The experts of a sparse MLP, as a torch operation:

    torch.ops.pensieve.experts(x, chosen, shares, up, down, up_bias=None, down_bias=None, limit=0,
    slope=0, up_scale=None, down_scale=None) -> y

    x       [T, hidden]
    chosen  [T, k] int64, the experts of each token; shares [T, k] float32, their weights
    up      [experts * 2 * width, hidden]: of each expert the gate's rows, then the values'
    down    [experts * hidden, width]
    biases  of up's and down's rows, or None
    limit   0: the gate is that of `silu_gate`; else that of `clamped_gate`, with this slope
    scales  of weights in FP8, [rows] or [rows, groups of inputs], or None
    y       [T, hidden]: the sum over a token's experts of share * down (gate(up x)), summed in
            float32

No shape depends on the routing, and nothing waits for the GPU, so a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .expert_reference import Experts, grouped, one_by_one
from .fp8 import runs_in_kernels

KERNEL_DTYPES = (torch.bfloat16, torch.float16)  # tensor cores multiply these exactly
ALIGNED = 16  # torch's grouped product reads rows of multiples of so many bytes

torch.library.define(
    "pensieve::experts",
    "(Tensor x, Tensor chosen, Tensor shares, Tensor up, Tensor down, Tensor? up_bias=None, "
    "Tensor? down_bias=None, "
    "float limit=0.0, float slope=0.0, Tensor? up_scale=None, Tensor? down_scale=None) -> Tensor",
)


@torch.library.impl("pensieve::experts", "cpu")
def _experts_cpu(x: Tensor, chosen: Tensor, shares: Tensor, *of: Any) -> Tensor:
    experts = Experts(*of).widened(x.dtype)
    return (grouped if _aligned(x, experts) else one_by_one)(x, chosen, shares, experts)


@torch.library.impl("pensieve::experts", "cuda")
def _experts_cuda(x: Tensor, chosen: Tensor, shares: Tensor, *of: Any) -> Tensor:
    experts = Experts(*of)
    in_fp8 = experts.up_scale is not None or experts.down_scale is not None
    if (
        (in_fp8 and not runs_in_kernels(x.dtype))
        or x.dtype not in KERNEL_DTYPES
        or not (experts.up.is_contiguous() and experts.down.is_contiguous())
    ):
        return one_by_one(x, chosen, shares, experts.widened(x.dtype))
    from . import expert_kernel  # imported here because only CUDA installations have Triton

    return expert_kernel.experts(x, chosen, shares, experts)


def _aligned(x: Tensor, experts: Experts) -> bool:
    return all(size * x.itemsize % ALIGNED == 0 for size in (x.shape[1], experts.down.shape[1]))


@torch.library.register_fake("pensieve::experts")
def _(x: Tensor, chosen: Tensor, shares: Tensor, *of: Any) -> Tensor:
    return x.new_empty(x.shape)
