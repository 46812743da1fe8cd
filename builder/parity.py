"""Checks that a compiled engine computes the reference's results. Both run random batches, in the
engine's precision and in float32; the engine's error may be twice the reference's own.

The batches resemble serving: prompts in pieces, new turns, generation, a piece recomputed in the
middle of a context and one at its end, suppressed writes, a single token, and steps without
samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from ..plugins.torch_ops import register_pool, release_pool
from ..scheduler.types import SettingError
from .checkpoints.config import DecoderConfig, Shard
from .checkpoints.hugging_face import weight_sources
from .forward_batch import NO_STATE, NOT_WRITTEN, Forward, ForwardBatch
from .manifest import Parity, Quantisation
from .model import Decoder
from .quantised import dequantised

CHUNK, SEATS, STEPS = 16, 5, 12
LONGEST_PIECE = 70  # most tokens of a prompt in one step
MOST_CONTEXT = 300

LEAST_BOUND = 1e-4
"""Least bound of the relative error. Differences in the order of float32 sums are below it, where
the reference has no error at all. A wrong engine's error is a hundred times as large."""

FP8_BOUND = 0.25
"""Bound of the relative error of rounding a model's weights to FP8, and also its activations on
GPUs with FP8 products, against the model itself in float32. Measured with weights alone: 0.04 for
the demo model, 0.12 for random ones of 32 layers; with activations: 0.16 for the latter."""


class SeatSpan(NamedTuple):
    """Positions [start, end) of a seat; those below `write_from` are not written. The slots of its
    states are as in `PackedBatch`."""

    seat: int
    start: int
    end: int
    write_from: int = 0
    state_in: int = NO_STATE
    state_out: int = NO_STATE


def check_parity(engine: Forward, config: DecoderConfig, weights: Mapping[str, Tensor]) -> Parity:
    """Does what `check_ranks` does, for an engine of one rank."""
    return check_ranks([engine], config, [weights])


def check_ranks(
    engines: Sequence[Forward], config: DecoderConfig, weights: Sequence[Mapping[str, Tensor]]
) -> Parity:
    """Checks all ranks, which run on threads of this process, against one undivided rank.

    weights: each rank's own, on its device. SettingError('--backend', ...) if a rank's error is too
    large. Needs as much memory as all weights in float32, unless they are already in float32.
    """
    embedding = weights[0]["embed.weight"]
    batches = random_batches(config, embedding.device.type)
    whole = Decoder.from_weights(config, whole_weights(config, weights))
    (truth,) = _run_all([whole], batches, config, torch.float32)
    del whole
    eager = [truth]
    if embedding.dtype != torch.float32 or len(weights) > 1:
        decoders = [Decoder.from_weights(config, own, len(weights)) for own in weights]
        eager = _run_all(decoders, batches, config, embedding.dtype)
    ours = _run_all(engines, batches, config, embedding.dtype)
    (logits, kv), (logits_eager, kv_eager) = (
        _worst_errors(outcomes, truth, config) for outcomes in (ours, eager)
    )
    parity = Parity(logits, logits_eager, kv, kv_eager)
    for what, error, own in (("logits", logits, logits_eager), ("KV", kv, kv_eager)):
        bound = max(2 * own, LEAST_BOUND)
        if not error <= bound:  # also true for NaN
            raise SettingError(
                "--backend",
                f"the compiled engine's {what} are off by {error:.1e}, and {bound:.1e} is allowed "
                "(the reference in "
                f"{str(embedding.dtype).removeprefix('torch.')}: {own:.1e}); use --backend "
                "reference",
            )
    return parity


