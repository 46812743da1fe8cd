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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import torch_ops  # noqa: F401  register torch.ops.pensieve.silu_gate

GROUPED_CAPABILITIES = (9, 10)  # major; on others torch's grouped product waits for the GPU
ALIGNED = 8  # bfloat16 numbers: torch's grouped product reads rows of multiples of 16 bytes


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the pairs of a token and an expert by expert.

    Returns the token of each place, [T * k]; the place of each pair, [T, k]; and the end of each expert's places,
    [experts] int32.
    """
    sorted_experts, pairs = chosen.flatten().sort()
    places = torch.empty_like(pairs).index_copy_(0, pairs, torch.arange(len(pairs), device=chosen.device))
    numbers = torch.arange(experts, device=chosen.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    return pairs // chosen.shape[1], places.view(chosen.shape), ends


def weighted_sum(made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """The sum of each token's rows of made [T * k, hidden], weighted, in made's dtype."""
    return (made[places] * shares.unsqueeze(2)).sum(1).to(made.dtype)


def grouped(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    order: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]] = by_expert,
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum,
) -> Tensor:
    """Each of the two products is one call for all experts. order, add: `by_expert` and `weighted_sum`, or kernels."""
    up, down = _matrices(x, up, down)
    tokens, places, ends = order(chosen, len(up))
    gated = torch.ops.pensieve.silu_gate(F.grouped_mm(x.index_select(0, tokens), up.mT, offs=ends))
    return add(F.grouped_mm(gated, down.mT, offs=ends), places, shares)


def one_by_one(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every expert computes every token: the twin of `grouped`, and slower by experts / k."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (own_up, own_down) in enumerate(zip(*_matrices(x, up, down), strict=True)):
        made = F.linear(torch.ops.pensieve.silu_gate(F.linear(x, own_up)), own_down)
        is_own = chosen == expert
        share = (shares * is_own).sum(1, keepdim=True)
        total += (made * share).where(is_own.any(1, keepdim=True), 0.0)  # others may be infinite
    return total.to(x.dtype)


def _matrices(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """[experts, 2 * width, hidden] and [experts, hidden, width]."""
    return up.unflatten(0, (-1, 2 * down.shape[1])), down.unflatten(0, (-1, x.shape[1]))


torch.library.define("pensieve::experts", "(Tensor x, Tensor chosen, Tensor shares, Tensor up, Tensor down) -> Tensor")
torch.library.impl("pensieve::experts", "cpu", grouped)


@torch.library.impl("pensieve::experts", "cuda")
def _experts_cuda(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    aligned = x.shape[1] % ALIGNED == down.shape[1] % ALIGNED == 0
    fast = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in GROUPED_CAPABILITIES
    if not (fast and aligned):
        return one_by_one(x, chosen, shares, up, down)
    from . import experts_kernel  # imported here because only CUDA installations have Triton

    return grouped(x, chosen, shares, up, down, experts_kernel.by_expert, experts_kernel.weighted_sum)


@torch.library.register_fake("pensieve::experts")
def _(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)
