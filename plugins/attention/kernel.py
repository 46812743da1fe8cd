"""`multi_token_attention` on a GPU, in Triton. Its twin is `reference.multi_token_attention`.

One kernel serves decode (one query), append (some) and prefill (thousands) over scattered chunks;
the classes of a work list differ in tile shape only. The grid is persistent: programs take items
from the list until it is empty, so one captured launch serves any mixture. See `work_list` for
tiles, splits and merging.

In a pool in eight bits (`fp8_pool`) a code becomes a number in registers, which is exact
(`fp8_codes`). Scales are applied where fewer products are needed: in tiles of few rows to scores
and weights, else to keys and values. Values and weights are bfloat16 with a float16 model too,
because scaled ones may be too small or too large for float16. So may scaled keys: a float16 model's
scores are scaled in every tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import Launch
from . import fp8_pool, prefill_kernel, work_list
from .fp8_codes import load_scales, number_pairs, numbers, scaled_numbers
from .work_list import ITEM, NAMED, STACKED, Capacity, Tile, WorkList, split_of

LOG2_E = tl.constexpr(1.4426950408889634)
UNMASKED_ABOVE = 16  # rows of a tile; in smaller tiles masks cost no time, except with codes (3%)
# of a tile: its products read keys and values from shared memory, after conversion
MANY_ROWS = tl.constexpr(64)


def tiles_for(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> tuple[Tile, ...]:
    """Tile shapes by class, measured (docs/design/kernels.md). ValueError for shapes that no tile
    holds."""
    group = heads // kv_heads
    if group > 64 or not 16 <= head_dim <= 256:
        raise ValueError(
            f"no tile holds {group} query heads a key head of size {head_dim}: at most 64, 16 to "
            "256"
        )
    least = max(16, triton.next_power_of_2(group))
    # IEEE products do not use the matrix units; a small tile keeps them in registers
    if dtype == torch.float32:
        return (Tile(least, 32, 4, 2, 2),)
    keys = 64 if head_dim <= 128 else 32
    large = Tile(128, keys, 8, 3, 1)
    medium = Tile(64, keys, 4, 3, 2)
    return (medium, large) if least > 16 else (Tile(16, keys, 4, 3, 3, 168), medium, large)


def make_work_list(capacity: Capacity, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
                   device: str = "cuda", pool: Tensor | None = None) -> WorkList:  # fmt: skip
    """A work list for pools of this shape and dtype. With the pool itself, the largest class gets
    the share of multiprocessors that suits its kernel."""
    tiles = tiles_for(dtype, heads, kv_heads, head_dim)
    cost = work_list.LARGE_TILE_COST
    if pool is not None and prefill_kernel.suits(dtype, pool, tiles):
        cost = prefill_kernel.TILE_COST
    return WorkList(capacity, heads, kv_heads, head_dim, tiles, device, cost)


def multi_token_attention(
    q: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    work: WorkList,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, heads, head_dim] (rotated) over the pool's `layer`, as `work` lists it.

    block_table [seats, blocks] int32; pool `[slot, layers, 2, kv_heads, chunk_tokens, head_dim]`,
    or `fp8_pool`'s; scale > 0; window and sinks as in the reference. Returns o [T, heads,
    head_dim]; tokens of no segment get zeros.
    """
    tokens, heads, head_dim = q.shape
    if tokens > work.capacity.tokens or q.stride(2) != 1:
        raise ValueError(
            f"q {list(q.shape)} is strided in a head, or beyond the {work.capacity.tokens} tokens "
            "listed"
        )
    if window and work.stacks:
        raise ValueError(
            "segments of a layer with a window are not stacked: build the work list without sharing"
        )
    o = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    classes = reachable_classes(work, tokens)
    kernels = launches(q, o, block_table, pool, layer, scale, work, classes, window, sinks)
    # the large tiles go first
    if classes == len(work.tiles) and prefill_kernel.fits(q, pool, work, window, sinks):
        kernels[0] = prefill_kernel.launch(
            q, o, block_table, pool, layer, scale * LOG2_E.value, work
        )
    for launch in kernels:
        launch.run()
    return o


def reachable_classes(work: WorkList, tokens: int) -> int:
    """How many classes, from the smallest tiles on, a step of so many tokens can have items of."""
    most_rows = min(tokens, work.longest) * work.group
    return 1 + sum(most_rows > tile.rows for tile in work.tiles[:-1])


