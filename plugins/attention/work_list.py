"""The work of one step's attention, listed on the device once for each step and used by all layers.

A *tile* is some consecutive queries of a segment, times the query heads that share a key head: the
rows of one matrix product. A *split* is a part of the keys between two fixed coordinates. An *item*
is one tile over one split; a program of the attention kernel takes an item and a key head at a
time. The program that finishes a tile's last split merges all of them.

The tiles, the splits and the order of merging depend on the query's own segment only, never on the
rest of the step. So a row's result has the same bits with any other rows in the step.

Generating rows whose chunks in a whole split are the same slots are *stacked*: one item reads the
split once for as many of them as fill a tile. Rows of a product do not depend on each other, so
this does not change a row's bits either.

    keys of a segment   kv_start ........................................ kv_len
    splits              |------- first -------|---- second ----|- third -|     see `_cuts`
    a tile's items                 x                 x           (none: no query of the tile)

Layers with a window use the same list, if it has no stacks. With a short window their programs take
each tile once and do not split it, with a long one they skip the items that no query of the tile
sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

STACKED = 16  # most tokens of a stack: one for each row of the smallest tile
NAMED = 14
ITEM = NAMED + 2 * STACKED
"""Words of an item.

0   first row in q
1   query tokens
2   first query's coordinate
3   first key's coordinate
4   end of the keys
5   seat
6   pairs of a token
7   number of this split
8   splits of the segment; 1: the result is complete
9   splits that the tile's last query reaches; the others are empty
10  1 for a stack, else 0
11  keys of a split, see `_cuts`
12  additional keys of the first
13  number of the last

Of a stack, the words from NAMED on are its tokens' rows in q; STACKED words later follow their
words 9.
"""
# a program reads this many keys in about 10 us; starting and merging a split takes 3 to 7 us
SMALLEST_SPLIT = 1024
LARGEST_SPLIT = 4096  # desired; histories beyond MOST_SPLITS of them get longer splits
# desired in a split: keeps the partial results under 1% of the bytes of the keys
TOKENS_PER_ROW = 256
# a tile of more is limited by arithmetic: with long splits one returning turn would delay the step
MANY_ROWS = 64
# desired in a split for each of many rows; from 512 rows on there are enough tiles
TOKENS_PER_MANY = 8
MOST_SPLITS = 16
# more rows make splits long; the first split is then longer than the last, so that programs end
# together
FEW_ROWS = 16
# time of a multiprocessor for a key of a large tile of `kernel`, relative to another tile
LARGE_TILE_COST = 2.5


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a class of tiles, and compiler settings of its kernel.

    rows, keys   of one matrix product, powers of two
    warps, stages, programs   warps of a program, tiles of keys in flight, programs on a
                              multiprocessor
    registers    most registers of a thread, so that this many programs fit; None: no limit
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that a work list can hold: tokens and segments of a step, and tokens of a segment's
    context."""

    tokens: int
    segments: int
    context: int


