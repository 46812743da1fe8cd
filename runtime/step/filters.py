"""The least likely token that the filters of a row keep: top-k, min-p and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling_inputs import MOST_LIMITED


def weights_of(logits: Tensor, highest: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities in float64, times a factor that makes the likeliest token's 1. highest [D,
    1]."""
    return ((logits.double() - highest.double()) / temperatures.unsqueeze(1)).exp()


def lowest_kept(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    most: int,
) -> Tensor:
    """Returns the lowest logit that stays in each row, [D, 1], of the `most` that are ordered. The
    others as in `sampler.draw_filtered`."""
    if most < logits.shape[1]:
        ordered = logits.topk(most, dim=-1).values
    else:
        ordered = logits.sort(dim=-1, descending=True).values
    weights = weights_of(ordered, ordered[:, :1], temperatures)
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    last_ranks = torch.where(top_ks > 0, top_ks, logits.shape[1]).unsqueeze(1)
    stays = (ranks < last_ranks) & (weights >= min_ps.unsqueeze(1)) & (weights > 0.0)
    weights = weights.where(stays, 0.0)

    # A rank stays while the ranks before it have not reached p. Weights fall, so a leading part
    # stays.
    reached = weights.cumsum(dim=-1)
    stays &= reached - weights < top_ps.unsqueeze(1) * reached[:, -1:]
    last = stays.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, last)


def lowest_kept_of_few(
    logits: Tensor,
    weights: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> Tensor:
    """Returns the same as `lowest_kept`, but for the rounding of sums, with less work where few
    tokens reach p: all logits are ordered only of rows in which the likeliest MOST_LIMITED do not,
    or in which top-k counts. weights [D, vocab] of all tokens.

    It looks at the result, so it would wait for a GPU.
    """
    few = min(MOST_LIMITED, logits.shape[1])
    ordered = logits.topk(few, dim=-1).values
    likely = weights_of(ordered, ordered[:, :1], temperatures)
    likely = likely.where(likely >= min_ps.unsqueeze(1), 0.0)
    reached = likely.cumsum(dim=-1)
    # Not `sum`: its rounding depends on the number of rows.
    all_reached = weights.where(weights >= min_ps.unsqueeze(1), 0.0).cumsum(dim=-1)
    # If the last of the few is removed, no other token stays, and these are all.
    total = reached[:, -1:].where(likely[:, -1:] == 0.0, all_reached[:, -1:])
    target = top_ps.unsqueeze(1) * total
    last = (reached - likely < target).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    lowest = ordered.gather(1, last)
    (unknown,) = ((reached[:, -1:] < target).squeeze(1) | (top_ks > 0)).nonzero(as_tuple=True)
    if len(unknown):
        lowest[unknown] = lowest_kept(
            logits[unknown],
            temperatures[unknown],
            top_ks[unknown],
            top_ps[unknown],
            min_ps[unknown],
            logits.shape[1],
        )
    return lowest