def launches(
    q: Tensor,
    o: Tensor,
    block_table: Tensor,
    pool: Tensor,
    layer: int,
    scale: float,
    work: WorkList,
    classes: int,
    window: int = 0,
    sinks: Tensor | None = None,
) -> list[Launch]:
    """The launches of `multi_token_attention`, in order: one for each of the first `classes`
    classes."""
    tokens, _, head_dim = q.shape
    _, _, _, kv_heads, chunk_tokens, _ = pool.shape
    overlap = _overlaps(q.device)
    # on GPUs whose kernels run one after the other no later kernel uses the free multiprocessors
    shared = overlap or q.device.type == "cpu"
    kernels = []
    # the large tiles first: they need a free multiprocessor each
    for kind in reversed(range(classes)):
        tile = work.tiles[kind]
        leads = overlap and kind > 0
        follows = overlap and kind < classes - 1
        short = (
            pool.dtype == fp8_pool.DTYPE
            and tile.rows < MANY_ROWS.value
            and q.dtype != torch.float32
        )
        arguments = (
            q,
            o,
            work.partial,
            work.lse,
            pool,
            block_table,
            work.items[kind],
            work.arrivals[kind],
            work.counters,
            work.covered,
            kind,
            len(work.tiles),
            tokens,
            q.stride(0),
            q.stride(1),
            block_table.stride(0),
            pool.stride(0),
            layer * pool.stride(1),
            scale * LOG2_E.value,
            sinks,
        )
        settings = dict(
            KV_HEADS=kv_heads,
            GROUP=work.group,
            HEAD_DIM=head_dim,
            CHUNK=chunk_tokens,
            DIM=triton.next_power_of_2(head_dim),
            ROWS=tile.rows,
            KEYS=tile.keys << short,
            UNMASKED=short or tile.rows > UNMASKED_ABOVE,
            LARGEST=shared and kind > 0 and kind == len(work.tiles) - 1,
            LEADS=leads,
            FOLLOWS=follows,
            STACKS=kind == 0 and tile.rows // work.group > 1 and not window,
            NAMED=NAMED,
            STACKED=STACKED,
            WORDS=ITEM,
            WINDOW=window,
            WHOLE=0 < window <= work_list.SMALLEST_SPLIT,
            num_warps=tile.warps,
            num_stages=tile.stages,
            maxnreg=tile.registers,
            launch_pdl=follows,
        )
        kernels.append(Launch(_attend, (work.processors * tile.programs,), arguments, settings))
    return kernels


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Returns whether a kernel can be launched to begin as soon as all programs of the previous one
    have begun."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _attend_tiles(
    acc,
    top,
    total,
    q,
    keys,
    exponents,
    table,
    own,
    begin,
    end,
    scale,
    slot_stride,
    first,
    skip_from,
    skip,
    count,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over `count` tiles of keys from tile `first`; skips `skip` tiles after
    `skip_from`.

    acc, top, total  weighted sum of values, largest score (base 2) and sum of weights of each row
                     so far
    exponents        of the keys, if the pool is in eight bits
    """
    FP8: tl.constexpr = keys.dtype.element_ty == tl.uint8
    ROWS: tl.constexpr = q.shape[0]
    EXACT: tl.constexpr = q.dtype == tl.float32
    V_KIND: tl.constexpr = tl.float32 if EXACT else tl.bfloat16  # of decoded values
    SCALED: tl.constexpr = FP8 and ROWS >= MANY_ROWS and not EXACT
    K_SCALED: tl.constexpr = SCALED and q.dtype == tl.bfloat16
    PAIRS: tl.constexpr = FP8 and ROWS < MANY_ROWS and not EXACT and HEAD_DIM % 2 == 0 and DIM >= 32
    PLACES: tl.constexpr = HEAD_DIM // 2 if PAIRS else HEAD_DIM  # of a key
    key = tl.arange(0, KEYS)
    stride = slot_stride
    if PAIRS:  # words of two codes, and products of the even and of the odd dimensions
        dim = tl.arange(0, DIM // 2)
        keys = keys.to(tl.pointer_type(tl.int16))
        stride = slot_stride // 2
        q, odd_q = tl.split(q.reshape(ROWS, DIM // 2, 2))
        acc, odd_acc = tl.split(acc.reshape(ROWS, DIM // 2, 2))
    else:
        dim = tl.arange(0, DIM)
    inside = keys + ((key % CHUNK) * PLACES)[:, None] + dim[None, :]
    to_values: tl.constexpr = KV_HEADS * CHUNK * PLACES
    n = (first + tl.where(skip_from <= 0, skip, 0)) * KEYS + key
    slot = tl.load(table + n // CHUNK, mask=n < end, other=0)
    if FP8:
        k_scale, v_scale = load_scales(
            exponents, slot, slot_stride, n, end, KV_HEADS * CHUNK, CHUNK
        )
    for i in range(count):
        # Reads the slots of the next tile now, so its keys can be requested without waiting for the
        # slots.
        ahead = (first + i + 1 + tl.where(i + 1 >= skip_from, skip, 0)) * KEYS + key
        next_slot = tl.load(table + ahead // CHUNK, mask=ahead < end, other=0)
        at = inside + (slot.to(tl.int64) * stride)[:, None]
        if KEYS % CHUNK != 0:  # a tile may begin inside a chunk
            at += ((n % CHUNK - key % CHUNK) * PLACES)[:, None]
        loaded = (n < end)[:, None] & (dim < PLACES)[None, :]
        if MASKED or HEAD_DIM != DIM:
            k = tl.load(at, mask=loaded, other=0)
        else:
            k = tl.load(at)
        if PAIRS:
            k, odd_k = number_pairs(k, q.dtype)
        elif K_SCALED:
            k = scaled_numbers(k, k_scale, q.dtype)
        elif FP8:
            k = numbers(k, q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if PAIRS:
            score = tl.dot(odd_q, tl.trans(odd_k), score)
        if FP8 and not K_SCALED:
            score = score * k_scale[None, :]
        if MASKED:
            seen = (n[None, :] <= own[:, None]) & (n >= begin)[None, :] & (n < end)[None, :]
            if WINDOW:
                seen = seen & (n[None, :] > own[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        base = higher
        if MASKED:  # a row that has seen no key yet has no finite score
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score * scale - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]
        if MASKED or HEAD_DIM != DIM:
            v = tl.load(at + to_values, mask=loaded, other=0)
        else:
            v = tl.load(at + to_values)
        if FP8 and not SCALED:
            weight = weight * v_scale[None, :]
        if PAIRS:
            v, odd_v = number_pairs(v, V_KIND)
            odd_acc = tl.dot(weight.to(V_KIND), odd_v, odd_acc * decay[:, None])
        elif SCALED:
            v = scaled_numbers(v, v_scale, V_KIND)
        elif FP8:
            v = numbers(v, V_KIND)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = higher
        n = ahead
        slot = next_slot
        if FP8:  # early, as the slots are
            k_scale, v_scale = load_scales(
                exponents, slot, slot_stride, n, end, KV_HEADS * CHUNK, CHUNK
            )
    if PAIRS:
        acc = tl.join(acc, odd_acc).reshape(ROWS, DIM)
    return acc, top, total


@triton.jit
def _with_sinks(total, top, sinks, q_head):
    """The sum of weights, relative to `top`, with the sink's. A sink is a logit to base e."""
    if sinks is not None:
        total += tl.exp2(tl.load(sinks + q_head).to(tl.float32) * LOG2_E - top)
    return total


