"""`causal_conv` and `gated_delta` on a CPU. `reference` is their slow twin and says what they
compute.

What all layers of a step share is computed once (`StepPlans`). Rows with one token are computed
together, token by token. Longer segments are computed in pieces of PIECE tokens by products of
matrices. So a state has the same bits wherever a prompt was cut at multiples of PIECE tokens.

A piece of n tokens turns the state S into S' with these sums, in which G is the sum of the decays
from the piece's first token on and row i of each matrix is of token i:

    (1 + L) U = beta (V - exp(G) K S)       L = beta exp(G_i - G_j) K K^T, below the diagonal
    O = exp(G) Q S + A U                    A = exp(G_i - G_j) Q K^T, diagonal included
    S' = exp(G_n) S + (exp(G_n - G) K)^T U
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.cpu import StepPlans
from .reference import StateSpan, spans_of, unit

PIECE = 64  # tokens
GATHERED = 2**18
"""Elements of states gathered at once, which fit in the processor's cache."""


class SingleTokens(NamedTuple):
    """n segments with one token each. Each part is [n].

    tokens  of the step
    before  the slots of their states; where `fresh`, they begin with zeros
    behind  the slots that get their states, where `kept`
    """

    tokens: Tensor
    before: Tensor
    fresh: Tensor
    behind: Tensor
    kept: Tensor

    @classmethod
    def of(cls, spans: list[StateSpan]) -> Self:
        start, _, before, behind = torch.tensor(spans, dtype=torch.long).view(-1, 4).unbind(1)
        return cls(start, before.clamp(min=0), before < 0, behind, behind >= 0)

    def groups(self, most: int) -> Iterator[Self]:
        """The same rows, at most so many at a time."""
        for first in range(0, len(self.tokens), most):
            yield type(self)(*(part[first : first + most] for part in self))

    def read(self, states: Tensor) -> Tensor:
        """Copies of the states [n, ...] from [slots, ...]."""
        own = states.index_select(0, self.before)
        own[self.fresh] = 0.0
        return own

    def write(self, own: Tensor, states: Tensor) -> None:
        states.index_copy_(0, self.behind[self.kept], own[self.kept])


class StatePlan(NamedTuple):
    """The segments with one token, and the others."""

    rows: SingleTokens
    longer: list[StateSpan]


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
    plan = _plan(segments, state_in, state_out, plans)
    out = torch.zeros_like(x)
    tokens = plan.rows.tokens
    if len(tokens):
        # [n, width, channels]
        inputs = torch.cat((plan.rows.read(columns), x[tokens].unsqueeze(1)), dim=1)
        out[tokens] = _convolved(inputs, taps).squeeze(1)
        plan.rows.write(inputs[:, 1:], columns)
    for start, end, before, behind in plan.longer:
        window = columns[before] if before >= 0 else torch.zeros_like(columns[0])
        for first in range(start, end, PIECE):
            own = slice(first, min(first + PIECE, end))
            inputs = torch.cat((window, x[own]))
            out[own] = _convolved(inputs, taps)
            window = inputs[len(inputs) - columns.shape[1] :]
        if behind >= 0:
            columns[behind] = window
    return out


def _convolved(inputs: Tensor, taps: Tensor) -> Tensor:
    """inputs [..., width - 1 + n, channels], taps [width, channels] float32. Returns
    [..., n, channels]."""
    count = inputs.shape[-2] - len(taps) + 1
    wide = inputs.float()
    total = wide.narrow(-2, 0, count) * taps[0]
    for distance in range(1, len(taps)):
        total.addcmul_(wide.narrow(-2, distance, count), taps[distance])
    return F.silu(total).to(inputs.dtype)


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
    plan = _plan(segments, state_in, state_out, plans)
    share = v.shape[1] // k.shape[1]
    q = unit(q.float()).repeat_interleave(share, dim=1).mul_(q.shape[2] ** -0.5)
    k = unit(k.float()).repeat_interleave(share, dim=1)
    out = torch.zeros_like(v)
    most = max(1, GATHERED // matrices[0].numel())
    for rows in plan.rows.groups(most):
        token = rows.tokens
        states = rows.read(matrices)
        out[token] = _next_token(q[token], k[token], v[token], decay[token], beta[token], states)
        rows.write(states, matrices)
    for start, end, before, behind in plan.longer:
        state = matrices[before] if before >= 0 else torch.zeros_like(matrices[0])
        for first in range(start, end, PIECE):
            own = slice(first, min(first + PIECE, end))
            results, state = _piece(q[own], k[own], v[own], decay[own], beta[own], state)
            out[own] = results.to(out.dtype)
        if behind >= 0:
            matrices[behind] = state
    return out


def _plan(segments: Tensor, state_in: Tensor, state_out: Tensor, plans: StepPlans) -> StatePlan:
    def make() -> StatePlan:
        spans = list(spans_of(segments, state_in, state_out))
        single = [span for span in spans if span.end == span.start + 1]
        return StatePlan(
            SingleTokens.of(single), [span for span in spans if span.end > span.start + 1]
        )

    return plans.get("states", make)


def _next_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> Tensor:
    """Takes one token of each of n rows, whose states [n, ...] it changes; returns
    [n, value_heads, value_dim]."""
    states *= decay.float().exp()[..., None, None]
    keys = k.unsqueeze(2)  # [n, value_heads, 1, key_dim]
    change = (v.float().unsqueeze(2) - keys @ states) * beta.float()[..., None, None]
    states.addcmul_(keys.transpose(2, 3), change)
    return (q.unsqueeze(2) @ states).squeeze(2).to(v.dtype)


def _piece(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the results of n tokens, [n, value_heads, value_dim] float32, and the state behind
    them."""
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))  # [value_heads, n, dim]
    passed = decay.float().t().cumsum(dim=1)  # G, [value_heads, n]
    since = passed.unsqueeze(2) - passed.unsqueeze(1)
    later = torch.ones(since.shape[1:], dtype=torch.bool).triu(1)
    kept = since.masked_fill_(later, -math.inf).exp_()
    from_start = passed.exp().unsqueeze(2)
    rate = beta.float().t().unsqueeze(2)
    recalled = from_start * (k @ state)
    # The diagonal, and what is above it, is not read.
    mixed = rate * kept * (k @ k.transpose(1, 2))
    change = torch.linalg.solve_triangular(
        mixed, rate * (v - recalled), upper=False, unitriangular=True
    )
    out = from_start * (q @ state) + (kept * (q @ k.transpose(1, 2))) @ change
    to_end = (passed[:, -1:] - passed).exp().unsqueeze(2)
    state = from_start[:, -1:] * state + (to_end * k).transpose(1, 2) @ change
    return out.transpose(0, 1), state
