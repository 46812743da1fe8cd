"""An engine whose output is computable by hand, and plans for it.

Its KV holds, layer by layer, a digest of each token at its position; the next token is the sum of
the digests of all visible tokens over all layers. A token, chunk or layer in the wrong place, early
or late, changes the sum.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

import pensieve.plugins.torch_ops  # noqa: F401 - registers the operations
from pensieve.plugins.attention.fp8_pool import pool_width
from pensieve.scheduler.plan import (
    NO_TICKETS,
    BlockUpdate,
    CopyBatch,
    Join,
    Lane,
    RowStart,
    Span,
    StepPlan,
    Tickets,
)
from pensieve.scheduler.types import GREEDY, RequestId, RowId, Sampling

VOCAB = 97


def next_token(context: Sequence[int], layers: int, largest: int = 61) -> int:
    """FakeEngine's token for a context."""
    digests = (
        (token * 31 + at * 17 + layer * 7) % largest
        for at, token in enumerate(context)
        for layer in range(layers)
    )
    return sum(digests) % VOCAB


def reply(prompt: Sequence[int], length: int, layers: int) -> list[int]:
    """The greedy continuation."""
    context = list(prompt)
    for _ in range(length):
        context.append(next_token(context, layers))
    return context[len(prompt) :]


class FakeEngine:
    dtype = torch.float32
    vocab_size = VOCAB
    state_shape = None

    def __init__(self, layers: int = 3, largest: int = 61, kv_dtype: torch.dtype = torch.float32):
        """largest: digests are below; with 16, KV in eight bits is exact."""
        self.layers = layers
        self.largest = largest
        self.kv_dtype = kv_dtype

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        return (slots, self.layers, 2, 1, chunk_tokens, pool_width(1, self.kv_dtype))

    def forward(self, batch, pool):
        tokens = batch.token_ids * 31 + batch.positions * 17
        means = torch.zeros(len(tokens))
        for layer in range(self.layers):
            digests = ((tokens + layer * 7) % self.largest).float().view(-1, 1, 1)
            no_keys = torch.zeros_like(digests)
            rotary = torch.empty(len(tokens), 0)
            q = torch.ops.pensieve.write_kv(
                no_keys, no_keys, digests, rotary, batch.slots, pool, layer
            )
            # Equal scores: the attention is the mean over the visible tokens.
            means += torch.ops.pensieve.multi_token_attention(
                q, batch.segments, batch.block_table, pool, layer, 1.0
            ).flatten()
        chosen = (means * (batch.positions + 1)).round()[batch.sample_rows].long() % VOCAB
        return torch.nn.functional.one_hot(chosen, VOCAB).float()


def row(request: int) -> RowId:
    return RowId(RequestId(request), request)


def join(seat: int, sampling: Sampling = GREEDY) -> Join:
    return Join(seat, row(seat), sampling)


def span(seat: int, start: int, end: int, write_from: int | None = None, samples: int = 1) -> Span:
    return Span(seat, start, end, start if write_from is None else write_from, samples)


def copy(
    lane: Lane, ticket: int, pairs: dict[int, int], after: Tickets = NO_TICKETS, gated: bool = False
) -> CopyBatch:
    return CopyBatch(
        lane, ticket, array("i", pairs.keys()), array("i", pairs.values()), after, gated
    )


def plan(
    step: int,
    *,
    copies: Sequence[CopyBatch] = (),
    after: Tickets = NO_TICKETS,
    joins: Sequence[Join] = (),
    origins: Sequence[tuple[int, int, int]] = (),
    blocks: Sequence[tuple[int, int, tuple[int, ...]]] = (),
    generate: dict[int, int] | None = None,
    spans: Sequence[Span] = (),
    token_ids: Sequence[int] = (),
    ended: Sequence[int] = (),
) -> StepPlan:
    """generate: position by seat; the request in a seat has the seat's number."""
    generate = generate or {}
    seats = [*generate, *(span.seat for span in spans for _ in range(span.samples))]
    return StepPlan(
        step=step,
        copies=tuple(copies),
        after=after,
        joins=tuple(joins),
        origins=tuple(RowStart(*origin) for origin in origins),
        blocks=tuple(BlockUpdate(*update) for update in blocks),
        generate=array("i", generate),
        positions=array("i", generate.values()),
        spans=tuple(spans),
        token_ids=array("i", token_ids),
        samples=tuple(row(seat) for seat in seats),
        ended=tuple(map(RequestId, ended)),
    )