@triton.jit
def _merge_splits(
    partial,
    lse,
    first,
    skipped,
    reached,
    kept,
    query_kept,
    heads,
    sinks,
    q_head,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Merges the partial results of a tile's rows, from split `skipped` on, in the order of their
    splits. first [ROWS]: pair of split 0."""
    dim = tl.arange(0, DIM)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in range(skipped, reached):
        at = first + split * heads
        part_top = tl.load(lse + at, mask=query_kept, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial + at[:, None] * HEAD_DIM + dim[None, :],
            mask=kept,
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(top, part_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        decay = tl.exp2(top - base)
        weight = tl.exp2(part_top - base)
        acc = acc * decay[:, None] + part * weight[:, None]
        total = total * decay + weight
        top = higher
    total = _with_sinks(total, top, sinks, q_head)
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit(do_not_specialize=["tokens", "blocks"])  # one kernel serves all sizes of step
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
    covered,
    kind,
    classes,
    tokens,
    q_stride,
    q_head_stride,
    blocks,
    slot_stride,
    layer_offset,
    scale,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNMASKED: tl.constexpr,
    LARGEST: tl.constexpr,
    LEADS: tl.constexpr,
    FOLLOWS: tl.constexpr,
    STACKS: tl.constexpr,
    NAMED: tl.constexpr,
    STACKED: tl.constexpr,
    WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Takes (item, key head) pairs from the list of one class until none is left. scale includes
    log2(e).

    The kernels of the classes run side by side: tiles of many rows use the matrix units, those of
    few rows the memory. A kernel with LEADS lets the next one begin as soon as all its own programs
    have begun. A kernel with FOLLOWS ends after the previous one, so work after the last kernel
    comes after all of them. A kernel with FOLLOWS reads no results of the others; its inputs were
    complete before the first kernel, which is launched normally and takes all multiprocessors.

    Row r of a tile is query r // GROUP of the item and head r % GROUP of the group. With UNMASKED,
    tiles of keys that every row sees are computed without masks. With STACKS, the queries of an
    item may belong to several segments.

    With WINDOW, tiles of keys that no row sees are not read, and splits of such keys have no
    result. With WHOLE the keys of a tile are not split.
    """
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    heads: tl.constexpr = KV_HEADS * GROUP
    listed = tl.load(counters + kind) * KV_HEADS
    if WHOLE:
        listed = tl.load(counters + 4 * classes + kind) * KV_HEADS
    taken_count = counters + classes + kind
    programs = tl.num_programs(0)
    if LARGEST:
        programs = tl.minimum(programs, tl.load(counters + 3 * classes))
    taken = tl.where(tl.program_id(0) < programs, tl.program_id(0), listed)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    while taken < listed:
        index = taken // KV_HEADS
        head = taken % KV_HEADS
        # early, because the atomic operation takes a while
        following = tl.atomic_add(taken_count, 1, sem="relaxed") + programs
        item = items + index * WORDS
        q_row = tl.load(item)
        size = tl.load(item + 1)
        first_own = tl.load(item + 2)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        seat = tl.load(item + 5)
        token_pairs = tl.load(item + 6)
        split = tl.load(item + 7)
        splits = tl.load(item + 8)
        reached = tl.load(item + 9)
        skipped = 0  # splits before those with keys that the tile sees
        if WINDOW:
            first_seen = tl.maximum(first_own - WINDOW + 1, 0)
            if WHOLE:
                end = first_own + size
            else:
                cut = tl.load(item + 11)
                more = tl.load(item + 12)
                last = tl.load(item + 13)
                first_split = split_of(begin, cut, more, last) - split
                skipped = tl.maximum(split_of(first_seen, cut, more, last) - first_split, 0)
            begin = tl.maximum(begin, first_seen)

        query = row // GROUP
        token = q_row + query
        if STACKS:
            stacked = tl.load(item + 10)
            token = tl.where(stacked != 0, tl.load(item + NAMED + query), token)
        q_head = head * GROUP + row % GROUP
        query_kept = query < size
        kept = query_kept[:, None] & (dim < HEAD_DIM)[None, :]
        at = token.to(tl.int64) * q_stride + q_head * q_head_stride
        rows = tl.load(q + at[:, None] + dim[None, :], mask=kept, other=0.0)
        own = first_own + query
        keys = pool + layer_offset + head * (CHUNK * HEAD_DIM)
        exponents = pool + layer_offset + 2 * KV_HEADS * CHUNK * HEAD_DIM + head * CHUNK
        table = block_table + seat.to(tl.int64) * blocks

        acc = tl.zeros([ROWS, DIM], tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        # tiles of keys   | head |       full        |   tail   |
        #                 first
        # The head begins before `begin`. Every row sees all of a full tile. With WINDOW the head
        # has all tiles before the full ones.
        first = begin // KEYS
        count = tl.cdiv(end, KEYS) - first
        if UNMASKED:
            start = tl.where(begin % KEYS == 0, 0, 1)
            if WINDOW:
                start = tl.cdiv(tl.maximum(begin, first_own + size - WINDOW), KEYS) - first
                start = tl.minimum(start, tl.maximum(count, 0))
            full = tl.minimum(end, first_own + 1) // KEYS - first - start
            full = tl.maximum(tl.minimum(full, count - start), 0)
            acc, top, total = _attend_tiles(
                acc,
                top,
                total,
                rows,
                keys,
                exponents,
                table,
                own,
                begin,
                end,
                scale,
                slot_stride,
                first + start,
                0,
                0,
                full,
                KV_HEADS,
                HEAD_DIM,
                CHUNK,
                DIM,
                KEYS,
                WINDOW,
                False,
            )
            acc, top, total = _attend_tiles(
                acc,
                top,
                total,
                rows,
                keys,
                exponents,
                table,
                own,
                begin,
                end,
                scale,
                slot_stride,
                first,
                start,
                full,
                count - full,
                KV_HEADS,
                HEAD_DIM,
                CHUNK,
                DIM,
                KEYS,
                WINDOW,
                True,
            )
        else:
            acc, top, total = _attend_tiles(
                acc,
                top,
                total,
                rows,
                keys,
                exponents,
                table,
                own,
                begin,
                end,
                scale,
                slot_stride,
                first,
                0,
                0,
                count,
                KV_HEADS,
                HEAD_DIM,
                CHUNK,
                DIM,
                KEYS,
                WINDOW,
                True,
            )

        complete = splits == 1
        seen = split < reached  # the split contains keys that a query of the tile sees
        if WHOLE:
            complete = True
        elif WINDOW:
            complete = (reached - skipped == 1) & (split == skipped)
            seen = seen & (split >= skipped)
        of_all = total
        if sinks is not None:
            of_all = tl.where(complete, _with_sinks(total, top, sinks, q_head), total)
        result = acc * (1.0 / tl.where(of_all == 0.0, 1.0, of_all))[:, None]
        to = (token.to(tl.int64) * heads + q_head) * HEAD_DIM
        target = o + to[:, None] + dim[None, :]
        if complete:
            tl.store(target, result.to(o.dtype.element_ty), mask=kept)
        elif seen:
            first_part = (token * token_pairs).to(tl.int64) * heads + q_head
            part = first_part + split * heads
            tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], result, mask=kept)
            tl.store(lse + part, tl.log2(total) + top, mask=query_kept)
            # The program that finishes a tile's last split merges them all. The barrier puts the
            # stores of all threads before the release, the acquire puts those of the other programs
            # before the reads.
            tl.debug_barrier()
            for member in range(tl.where(stacked != 0, size, 1) if STACKS else 1):
                first_token = q_row
                merging = query_kept
                if STACKS:
                    first_token = tl.where(
                        stacked != 0, tl.load(item + NAMED + member), first_token
                    )
                    reached = tl.where(
                        stacked != 0, tl.load(item + NAMED + STACKED + member), reached
                    )
                    merging = merging & (tl.where(stacked != 0, query, member) == member)
                counter = arrivals + first_token * KV_HEADS + head
                if tl.atomic_add(counter, 1, sem="acq_rel") == reached - skipped - 1:
                    tl.store(counter, 0)
                    merging_kept = merging[:, None] & (dim < HEAD_DIM)[None, :]
                    merged = _merge_splits(
                        partial,
                        lse,
                        first_part,
                        skipped,
                        reached,
                        merging_kept,
                        merging,
                        heads,
                        sinks,
                        q_head,
                        ROWS,
                        HEAD_DIM,
                        DIM,
                    )
                    tl.store(target, merged.to(o.dtype.element_ty), mask=merging_kept)
        taken = following

    if kind == 0:
        wide = tl.arange(0, DIM)
        for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
            if tl.load(covered + token) == 0:
                for head in range(heads):
                    to = (token * heads + head) * HEAD_DIM
                    tl.store(
                        o + to + wide, tl.zeros([DIM], o.dtype.element_ty), mask=wide < HEAD_DIM
                    )
    # The last program resets the counters for the next layer's attention.
    left_count = taken_count + classes
    if tl.atomic_add(left_count, 1) == tl.num_programs(0) - 1:
        tl.store(taken_count, 0)
        tl.store(left_count, 0)
        if FOLLOWS:  # no other program holds a place on a multiprocessor for it
            tl.extra.cuda.gdc_wait()