class WorkList:
    """Device memory for the work of one step at a time. `build` fills it, the attention of every
    layer reads it.

    items     [classes, most, ITEM] int32
    counters  [5, classes] int32: items listed; items taken and programs ended, by the running
              attention kernel; in the first place of the fourth row, the multiprocessors that the
              largest class may use while others have work; last, tiles listed. A tile's item of the
              first split is among the first items, one for each tile
    arrivals  [classes, 2 * tokens * kv_heads] int32: finished splits of each tile, by its first
              token, and key head; `prefill_kernel` counts those of a tile's halves
    covered   [tokens] int32: 1 if the token has a segment
    partial   [pairs, heads, head_dim] float32, and lse [pairs, heads] float32: normalised partial
              results and the base-2 logarithms of their weights; a pair is a query token and a
              split: token * splits + split

    Between kernels the counts of items taken, programs ended and arrivals are zero: each kernel
    resets them.
    """

    def __init__(
        self,
        capacity: Capacity,
        heads: int,
        kv_heads: int,
        head_dim: int,
        tiles: tuple[Tile, ...],
        device: str,
        tile_cost: float = LARGE_TILE_COST,
    ):
        """tiles: one for each class, by ascending rows; a segment belongs to the first class that
        holds all its rows. tile_cost: as LARGE_TILE_COST."""
        if heads % kv_heads or heads // kv_heads > tiles[0].rows:
            raise ValueError(
                f"{heads} heads cannot share {kv_heads} key heads in tiles of {tiles[0].rows} rows"
            )
        self.capacity = capacity
        self.tiles = tiles
        self.tile_cost = tile_cost
        on_gpu = torch.device(device).type == "cuda"  # elsewhere Triton interprets
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        )
        self.kv_heads = kv_heads
        self.group = heads // kv_heads
        splits = min(MOST_SPLITS, -(-capacity.context // SMALLEST_SPLIT))
        most = splits * (capacity.segments + capacity.tokens // (tiles[-1].rows // self.group))
        self.splits = splits
        pairs = splits * capacity.tokens if splits > 1 else 0
        self.items = torch.zeros(len(tiles), most, ITEM, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(
            len(tiles), 2 * capacity.tokens * kv_heads, dtype=torch.int32, device=device
        )
        self.covered = torch.zeros(capacity.tokens, dtype=torch.int32, device=device)
        self.counters = torch.zeros(5, len(tiles), dtype=torch.int32, device=device)
        self.partial = torch.empty(pairs, heads, head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(pairs, heads, dtype=torch.float32, device=device)
        self.longest = capacity.tokens
        self.stacks = False

    def build(
        self, segments: Tensor, longest: int | None = None, sharing: Tensor | None = None
    ) -> None:
        """Lists the work of segments [S, 5] int32 (as in `multi_token_attention`; those without
        queries have no work). None has more than `longest` queries: kernels for longer ones are not
        launched in this step.

        sharing [S, 2] int32: a permutation of the segments, and how many leading keys a segment of
        one query has in the same slots as the one before it in that order. None: no segment shares
        keys, which layers with a window need.

        Enqueued on the current stream, after the attention of the previous step; the host does not
        wait for the device. The values must respect the capacity: the device does not check them.
        """
        count = len(segments)
        if count > self.capacity.segments:
            raise ValueError(
                f"{count} segments, but the work list was made for {self.capacity.segments}"
            )
        self.longest = self.capacity.tokens if longest is None else longest
        self.stacks = sharing is not None
        self.covered.zero_()
        if not count:
            self.counters.zero_()
            return
        rows = [tile.rows for tile in self.tiles]
        _list_work[(count,)](
            segments,
            sharing,
            self.items,
            self.counters,
            self.covered,
            count,
            self.items.stride(0),
            self.processors,
            self.splits,
            GROUP=self.group,
            SEGMENTS=triton.next_power_of_2(self.capacity.segments),
            SMALL=rows[0],
            MEDIUM=rows[min(1, len(rows) - 1)],
            LARGE=rows[-1],
            CLASSES=len(rows),
            SMALLEST=SMALLEST_SPLIT,
            LARGEST=LARGEST_SPLIT,
            PER_ROW=TOKENS_PER_ROW,
            MOST=MOST_SPLITS,
            FEW=FEW_ROWS,
            MANY=MANY_ROWS,
            PER_MANY=TOKENS_PER_MANY,
            COST=self.tile_cost,
            NAMED=NAMED,
            STACKED=STACKED,
            WORDS=ITEM,
        )


@triton.jit
def _cuts(
    rows,
    kv_len,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    PER_ROW: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    PER_MANY: tl.constexpr,
):
    """Returns the cuts of a segment's keys, by its rows (queries times heads of a group) and its
    context; see `split_of`.

    The result is (keys of a split, additional keys of the first, number of the last): with many
    rows long splits are processed first, short ones last. With few rows all cuts are multiples of
    the same number, so that rows which share keys can share splits. A last split shorter than half
    a split is then part of the one before it: starting and merging it would take as long as reading
    it.
    """
    per_row = tl.where(rows > MANY, PER_MANY, PER_ROW)
    wanted = tl.maximum(tl.minimum(rows * per_row, LARGEST), tl.cdiv(kv_len, MOST))
    cut = tl.full(rows.shape, SMALLEST, tl.int32)
    for _ in tl.static_range(20):
        cut = tl.where(cut < wanted, cut * 2, cut)
    whole = kv_len // cut
    rest = kv_len % cut
    few = rows <= FEW
    last = tl.where(few & (whole > 0) & (2 * rest < cut), whole - 1, MOST)
    return cut, tl.where(few, 0, cut // 4), last


@triton.jit
def split_of(key, cut, more, last):
    """The split of a key."""
    return tl.minimum(tl.maximum(key - more, 0) // cut, last)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _shape_of(
    segments,
    order,
    index,
    there,
    GROUP: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    PER_ROW: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    PER_MANY: tl.constexpr,
):
    """Queries, first key, keys, cuts (see `_cuts`) and number of splits of the segments `order`."""
    field = segments + order * 5
    q_len = tl.load(field + 1, mask=there, other=0)
    kv_start = tl.load(field + 2, mask=there, other=0)
    kv_len = tl.load(field + 3, mask=there, other=1)
    cut, more, last = _cuts(
        q_len * GROUP, kv_len, SMALLEST, LARGEST, PER_ROW, MOST, FEW, MANY, PER_MANY
    )
    splits = split_of(kv_len - 1, cut, more, last) - split_of(kv_start, cut, more, last) + 1
    return q_len, kv_start, kv_len, cut, more, last, splits


@triton.jit
def _rank(common, split, index, any_common):
    """Counts the segments directly before each segment that share the split with it."""
    rank = tl.zeros_like(index)
    if any_common:
        first = tl.where(common <= split, index, 0)
        rank = index - tl.associative_scan(first, 0, _later)
    return rank


@triton.jit
def _list_work(
    segments,
    sharing,
    items,
    counters,
    covered,
    count,
    class_stride,
    processors,
    token_pairs,
    GROUP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SMALL: tl.constexpr,
    MEDIUM: tl.constexpr,
    LARGE: tl.constexpr,
    CLASSES: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    PER_ROW: tl.constexpr,
    MOST: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    PER_MANY: tl.constexpr,
    COST: tl.constexpr,
    NAMED: tl.constexpr,
    STACKED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program for each segment. Each sums the segments before its own, then lists its own items
    and tokens.

    Items are in order of splits, then of contexts from the longest: the last items are short. The
    first of the segments in a stack lists its item.
    """
    me = tl.program_id(0)
    index = tl.arange(0, SEGMENTS)
    there = index < count
    order = index
    mine = me
    if sharing is not None:
        order = tl.load(sharing + 2 * index, mask=there, other=0)
        mine = tl.load(sharing + 2 * me)
    q_len, kv_start, kv_len, cut, more, last, splits = _shape_of(
        segments, order, index, there, GROUP, SMALLEST, LARGEST, PER_ROW, MOST, FEW, MANY, PER_MANY
    )
    rows = q_len * GROUP
    kind = tl.where(rows <= SMALL, 0, tl.where(rows <= MEDIUM, 1, 2))
    kind = tl.minimum(kind, CLASSES - 1)
    step = tl.where(kind == 0, SMALL // GROUP, tl.where(kind == 1, MEDIUM // GROUP, LARGE // GROUP))
    tiles = tl.cdiv(q_len, step)

    # common: how many splits a segment shares with the one before it. A segment's last split is its
    # own.
    deep: tl.constexpr = SMALL // GROUP
    common = tl.zeros_like(index)
    any_common = False
    stacks: tl.constexpr = sharing is not None and deep > 1
    if stacks:
        shared = tl.load(sharing + 2 * index + 1, mask=there, other=0)
        any_common = tl.max(shared) >= SMALLEST
        if any_common:
            behind = there & (index > 0)
            before_it = tl.load(sharing + 2 * index - 2, mask=behind, other=0)
            q_len_, kv_start_, _, cut_, _, _, splits_ = _shape_of(
                segments,
                before_it,
                index,
                behind,
                GROUP,
                SMALLEST,
                LARGEST,
                PER_ROW,
                MOST,
                FEW,
                MANY,
                PER_MANY,
            )
            like_it = (
                behind
                & (q_len == 1)
                & (q_len_ == 1)
                & (cut == cut_)
                & (kv_start == 0)
                & (kv_start_ == 0)
            )
            common = tl.minimum(
                tl.minimum(splits, splits_) - 1, tl.maximum(shared - more, 0) // cut
            )
            common = tl.where(like_it, common, 0)

    mine_here = index == me
    my_keys = tl.sum(tl.where(mine_here, kv_len, 0))
    before = (kv_len > my_keys) | ((kv_len == my_keys) & (index < me))
    my_kind = tl.sum(tl.where(mine_here, kind, 0))
    my_step = tl.sum(tl.where(mine_here, step, 0))
    my_splits = tl.sum(tl.where(mine_here, splits, 0))
    my_cut = tl.sum(tl.where(mine_here, cut, 0))
    my_more = tl.sum(tl.where(mine_here, more, 0))
    my_last = tl.sum(tl.where(mine_here, last, 0))
    my_tiles = tl.sum(tl.where(mine_here, tiles, 0))
    like = tl.where(kind == my_kind, tiles, 0)
    if me == 0:
        if any_common:
            listed = tl.zeros_like(index)
            for i in range(tl.max(tl.where(there, splits, 0))):
                leads = (splits > i) & (_rank(common, i, index, any_common) % deep == 0)
                listed += tl.where(leads, tiles, 0)
        else:
            listed = tiles * splits
        for i in tl.static_range(CLASSES):
            tl.store(counters + i, tl.sum(tl.where(kind == i, listed, 0)))
            tl.store(counters + 4 * CLASSES + i, tl.sum(tl.where(kind == i, tiles, 0)))
        # Large tiles fill a multiprocessor each and are limited by arithmetic; the others are
        # limited by memory, which some multiprocessors can saturate. Both run at once, and end
        # together if each gets its share.
        keys = tiles.to(tl.float32) * (kv_len - kv_start - q_len // 2)  # too many for 32 bits
        keys -= common * cut  # memory serves them once
        large = COST * tl.sum(tl.where(kind == CLASSES - 1, keys, 0.0))
        other = tl.sum(tl.where(kind == CLASSES - 1, 0.0, keys))
        share = tl.ceil(processors * (large / tl.maximum(large + other, 1.0))).to(tl.int32)
        tl.store(counters + 3 * CLASSES, tl.maximum(share, 1))

    q_row = tl.load(segments + mine * 5)
    queries = tl.load(segments + mine * 5 + 1)
    first_key = tl.load(segments + mine * 5 + 2)
    seat = tl.load(segments + mine * 5 + 4)
    block = tl.arange(0, 128)
    first_split = split_of(first_key, my_cut, my_more, my_last)
    class_items = items + my_kind.to(tl.int64) * class_stride
    place = 0  # of the split's first item
    for i in range(my_splits):
        rank = _rank(common, i, index, any_common)
        leads = (splits > i) & (rank % deep == 0)
        listed_now = tl.where(leads, like, 0)
        first_place = place + tl.sum(tl.where(before, listed_now, 0))
        place += tl.sum(listed_now)
        stack = 1
        if any_common:
            end_of_run = tl.min(tl.where((index > me) & (common <= i), index, SEGMENTS))
            stack = tl.minimum(end_of_run - me, deep)
        if tl.sum(tl.where(mine_here & leads, 1, 0)) == 1:
            for base in range(0, my_tiles, 128):
                tile = base + block
                kept = tile < my_tiles
                # the last tiles have most keys, so they go first
                start = (my_tiles - 1 - tile) * my_step
                size = tl.minimum(my_step, queries - start)
                own = my_keys - queries + start
                begin = tl.where(i == 0, first_key, (first_split + i) * my_cut + my_more)
                end = tl.where(
                    first_split + i == my_last, my_keys, (first_split + i + 1) * my_cut + my_more
                )
                end = tl.minimum(own + size, end)
                word = class_items + (first_place + tile) * WORDS
                tl.store(word, q_row + start, mask=kept)
                tl.store(word + 1, tl.where(stack > 1, stack, size), mask=kept)
                tl.store(word + 2, own, mask=kept)
                tl.store(word + 3, tl.zeros_like(tile) + begin, mask=kept)
                tl.store(word + 4, end, mask=kept)
                tl.store(word + 5, tl.zeros_like(tile) + seat, mask=kept)
                tl.store(word + 6, tl.zeros_like(tile) + token_pairs, mask=kept)
                tl.store(word + 7, tl.zeros_like(tile) + i, mask=kept)
                tl.store(word + 8, tl.zeros_like(tile) + my_splits, mask=kept)
                tl.store(
                    word + 9,
                    split_of(own + size - 1, my_cut, my_more, my_last) - first_split + 1,
                    mask=kept,
                )
                tl.store(word + 10, tl.zeros_like(tile) + tl.where(stack > 1, 1, 0), mask=kept)
                tl.store(word + 11, tl.zeros_like(tile) + my_cut, mask=kept)
                tl.store(word + 12, tl.zeros_like(tile) + my_more, mask=kept)
                tl.store(word + 13, tl.zeros_like(tile) + my_last, mask=kept)
            if stack > 1:
                named = class_items + first_place * WORDS + NAMED + index - me
                in_stack = (index >= me) & (index < me + stack)
                tl.store(
                    named, tl.load(segments + order * 5, mask=in_stack, other=0), mask=in_stack
                )
                tl.store(named + STACKED, splits, mask=in_stack)
    for base in range(0, queries, 128):
        query = base + block
        tl.store(covered + q_row + query, 1, mask=query < queries)
