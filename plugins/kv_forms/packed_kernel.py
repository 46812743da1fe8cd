"""Encodes chunks of bfloat16 KV into packed records and decodes them, exactly, on a GPU, in Triton.
Twins, and the format, in `packed_reference`.

Like the kernels of `fp8_kernel` they run beside steps: a fixed number of programs processes the
heads in strides. All arithmetic is on integers. A program processes the tokens of some heads, two
at a time: those whose codes share a byte. A thread has the same channels of all tokens, so threads
exchange data only for the ranks of a token's escapes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fp8_kernel import places
from .packed_reference import ESCAPE, ZERO, layout

PROGRAMS = 64
"""16 programs are as fast as a link of 55 GB/s; with more, for a shorter time, steps are delayed
less."""

TILE = 2048
"""Numbers of a token that a program processes at once, of whole heads; four for each thread."""

UNROLL = tl.constexpr(4)
"""Tokens of each half that are loaded at once where little is computed with them."""

_ZERO, _ESCAPE = tl.constexpr(ZERO), tl.constexpr(ESCAPE)


def encode(pool: Tensor, slots: Tensor, layers: range, records: Tensor) -> None:
    """Writes `layers` of the pool's chunks in `slots` [n] int32 to `records` [n, layers,
    layer_bytes] uint8.

    pool [slots, layers, 2, kv_heads, chunk_tokens, head_dim] bfloat16; both contiguous. Padding is
    not written.
    """
    _launch(_encode, pool, slots, layers, records)


def decode(records: Tensor, slots: Tensor, layers: range, pool: Tensor) -> None:
    """Writes records from `encode` to `layers` of the pool's chunks in `slots`, which are distinct.

    A record that is not exact produces arbitrary numbers, in its own chunk only.
    """
    _launch(_decode, pool, slots, layers, records)


def _launch(
    kernel: triton.JITFunction, pool: Tensor, slots: Tensor, layers: range, records: Tensor
) -> None:
    if pool.dtype != torch.bfloat16:
        raise ValueError(f"packed chunks are bfloat16, not {pool.dtype}")
    at = layout(tuple(pool.shape))
    heads = math.prod(pool.shape[2:4])
    tokens, channels = pool.shape[4:]
    expected = (len(slots), len(layers), at.length)
    if records.shape != expected or not (records.is_contiguous() and pool.is_contiguous()):
        raise ValueError(
            f"records must be contiguous and {list(expected)}, not {list(records.shape)}"
        )
    tasks = len(slots) * len(layers) * heads
    if not tasks:
        return
    columns = triton.next_power_of_2(channels)
    group = max(TILE // columns, 1)
    kernel[(min(triton.cdiv(tasks, group), PROGRAMS),)](
        pool.view(torch.int16),
        slots,
        records,
        records.view(torch.int32),
        tasks,
        layers.start,
        len(layers),
        LAYERS=pool.shape[1],
        HEADS=heads,
        HALF=tokens // 2,
        CHANNELS=channels,
        LAYER_BYTES=at.length,
        CODES=at.codes,
        BASES=at.bases,
        ESCAPES=at.escapes // 4,
        COUNTS=at.counts // 4,
        ROOM=at.room,
        COLUMNS=columns,
        LIST=triton.next_power_of_2(at.room),
        GROUP=group,
        num_warps=min(group * columns // 128, 32),
    )


@triton.jit
def _code(bits, base):
    exponent = (bits >> 7) & 0xFF
    # Unsigned: numbers are read twice, and if a token is written in between, an exponent above the
    # base becomes an escape.
    distance = (base - exponent).to(tl.uint32)
    return tl.where(
        exponent == 0, _ZERO, tl.where(distance < _ZERO, distance, _ESCAPE).to(tl.int32)
    )


@triton.jit
def _low(bits):
    return (((bits >> 8) & 0x80) | (bits & 0x7F)).to(tl.uint8)


@triton.jit
def _bits(low, code, base):
    exponent = tl.where(code == _ZERO, 0, base - code)
    return (((low & 0x80) << 8) | (exponent << 7) | (low & 0x7F)).to(tl.int16)


@triton.jit
def _quarters(tile):
    """Returns four tiles, each with one number for each thread: for a whole tile stored to
    scattered places, the compiler would redistribute the numbers among the threads through shared
    memory."""
    even, odd = tl.split(tl.reshape(tile, [tile.numel // 4, 2, 2]))
    zero, two = tl.split(even)
    one, three = tl.split(odd)
    return zero, one, two, three


@triton.jit
def _list(lists, ranks, items, ROOM: tl.constexpr):
    """Stores items at their ranks in the lists, if the rank is below ROOM: words, all [heads,
    channels]."""
    list_0, list_1, list_2, list_3 = _quarters(lists)
    rank_0, rank_1, rank_2, rank_3 = _quarters(ranks)
    item_0, item_1, item_2, item_3 = _quarters(items)
    tl.store(list_0 + rank_0, item_0, mask=rank_0 < ROOM)
    tl.store(list_1 + rank_1, item_1, mask=rank_1 < ROOM)
    tl.store(list_2 + rank_2, item_2, mask=rank_2 < ROOM)
    tl.store(list_3 + rank_3, item_3, mask=rank_3 < ROOM)


@triton.jit(do_not_specialize=["slots", "tasks", "first", "layers"])
def _encode(
    pool,
    slots,
    records,
    words,
    tasks,
    first,
    layers,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    LAYER_BYTES: tl.constexpr,
    CODES: tl.constexpr,
    BASES: tl.constexpr,
    ESCAPES: tl.constexpr,
    COUNTS: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST: tl.constexpr,
    GROUP: tl.constexpr,
):
    NUMBERS: tl.constexpr = HALF * CHANNELS  # of half a head
    channel = tl.arange(0, COLUMNS)[None, :]
    entry = tl.arange(0, LIST)[None, :]
    for start in range(tl.program_id(0) * GROUP, tasks, tl.num_programs(0) * GROUP):
        task = start + tl.arange(0, GROUP)
        live = task < tasks
        mask = live[:, None] & (channel < CHANNELS)
        number, byte, head = places(
            task, live, slots, first, layers, LAYERS, HEADS, 2 * NUMBERS, LAYER_BYTES
        )
        source = pool + number[:, None] + channel
        base = tl.zeros([GROUP, COLUMNS], tl.int32)
        for row in tl.range(HALF, loop_unroll_factor=UNROLL):
            at = source + row * CHANNELS
            one = tl.load(at, mask=mask, other=0).to(tl.int32)
            two = tl.load(at + NUMBERS, mask=mask, other=0).to(tl.int32)
            base = tl.maximum(base, tl.maximum(one & 0x7F80, two & 0x7F80))
        base = base >> 7
        tl.store(
            records + (byte + BASES + head * CHANNELS)[:, None] + channel,
            base.to(tl.uint8),
            mask=mask,
        )

        low = records + (byte + head * (2 * NUMBERS))[:, None] + channel
        codes = records + (byte + CODES + head * NUMBERS)[:, None] + channel
        word = byte // 4
        escapes = tl.broadcast_to((words + word + ESCAPES + head * ROOM)[:, None], [GROUP, COLUMNS])
        count = tl.zeros([GROUP], tl.int32)
        for row in range(HALF):
            at = source + row * CHANNELS
            one = tl.load(at, mask=mask, other=0).to(tl.int32)
            two = tl.load(at + NUMBERS, mask=mask, other=0).to(tl.int32)
            code_one, code_two = _code(one, base), _code(two, base)
            tl.store(low + row * CHANNELS, _low(one), mask=mask)
            tl.store(low + row * CHANNELS + NUMBERS, _low(two), mask=mask)
            tl.store(codes + row * CHANNELS, (code_one | (code_two << 4)).to(tl.uint8), mask=mask)
            # Counts both halves at once, each in half of a word.
            escaped_one = code_one == _ESCAPE
            escaped_two = code_two == _ESCAPE
            escaped = (tl.where(escaped_one, 1, 0) + tl.where(escaped_two, 0x10000, 0)).to(
                tl.uint32
            )
            ranks = tl.cumsum(escaped, axis=1)  # from 1 on
            total = tl.sum(escaped, axis=1)
            position = row * CHANNELS + channel
            rank = tl.where(escaped_one, (ranks & 0xFFFF).to(tl.int32) + (count - 1)[:, None], ROOM)
            _list(escapes, rank, (position << 16) | (one & 0xFFFF), ROOM)
            count += (total & 0xFFFF).to(tl.int32)
            rank = tl.where(escaped_two, (ranks >> 16).to(tl.int32) + (count - 1)[:, None], ROOM)
            _list(escapes, rank, ((position + NUMBERS) << 16) | (two & 0xFFFF), ROOM)
            count += (total >> 16).to(tl.int32)
        tl.store(words + word + COUNTS + head, count, mask=live)
        unused = live[:, None] & (entry >= count[:, None]) & (entry < ROOM)
        tl.store((words + word + ESCAPES + head * ROOM)[:, None] + entry, 0, mask=unused)


@triton.jit(do_not_specialize=["slots", "tasks", "first", "layers"])
def _decode(
    pool,
    slots,
    records,
    words,
    tasks,
    first,
    layers,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CHANNELS: tl.constexpr,
    LAYER_BYTES: tl.constexpr,
    CODES: tl.constexpr,
    BASES: tl.constexpr,
    ESCAPES: tl.constexpr,
    COUNTS: tl.constexpr,
    ROOM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIST: tl.constexpr,
    GROUP: tl.constexpr,
):
    NUMBERS: tl.constexpr = HALF * CHANNELS  # of half a head
    channel = tl.arange(0, COLUMNS)[None, :]
    entry = tl.arange(0, LIST)[None, :]
    for start in range(tl.program_id(0) * GROUP, tasks, tl.num_programs(0) * GROUP):
        task = start + tl.arange(0, GROUP)
        live = task < tasks
        mask = live[:, None] & (channel < CHANNELS)
        number, byte, head = places(
            task, live, slots, first, layers, LAYERS, HEADS, 2 * NUMBERS, LAYER_BYTES
        )
        word = byte // 4
        count = tl.load(words + word + COUNTS + head, mask=live, other=0)
        listed = live[:, None] & (entry < count[:, None]) & (entry < ROOM)
        item = tl.load(
            words + (word + ESCAPES + head * ROOM)[:, None] + entry, mask=listed, other=0
        )
        base = tl.load(
            records + (byte + BASES + head * CHANNELS)[:, None] + channel, mask=mask, other=0
        ).to(tl.int32)
        low = records + (byte + head * (2 * NUMBERS))[:, None] + channel
        codes = records + (byte + CODES + head * NUMBERS)[:, None] + channel
        target = pool + number[:, None] + channel
        for row in range(HALF):
            code = tl.load(codes + row * CHANNELS, mask=mask, other=0).to(tl.int32)
            one = tl.load(low + row * CHANNELS, mask=mask, other=0).to(tl.int32)
            two = tl.load(low + row * CHANNELS + NUMBERS, mask=mask, other=0).to(tl.int32)
            tl.store(target + row * CHANNELS, _bits(one, code & 0xF, base), mask=mask)
            tl.store(target + row * CHANNELS + NUMBERS, _bits(two, code >> 4, base), mask=mask)
        # Writes to the same places, after the barrier: skipping escapes above would need stores of
        # single numbers.
        tl.debug_barrier()
        position = (item >> 16) & 0xFFFF
        tl.store(
            pool + number[:, None] + position,
            item.to(tl.int16),
            mask=listed & (position < 2 * NUMBERS),
        )
