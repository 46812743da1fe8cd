"""The order of experts' work, and the sum of their results, on a GPU in Triton: one launch each.

Their twins in plain PyTorch are `experts.by_expert` and `experts.weighted_sum`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024  # that the one program of `by_expert` counts or places at once
WIDTH = 1024  # numbers of a row that a program adds at once


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`experts.by_expert` of a contiguous chosen; tokens and places int32, pairs of one expert in any order."""
    _check_contiguous(chosen)
    pairs = chosen.numel()
    tokens, places, ends, free = (
        torch.empty(size, dtype=torch.int32, device=chosen.device) for size in (pairs, pairs, experts, experts)
    )
    settings = dict(BINS=triton.next_power_of_2(experts), PAIRS=PAIRS, num_warps=8)
    _by_expert[(1,)](chosen, tokens, places, ends, free, pairs, experts, chosen.shape[1], **settings)
    return tokens, places.view(chosen.shape), ends


def weighted_sum(made: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """`experts.weighted_sum`; all are contiguous."""
    _check_contiguous(made, places, shares)
    (tokens, per_token), size = places.shape, made.shape[1]
    y = torch.empty((tokens, size), dtype=made.dtype, device=made.device)
    if tokens:
        grid = (tokens, triton.cdiv(size, WIDTH))
        _weighted_sum[grid](
            made, places, shares, y, size, PER_TOKEN=per_token, WIDTH=WIDTH, num_warps=4, enable_fp_fusion=False
        )
    return y


def _check_contiguous(*tensors: Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"tensors {[list(tensor.shape) for tensor in tensors]} must be contiguous")


@triton.jit(do_not_specialize=["pairs"])
def _by_expert(chosen, tokens, places, ends, free, pairs, experts, per_token, BINS: tl.constexpr, PAIRS: tl.constexpr):
    """One program: counts the pairs of each expert, then gives each pair its expert's next free place."""
    number = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=0).to(tl.int32)
        counts += tl.histogram(expert, BINS, mask=pair < pairs)
    end = tl.cumsum(counts, axis=0)
    tl.store(ends + number, end, mask=number < experts)
    tl.store(free + number, end - counts, mask=number < experts)
    tl.debug_barrier()  # all threads see `free`
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=0)
        place = tl.atomic_add(free + expert, 1, mask=pair < pairs, sem="relaxed")
        tl.store(places + pair, place, mask=pair < pairs)
        tl.store(tokens + place, pair // per_token, mask=pair < pairs)


@triton.jit
def _weighted_sum(made, places, shares, y, size, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr):
    """One program for WIDTH columns of a token."""
    token = tl.program_id(0).to(tl.int64)  # 64 bits for places in memory
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < size
    total = tl.zeros((WIDTH,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + i).to(tl.int64)
        share = tl.load(shares + token * PER_TOKEN + i)
        total += share * tl.load(made + place * size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * size + column, total.to(y.dtype.element_ty), mask=mask)
