"""The attention kernel: as exact as plain attention in its precision, and independent of the rest
of the step."""

import random
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from ..kernel_cases import (
    CUDA,
    DEVICE,
    dense_attention,
    error,
    in_eight_bits,
    needs_kernels,
    random_batch,
)

pytest.importorskip("triton")
import triton.language as tl

from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention import reference as attention_reference
from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import NAMED, STACKED, Capacity, Tile, WorkList

from .work_list_twin import list_work

TINY = (Tile(16, 16, 4, 2, 1), Tile(32, 32, 4, 2, 1), Tile(128, 32, 4, 2, 1))  # for the interpreter
LENGTHS = (1, 31, 32, 33, 700, 2500, 9000, 1200) if CUDA else (1, 31, 33, 70, 110)
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    """Without a GPU contexts are short, and so must be their splits."""
    if not CUDA:
        for name, size in {"SMALLEST_SPLIT": 32, "LARGEST_SPLIT": 64, "TOKENS_PER_ROW": 1}.items():
            monkeypatch.setattr(work_list, name, size)


def work_for(q, segments, pool, spare=5):
    heads, head_dim = q.shape[1:]
    capacity = Capacity(len(q) + spare, len(segments) + spare, max(LENGTHS))
    if CUDA:
        return attention_kernel.make_work_list(capacity, heads, pool.shape[3], head_dim, q.dtype)
    return WorkList(capacity, heads, pool.shape[3], head_dim, TINY, DEVICE)


def attend(q, segments, block_table, pool, layer=1, work=None, window=0, sinks=None):
    work = work or work_for(q, segments, pool)
    work.build(segments)
    scale = q.shape[2] ** -0.5
    return attention_kernel.multi_token_attention(
        q, block_table, pool, layer, scale, work, window, sinks
    )


def assert_as_exact_as_plain_attention(batch, o, layer=1, window=0, sinks=None):
    scale = batch[0].shape[2] ** -0.5
    exact = dense_attention(*batch, layer, scale, torch.float64, window, sinks)
    plain = error(dense_attention(*batch, layer, scale, batch[0].dtype, window, sinks), exact)
    assert o.dtype == batch[0].dtype and o.isfinite().all()
    # the value of a lone key is exact in plain attention
    assert error(o, exact) <= 2 * plain + 1e-7, (
        f"error {error(o, exact):.3g}, of plain attention {plain:.3g}"
    )
    assert (o[(exact == 0).all(dim=2)] == 0).all()  # tokens of no segment


