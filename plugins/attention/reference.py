"""Reference of the two operations inside every engine: `write_kv` and `multi_token_attention`, on
plain tensors.

A KV pool is one tensor `[slot, layers, 2, kv_heads, chunk_tokens, head_dim]`: each chunk is one
contiguous record. A token's place in it is `slot * chunk_tokens + offset`; its *coordinate* is its
index in its own request's row, and row `seat` of the block table gives the slot of every
`chunk_tokens` coordinates. A pool in eight bits is laid out as `fp8_pool` says.

Tests compare `multi_token_attention` with a twin that takes one token at a time in float64. Faster
implementations, of GPUs and of the CPU (`cpu`), are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fp8_pool

GATHERED = 2**20
"""Elements of keys gathered at once: such buffers fit in the processor's cache, and the allocator
reuses them."""


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotates the first R of each head's dimensions: dimensions i and i + R/2 are a pair, rotated
    by angle i.

    x [T, heads, head_dim]; rotary [T, R] float32, R/2 cosines then R/2 sines. Computed in float32.
    Returns a new tensor.
    """
    dims = rotary.shape[1]
    cos, sin = rotary.unsqueeze(1).chunk(2, dim=-1)
    first, second = x[..., :dims].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), dim=-1)


def write_kv(
    q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, slots: Tensor, pool: Tensor, layer: int
) -> Tensor:
    """Writes the keys, rotated, and values of T tokens into `layer` of the pool; returns the
    rotated queries.

    q [T, heads, head_dim], k and v [T, kv_heads, head_dim]; rotary [T, R] as in `rotate`, R = 0 for
    none; slots [T] int32, places in the pool or -1: that token is not written. The result never
    aliases q.
    """
    if rotary.shape[1]:
        q, k = rotate(q, rotary), rotate(k, rotary)
    else:
        q = q.clone(memory_format=torch.contiguous_format)
    written = slots >= 0
    places = slots[written]
    chunk_tokens = pool.shape[4]
    slot = places // chunk_tokens
    offset = places % chunk_tokens
    if pool.dtype == fp8_pool.DTYPE:
        fp8_pool.write(pool, layer, k[written], v[written], slot, offset)
        return q
    keys, values = pool[:, layer, 0], pool[:, layer, 1]
    keys[slot, :, offset] = k[written]
    values[slot, :, offset] = v[written]
    return q


