"""Draws tokens from logits: greedy, or temperature, top-k and top-p with a counter-based uniform number a row.

The number of a draw is a pure function of (seed, position), made with integer operations that wrap alike on every
device: a suspended request resumes exactly and no generator state exists. A row's token does not depend on its
neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64: the step between two states, and its mixing function's two multipliers, as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def sample(
    logits: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Tokens [R] int64 for logits [R, vocab] float32.

    `rows` [D] int64 are drawn, as the other arguments [D] say (`step_inputs.Draws`, on the logits' device); the rest
    take the largest logit, of equals the lowest id.
    """
    tokens = logits.argmax(dim=-1)
    if len(rows):
        tokens[rows] = draw(logits[rows], temperatures, top_ks, top_ps, uniform(seeds, positions))
    return tokens


def draw(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [D] int64 from logits [D, vocab] float32 by inverse CDF, likeliest token first, in float64.

    temperatures [D] float64, above 0. top_ks [D] int64: logits below the k-th largest are cut (its equals stay);
    0 is off. top_ps [D] float64: of what is left, the smallest set of likeliest tokens whose probability reaches p
    stays, at least one. uniforms [D] float64 in [0, 1).
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    vocab = logits.shape[1]
    last_kept = torch.where(top_ks > 0, top_ks.clamp(max=vocab), vocab).unsqueeze(1) - 1
    scaled = (ordered.double() - ordered[:, :1].double()) / temperatures.unsqueeze(1)
    weights = scaled.exp().where(ordered >= ordered.gather(1, last_kept), 0.0)

    # A rank stays while the ranks before it have not reached p. Weights fall, so what stays is a leading part.
    reached = weights.cumsum(dim=-1)
    stays = reached - weights < top_ps.unsqueeze(1) * reached[:, -1:]
    last = stays.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    target = uniforms.unsqueeze(1) * reached.gather(1, last)
    rank = (reached <= target).sum(dim=-1, keepdim=True).minimum(last)
    return ids.gather(1, rank).squeeze(1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw number `positions` [D] int64 of `seeds` [D] int64: [D] float64 in [0, 1), 53 random bits each."""
    state = _mix(seeds + _STEP) + (positions + 1) * _STEP
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's mixing function; int64 products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts zeros in from the left, where `>>` would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
