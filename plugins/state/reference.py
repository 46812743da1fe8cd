"""Reference of the two operations on states, `causal_conv` and `gated_delta`: one token after the
other, on plain tensors. Faster implementations are compared with it.

A segment is as in `attention.reference`; only its q_start and q_len are read. It begins with the
state in slot `state_in[i]`, or with zeros if that is negative, and the state behind its last token
is written to slot `state_out[i]`, or dropped if that is negative. A segment's own slots may be
equal. No segment reads a slot that another one writes. Segments without tokens change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6
"""Added to the squared lengths of queries and keys."""


class StateSpan(NamedTuple):
    """The tokens [start, end) of a step, and the slots of the states around them."""

    start: int
    end: int
    state_in: int
    state_out: int


def spans_of(segments: Tensor, state_in: Tensor, state_out: Tensor) -> Iterator[StateSpan]:
    """The segments that have tokens."""
    places = segments[:, :2].tolist()
    for (start, count), before, behind in zip(
        places, state_in.tolist(), state_out.tolist(), strict=True
    ):
        if count:
            yield StateSpan(start, start + count, before, behind)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    columns: Tensor,
) -> Tensor:
    """SiLU of a causal convolution of each channel over the tokens of each segment, accumulated in
    float32.

    x        [T, channels]
    weight   [channels, 1, width]; the last number is the token's own
    columns  [slots, width - 1, channels], the inputs in front of a position, oldest first
    Returns [T, channels]; tokens of no segment get zeros.
    """
    taps = weight[:, 0].t().float()  # [width, channels]
    out = torch.zeros_like(x)
    for start, end, before, behind in spans_of(segments, state_in, state_out):
        window = columns[before].clone() if before >= 0 else torch.zeros_like(columns[0])
        for token in range(start, end):
            inputs = torch.cat((window, x[token : token + 1]))
            out[token] = F.silu((inputs.float() * taps).sum(dim=0))
            window = inputs[1:]
        if behind >= 0:
            columns[behind] = window
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
) -> Tensor:
    """The gated delta rule of each segment, in the dtype of the matrices. With queries and
    keys of length 1, and queries divided by the square root of key_dim:

        S = exp(decay) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q

    q, k      [T, key_heads, key_dim]; value head h has key head h / (value_heads / key_heads)
    v         [T, value_heads, value_dim]
    decay     [T, value_heads] float32, not positive; beta the same, between 0 and 1
    matrices  [slots, value_heads, key_dim, value_dim]
    Returns [T, value_heads, value_dim] in v's dtype; tokens of no segment get zeros.
    """
    kind = matrices.dtype
    share = v.shape[1] // k.shape[1]
    q = unit(q.to(kind)).repeat_interleave(share, dim=1) * q.shape[2] ** -0.5
    k = unit(k.to(kind)).repeat_interleave(share, dim=1)
    out = torch.zeros_like(v)
    for start, end, before, behind in spans_of(segments, state_in, state_out):
        state = matrices[before].clone() if before >= 0 else torch.zeros_like(matrices[0])
        for token in range(start, end):
            state = state * decay[token].to(kind).exp().view(-1, 1, 1)
            key = k[token].unsqueeze(2)  # [value_heads, key_dim, 1]
            recalled = (state * key).sum(dim=1)
            change = (v[token].to(kind) - recalled) * beta[token].to(kind).unsqueeze(1)
            state = state + key * change.unsqueeze(1)
            out[token] = (state * q[token].unsqueeze(2)).sum(dim=1)
        if behind >= 0:
            matrices[behind] = state
    return out


def unit(x: Tensor) -> Tensor:
    """Vectors divided by their lengths."""
    return x * (x.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt()
