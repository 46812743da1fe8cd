"""The GPU's operations on states against their twin in float64, their bits, and their slots."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from pensieve.plugins.state import reference
from pensieve.plugins.state.pool import StatePool, StateShape

from ..kernel_cases import CUDA, DEVICE, error, needs_kernels
from .state_cases import (
    NOT_KEPT,
    SHAPE,
    SLOTS,
    SPANS,
    ZERO,
    Tokens,
    batch_of_spans,
    new_pool,
)

pytest.importorskip("triton")
from pensieve.plugins.state import kernel
from pensieve.plugins.state.work_list import FEW, PIECE, StateWork

pytestmark = needs_kernels

HALF = torch.bfloat16 if CUDA else torch.float16  # bfloat16 is wrong in the interpreter
DTYPES = (torch.float32, HALF)
KERNEL_SPANS = {
    **SPANS,
    "tails behind pieces": [(0, 65, ZERO, 0), (65, 65 + 80, 3, 3), (145, 145 + 81, 4, 5)],
    "a tail that is not kept": [(0, 70, 2, NOT_KEPT), (70, 86, ZERO, NOT_KEPT)],
    "a long tail": [(0, 17, 2, 2), (17, 17 + 127, ZERO, 3)],
}
WIDE = StateShape(2, 4, 128, 128, 3, 2 * 2 * 128 + 4 * 128, torch.float32)


class KernelRun:
    """The results of one step by the kernels, and the pool behind it."""

    def __init__(self, tokens: Tokens, spans, pool: StatePool):
        where = batch_of_spans(spans, DEVICE)
        self.columns = pool.columns[1].clone()
        self.matrices = pool.matrices[1].clone()
        longest = max((end - start for start, end, *_ in spans), default=0)
        work = StateWork(len(tokens.x), max(len(spans), 1), DEVICE)
        work.build(where[0], where[2], 1 if longest <= 1 else None)
        inputs = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta
        self.conv = kernel.causal_conv(tokens.x, tokens.weight, *where, self.columns, work)
        self.delta = kernel.gated_delta(*inputs, *where, self.matrices, work)


class TwinRun:
    """The results of the twin in float64."""

    def __init__(self, tokens: Tokens, spans, pool: StatePool):
        where = batch_of_spans(spans, DEVICE)
        self.columns = pool.columns[1].clone()
        self.matrices = pool.matrices[1].double()
        inputs = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta
        self.conv = reference.causal_conv(tokens.x, tokens.weight, *where, self.columns)
        self.delta = reference.gated_delta(*inputs, *where, self.matrices)


def tokens_of(spans, dtype=torch.float32, shape=SHAPE, key_heads=3) -> Tokens:
    count = max((end for _, end, *_ in spans), default=3)
    return Tokens(count, dtype, shape, key_heads, DEVICE)


def compare(spans, dtype, shape=SHAPE, key_heads=3) -> None:
    tokens = tokens_of(spans, dtype, shape, key_heads)
    pool = new_pool(dtype, shape, DEVICE)
    ours, twin = (run(tokens, spans, pool) for run in (KernelRun, TwinRun))
    assert ours.conv.dtype == ours.delta.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(ours.conv, twin.conv, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.columns, twin.columns)
    within = 1e-5 if dtype == torch.float32 else 1e-2
    if spans:
        assert error(ours.delta, twin.delta.double()) <= within
        assert error(ours.matrices, twin.matrices) <= within
    untouched = sorted(set(range(SLOTS)) - {behind for *_, behind in spans})
    assert torch.equal(ours.matrices[untouched], pool.matrices[1][untouched])
    covered = torch.zeros(len(tokens.x), dtype=torch.bool)
    for start, end, *_ in spans:
        covered[start:end] = True
    assert not ours.conv[~covered].any() and not ours.delta[~covered].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KERNEL_SPANS)
def test_results_and_states_equal_those_of_the_twin(name, dtype):
    compare(KERNEL_SPANS[name], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_128(dtype):
    compare([(0, 1, 2, 2), (1, 1 + 144, ZERO, 3), (145, 147, 4, 5)], dtype, WIDE, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_in_parts_of_wider_rows(dtype):
    """As the model's projections leave them."""
    spans = [(0, 100, ZERO, 4), (100, 101, 3, 3)]
    dense, parts = tokens_of(spans, dtype), tokens_of(spans, dtype)
    wide = torch.cat((dense.x, dense.x), dim=1)
    parts.x = wide[:, : SHAPE.channels]
    mixed = torch.cat([part.flatten(1) for part in (dense.q, dense.k, dense.v)], dim=1)
    sizes = (3 * SHAPE.key_dim, 3 * SHAPE.key_dim, SHAPE.value_heads * SHAPE.value_dim)
    parts.q, parts.k, parts.v = (
        part.unflatten(1, (-1, dim))
        for part, dim in zip(
            mixed.split(sizes, dim=1),
            (SHAPE.key_dim, SHAPE.key_dim, SHAPE.value_dim),
            strict=True,
        )
    )
    one, other = (KernelRun(x, spans, new_pool(dtype, SHAPE, DEVICE)) for x in (dense, parts))
    within = 1e-6 if dtype == torch.float32 else 1e-2  # compiled for other strides
    assert error(other.conv, one.conv.double()) <= within
    assert error(other.delta, one.delta.double()) <= within