def check_quantisation(
    config: DecoderConfig, original: Mapping[str, Tensor], weights: Sequence[Mapping[str, Tensor]]
) -> Quantisation:
    """Measures the error of rounding to FP8.

    original: the undivided, unquantised weights; weights: each rank's own, on its device.
    SettingError('--weights', ...) if the error of logits or KV exceeds `FP8_BOUND`.
    """
    embedding = weights[0]["embed.weight"]
    batches = random_batches(config, embedding.device.type)
    wide = {name: tensor.to(embedding.device, torch.float32) for name, tensor in original.items()}
    (truth,) = _run_all([Decoder.from_weights(config, wide)], batches, config, torch.float32)
    del wide
    decoders = [Decoder.from_weights(config, own, len(weights)) for own in weights]
    errors = _worst_errors(_run_all(decoders, batches, config, embedding.dtype), truth, config)
    for what, error in zip(("logits", "KV"), errors, strict=True):
        if not error <= FP8_BOUND:
            raise SettingError(
                "--weights",
                f"in fp8 this model's {what} are off by {error:.1e}, and {FP8_BOUND} is allowed; "
                "use same",
            )
    return Quantisation(*errors)


def whole_weights(
    config: DecoderConfig, weights: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The undivided weights in float32, joined from those of all ranks; quantised weights are
    converted."""
    ranks = len(weights)
    if any(name.endswith((".scale", ".scales_zeros")) for name in weights[0]):
        weights = [dequantised(own) for own in weights]
    if ranks == 1:
        return {name: tensor.float() for name, tensor in weights[0].items()}
    sources = [weight_sources(Shard(config, ranks, rank)) for rank in range(ranks)]
    whole = {}
    for name, tensor in weights[0].items():
        joined = [
            tensor.new_zeros(source.shape, dtype=torch.float32) for source in sources[0][name]
        ]
        for own, of_rank in zip(weights, sources, strict=True):
            pieces = own[name].split([source.cut_shape[0] for source in of_rank[name]])
            for target, source, piece in zip(joined, of_rank[name], pieces, strict=True):
                # Beyond the end of the whole, a piece contains only zeros.
                place = target[
                    tuple(slice(part.start, part.start + part.size) for part in source.parts)
                ]
                place.copy_(piece[tuple(slice(size) for size in place.shape)])
        whole[name] = torch.cat(joined)
    return whole


def random_batches(config: DecoderConfig, device: str, seed: int = 0) -> list[ForwardBatch]:
    """Random batches, equal for equal seeds."""
    dice = random.Random(seed)
    longest = min(MOST_CONTEXT, config.max_positions)
    blocks = -(-longest // CHUNK)
    slots = dice.sample(range(SEATS * blocks), SEATS * blocks)
    table = torch.tensor(slots, dtype=torch.int32).view(SEATS, blocks)
    lengths = [0] * SEATS
    steps = [_step(dice, lengths, longest) for _ in range(STEPS)]
    # one token alone, of a full hit
    steps.append([SeatSpan(0, lengths[0] - 1, lengths[0], lengths[0])])
    tokens = torch.Generator().manual_seed(seed)
    batches = []
    for step, pieces in enumerate(steps):
        count = sum(piece.end - piece.start for piece in pieces)
        token_ids = torch.randint(config.vocab_size, (count,), generator=tokens)
        rows = torch.arange(0 if step % 5 == 4 else count)
        batches.append(
            batch_of(pieces, token_ids, table, rows, CHUNK).map(lambda part: part.to(device))
        )
    return batches


def _step(dice: random.Random, lengths: list[int], longest: int) -> list[SeatSpan]:
    """The next pieces of some seats; advances `lengths`, the tokens of each seat."""
    pieces = []
    for seat in dice.sample(range(SEATS), dice.randint(2, SEATS)):
        length = lengths[seat]
        if length >= 3 * CHUNK and dice.random() < 0.5:
            dropped = dice.randrange(length // CHUNK - 1) * CHUNK
            pieces.append(SeatSpan(seat, dropped, dropped + CHUNK, dropped))
        end = min(length + dice.choice((1, 1, dice.randint(2, LONGEST_PIECE))), longest)
        start = min(length, end - 1)  # of a full hit the last token is recomputed
        pieces.append(SeatSpan(seat, start, end, write_from=length))
        lengths[seat] = end
    return pieces


def batch_of(
    pieces: Sequence[SeatSpan],
    token_ids: Tensor,
    block_table: Tensor,
    sample_rows: Tensor,
    chunk_tokens: int,
) -> ForwardBatch:
    """The pieces, one after the other, as a batch on the CPU. The other arguments may have any type
    of integers."""
    positions = []
    slots = []
    segments = []
    first = 0
    for seat, start, end, write_from, _, _ in pieces:
        own = torch.arange(start, end)
        places = block_table[seat, own // chunk_tokens] * chunk_tokens + own % chunk_tokens
        positions.append(own)
        slots.append(places.where(own >= write_from, NOT_WRITTEN))
        segments.append((first, end - start, 0, end, seat))
        first += end - start
    return ForwardBatch(
        token_ids=token_ids,
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        segments=torch.tensor(segments),
        sample_rows=sample_rows,
        state_in=torch.tensor([piece.state_in for piece in pieces]),
        state_out=torch.tensor([piece.state_out for piece in pieces]),
        block_table=block_table,
    ).map(lambda part: part.int())


class Outcome(NamedTuple):
    """One rank's results, float32: all logits, and the final KV of its pool."""

    logits: Tensor
    kv: Tensor


def _run_all(
    forwards: Sequence[Forward],
    batches: list[ForwardBatch],
    config: DecoderConfig,
    dtype: torch.dtype,
) -> list[Outcome]:
    """The results of each rank; all run side by side."""
    ranks = len(forwards)
    if ranks == 1:
        return [_run(forwards[0], batches, Shard(config), dtype)]
    group = ThreadRanks(ranks)
    register_group(TENSOR_PARALLEL, group)
    try:
        return group.run(
            lambda rank: _run(forwards[rank], batches, Shard(config, ranks, rank), dtype)
        )
    finally:
        release_group(TENSOR_PARALLEL)


@torch.inference_mode()
def _run(
    forward: Forward, batches: list[ForwardBatch], shard: Shard, dtype: torch.dtype
) -> Outcome:
    table = batches[0].block_table
    config = shard.config
    shape = (table.numel(), config.kv_layers, 2, shard.kv_heads, CHUNK, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=table.device)
    with registered(pool, shard, batches) as (handle, plan):
        logits = []
        for batch in batches:
            plan(batch.segments)
            logits.append(forward(batch, handle).float())
    return Outcome(torch.cat(logits), pool.float())


@contextmanager
def registered(
    pool: Tensor, shard: Shard, batches: list[ForwardBatch]
) -> Iterator[tuple[int, Callable[[Tensor], None]]]:
    """Yields (the pool's handle, a function to call with a batch's segments before the batch
    runs)."""
    work = None
    if pool.is_cuda:
        # imported here because only CUDA installations have Triton
        from ..plugins.attention.kernel import make_work_list
        from ..plugins.attention.work_list import Capacity

        capacity = Capacity(
            max(len(batch.token_ids) for batch in batches),
            max(len(batch.segments) for batch in batches),
            batches[0].block_table.shape[1] * CHUNK,
        )
        work = make_work_list(
            capacity, shard.heads, shard.kv_heads, shard.config.head_dim, pool.dtype
        )
    handle = register_pool(pool, work=work)
    try:
        yield handle, (work.build if work is not None else lambda segments: None)
    finally:
        release_pool(handle)


def _worst_errors(
    outcomes: list[Outcome], truth: Outcome, config: DecoderConfig
) -> tuple[float, float]:
    """The largest errors of any rank's logits and KV."""
    errors = []
    for rank, (logits, kv) in enumerate(outcomes):
        shard = Shard(config, len(outcomes), rank)
        own_heads = truth.kv.narrow(3, shard.first_kv_head, shard.kv_heads)
        errors.append((_relative_error(logits, truth.logits), _relative_error(kv, own_heads)))
    # NaN counts as the largest
    logits_error, kv_error = torch.tensor(errors, dtype=torch.float64).amax(dim=0).tolist()
    return logits_error, kv_error


def _relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())
