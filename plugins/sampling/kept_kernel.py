"""Finds the least likely token that a row's filters keep, without ordering the row.

The mass above a logit falls as the logit grows, so the lowest logit that is kept is searched for:
each pass over the row sums the mass above WAYS logits between the bounds, and leaves an eighth of
the distance between them. Logits are compared as integers of the same order, so eleven passes end
the search.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WAYS = 8  # logits that a pass tries
BLOCK = 512  # logits of a row that are read at once
WARPS = 8


def lowest_kept(
    logits: Tensor, weights: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor
) -> Tensor:
    """Returns the lowest logit that stays in each row, [D, 1] float32, as `filters.lowest_kept`
    does, but for the rounding of sums.

    logits [D, vocab] float32, weights [D, vocab] float64, the likeliest token's 1; both contiguous.
    The others as in `sampler.draw_filtered`.
    """
    rows, vocab = logits.shape
    lowest = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    _search[(rows,)](
        logits,
        weights,
        top_ks,
        top_ps,
        min_ps,
        lowest,
        vocab,
        WAYS=WAYS,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return lowest


@triton.jit
def _ordered(logits):
    """Integers in the order of float32 logits, [.] int64."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _above(logits, weights, min_p, keys, vocab, WAYS: tl.constexpr, BLOCK: tl.constexpr):
    """Mass and number of the tokens with greater keys than each of `keys` [WAYS]. Tokens that are
    less likely than `min_p` have no mass."""
    mass = tl.zeros((WAYS, BLOCK), tl.float64)
    number = tl.zeros((WAYS, BLOCK), tl.int32)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < vocab
        key = _ordered(tl.load(logits + at, mask=inside, other=float("-inf")))
        weight = tl.load(weights + at, mask=inside, other=0.0)
        weight = tl.where(weight >= min_p, weight, 0.0)
        above = key[None, :] > keys[:, None]
        mass += tl.where(above, weight[None, :], 0.0)
        number += above.to(tl.int32)
    return tl.sum(mass, axis=1), tl.sum(number, axis=1)


@triton.jit
def _between(low, high, WAYS: tl.constexpr):
    """WAYS keys evenly above `low`, the last one `high`. Some are equal if there are fewer."""
    return low + tl.maximum((high - low) * (tl.arange(0, WAYS) + 1) // WAYS, 1)


@triton.jit
def _search(
    logits,
    weights,
    top_ks,
    top_ps,
    min_ps,
    lowest,
    vocab,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    weights += row * vocab
    top_k = tl.load(top_ks + row)
    min_p = tl.load(min_ps + row)

    least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int64)
    most = tl.full((BLOCK,), -0x80000000, tl.int64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < vocab
        key = _ordered(tl.load(logits + at, mask=inside, other=float("-inf")))
        least = tl.minimum(least, tl.where(inside, key, least))
        most = tl.maximum(most, tl.where(inside, key, most))
    bottom = tl.min(least, axis=0) - 1  # all tokens are above it
    top = tl.max(most, axis=0)  # no token is

    # the key of the top_k-th token: fewer than top_k are above it, and it is the lowest such key
    low = bottom
    high = top
    if top_k > 0:
        while high - low > 1:
            keys = _between(low, high, WAYS)
            _, number = _above(logits, weights, min_p, keys, vocab, WAYS, BLOCK)
            fewer = number < top_k
            low = tl.max(tl.where(fewer, low, keys), axis=0)
            high = tl.min(tl.where(fewer, keys, high), axis=0)
    else:
        high = low + 1

    # Of the tokens that are as likely as the last of these, only so many count for the sum as are
    # within top_k.
    keys = high - 1 + tl.arange(0, WAYS)
    mass, number = _above(logits, weights, min_p, keys, vocab, WAYS, BLOCK)
    which = tl.arange(0, WAYS)
    total = tl.sum(tl.where(which == 0, mass, 0.0), axis=0)
    if top_k > 0:
        over = tl.sum(tl.where(which == 1, mass, 0.0), axis=0)
        before = tl.sum(tl.where(which == 1, number, 0), axis=0)
        equals = tl.sum(tl.where(which == 0, number, 0), axis=0) - before
        total = over + (total - over) / equals * tl.minimum(equals, top_k - before)
    target = tl.load(top_ps + row) * total

    # the lowest key with less than the target above it
    low = high - 1
    high = top
    while high - low > 1:
        keys = _between(low, high, WAYS)
        mass, _ = _above(logits, weights, min_p, keys, vocab, WAYS, BLOCK)
        less = mass < target
        low = tl.max(tl.where(less, low, keys), axis=0)
        high = tl.min(tl.where(less, keys, high), axis=0)
    bits = high.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tl.store(lowest + row, bits.to(tl.float32, bitcast=True))
