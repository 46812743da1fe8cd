"""`causal_conv` and `gated_delta` on a CPU. `reference` is their slow twin and says what they
compute.

Segments are computed in pieces of PIECE tokens by products of matrices, so a state has the same
bits wherever a prompt was cut at multiples of PIECE tokens. States are changed in their slots.

A piece of n tokens turns the state S into S' with these sums, in which G is the sum of the decays
from the piece's first token on and row i of each matrix is of token i:

    (1 + L) U = beta (V - exp(G) K S)       L = beta exp(G_i - G_j) K K^T, below the diagonal
    O = exp(G) Q S + A U                    A = exp(G_i - G_j) Q K^T, diagonal included
    S' = exp(G_n) S + (exp(G_n - G) K)^T U
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.cpu import StepPlans
from .reference import StateSpan, spans_of, unit

PIECE = 64  # tokens


def causal_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    columns: Tensor,
    plans: StepPlans,
) -> Tensor:
    """Does what `reference.causal_conv` does."""
    taps = weight[:, 0].t().float()
    width = len(taps)
    out = torch.zeros_like(x)
    for span in _spans(segments, state_in, state_out, plans):
        window = _own_state(span, columns)
        for first in range(span.start, span.end, PIECE):
            piece = slice(first, min(first + PIECE, span.end))
            inputs = torch.cat((window, x[piece]))
            count = len(inputs) - width + 1
            wide = inputs.float()
            total = wide[:count] * taps[0]
            for distance in range(1, width):
                total.addcmul_(wide[distance : distance + count], taps[distance])
            out[piece] = F.silu(total)
            window.copy_(inputs[count:])
    return out


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    matrices: Tensor,
    plans: StepPlans,
) -> Tensor:
    """Does what `reference.gated_delta` does, in float32."""
    share = v.shape[1] // k.shape[1]
    q = unit(q.float()).repeat_interleave(share, dim=1).mul_(q.shape[2] ** -0.5)
    k = unit(k.float()).repeat_interleave(share, dim=1)
    # each [value_heads, T, ...]
    q, k, wide = (x.transpose(0, 1) for x in (q, k, v.float()))
    decay, beta = (x.float().t().unsqueeze(2) for x in (decay, beta))
    out = torch.zeros_like(v)
    results = out.transpose(0, 1)
    for span in _spans(segments, state_in, state_out, plans):
        state = _own_state(span, matrices)
        compute = _token if span.end == span.start + 1 else _piece
        for first in range(span.start, span.end, PIECE):
            piece = slice(first, min(first + PIECE, span.end))
            results[:, piece] = compute(
                q[:, piece], k[:, piece], wide[:, piece], decay[:, piece], beta[:, piece], state
            )
    return out


def _spans(
    segments: Tensor, state_in: Tensor, state_out: Tensor, plans: StepPlans
) -> list[StateSpan]:
    return plans.get("states", lambda: list(spans_of(segments, state_in, state_out)))


def _own_state(span: StateSpan, states: Tensor) -> Tensor:
    """The state in front of the span, in the slot of the state behind it, or in memory of its
    own."""
    if span.state_out < 0:
        own = torch.empty_like(states[0])
    else:
        own = states[span.state_out]
    if span.state_in < 0:
        own.zero_()
    elif span.state_in != span.state_out:
        own.copy_(states[span.state_in])
    return own


def _token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Does what `_piece` does, for one token."""
    state *= decay.exp()
    change = (v - k @ state) * beta
    state.addcmul_(k.transpose(1, 2), change)
    return q @ state


def _piece(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Returns the results of n tokens, [value_heads, n, value_dim] float32, and changes the state
    [value_heads, key_dim, value_dim] to the one behind them. q, k and v are [value_heads, n, dim],
    decay and beta [value_heads, n, 1]."""
    passed = decay.cumsum(dim=1)  # G
    since = passed - passed.transpose(1, 2)
    later = torch.ones(since.shape[1:], dtype=torch.bool).triu(1)
    kept = since.masked_fill_(later, -math.inf).exp_()
    from_start = passed.exp()
    recalled = from_start * (k @ state)
    # The diagonal, and what is above it, is not read.
    mixed = beta * kept * (k @ k.transpose(1, 2))
    change = torch.linalg.solve_triangular(
        mixed, beta * (v - recalled), upper=False, unitriangular=True
    )
    out = from_start * (q @ state) + (kept * (q @ k.transpose(1, 2))) @ change
    to_end = (passed[:, -1:] - passed).exp()
    state.mul_(from_start[:, -1:]).baddbmm_((to_end * k).transpose(1, 2), change)
    return out
