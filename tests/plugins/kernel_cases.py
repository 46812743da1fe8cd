"""Shared by the kernel tests: their device, random batches over scattered chunks, dense attention
for comparison.

Kernels run on a GPU if there is one, else in Triton's interpreter, which must be enabled before
Triton is imported: `test_in_the_interpreter` runs the tests once more in a separate process.
"""

import os
import random

import pytest
import torch

from pensieve.plugins.attention import fp8_pool
from pensieve.plugins.kv_forms.fp8_reference import scales, to_codes

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

needs_kernels = pytest.mark.skipif(
    not (CUDA or INTERPRETED), reason="runs in Triton's interpreter, in a process apart"
)


def random_batch(
    seed, heads, kv_heads, head_dim, dtype, lengths, chunk=32, layers=2, table="random"
):
    """q, segments, block table and pool for one segment or two a seat, over contexts of these
    lengths.

    Slots hold NaN wherever no token of a context is. table: slots in "random" or "reversed" order,
    or "shared": all seats open with the same chunks.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dice = random.Random(seed)
    blocks = -(-max(lengths) // chunk)
    slots = len(lengths) * blocks
    order = torch.randperm(slots, generator=generator, device=DEVICE)
    if table == "reversed":
        order = torch.arange(slots - 1, -1, -1, device=DEVICE)
    block_table = order.view(len(lengths), blocks).int()
    if table == "shared":
        block_table[:, : blocks // 2 + 1] = block_table[0, : blocks // 2 + 1].clone()
    pool = torch.full(
        (slots, layers, 2, kv_heads, chunk, head_dim), float("nan"), dtype=dtype, device=DEVICE
    )
    segments = []
    row = 0
    for seat, length in enumerate(lengths):
        filled = block_table[seat].long().repeat_interleave(chunk)[:length]
        offsets = torch.arange(length, device=DEVICE) % chunk
        values = torch.randn(
            length, layers, 2, kv_heads, head_dim, generator=generator, device=DEVICE
        )
        pool[filled, :, :, :, offsets] = values.to(dtype)
        cut = dice.randint(1, length)
        ends = [cut, length] if dice.random() < 0.5 and cut < length else [length]
        for before, end in zip([0, *ends], ends, strict=False):
            q_len = dice.choice([1, 1, end - before, dice.randint(1, end - before)])
            kv_start = dice.choice([0, 0, dice.randint(0, end - q_len)])
            segments.append((row, q_len, kv_start, end, seat))
            row += q_len + dice.choice([0, 0, 2])  # rows of no segment: padding
    dice.shuffle(segments)
    q = torch.randn(row + 3, heads, head_dim, generator=generator, device=DEVICE).to(dtype)
    return q, torch.tensor(segments, dtype=torch.int32, device=DEVICE), block_table, pool


def in_eight_bits(pool):
    """(the numbers in a pool of eight bits, the numbers decoded in float64). Tokens that are NaN
    get codes of NaN and infinite scales."""
    codes, exponents = to_codes(pool.float(), (-1,))
    codes = codes.view(torch.uint8)
    exponents = exponents.squeeze(-1)
    exponents[pool.isnan().any(-1)] = 255
    packed = torch.empty(
        *pool.shape[:-1], pool.shape[-1] + 1, dtype=fp8_pool.DTYPE, device=pool.device
    )
    for layer in range(pool.shape[1]):
        for part, values in zip(fp8_pool.parts(packed, layer), (codes, exponents), strict=True):
            part.copy_(values[:, layer])
    return packed, codes.view(torch.float8_e4m3fn).double() * scales(exponents).unsqueeze(-1)


def dense_attention(q, segments, block_table, pool, layer, scale, dtype, window=0, sinks=None):
    """The plain formula, segment by segment, every operation in `dtype`; rows of no segment are
    zero."""
    o = torch.zeros(q.shape, dtype=dtype, device=q.device)
    kv_heads, chunk = pool.shape[3:5]
    share = q.shape[1] // kv_heads
    for q_start, q_len, kv_start, kv_len, seat in segments.tolist():
        coordinates = torch.arange(kv_start, kv_len, device=q.device)
        slots = block_table[seat].long()[coordinates // chunk]
        # [keys, kv_heads, D]
        k, v = (pool[slots, layer, i, :, coordinates % chunk].to(dtype) for i in (0, 1))
        k, v = (x.repeat_interleave(share, dim=1).transpose(0, 1) for x in (k, v))
        queries = q[q_start : q_start + q_len].to(dtype).transpose(0, 1)
        own = torch.arange(kv_len - q_len, kv_len, device=q.device)
        score = (queries @ k.transpose(1, 2)) * scale
        score = score.masked_fill(coordinates > own.unsqueeze(1), float("-inf"))
        if window:
            score = score.masked_fill(coordinates <= own.unsqueeze(1) - window, float("-inf"))
        if sinks is not None:
            score = torch.cat((score, sinks.to(dtype).view(-1, 1, 1).expand(-1, q_len, 1)), dim=-1)
        weights = score.softmax(-1)[..., : len(coordinates)]
        o[q_start : q_start + q_len] = (weights @ v).transpose(0, 1)
    return o


def error(o, reference):
    """Relative error ‖o - reference‖ / ‖reference‖, both float64 at least in the difference."""
    return ((o.double() - reference).norm() / reference.norm()).item()