def one_after_the_other(tokens: Tokens, spans, dtype) -> tuple[list, StatePool]:
    """Each span in a step of its own, over one pool: the results, and the pool."""
    pool = new_pool(dtype, SHAPE, DEVICE)
    results = []
    for start, end, before, behind in spans:
        step = KernelRun(part_of(tokens, start, end), [(0, end - start, before, behind)], pool)
        pool.columns[1].copy_(step.columns)
        pool.matrices[1].copy_(step.matrices)
        results.append((step.conv, step.delta))
    return results, pool


def part_of(tokens: Tokens, start: int, end: int) -> Tokens:
    part = Tokens(end - start, tokens.x.dtype, SHAPE, 3, DEVICE)
    part.weight = tokens.weight
    for name in ("x", "q", "k", "v", "decay", "beta"):
        setattr(part, name, getattr(tokens, name)[start:end].contiguous())
    return part


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [(6,), (6, 3, 8)], ids=["one slot", "changing slots"])
@pytest.mark.parametrize("length", [129, 145, 230])
def test_cuts_at_multiples_of_a_piece_keep_all_bits(length, slots, dtype):
    tokens = Tokens(length, dtype, SHAPE, 3, DEVICE)
    whole = KernelRun(tokens, [(0, length, 6, 6)], new_pool(dtype, SHAPE, DEVICE))
    multiples = range(PIECE, length, PIECE)
    for cuts in [*([cut] for cut in multiples), list(multiples)]:
        spans = []
        before = 6
        for number, (start, end) in enumerate(pairwise([0, *cuts, length])):
            behind = slots[(number + 1) % len(slots)]
            spans.append((start, end, before, behind))
            before = behind
        results, pool = one_after_the_other(tokens, spans, dtype)
        assert torch.equal(torch.cat([conv for conv, _ in results]), whole.conv)
        assert torch.equal(torch.cat([delta for _, delta in results]), whole.delta)
        assert torch.equal(pool.matrices[1][before], whole.matrices[6])
        assert torch.equal(pool.columns[1][before], whole.columns[6])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_rows_of_a_step_change_no_bits(dtype):
    spans = KERNEL_SPANS["a mixed step"]
    tokens = tokens_of(spans, dtype)
    together = KernelRun(tokens, spans, new_pool(dtype, SHAPE, DEVICE))
    for start, end, before, behind in spans:
        alone = KernelRun(tokens, [(start, end, before, behind)], new_pool(dtype, SHAPE, DEVICE))
        assert torch.equal(alone.conv[start:end], together.conv[start:end])
        assert torch.equal(alone.delta[start:end], together.delta[start:end])
        if behind >= 0:
            assert torch.equal(alone.matrices[behind], together.matrices[behind])
            assert torch.equal(alone.columns[behind], together.columns[behind])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_that_repeat_stay_exact(dtype):
    """The matrix to invert is then full."""
    spans = [(0, 128, 6, 6)]
    tokens = tokens_of(spans, dtype)
    tokens.k[:] = tokens.k[:1].clone()
    tokens.decay.fill_(-1e-3)
    tokens.beta.fill_(0.99)
    ours, twin = (
        run(tokens, spans, new_pool(dtype, SHAPE, DEVICE)) for run in (KernelRun, TwinRun)
    )
    within = 1e-5 if dtype == torch.float32 else 2e-2
    assert error(ours.delta, twin.delta.double()) <= within
    assert error(ours.matrices, twin.matrices) <= within


