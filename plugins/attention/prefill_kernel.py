"""The largest class of `multi_token_attention` on a Hopper GPU, in Gluon. `kernel._attend` is its
slow twin.

A program is a loader and two groups of four warps, which work side by side:

    loader   | item 1: K V K V .. | item 2: K V ..      copies chunks into shared memory (TMA)
    group 0      | item 1 ..        | item 2 ..         64 rows: a tile's products, the last's
                 softmax
    group 1        | item 1 ..        | item 2 ..       64 rows, half a tile later

The loader is ahead: the keys of the next item arrive while the groups end the one before. A group
starts its products after the other group's, so that one multiplies while the other is at its
softmax. Barriers in shared memory say which stages are full and which are empty.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton_launch import Launch
from .work_list import ITEM, Tile, WorkList

ROWS, KEYS = 128, 128  # of a tile
STAGES = 2  # tiles of keys, and of values, in shared memory
REGISTERS = 232  # of a thread in a group; two groups and the loader share 504
HALF_WIDTH = 64  # numbers of a row in one copy: 128 bytes, the widest that shared memory swizzles
TILE_COST = 1.8  # as `work_list.LARGE_TILE_COST`; expected from its speed, not measured
TRITON = ("3.6.",)  # Gluon is experimental: other versions of Triton use the twin


@functools.cache
def _on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def suits(dtype: torch.dtype, pool: Tensor, tiles: tuple[Tile, ...]) -> bool:
    """Returns whether this kernel can compute the largest class for queries of this dtype."""
    _, _, _, _, chunk_tokens, head_dim = pool.shape
    return (
        _on_hopper(pool.device)
        and triton.__version__.startswith(TRITON)
        and dtype == pool.dtype == torch.bfloat16
        and head_dim == 128
        and chunk_tokens == 32
        and len(tiles) > 1
        and tiles[-1].rows == ROWS
    )


def fits(
    q: Tensor, pool: Tensor, work: WorkList, window: int = 0, sinks: Tensor | None = None
) -> bool:
    """Returns whether this kernel can compute the largest class of this layer."""
    return not window and sinks is None and suits(q.dtype, pool, work.tiles)


def launch(
    q: Tensor,
    o: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    work: WorkList,
) -> Launch:
    """The launch of the largest class, before those of the others. scale includes log2(e)."""
    _, _, _, kv_heads, chunk_tokens, head_dim = pool.shape
    kind = len(work.tiles) - 1
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = TensorDescriptor.from_tensor(pool.view(-1, head_dim), [chunk_tokens, HALF_WIDTH], layout)
    arguments = (
        q,
        o,
        work.partial,
        work.lse,
        rows,
        block_table,
        work.items[kind],
        work.arrivals[kind],
        work.counters,
        kind,
        len(work.tiles),
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        scale,
    )
    settings = dict(
        KV_HEADS=kv_heads,
        GROUP=work.group,
        CHUNK=chunk_tokens,
        HEAD_DIM=head_dim,
        ROWS=ROWS,
        KEYS=KEYS,
        STAGES=STAGES,
        HALF_WIDTH=HALF_WIDTH,
        REGISTERS=REGISTERS,
        WORDS=ITEM,
        num_warps=4,
    )
    return Launch(_attend, (work.processors,), arguments, settings)


@gluon.jit
def _slots(table, chunk, first_chunk, last_chunk):
    """The slots of a tile's four chunks; those outside the item's keys repeat its first or last."""
    slot0 = gl.load(table + gl.minimum(gl.maximum(chunk, first_chunk), last_chunk))
    slot1 = gl.load(table + gl.minimum(gl.maximum(chunk + 1, first_chunk), last_chunk))
    slot2 = gl.load(table + gl.minimum(gl.maximum(chunk + 2, first_chunk), last_chunk))
    slot3 = gl.load(table + gl.minimum(gl.maximum(chunk + 3, first_chunk), last_chunk))
    return slot0, slot1, slot2, slot3


@gluon.jit
def _load(
    pool,
    block_table,
    blocks,
    items,
    taken_count,
    parts,
    full,
    empty,
    posted,
    post_full,
    post_empty,
    listed,
    taken,
    programs,
    slot_rows,
    layer_rows,
    KV_HEADS: gl.constexpr,
    CHUNK: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HALF_WIDTH: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Takes (item, key head) pairs from the list, posts their numbers to the groups and copies
    their keys and values.

    parts   in shared memory, by stage, keys or values, columns, chunk
    posted  the last two numbers taken; one that is not listed ends the groups
    """
    CHUNKS: gl.constexpr = KEYS // CHUNK
    COLUMNS: gl.constexpr = HEAD_DIM // HALF_WIDTH
    gl.static_assert(CHUNKS == 4)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    done = 0  # tiles of keys copied
    turn = 0
    more = True
    while more:
        mbarrier.wait(post_empty.index(turn & 1), ((turn // 2) & 1) ^ 1)
        posted.index(turn & 1).store(gl.full([1], taken, gl.int32, layout=ONE))
        gl.thread_barrier()
        mbarrier.arrive(post_full.index(turn & 1))
        turn += 1
        more = taken < listed
        if more:
            following = gl.atomic_add(taken_count, 1, sem="relaxed") + programs
            item = items + (taken // KV_HEADS) * WORDS
            begin = gl.load(item + 3)
            end = gl.load(item + 4)
            seat = gl.load(item + 5)
            table = block_table + seat.to(gl.int64) * blocks
            at = layer_rows + (taken % KV_HEADS) * CHUNK
            first = begin // KEYS
            count = gl.maximum(gl.cdiv(end, KEYS) - first, 0)
            first_chunk = begin // CHUNK
            last_chunk = gl.maximum((end - 1) // CHUNK, first_chunk)
            slot0, slot1, slot2, slot3 = _slots(table, first * CHUNKS, first_chunk, last_chunk)
            for i in range(count):
                stage = (done + i) % STAGES
                phase = ((done + i) // STAGES) & 1
                row0 = slot0 * slot_rows + at
                row1 = slot1 * slot_rows + at
                row2 = slot2 * slot_rows + at
                row3 = slot3 * slot_rows + at
                # the slots of the next tile, early
                slot0, slot1, slot2, slot3 = _slots(
                    table, (first + i + 1) * CHUNKS, first_chunk, last_chunk
                )
                for what in gl.static_range(2):
                    place = stage * 2 + what
                    mbarrier.wait(empty.index(place), phase ^ 1)
                    mbarrier.expect(full.index(place), KEYS * HEAD_DIM * 2)
                    away = what * KV_HEADS * CHUNK
                    for column in gl.static_range(COLUMNS):
                        to = (place * COLUMNS + column) * CHUNKS
                        x = column * HALF_WIDTH
                        tma.async_copy_global_to_shared(
                            pool, [row0 + away, x], full.index(place), parts.index(to)
                        )
                        tma.async_copy_global_to_shared(
                            pool, [row1 + away, x], full.index(place), parts.index(to + 1)
                        )
                        tma.async_copy_global_to_shared(
                            pool, [row2 + away, x], full.index(place), parts.index(to + 2)
                        )
                        tma.async_copy_global_to_shared(
                            pool, [row3 + away, x], full.index(place), parts.index(to + 3)
                        )
            done += count
            taken = following


@gluon.jit
def _soften(
    score,
    top,
    total,
    scale,
    tile,
    own,
    begin,
    end,
    seen_by_all,
    S: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Weights of a tile's keys, the decay of the sums before, the new largest score and the new sum
    of weights."""
    n0 = tile * KEYS
    if (n0 < begin) | (n0 + KEYS > seen_by_all):
        n = n0 + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S))
        seen = (n[None, :] <= own[:, None]) & ((n >= begin) & (n < end))[None, :]
        score = gl.where(seen, score, float("-inf"))
    higher = gl.maximum(top, gl.max(score, 1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher)  # a row may have seen no key yet
    weight = gl.exp2(score * scale - base[:, None])
    decay = gl.exp2(top - base)
    return weight, decay, higher, total * decay + gl.sum(weight, 1)


@gluon.jit
def _clear(values, n0, begin, end, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr, WARPS: gl.constexpr):
    """Zeroes the values outside [begin, end): memory that no token was written to may hold NaN.
    Both groups do this; they write equal values."""
    if (n0 < begin) | (n0 + KEYS > end):
        L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        ROWS: gl.constexpr = 32
        for part in gl.static_range(KEYS // ROWS):
            some = values.slice(part * ROWS, ROWS, 0)
            n = n0 + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
            x = some.load(L)
            some.store(gl.where(((n >= begin) & (n < end))[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _attend_tile(
    q,
    q_shared,
    o,
    partial,
    lse,
    kv,
    full,
    empty,
    turns,
    first,
    count,
    q_row,
    size,
    first_own,
    begin,
    end,
    token_pairs,
    split,
    splits,
    reached,
    head,
    scale,
    q_stride,
    q_head_stride,
    done,
    steps,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Online softmax of one group's rows over an item's `count` tiles of keys. Returns the new
    `done` and `steps`.

    done   tiles of keys so far, of all items
    steps  of them, those whose products were issued in turn with the other group's
    """
    heads: gl.constexpr = KV_HEADS * GROUP
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    row = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L))
    query = row // GROUP
    at = (q_row + query).to(gl.int64) * q_stride + (head * GROUP + row % GROUP) * q_head_stride
    mine = q_shared.index(HALF)
    mine.store(gl.load(q + at[:, None] + dim[None, :], mask=(query < size)[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    own = first_own + (HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))) // GROUP
    seen_by_all = gl.minimum(end, first_own + (HALF * ROWS) // GROUP + 1)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, S))
    zeros = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=S)
    acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=A)

    place = (done % STAGES) * 2
    mbarrier.wait(full.index(place), (done // STAGES) & 1)
    score = warpgroup_mma(
        mine, kv.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    score = warpgroup_mma_wait(0, deps=[score])
    gl.thread_barrier()
    mbarrier.arrive(empty.index(place))
    weight, decay, top, total = _soften(
        score, top, total, scale, first, own, begin, end, seen_by_all, S, KEYS
    )
    p = gl.convert_layout(weight.to(gl.bfloat16), P)
    for i in range(done, done + count - 1):
        keys = ((i + 1) % STAGES) * 2
        values = (i % STAGES) * 2 + 1
        mbarrier.wait(full.index(keys), ((i + 1) // STAGES) & 1)
        mbarrier.wait(turns.index(HALF), ((steps + i - done) & 1) ^ (1 - HALF))
        score = warpgroup_mma(
            mine, kv.index(keys).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(full.index(values), (i // STAGES) & 1)
        _clear(kv.index(values), (first + i - done) * KEYS, begin, end, KEYS, HEAD_DIM, WARPS)
        summed = warpgroup_mma(p, kv.index(values), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - HALF))
        score = warpgroup_mma_wait(1, deps=[score])
        weight, decay, top, total = _soften(
            score, top, total, scale, first + i - done + 1, own, begin, end, seen_by_all, S, KEYS
        )
        acc, p = warpgroup_mma_wait(0, deps=[summed, p])
        gl.thread_barrier()
        mbarrier.arrive(empty.index(keys))
        mbarrier.arrive(empty.index(values))
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A))[:, None]
        p = gl.convert_layout(weight.to(gl.bfloat16), P)
    last = done + count - 1
    values = (last % STAGES) * 2 + 1
    mbarrier.wait(full.index(values), (last // STAGES) & 1)
    _clear(kv.index(values), (first + count - 1) * KEYS, begin, end, KEYS, HEAD_DIM, WARPS)
    acc = warpgroup_mma(p, kv.index(values), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(empty.index(values))

    top = gl.convert_layout(top, gl.SliceLayout(1, A))
    total = gl.convert_layout(total, gl.SliceLayout(1, A))
    result = acc * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]
    row = HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, A))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, A))
    query = row // GROUP
    q_head = head * GROUP + row % GROUP
    kept = query < size
    if splits == 1:
        to = ((q_row + query).to(gl.int64) * heads + q_head) * HEAD_DIM
        gl.store(o + to[:, None] + dim[None, :], result.to(gl.bfloat16), mask=kept[:, None])
    else:
        if split < reached:
            part = ((q_row + query) * token_pairs + split).to(gl.int64) * heads + q_head
            gl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], result, mask=kept[:, None])
            gl.store(lse + part, gl.log2(total) + top, mask=kept)
    return done + count, steps + count - 1


@gluon.jit
def _merge_splits(
    o,
    partial,
    lse,
    q_row,
    size,
    token_pairs,
    reached,
    head,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Merges the partial results of a group's rows in the order of their splits, some rows at a
    time."""
    heads: gl.constexpr = KV_HEADS * GROUP
    SOME: gl.constexpr = 32
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, L))
    for block in range(ROWS // SOME):
        row = HALF * ROWS + block * SOME + gl.arange(0, SOME, layout=gl.SliceLayout(1, L))
        query = row // GROUP
        q_head = head * GROUP + row % GROUP
        kept = query < size
        first = ((q_row + query) * token_pairs).to(gl.int64) * heads + q_head
        acc = gl.full([SOME, HEAD_DIM], 0.0, gl.float32, layout=L)
        top = gl.full([SOME], float("-inf"), gl.float32, layout=gl.SliceLayout(1, L))
        total = gl.full([SOME], 0.0, gl.float32, layout=gl.SliceLayout(1, L))
        for split in range(reached):
            at = first + split * heads
            part_top = gl.load(lse + at, mask=kept, other=float("-inf"), cache_modifier=".cg")
            place = partial + at[:, None] * HEAD_DIM + dim[None, :]
            part = gl.load(place, mask=kept[:, None], other=0.0, cache_modifier=".cg")
            higher = gl.maximum(top, part_top)
            base = gl.where(higher == float("-inf"), 0.0, higher)
            decay = gl.exp2(top - base)
            weight = gl.exp2(part_top - base)
            acc = acc * decay[:, None] + part * weight[:, None]
            total = total * decay + weight
            top = higher
        result = acc * (1.0 / gl.where(total == 0.0, 1.0, total))[:, None]
        to = ((q_row + query).to(gl.int64) * heads + q_head) * HEAD_DIM
        gl.store(o + to[:, None] + dim[None, :], result.to(gl.bfloat16), mask=kept[:, None])


@gluon.jit
def _attend_items(
    q,
    q_shared,
    o,
    partial,
    lse,
    kv,
    full,
    empty,
    turns,
    posted,
    post_full,
    post_empty,
    items,
    arrivals,
    listed,
    scale,
    q_stride,
    q_head_stride,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    WORDS: gl.constexpr,
):
    """A group: computes its half of the rows of each item that the loader posts."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    done = 0
    turn = 0
    steps = 0
    more = True
    while more:
        mbarrier.wait(post_full.index(turn & 1), (turn // 2) & 1)
        taken = gl.max(posted.index(turn & 1).load(ONE), 0)
        gl.thread_barrier()
        mbarrier.arrive(post_empty.index(turn & 1))
        turn += 1
        more = taken < listed
        if more:
            head = taken % KV_HEADS
            item = items + (taken // KV_HEADS) * WORDS
            q_row = gl.load(item)
            size = gl.load(item + 1)
            first_own = gl.load(item + 2)
            begin = gl.load(item + 3)
            end = gl.load(item + 4)
            token_pairs = gl.load(item + 6)
            split = gl.load(item + 7)
            splits = gl.load(item + 8)
            reached = gl.load(item + 9)
            first = begin // KEYS
            count = gl.maximum(gl.cdiv(end, KEYS) - first, 0)
            if count > 0:
                done, steps = _attend_tile(
                    q,
                    q_shared,
                    o,
                    partial,
                    lse,
                    kv,
                    full,
                    empty,
                    turns,
                    first,
                    count,
                    q_row,
                    size,
                    first_own,
                    begin,
                    end,
                    token_pairs,
                    split,
                    splits,
                    reached,
                    head,
                    scale,
                    q_stride,
                    q_head_stride,
                    done,
                    steps,
                    HALF,
                    GROUP,
                    KV_HEADS,
                    KEYS,
                    STAGES,
                    HEAD_DIM,
                    ROWS,
                    WARPS,
                )
                if (splits > 1) & (split < reached):
                    gl.thread_barrier()  # see `kernel._attend`
                    counter = arrivals + (q_row * KV_HEADS + head) * 2 + HALF
                    if gl.atomic_add(counter, 1, sem="acq_rel") == reached - 1:
                        gl.store(counter, 0)
                        _merge_splits(
                            o,
                            partial,
                            lse,
                            q_row,
                            size,
                            token_pairs,
                            reached,
                            head,
                            GROUP,
                            KV_HEADS,
                            HALF,
                            ROWS,
                            HEAD_DIM,
                            WARPS,
                        )


@gluon.jit(do_not_specialize=["blocks"])
def _attend(
    q,
    o,
    partial,
    lse,
    pool,
    block_table,
    items,
    arrivals,
    counters,
    kind,
    classes,
    q_stride,
    q_head_stride,
    blocks,
    slot_stride,
    layer_offset,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    HALF_WIDTH: gl.constexpr,
    REGISTERS: gl.constexpr,
    WORDS: gl.constexpr,
):
    """pool: descriptor of the pool's rows of HEAD_DIM numbers, in parts of CHUNK rows and
    HALF_WIDTH numbers."""
    # lets the next class's kernel begin, as LEADS in `kernel._attend`
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    WARPS: gl.constexpr = gl.num_warps()
    HALF_ROWS: gl.constexpr = ROWS // 2
    PARTS: gl.constexpr = STAGES * 2 * (HEAD_DIM // HALF_WIDTH) * (KEYS // CHUNK)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    parts = gl.allocate_shared_memory(gl.bfloat16, [PARTS, CHUNK, HALF_WIDTH], pool.layout)
    kv = parts._reinterpret(gl.bfloat16, [STAGES * 2, KEYS, HEAD_DIM], wide)
    q_shared = gl.allocate_shared_memory(gl.bfloat16, [2, HALF_ROWS, HEAD_DIM], wide)
    full = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES * 2, 1], barrier)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    posted = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    post_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    post_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(STAGES * 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
        mbarrier.init(post_full.index(i), count=1)
        mbarrier.init(post_empty.index(i), count=2)
    fence_async_shared()
    gl.thread_barrier()

    listed = gl.load(counters + kind) * KV_HEADS
    taken_count = counters + classes + kind
    programs = gl.minimum(gl.num_programs(0), gl.load(counters + 3 * classes))
    taken = gl.program_id(0)
    if taken >= programs:
        taken = listed
    gl.warp_specialize(
        [
            (
                _attend_items,
                (
                    q,
                    q_shared,
                    o,
                    partial,
                    lse,
                    kv,
                    full,
                    empty,
                    turns,
                    posted,
                    post_full,
                    post_empty,
                    items,
                    arrivals,
                    listed,
                    scale,
                    q_stride,
                    q_head_stride,
                    gl.constexpr(0),
                    GROUP,
                    KV_HEADS,
                    KEYS,
                    STAGES,
                    HEAD_DIM,
                    HALF_ROWS,
                    WARPS,
                    WORDS,
                ),
            ),
            (
                _attend_items,
                (
                    q,
                    q_shared,
                    o,
                    partial,
                    lse,
                    kv,
                    full,
                    empty,
                    turns,
                    posted,
                    post_full,
                    post_empty,
                    items,
                    arrivals,
                    listed,
                    scale,
                    q_stride,
                    q_head_stride,
                    gl.constexpr(1),
                    GROUP,
                    KV_HEADS,
                    KEYS,
                    STAGES,
                    HEAD_DIM,
                    HALF_ROWS,
                    WARPS,
                    WORDS,
                ),
            ),
            (
                _load,
                (
                    pool,
                    block_table,
                    blocks,
                    items,
                    taken_count,
                    parts,
                    full,
                    empty,
                    posted,
                    post_full,
                    post_empty,
                    listed,
                    taken,
                    programs,
                    slot_stride // HEAD_DIM,
                    layer_offset // HEAD_DIM,
                    KV_HEADS,
                    CHUNK,
                    KEYS,
                    STAGES,
                    HEAD_DIM,
                    HALF_WIDTH,
                    WORDS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
    # The last program resets the counters for the next layer's attention.
    left_count = taken_count + classes
    if gl.atomic_add(left_count, 1) == gl.num_programs(0) - 1:
        gl.store(taken_count, 0)
        gl.store(left_count, 0)
