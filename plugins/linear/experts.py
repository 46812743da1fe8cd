"""The experts of a sparse MLP, as a torch operation:

    torch.ops.pensieve.experts(x, chosen, shares, up, down) -> y

    x       [T, hidden]
    chosen  [T, k] int64, the experts of each token; shares [T, k] float32, their weights
    up      [experts * 2 * width, hidden]: of each expert the gate's rows, then the values'
    down    [experts * hidden, width]
    y       [T, hidden]: the sum over a token's experts of share * down (silu(gate x) * (up x)), summed in float32

No shape depends on the routing, and nothing waits for the GPU, so a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_ops  # noqa: F401  register torch.ops.pensieve.silu_gate

GROUPED_CAPABILITIES = (9, 10)  # major; on others torch's grouped product waits for the GPU
ALIGNED = 16  # torch's grouped product reads rows of multiples of so many bytes


def grouped(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Sorts the pairs of a token and an expert by expert; each of the two products is one call for all experts."""
    up, down = _by_expert(x, up, down)
    experts, pairs = chosen.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(len(up), device=x.device), right=True, out_int32=True)
    gated = torch.ops.pensieve.silu_gate(F.grouped_mm(x[pairs // chosen.shape[1]], up.mT, offs=ends))
    made = F.grouped_mm(gated, down.mT, offs=ends)
    of_tokens = torch.empty_like(made).index_copy_(0, pairs, made).unflatten(0, chosen.shape)
    return (of_tokens * shares.unsqueeze(2)).sum(1).to(x.dtype)


def one_by_one(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert computes every token: the twin of `grouped`, and slower by experts / k."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (own_up, own_down) in enumerate(zip(*_by_expert(x, up, down), strict=True)):
        made = F.linear(torch.ops.pensieve.silu_gate(F.linear(x, own_up)), own_down)
        is_own = chosen == expert
        share = (shares * is_own).sum(1, keepdim=True)
        total += (made * share).where(is_own.any(1, keepdim=True), 0.0)  # others may be infinite
    return total.to(x.dtype)


def _by_expert(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, 2 * width, hidden] and [experts, hidden, width]."""
    return up.unflatten(0, (-1, 2 * down.shape[1])), down.unflatten(0, (-1, x.shape[1]))


torch.library.define("pensieve::experts", "(Tensor x, Tensor chosen, Tensor shares, Tensor up, Tensor down) -> Tensor")


@torch.library.impl("pensieve::experts", "cpu")
def _experts_cpu(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (grouped if _aligned(x, down) else one_by_one)(x, chosen, shares, up, down)


@torch.library.impl("pensieve::experts", "cuda")
def _experts_cuda(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    fast = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in GROUPED_CAPABILITIES
    return (grouped if fast and _aligned(x, down) else one_by_one)(x, chosen, shares, up, down)


def _aligned(x: Tensor, down: Tensor) -> bool:
    return all(size * x.itemsize % ALIGNED == 0 for size in (x.shape[1], down.shape[1]))


@torch.library.register_fake("pensieve::experts")
def _(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)
