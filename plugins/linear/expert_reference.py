"""The experts of a sparse MLP in plain PyTorch: used on a CPU, and as twins of `expert_kernel`. The
tensors are described in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import norm_ops, norm_reference  # noqa: F401  register torch.ops.pensieve.silu_gate
from .fp8_format import widened


class Experts(NamedTuple):
    """All inputs of the operation but those of the tokens."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    limit: float = 0.0
    slope: float = 0.0
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    def widened(self, dtype: torch.dtype) -> Experts:
        """With the values of weights in FP8."""
        if self.up_scale is None and self.down_scale is None:
            return self
        up, down = (
            weight if scale is None else widened(weight, scale, dtype)
            for weight, scale in ((self.up, self.up_scale), (self.down, self.down_scale))
        )
        return self._replace(up=up, down=down, up_scale=None, down_scale=None)

    def by_expert(self) -> tuple[Tensor, Tensor]:
        """up as [experts, 2 * width, hidden] and down as [experts, hidden, width]."""
        hidden = self.up.shape[1]
        width = self.down.shape[1]
        return self.up.unflatten(0, (-1, 2 * width)), self.down.unflatten(0, (-1, hidden))

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """[experts, 2 * width] and [experts, hidden]."""
        hidden = self.up.shape[1]
        width = self.down.shape[1]
        up, down = self.up_bias, self.down_bias
        return None if up is None else up.view(-1, 2 * width), None if down is None else down.view(
            -1, hidden
        )

    def gate(self, x: Tensor, experts: Tensor) -> Tensor:
        """The gated values of products [T, 2 * width]; experts [T], the expert of each row."""
        bias, _ = self.biases()
        if self.limit:
            return _clamped_gate(x)(x, bias, experts, self.limit, self.slope)
        gated: Tensor = torch.ops.pensieve.silu_gate(x if bias is None else x + bias[experts])
        return gated


def _clamped_gate(x: Tensor) -> Callable[..., Tensor]:
    if not x.is_cuda:
        return norm_reference.clamped_gate
    from . import norm_kernel  # imported here because only CUDA installations have Triton

    return norm_kernel.clamped_gate


def grouped(x: Tensor, chosen: Tensor, shares: Tensor, of: Experts) -> Tensor:
    """Sorts the pairs of a token and an expert by expert; each of the two products is one call for
    all experts."""
    (up, down), (_, down_bias) = of.by_expert(), of.biases()
    experts, pairs = chosen.flatten().sort()
    ends = torch.searchsorted(
        experts, torch.arange(len(up), device=x.device), right=True, out_int32=True
    )
    gated = of.gate(F.grouped_mm(x[pairs // chosen.shape[1]], up.mT, offs=ends), experts)
    results = F.grouped_mm(gated, down.mT, offs=ends)
    if down_bias is not None:
        results += down_bias[experts]
    of_tokens = torch.empty_like(results).index_copy_(0, pairs, results).unflatten(0, chosen.shape)
    return (of_tokens * shares.unsqueeze(2)).sum(1).to(x.dtype)


def one_by_one(x: Tensor, chosen: Tensor, shares: Tensor, of: Experts) -> Tensor:
    """Every expert computes every token: the twin of `grouped`, and slower by experts / k."""
    (up, down), (_, down_bias) = of.by_expert(), of.biases()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(up)):
        gated = of.gate(F.linear(x, up[expert]), chosen.new_full((len(x),), expert))
        result = F.linear(gated, down[expert], None if down_bias is None else down_bias[expert])
        is_own = chosen == expert
        share = (shares * is_own).sum(1, keepdim=True)
        total += (result * share).where(is_own.any(1, keepdim=True), 0.0)  # others may be infinite
    return total.to(x.dtype)
