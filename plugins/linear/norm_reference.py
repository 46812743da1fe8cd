"""Norms and gates in plain PyTorch: used on the CPU, and as twins of `norm_kernel`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> Tensor:
    """RMS norm, else layer norm, over the last dimension of x, which may have any shape;
    accumulated in float32.

    weight, bias [size] or None. An RMS norm rounds to x's dtype before it is weighted, and has no
    bias; a layer norm rounds at the end, and so does an RMS norm that multiplies by 1 + weight
    (`plus_one`). Returns a new tensor.
    """
    wide = x.float()
    if rms:
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if plus_one and weight is not None:
            return (normed * (1.0 + weight.float())).to(x.dtype)
        normed = normed.to(x.dtype)
        return normed if weight is None else normed * weight
    normed = F.layer_norm(wide, x.shape[-1:], eps=eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype)


def add_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (norm of x + y, x + y); the sum is rounded to the dtype first. x and y [T, size];
    both results are new."""
    total = x + y
    return norm(total, weight, bias, eps, rms, plus_one), total


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) * up, [T, width], of a fused projection [T, 2 * width]: gate, then up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped_gate(
    x: Tensor, bias: Tensor | None, experts: Tensor, limit: float, slope: float
) -> Tensor:
    """(up + 1) * gate * sigmoid(slope * gate), [T, width], of [T, 2 * width]: gate, at most
    `limit`, then up, between -limit and limit. Computed in float32.

    bias [experts, 2 * width], or None, is added to x first; experts [T] int64, the expert of each
    row.
    """
    gate, up = (x if bias is None else x + bias[experts]).float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(slope * gate)).to(x.dtype)