@needs_kernels
@pytest.mark.parametrize("seed", range(4 if CUDA else 1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads", [(4, 4), (8, 2), (5, 1), (14, 2), (32, 1)] if CUDA else [(2, 2), (6, 2)]
)
def test_errors_are_those_of_plain_attention(seed, dtype, heads, kv_heads):
    batch = random_batch(seed, heads, kv_heads, 128 if CUDA else 16, dtype, LENGTHS)
    for layer in (0, 1):
        assert_as_exact_as_plain_attention(batch, attend(*batch, layer), layer)


@needs_kernels
@pytest.mark.parametrize(
    "head_dim, chunk",
    [(16, 16), (64, 64), (64, 24), (80, 32), (96, 16), (256, 32)] if CUDA else [(24, 16), (16, 24)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_and_chunk_sizes(head_dim, chunk, dtype):
    batch = random_batch(7, 4, 2, head_dim, dtype, LENGTHS, chunk)
    assert_as_exact_as_plain_attention(batch, attend(*batch))


def random_sinks(heads, dtype):
    return torch.randn(heads, generator=torch.Generator().manual_seed(3)).mul(4).to(DEVICE, dtype)


WINDOWS = [(0, True), (1, False), (20, True), (33, False), (75, True), (200, True)]
"""(window, whether with sinks): of one key, of less than a tile, of a split, of more, of more than
all contexts."""
if CUDA:
    WINDOWS = [(0, True), (1, False), (20, True), (100, False), (128, True), (5000, False)]


@needs_kernels
@pytest.mark.parametrize("window, with_sinks", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_windows_and_sinks(window, with_sinks, dtype):
    """Each row is as exact as plain attention, and has the same bits with any neighbours."""
    q, segments, block_table, pool = batch = random_batch(
        12, 6, 2, 64 if CUDA else 16, dtype, LENGTHS
    )
    # the smallest and the largest tiles
    assert segments[:, 1].min() == 1 and 3 * segments[:, 1].max() > 64
    sinks = random_sinks(6, dtype) if with_sinks else None
    work = work_for(q, segments, pool)
    for layer in (0, 1):
        o = attend(*batch, layer, work, window, sinks)
        assert_as_exact_as_plain_attention(batch, o, layer, window, sinks)
    assert not work.arrivals.any() and not work.counters[1:3].any()
    assert not torch.equal(o, attend(*batch))
    for segment in segments if CUDA else segments[::3]:
        alone = attend(q, segment.view(1, 5), block_table, pool, 1, work, window, sinks)
        rows = slice(int(segment[0]), int(segment[0] + segment[1]))
        assert torch.equal(alone[rows], o[rows])


@needs_kernels
@pytest.mark.parametrize("window", [0, 20])
def test_sinks_of_any_size(window):
    """A sink far below the scores changes nothing; beside one far above them the values have no
    weight."""
    batch = random_batch(12, 2, 2, 64 if CUDA else 16, torch.float32, LENGTHS[:5])
    sinks = torch.tensor([float("-inf"), 1e4], device=DEVICE)
    o, plain = attend(*batch, window=window, sinks=sinks), attend(*batch, window=window)
    torch.testing.assert_close(o[:, 0], plain[:, 0])
    assert (o[:, 1] == 0).all() and plain[:, 1].any()


@needs_kernels
def test_keys_before_every_window_are_not_read():
    length = max(LENGTHS)
    head_dim = 64 if CUDA else 16
    dtype = DTYPES[1]
    _, _, block_table, pool = random_batch(2, 4, 2, head_dim, dtype, [length])
    for queries in (1, 9, length // 3):
        segments = torch.tensor([[0, queries, 0, length, 0]], dtype=torch.int32, device=DEVICE)
        rows = torch.randn(queries, 4, head_dim, device=DEVICE).to(dtype)
        whole = attend(rows, segments, block_table, pool, window=24)
        masked = pool.clone()
        # whole tiles of keys
        masked[block_table[0, : (length - queries - 24) // 64 * 2].long()] = float("nan")
        assert (
            torch.equal(attend(rows, segments, block_table, masked, window=24), whole)
            and whole.isfinite().all()
        )


@pytest.fixture
def bfloat16_products(monkeypatch):
    """Lets Triton's interpreter multiply bfloat16, which it has as integers of 16 bits."""
    if not CUDA:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def wide(one):
            bits = one.data.astype("uint32") << 16
            return (
                TensorHandle(bits.view("float32"), tl.float32) if one.dtype == tl.bfloat16 else one
            )

        def dot(self, a, b, *rest, plain=InterpreterBuilder.create_dot):
            return plain(self, wide(a), wide(b), *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@needs_kernels
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, chunk",
    [(8, 2, 128, 32), (4, 4, 80, 24), (32, 1, 64, 16)]
    if CUDA
    else [(6, 2, 16, 32), (4, 2, 24, 24)],
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_a_pool_in_eight_bits(dtype, heads, kv_heads, head_dim, chunk, bfloat16_products):
    """Exact like plain attention over the decoded KV, and a row's bits are equal with any
    neighbours. The sizes of values differ by up to 2**20."""
    q, segments, block_table, pool = random_batch(
        6, heads, kv_heads, head_dim, dtype, LENGTHS, chunk
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    sizes = torch.randint(
        -15, 5, (*pool.shape[:2], 2, *pool.shape[3:5], 1), generator=generator, device=DEVICE
    )
    sizes[:, :, 0] = 0  # scores so large would leave one key
    codes, decoded = in_eight_bits(pool.float() * sizes.float().exp2())
    scale = head_dim**-0.5
    work = work_for(q, segments, pool)
    for layer in (0, 1):
        o = attend(q, segments, block_table, codes, layer, work)
        exact = dense_attention(q, segments, block_table, decoded, layer, scale, torch.float64)
        rounded = torch.float32 if dtype == torch.float32 else torch.bfloat16
        plain = error(
            dense_attention(q, segments, block_table, decoded, layer, scale, rounded), exact
        )
        assert o.dtype == dtype and error(o, exact) <= 2 * plain
    twin = attention_reference.multi_token_attention(
        *(x.cpu() for x in (q.float(), segments, block_table, codes)), 1, scale
    )
    assert error(twin.to(DEVICE), exact) < 1e-5
    alone = attend(q, segments[:1], block_table, codes, 1, work)
    rows = slice(int(segments[0, 0]), int(segments[0, :2].sum()))
    assert torch.equal(alone[rows], o[rows])
    sinks = random_sinks(heads, dtype)
    for window in (20, 40):  # shorter and longer than the shortest split
        o = attend(q, segments, block_table, codes, 1, work, window, sinks)
        exact = dense_attention(
            q, segments, block_table, decoded, 1, scale, torch.float64, window, sinks
        )
        plain = error(
            dense_attention(q, segments, block_table, decoded, 1, scale, rounded, window, sinks),
            exact,
        )
        assert error(o, exact) <= 2 * plain


@needs_kernels
@pytest.mark.parametrize("table", ["reversed", "shared"])
def test_block_tables_in_any_order(table):
    batch = random_batch(11, 4, 2, 128 if CUDA else 16, DTYPES[-1], LENGTHS, table=table)
    assert_as_exact_as_plain_attention(batch, attend(*batch))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_with_any_neighbours(dtype):
    q, segments, block_table, pool = random_batch(5, 4, 1, 128 if CUDA else 16, dtype, LENGTHS)
    together = attend(q, segments, block_table, pool)
    for segment in segments if CUDA else segments[::3]:
        alone = attend(q, segment.view(1, 5), block_table, pool)
        rows = slice(int(segment[0]), int(segment[0] + segment[1]))
        assert torch.equal(alone[rows], together[rows])
        assert (alone[: rows.start] == 0).all() and (alone[rows.stop :] == 0).all()
    assert torch.equal(attend(q, segments.flip(0), block_table, pool), together)


@pytest.mark.parametrize("overlap", [True, False])
def test_large_tiles_leave_multiprocessors_only_to_kernels_beside_them(monkeypatch, overlap):
    kernel = MagicMock()
    monkeypatch.setattr(attention_kernel, "_attend", kernel)
    monkeypatch.setattr(attention_kernel, "_overlaps", lambda device: overlap)
    work = WorkList(Capacity(200, 1, 200), 2, 2, 16, TINY, "meta")
    q, pool = torch.empty(200, 2, 16, device="meta"), torch.empty(9, 1, 2, 2, 32, 16, device="meta")
    attention_kernel.multi_token_attention(q, torch.empty(1, 9, device="meta"), pool, 0, 1.0, work)
    names = ("LARGEST", "LEADS", "FOLLOWS", "launch_pdl")
    launches = kernel.__getitem__.return_value.call_args_list
    assert [[launch.kwargs[name] for name in names] for launch in launches] == (
        [[True, True, False, False], [False, True, True, True], [False, False, True, True]]
        if overlap
        else [[False] * 4] * 3
    )


@needs_kernels
def test_a_work_list_serves_one_step_after_the_other():
    batch = random_batch(3, 4, 2, 128 if CUDA else 16, DTYPES[-1], LENGTHS)
    q, segments, block_table, pool = batch
    work = work_for(q, segments, pool)
    first = attend(*batch, work=work)
    work.build(segments[:2])
    scale = q.shape[2] ** -0.5
    again = [
        attention_kernel.multi_token_attention(q, block_table, pool, layer, scale, work)
        for layer in (0, 1)
    ]
    work.build(segments[:0])
    assert (attention_kernel.multi_token_attention(q, block_table, pool, 0, scale, work) == 0).all()
    for layer, o in enumerate(again):
        assert_as_exact_as_plain_attention((q, segments[:2], block_table, pool), o, layer)
    assert torch.equal(attend(*batch, work=work), first)


@needs_kernels
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("group", [1, 4, 5])
def test_the_list_agrees_with_its_twin(seed, group):
    dice = random.Random(seed)
    segments = []
    row = 0
    for seat in range(7):
        kv_len = dice.choice([1, 500, 512, 513, 3000, 40000])
        q_len = min(kv_len, dice.choice([0, 1, 3, 16, 17, 200, 2000]))
        segments.append((row, q_len, dice.randint(0, kv_len - q_len) if q_len else 0, kv_len, seat))
        row += q_len
    tiles = (Tile(16, 64, 4, 2, 1), Tile(64, 64, 4, 2, 1), Tile(128, 64, 8, 2, 1))
    work = WorkList(Capacity(row + 9, 8, 40000), group, 1, 16, tiles, DEVICE)
    listed = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
    work.build(listed)
    items = list_work(listed, group, tiles, work.splits)
    assert work.counters[:3].tolist() == [[len(kind) for kind in items], [0, 0, 0], [0, 0, 0]]
    tiles_listed = [len({item[0] for item in kind}) for kind in items]
    assert work.counters[4].tolist() == tiles_listed
    assert all(
        item[7] == 0
        for kind, count in zip(items, tiles_listed, strict=True)
        for item in kind[:count]
    )
    keys = [sum(max(end - begin, 0) for _, _, _, begin, end, *_ in kind) for kind in items]
    large = work_list.LARGE_TILE_COST * keys[2]
    share = work.processors * large / max(large + keys[0] + keys[1], 1)
    # its keys are summed up less exactly
    assert abs(work.counters[3, 0].item() - share) <= 2 + share / 10
    assert [work.items[i, : len(kind), :NAMED].tolist() for i, kind in enumerate(items)] == items
    assert work.covered.tolist() == [1] * row + [0] * 9
    assert max((item[8] for kind in items for item in kind), default=0) <= work.splits


@pytest.fixture
def equal_rows(monkeypatch):
    """Lets Triton's interpreter multiply as a GPU does: a row of a product has the same bits in any
    place of the tile. NumPy's matrix product does not."""
    if not CUDA:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def dot(self, a, b, d, *rest):
            product = np.einsum(
                "mk,kn->mn", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
            )
            return TensorHandle(product + d.data, d.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def shared_batch(seed, dtype, heads, kv_heads, lengths):
    """Generating rows with contexts in a tree: (keys in common with the row before, keys). Beside
    them a prompt and a row of their own. Returns the batch and its sharing, with segments in
    another order than the tree's."""
    chunk = 32
    head_dim = 128 if CUDA else 16
    contexts = [keys for _, keys in lengths]
    blocks = -(-max(contexts) // chunk)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    table = torch.zeros(len(lengths) + 1, blocks, dtype=torch.int32, device=DEVICE)
    pool = torch.randn(
        (len(lengths) + 1) * blocks,
        2,
        2,
        kv_heads,
        chunk,
        head_dim,
        generator=generator,
        device=DEVICE,
    )
    slots = torch.randperm(len(pool), generator=generator, device=DEVICE).int().view(-1, blocks)
    for row, (shared, _) in enumerate(lengths):
        table[row] = slots[row]
        table[row, : shared // chunk] = table[row - 1, : shared // chunk]
    table[-1] = slots[-1]
    places = list(range(len(lengths)))
    random.Random(seed).shuffle(places)  # of row i of the tree: its segment
    segments: list = [None] * len(lengths)
    for row, keys in enumerate(contexts):
        segments[places[row]] = (places[row], 1, 0, keys, row)
    prompt = min(70, max(contexts))
    segments.append((len(lengths), prompt, 0, max(contexts), len(lengths)))
    sharing = [(places[row], shared) for row, (shared, _) in enumerate(lengths)] + [
        (len(lengths), 0)
    ]
    q = torch.randn(len(lengths) + prompt, heads, head_dim, generator=generator, device=DEVICE)
    as_int = dict(dtype=torch.int32, device=DEVICE)
    batch = q.to(dtype), torch.tensor(segments, **as_int), table, pool.to(dtype)
    return batch, torch.tensor(sharing, **as_int)


LONG = 1024 if CUDA else 32  # a split
TREES = {
    "one prefix": [(0, 4), *[(2, 2 + i % 3) for i in range(5)]],
    "two levels": [(0, 4), (3, 5), (1, 3), (2, 3), (0, 2), (1, 3)],
    "short of a split": [(0, 3), (1, 3), (1, 4)],
}


@needs_kernels
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (2, 2), (20, 1)])
def test_rows_that_share_chunks_have_the_same_bits_as_alone(tree, heads, kv_heads, equal_rows):
    odd = -32 if tree == "short of a split" else 0
    split = LONG * (4 if CUDA and heads // kv_heads > work_list.FEW_ROWS else 1)
    lengths = [
        (max(shared * split + odd, 0), keys * split + 7 * i % split + 1)
        for i, (shared, keys) in enumerate(TREES[tree])
    ]
    batch, sharing = shared_batch(len(tree), DTYPES[-1], heads, kv_heads, lengths)
    q, segments, table, pool = batch
    scale = q.shape[2] ** -0.5
    longest = Capacity(len(q), len(segments), int(segments[:, 3].max()))
    tiles = TINY if heads < 20 else (Tile(64, 32, 4, 2, 1), TINY[-1])
    if CUDA:
        tiles = attention_kernel.tiles_for(q.dtype, heads, kv_heads, q.shape[2])
    work = WorkList(longest, heads, kv_heads, q.shape[2], tiles, DEVICE)
    results = []
    for given in (None, sharing):
        work.build(segments, sharing=given)
        items = list_work(segments, heads // kv_heads, tiles, work.splits, given)
        for kind, expected in enumerate(items):
            got = work.items[kind, : len(expected)].tolist()
            for item, wanted in zip(got, expected, strict=True):
                size = item[1] if item[10] else 0
                names = item[NAMED : NAMED + size] + item[NAMED + STACKED : NAMED + STACKED + size]
                assert item[:NAMED] + names == wanted
        assert work.counters[0].tolist()[: len(items)] == [len(kind) for kind in items]
        stacked = [item for item in items[0] if item[10]]
        assert bool(stacked) == (given is not None and tree != "short of a split")
        results.append(attention_kernel.multi_token_attention(q, table, pool, 1, scale, work))
        assert not work.arrivals.any() and not work.counters[1:3].any()
    assert torch.equal(*results)
    assert_as_exact_as_plain_attention(batch, results[1])


@needs_kernels
def test_large_tiles_over_a_long_context_get_every_multiprocessor():
    """6,000 queries of 64 heads a group, two to a tile, over a million keys: more keys than 32 bits
    count."""
    tiles = (Tile(64, 64, 4, 2, 1), Tile(128, 64, 8, 2, 1))
    work = WorkList(Capacity(6000, 1, 2**20), 64, 1, 16, tiles, DEVICE)
    work.build(torch.tensor([(0, 6000, 0, 2**20, 0)], dtype=torch.int32, device=DEVICE))
    assert work.counters[3, 0].item() == work.processors


@needs_kernels
def test_what_no_work_list_holds_is_refused():
    batch = random_batch(3, 4, 2, 16, torch.float32, LENGTHS[:4])
    work = work_for(*batch[:2], batch[3], spare=0)
    with pytest.raises(ValueError, match="segments"):
        work.build(torch.cat((batch[1], batch[1])))
    with pytest.raises(ValueError, match="beyond"):
        attention_kernel.multi_token_attention(
            torch.cat((batch[0], batch[0])), *batch[2:], 0, 1.0, work
        )
    with pytest.raises(ValueError, match="tile"):
        attention_kernel.tiles_for(torch.float16, 4, 4, 512)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_one_captured_launch_serves_any_mixture():
    tokens = 2200
    scale = 128**-0.5
    q, _, block_table, pool = random_batch(1, 8, 2, 128, torch.bfloat16, (3000, 2000, 40, 9000))
    static_q = torch.zeros(tokens, 8, 128, dtype=q.dtype, device="cuda")
    static_segments = torch.zeros(16, 5, dtype=torch.int32, device="cuda")
    work = attention_kernel.make_work_list(Capacity(tokens, 16, 9000), 8, 2, 128, pool.dtype)
    work.build(static_segments)
    attention_kernel.multi_token_attention(static_q, block_table, pool, 1, scale, work)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.build(static_segments)
        o = attention_kernel.multi_token_attention(static_q, block_table, pool, 1, scale, work)
    mixtures = [
        [(0, 1, 0, 9000, 3)],
        [(0, 2000, 0, 3000, 0), (2000, 1, 0, 40, 2)],
        [(5, 30, 64, 1999, 1)],
        [],
    ]
    mixtures.append([(i, 1, 0, 1000 + i, i % 2) for i in range(16)])
    for mixture in mixtures * 2:
        static_segments.zero_()
        if mixture:
            static_segments[: len(mixture)] = torch.tensor(mixture, dtype=torch.int32)
        static_q.normal_()
        graph.replay()
        batch = (static_q, static_segments[: len(mixture)], block_table, pool)
        if mixture:
            assert_as_exact_as_plain_attention(batch, o)
        assert torch.equal(o, attend(*batch))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_slots_beyond_four_billion_elements():
    pool = torch.zeros(1200, 64, 2, 8, 32, 128, dtype=torch.bfloat16, device="cuda")  # 10 GB
    table = torch.tensor([[1199, 1198, 600]], dtype=torch.int32, device="cuda")
    pool[table[0].long(), 63] = torch.randn(3, 2, 8, 32, 128, device="cuda").to(pool.dtype)
    q = torch.randn(2, 8, 128, device="cuda").to(pool.dtype)
    segments = torch.tensor([[0, 2, 0, 90, 0]], dtype=torch.int32, device="cuda")
    batch = (q, segments, table, pool)
    assert_as_exact_as_plain_attention(batch, attend(*batch, layer=63), layer=63)


@needs_kernels
def test_a_tile_is_merged_when_its_own_last_split_is_done():
    """The first queries of a long prompt do not reach the last splits of its segment."""
    length = max(LENGTHS)
    head_dim = 128 if CUDA else 16
    _, _, block_table, pool = random_batch(2, 6, 2, head_dim, DTYPES[0], [length])
    queries = 3 * length // 4
    q = torch.randn(
        queries, 6, head_dim, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE
    )
    segments = torch.tensor([[0, queries, 0, length, 0]], dtype=torch.int32, device=DEVICE)
    (items,) = (
        kind for kind in list_work(segments, 3, work_for(q, segments, pool).tiles, 1) if kind
    )
    assert min(item[9] for item in items) < max(item[8] for item in items)
    batch = q, segments, block_table, pool
    assert_as_exact_as_plain_attention(batch, attend(*batch))
