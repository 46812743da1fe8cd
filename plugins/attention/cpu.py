"""`write_kv` and `multi_token_attention` on a CPU. `reference` is their slow twin and says what
they compute; a pool in eight bits is left to it.

KV is read and written as rows of the pool's memory, because torch copies rows three to six times as
fast as it indexes several dimensions. What all layers of a step share is computed once
(`StepPlans`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fp8_pool, reference

T = TypeVar("T")


class StepPlans:
    """What the layers of one step share: the places of its tokens and the plans of its attention.

    It describes the inputs of one step. The code that runs the step calls `clear` behind it.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Any] = {}

    def clear(self) -> None:
        self._plans.clear()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan of this key. `make` computes it for the step's first layer that needs it."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: T = self._plans[key]
        return plan


class Places(NamedTuple):
    """Where the step's KV is written.

    tokens  the tokens that have a place; None: all of them
    rows    [tokens * 2 * kv_heads], the places in layer 0 as rows of head_dim numbers
    """

    tokens: Tensor | None
    rows: Tensor


class SegmentGroup(NamedTuple):
    """The attention of S segments of like size, padded to M queries over N keys each, in layer 0.

    queries  [S, M], rows of q; padding repeats a segment's last query
    real     [S, M], whether a query is no padding; None: all of them
    chunks   [2 * S * kv_heads * N / chunk_tokens], chunks as rows of chunk_tokens * head_dim
             numbers: those of keys, then those of values; padding repeats a segment's last chunk
    foreign  keys and values that are not of their segment, as rows of [2, S, kv_heads, N]
    mask     [S, 1, M * share, N], 0 where a query sees a key, else minus infinity; share is the
             number of query heads of one key head
    """

    queries: Tensor
    real: Tensor | None
    chunks: Tensor
    foreign: Tensor
    mask: Tensor


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Tensor,
    slots: Tensor,
    pool: Tensor,
    layer: int,
    plans: StepPlans,
) -> Tensor:
    """Does what `reference.write_kv` does."""
    if pool.dtype == fp8_pool.DTYPE:
        return reference.write_kv(q, k, v, rotary, slots, pool, layer)
    heads = q.shape[1]
    if rotary.shape[1]:
        turned = _rotated(torch.cat((q, k), dim=1), rotary)
        q = turned[:, :heads].contiguous()  # as compiled code expects it
        k = turned[:, heads:]
    else:
        q = q.clone(memory_format=torch.contiguous_format)
    places = plans.get("places", lambda: _places(slots, pool))
    kv = torch.stack((k, v), dim=1)
    if places.tokens is not None:
        kv = kv[places.tokens]
    head_dim = pool.shape[5]
    rows_of_a_layer = math.prod(pool.shape[2:5])
    memory = pool.view(-1, head_dim)
    memory.index_copy_(0, places.rows + layer * rows_of_a_layer, kv.view(-1, head_dim))
    return q


def _rotated(x: Tensor, rotary: Tensor) -> Tensor:
    """Does what `reference.rotate` does."""
    half = rotary.shape[1] // 2
    cos, sin = rotary.unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., : 2 * half].float().chunk(2, dim=-1)
    turned_first = (first * cos).addcmul_(second, sin, value=-1.0)
    turned_second = (second * cos).addcmul_(first, sin)
    turned = torch.cat((turned_first, turned_second), dim=-1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return turned
    return torch.cat((turned, x[..., 2 * half :]), dim=-1)


def _places(slots: Tensor, pool: Tensor) -> Places:
    written = slots >= 0
    tokens = None if bool(written.all()) else written.nonzero().squeeze(1)
    if tokens is not None:
        slots = slots[tokens]
    _, layers, _, kv_heads, chunk_tokens, _ = pool.shape
    slot = slots.long() // chunk_tokens
    offset = slots.long() % chunk_tokens
    heads = torch.arange(2 * kv_heads)  # of keys, then of values
    first = slot * (layers * 2 * kv_heads * chunk_tokens) + offset
    return Places(tokens, (first.unsqueeze(1) + heads * chunk_tokens).flatten())


def multi_token_attention(
    q: Tensor,
    segments: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    plans: StepPlans,
) -> Tensor:
    """Does what `reference.multi_token_attention` does."""
    if pool.dtype == fp8_pool.DTYPE:
        return reference.multi_token_attention(
            q, segments, block_table, pool, layer, scale, window, sinks
        )
    groups = plans.get(
        ("attention", window),
        lambda: [
            _group(group, block_table, pool, window, q.shape[1])
            for group in reference.groups_of_like_size(segments, pool.shape[3:], window)
        ],
    )
    o = q.new_zeros(q.shape)
    for group in groups:
        attended = _attend(q, group, pool, layer, scale, sinks)
        if group.real is None:
            o[group.queries.flatten()] = attended.flatten(0, 1).to(o.dtype)
        else:
            o[group.queries[group.real]] = attended[group.real].to(o.dtype)
    return o


def _group(
    segments: Tensor, block_table: Tensor, pool: Tensor, window: int, heads: int
) -> SegmentGroup:
    kv_heads, chunk_tokens = pool.shape[3:5]
    padded = reference.padded(segments, block_table, chunk_tokens, window)
    records = math.prod(pool.shape[1:4])  # rows of a slot: of each layer its keys, then its values
    head = torch.arange(2 * kv_heads).view(2, 1, kv_heads, 1)
    chunks = padded.slots.long().unsqueeze(1) * records + head
    foreign = (~padded.valid).unsqueeze(1).expand(-1, kv_heads, -1)
    mask = torch.zeros(padded.seen.shape).masked_fill_(~padded.seen, -math.inf)
    return SegmentGroup(
        queries=padded.queries,
        real=None if bool(padded.real.all()) else padded.real,
        chunks=chunks.flatten(),
        foreign=foreign.expand(2, *foreign.shape).flatten().nonzero().squeeze(1),
        mask=mask.repeat_interleave(heads // kv_heads, dim=1).unsqueeze(1),
    )


def _attend(
    q: Tensor, group: SegmentGroup, pool: Tensor, layer: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Returns the results of the group's queries, [S, M, heads, head_dim] float32."""
    heads, head_dim = q.shape[1:]
    kv_heads, chunk_tokens = pool.shape[3:5]
    count, queries = group.queries.shape
    share = heads // kv_heads
    memory = pool.view(-1, chunk_tokens * head_dim)
    kv = memory.index_select(0, group.chunks + layer * 2 * kv_heads).float()
    # They may be infinite, and 0 times infinity is not 0.
    kv.view(-1, head_dim).index_fill_(0, group.foreign, 0.0)
    k, v = kv.view(2, count, kv_heads, -1, head_dim)
    # Query heads that share a key head are treated as further queries.
    grouped = q.index_select(0, group.queries.flatten()).float()
    grouped = grouped.view(count, queries, kv_heads, share, head_dim).transpose(1, 2)
    grouped = grouped.flatten(2, 3)
    mask = group.mask
    if sinks is not None:
        k, v, mask = reference.with_sinks(k, v, mask, sinks)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    out = out.view(count, kv_heads, queries, share, head_dim).transpose(1, 2)
    return out.reshape(count, queries, heads, head_dim)