def multi_token_attention(
    q: Tensor,
    segments: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of many query tokens over scattered KV, accumulated in float32.

    q            [T, heads, head_dim], rotated
    segments     [S, 5] int32: q_start, q_len, kv_start, kv_len, seat. Query j of a segment has the
                 coordinate kv_len - q_len + j and sees the keys at coordinates [kv_start, its own].
                 Segments are disjoint in q; several may share a seat.
    block_table  [seats, blocks] int32, the slot of each chunk of a seat's row
    window       a query sees only the last `window` of its keys, its own among them; 0: all of them
    sinks        [heads], a logit for each head that joins the softmax of every query and has no
                 value; None: none
    Returns o [T, heads, head_dim]; tokens of no segment get zeros.
    """
    o = q.new_zeros(q.shape)
    for group in groups_of_like_size(segments, pool.shape[3:], window):
        _attend_group(q, group, block_table, pool, layer, scale, window, sinks, o)
    return o


def groups_of_like_size(segments: Tensor, record: Sequence[int], window: int) -> list[Tensor]:
    """Divides the segments into groups that are padded to their largest member; padding at most
    doubles either length.

    record: kv_heads, chunk_tokens, head_dim. A group's keys fill at most GATHERED elements (a
    single segment may fill more).
    Returns the segments of each group; their kv_start leaves out keys before all windows.
    """
    if window:
        _, q_len, kv_start, kv_len, _ = segments.unbind(1)
        segments = segments.clone()
        segments[:, 2] = kv_start.maximum(kv_len - q_len - window + 1)
    _, chunk_tokens, _ = record
    most_chunks = GATHERED // math.prod(record)
    sizes = []
    for i, (_, q_len, kv_start, kv_len, _) in enumerate(segments.tolist()):
        if q_len:
            sizes.append(
                (q_len.bit_length(), -(-kv_len // chunk_tokens) - kv_start // chunk_tokens, i)
            )
    groups: list[list[int]] = []
    smallest = (0, 0)  # of the group being filled
    for bits, chunks, i in sorted(sizes):
        like = bits == smallest[0] and chunks <= 2 * smallest[1]
        if like and (len(groups[-1]) + 1) * chunks <= most_chunks:
            groups[-1].append(i)
        else:
            groups.append([i])
            smallest = (bits, chunks)
    return [segments[torch.tensor(members)] for members in groups]


class Padded(NamedTuple):
    """S segments, padded to M queries over N keys each. Padding repeats a segment's last query and
    its last chunk.

    queries  [S, M], rows of q
    real     [S, M], whether a query is no padding
    slots    [S, N / chunk_tokens]
    valid    [S, N], whether a key is of the segment
    seen     [S, M, N], whether the query sees the key
    """

    queries: Tensor
    real: Tensor
    slots: Tensor
    valid: Tensor
    seen: Tensor


def padded(segments: Tensor, block_table: Tensor, chunk_tokens: int, window: int) -> Padded:
    """segments, block_table and window: as `multi_token_attention` takes them."""
    q_start, q_len, kv_start, kv_len, seat = segments.long().unsqueeze(-1).unbind(1)  # each [S, 1]
    steps = torch.arange(int(q_len.max()))
    query = steps.minimum(q_len - 1)
    own = kv_len - q_len + query
    first = kv_start // chunk_tokens
    last = (kv_len - 1) // chunk_tokens
    chunk = first + torch.arange(int((last - first).max()) + 1)  # [S, chunks]
    # [S, N]
    coordinates = (chunk.unsqueeze(-1) * chunk_tokens + torch.arange(chunk_tokens)).flatten(1)
    valid = (coordinates >= kv_start) & (coordinates < kv_len)
    seen = valid.unsqueeze(1) & (coordinates.unsqueeze(1) <= own.unsqueeze(2))
    if window:
        seen &= coordinates.unsqueeze(1) > own.unsqueeze(2) - window
    return Padded(
        queries=q_start + query,
        real=steps < q_len,
        slots=block_table[seat, chunk.minimum(last)],
        valid=valid,
        seen=seen,
    )


def _attend_group(
    q: Tensor,
    segments: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    o: Tensor,
) -> None:
    """Writes into o the attention of some segments."""
    heads, head_dim = q.shape[1:]
    kv_heads, chunk_tokens = pool.shape[3:5]
    rows, real, slots, valid, seen = padded(segments, block_table, chunk_tokens, window)

    # Query heads that share a key head are treated as further queries: [S, kv_heads, M * share, D].
    share = heads // kv_heads
    count, queries, keys = seen.shape
    head = torch.arange(kv_heads).view(-1, 1)
    k, v = (
        _read(pool, layer, i, slots.unsqueeze(1), head).view(count, kv_heads, keys, head_dim)
        for i in (0, 1)
    )
    # not of this segment: may be infinite, and 0 times infinity is not 0
    foreign = (~valid).nonzero(as_tuple=True)
    for kv in (k, v):
        kv[foreign[0], :, foreign[1]] = 0.0
    grouped = (
        q[rows]
        .view(count, queries, kv_heads, share, head_dim)
        .transpose(1, 2)
        .flatten(2, 3)
        .float()
    )
    seen = seen.repeat_interleave(share, dim=1).unsqueeze(1)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    if sinks is not None:
        k, v, mask = with_sinks(k, v, mask, sinks)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    out = (
        out.view(count, kv_heads, queries, share, head_dim)
        .transpose(1, 2)
        .reshape(count, queries, heads, head_dim)
    )
    o[rows[real]] = out[real].to(o.dtype)


def with_sinks(k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds one key of zeros, whose score is the sink's logit, with a value of zeros.

    k, v [S, kv_heads, N, head_dim]; mask [S, 1, M * share, N], added to the scores; sinks [heads].
    """
    count, kv_heads = k.shape[:2]
    share = len(sinks) // kv_heads
    queries = mask.shape[2] // share
    of_row = sinks.float().view(kv_heads, 1, share).expand(-1, queries, -1).flatten(1)
    of_sink = of_row.expand(count, -1, -1).unsqueeze(3)
    mask = torch.cat((mask.expand(-1, kv_heads, -1, -1), of_sink), dim=3)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask


def _read(pool: Tensor, layer: int, i: int, slot: Tensor, head: Tensor) -> Tensor:
    """Returns keys (i = 0) or values (1) of whole chunks, [..., chunk_tokens, head_dim] float32.
    `slot` and `head` broadcast."""
    if pool.dtype == fp8_pool.DTYPE:
        return fp8_pool.read(pool, layer, i, slot, head)
    return pool[:, layer, i][slot, head].float()