@pytest.mark.parametrize("length", [1e4, 1.0, 1e-2, 1e-4])
def test_keys_of_any_length_of_float16(length):
    """Keys divided by their lengths are neither too small nor too large for it, and nor is a
    change of the state."""
    spans = [(0, 130, 6, 6), (130, 131, 3, 3)]
    tokens = tokens_of(spans, torch.float16)
    tokens.q *= length
    tokens.k *= length
    tokens.v *= 100.0
    ours, twin = (
        run(tokens, spans, new_pool(torch.float16, SHAPE, DEVICE)) for run in (KernelRun, TwinRun)
    )
    assert error(ours.delta, twin.delta.double()) <= 1e-2
    assert error(ours.matrices, twin.matrices) <= 2e-3


def test_strong_decays_stay_finite():
    spans = [(0, 100, 6, 6)]
    tokens = tokens_of(spans)
    tokens.decay.fill_(-200.0)
    ours, twin = (run(tokens, spans, new_pool(device=DEVICE)) for run in (KernelRun, TwinRun))
    torch.testing.assert_close(ours.delta, twin.delta, atol=2e-5, rtol=2e-5)


def entries_of(listed, count):
    return [tuple(entry) for entry in listed[:count].tolist()]


@pytest.mark.parametrize("name", KERNEL_SPANS)
def test_work_has_every_token_once(name):
    spans = KERNEL_SPANS[name]
    work = StateWork(300, max(len(spans), 1), DEVICE)
    segments, _, state_out = batch_of_spans(spans, DEVICE)
    work.build(segments, state_out)
    tiles, pieces, longs, tails = work.counts.tolist()
    expected: dict[str, list] = {"tiles": [], "pieces": [], "longs": [], "tails": []}
    for number, (start, end, _, behind) in enumerate(spans):
        firsts = list(range(0, end - start, PIECE))
        expected["tiles"] += [(number, first) for first in firsts]
        rest = (end - start) % PIECE
        if 0 < rest <= FEW and (behind >= 0 or len(firsts) == 1):
            firsts.pop()
            expected["tails"].append(number)
        expected["pieces"] += [(number, first) for first in firsts]
        if firsts:
            expected["longs"].append((number, len(firsts)))
    assert entries_of(work.tiles, tiles) == expected["tiles"]
    assert entries_of(work.pieces, pieces) == expected["pieces"]
    assert entries_of(work.longs, longs) == expected["longs"]
    assert work.tails[:tails].tolist() == expected["tails"]


def test_more_segments_than_the_list_holds_are_refused():
    segments, _, state_out = batch_of_spans([(0, 1, 0, 0), (1, 2, 1, 1)], DEVICE)
    with pytest.raises(ValueError, match="2 segments, but the list was made for 1"):
        StateWork(2, 1, DEVICE).build(segments, state_out)
