"""Does a compiled engine compute what the reference does? Both run random batches, in the engine's precision and in
float32, and the engine may be wrong by twice the reference's own error.

The batches are what serving brings: prompts in pieces, new turns, generation, a piece recomputed in the middle of a
context beside its end, writes that are suppressed, one token alone, and steps that sample nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..plugins.torch_ops import register_pool, release_pool
from ..scheduler.types import SettingError
from .config import DecoderConfig
from .manifest import Parity
from .model import Decoder

Forward = Callable[..., Tensor]

CHUNK, SEATS, STEPS = 16, 5, 12
LONGEST_PIECE = 70  # tokens of a prompt that a step computes
MOST_CONTEXT = 300

LEAST_BOUND = 1e-4
"""Of the relative error: below are differences in the order of float32 sums, where the reference has no error at all.
A wrong engine is off by a hundred times as much."""


class Batch(NamedTuple):
    """Arguments of `Decoder.forward` but the pool."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    segments: Tensor
    block_table: Tensor
    sample_rows: Tensor


class Piece(NamedTuple):
    """Positions [start, end) of a seat; those below `write_from` are not written."""

    seat: int
    start: int
    end: int
    write_from: int


def check_parity(engine: Forward, config: DecoderConfig, weights: Mapping[str, Tensor]) -> Parity:
    """weights: the engine's own, on its device. SettingError('--backend', ...) if it is too far off.

    Takes as much memory as the weights in float32, unless they are.
    """
    dtype, device = weights["embed.weight"].dtype, weights["embed.weight"].device.type
    batches = random_batches(config, device)
    wide_weights = {name: tensor.float() for name, tensor in weights.items()}
    truth = _run(Decoder.from_weights(config, wide_weights), batches, config, torch.float32)
    del wide_weights
    eager = truth
    if dtype != torch.float32:
        eager = _run(Decoder.from_weights(config, weights), batches, config, dtype)
    ours = _run(engine, batches, config, dtype)
    (logits, kv), (logits_eager, kv_eager) = (
        [_relative_error(*pair) for pair in zip(outcome, truth, strict=True)] for outcome in (ours, eager)
    )
    parity = Parity(logits, logits_eager, kv, kv_eager)
    for what, error, own in (("logits", logits, logits_eager), ("KV", kv, kv_eager)):
        bound = max(2 * own, LEAST_BOUND)
        if not error <= bound:  # not a number is too far off as well
            raise SettingError(
                "--backend",
                f"the compiled engine's {what} are off by {error:.1e}, and {bound:.1e} is allowed (the reference in "
                f"{str(dtype).removeprefix('torch.')}: {own:.1e}); use --backend reference",
            )
    return parity


def random_batches(config: DecoderConfig, device: str, seed: int = 0) -> list[Batch]:
    """The same for the same seed."""
    dice = random.Random(seed)
    longest = min(MOST_CONTEXT, config.max_positions)
    blocks = -(-longest // CHUNK)
    slots = dice.sample(range(SEATS * blocks), SEATS * blocks)
    table = torch.tensor(slots, dtype=torch.int32).view(SEATS, blocks)
    lengths = [0] * SEATS
    steps = [_step(dice, lengths, longest) for _ in range(STEPS)]
    steps.append([Piece(0, lengths[0] - 1, lengths[0], lengths[0])])  # one token alone, of a full hit
    tokens = torch.Generator().manual_seed(seed)
    return [_batch(pieces, table, config, tokens, device, sampled=i % 5 != 4) for i, pieces in enumerate(steps)]


def _step(dice: random.Random, lengths: list[int], longest: int) -> list[Piece]:
    """What some seats compute next; `lengths`, the tokens that each has, moves on."""
    pieces = []
    for seat in dice.sample(range(SEATS), dice.randint(2, SEATS)):
        length = lengths[seat]
        if length >= 3 * CHUNK and dice.random() < 0.5:
            dropped = dice.randrange(length // CHUNK - 1) * CHUNK
            pieces.append(Piece(seat, dropped, dropped + CHUNK, dropped))
        end = min(length + dice.choice((1, 1, dice.randint(2, LONGEST_PIECE))), longest)
        start = min(length, end - 1)  # of a full hit the last token is computed again
        pieces.append(Piece(seat, start, end, write_from=length))
        lengths[seat] = end
    return pieces


def _batch(
    pieces: list[Piece], table: Tensor, config: DecoderConfig, tokens: torch.Generator, device: str, sampled: bool
) -> Batch:
    positions, slots, segments, row = [], [], [], 0
    for seat, start, end, write_from in pieces:
        own = torch.arange(start, end)
        places = table[seat, own // CHUNK] * CHUNK + own % CHUNK
        positions.append(own)
        slots.append(places.where(own >= write_from, -1))
        segments.append((row, end - start, 0, end, seat))
        row += end - start
    ids = torch.randint(config.vocab_size, (row,), generator=tokens)
    rows = torch.arange(row if sampled else 0)
    parts = (ids, torch.cat(positions), torch.cat(slots), torch.tensor(segments), table, rows)
    return Batch(*(part.int().to(device) for part in parts))


@torch.inference_mode()
def _run(forward: Forward, batches: list[Batch], config: DecoderConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All logits, and the KV that is left; both float32."""
    table = batches[0].block_table
    shape = (table.numel(), config.layers, 2, config.kv_heads, CHUNK, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=table.device)
    with registered(pool, config, batches) as (handle, plan):
        logits = []
        for batch in batches:
            plan(batch.segments)
            logits.append(forward(*batch, handle).float())
    return torch.cat(logits), pool.float()


@contextmanager
def registered(
    pool: Tensor, config: DecoderConfig, batches: list[Batch]
) -> Iterator[tuple[int, Callable[[Tensor], None]]]:
    """(The pool's handle, what is to be called with a batch's segments before the batch is run)."""
    work = None
    if pool.is_cuda:
        from ..plugins.attention_kernel import make_work_list  # Triton comes with CUDA only
        from ..plugins.work_list import Capacity

        most = [max(len(part) for part in parts) for parts in zip(*batches, strict=True)]
        capacity = Capacity(most[0], most[3], batches[0].block_table.shape[1] * CHUNK)
        work = make_work_list(capacity, config.heads, config.kv_heads, config.head_dim, pool.dtype)
    handle = register_pool(pool, work=work)
    try:
        yield handle, (work.build if work is not None else lambda segments: None)
    finally:
        release_pool(handle)


def _relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())
