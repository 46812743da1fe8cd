"""The vectorised attention and the slow twin agree; both see exactly [kv_start, own coordinate]."""

import math
import random

import pytest
import torch

from pensieve.plugins.attention.reference import (
    multi_token_attention,
    rotate,
    write_kv,
)

CHUNK, LAYERS, HEAD_DIM = 8, 3, 16
SCALE = HEAD_DIM**-0.5


def multi_token_attention_slow(q, segments, block_table, pool, layer, scale, window=0, sinks=None):
    """The twin of `multi_token_attention`: token by token, in float64."""
    o = q.new_zeros(q.shape)
    share = q.shape[1] // pool.shape[3]
    chunk_tokens = pool.shape[4]
    for q_start, q_len, kv_start, kv_len, seat in segments.tolist():
        for j in range(q_len):
            own = kv_len - q_len + j
            first = max(kv_start, own - window + 1) if window else kv_start
            places = [
                (block_table[seat, c // chunk_tokens], c % chunk_tokens)
                for c in range(first, own + 1)
            ]
            k, v = (
                torch.stack([pool[slot, layer, i, :, offset] for slot, offset in places]).double()
                for i in (0, 1)
            )
            k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))  # [keys, heads, D]
            scores = torch.einsum("hd,nhd->hn", q[q_start + j].double(), k).mul(scale)
            sink = torch.empty(len(scores), 0) if sinks is None else sinks.unsqueeze(1)
            weights = torch.cat((scores, sink.double()), dim=1).softmax(dim=-1)[:, : len(places)]
            o[q_start + j] = torch.einsum("hn,nhd->hd", weights, v).to(o.dtype)
    return o


def random_batch(seed, heads, kv_heads, dtype=torch.float32, seats=6):
    """Segments of all lengths over scattered chunks; unowned slots and padding rows hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    dice = random.Random(seed)
    pool = torch.full((80, LAYERS, 2, kv_heads, CHUNK, HEAD_DIM), float("nan"), dtype=dtype)
    block_table = torch.randperm(80, generator=generator)[: seats * 10].view(seats, 10).int()
    segments = []
    row = 0
    for seat in range(seats):
        length = dice.choice([1, 7, 8, 9, 40, 80])
        slots = block_table[seat, : -(-length // CHUNK)]
        pool[slots] = torch.randn((len(slots), *pool.shape[1:]), generator=generator).to(dtype)
        ends = sorted({length, dice.randint(1, length)})
        for end, before in zip(ends, [0, *ends], strict=False):
            q_len = dice.choice([1, end - before, dice.randint(1, end - before)])
            kv_start = dice.choice([0, 0, dice.randint(0, end - q_len)])
            segments.append((row, q_len, kv_start, end, seat))
            row += q_len + dice.choice([0, 0, 2])  # rows of no segment: padding
    q = torch.randn(row + 3, heads, HEAD_DIM, generator=generator).to(dtype)
    dice.shuffle(segments)
    return q, torch.tensor(segments, dtype=torch.int32), block_table, pool


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(6))
def test_the_fast_road_agrees_with_its_twin(seed, heads, kv_heads):
    batch = random_batch(seed, heads, kv_heads)
    for layer in (0, LAYERS - 1):
        fast = multi_token_attention(*batch, layer, SCALE)
        torch.testing.assert_close(
            fast, multi_token_attention_slow(*batch, layer, SCALE), atol=2e-6, rtol=1e-5
        )


@pytest.mark.parametrize("window", [0, 1, 5, CHUNK, 13, 80, 1000])
@pytest.mark.parametrize(
    "sinks", [None, (0.5, -2.0, 30.0, -torch.inf, 0.0, 4.0)], ids=["", "sinks"]
)
def test_windows_and_sinks_agree_with_the_twin(window, sinks):
    sinks = None if sinks is None else torch.tensor(sinks)
    batch = random_batch(2, 6, 2)
    fast, slow = (
        attention(*batch, 1, SCALE, window, sinks)
        for attention in (multi_token_attention, multi_token_attention_slow)
    )
    torch.testing.assert_close(fast, slow, atol=2e-6, rtol=1e-5)
    plain = multi_token_attention(*batch, 1, SCALE)
    assert torch.equal(fast, plain) == (sinks is None and window in (0, 80, 1000))


def test_a_window_counts_from_the_query_and_a_sink_has_no_value():
    """With equal scores the result is the sum of the visible values, divided by their number and
    the sink's weight."""
    pool = torch.zeros(3, 1, 2, 1, 4, 1)
    for coordinate in range(12):
        pool[coordinate // 4, 0, 1, 0, coordinate % 4] = coordinate
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    segments = torch.tensor([[0, 3, 1, 9, 0], [3, 1, 1, 2, 0]], dtype=torch.int32)
    q = torch.zeros(4, 1, 1)
    sinks = torch.tensor([math.log(2.0)])
    for attention in (multi_token_attention, multi_token_attention_slow):
        o = attention(q, segments, table, pool, 0, 1.0, window=3)
        assert o.flatten().tolist() == pytest.approx([5, 6, 7, 1])
        o = attention(q, segments, table, pool, 0, 1.0, 3, sinks)
        assert o.flatten().tolist() == pytest.approx([15 / 5, 18 / 5, 21 / 5, 1 / 3])


def test_keys_before_every_window_are_not_read():
    q, segments, block_table, pool = random_batch(4, 4, 2, seats=2)
    segments = torch.tensor([[0, 3, 0, 40, 0]], dtype=torch.int32)
    pool[block_table[0, :5]] = torch.randn(5, *pool.shape[1:])
    whole = multi_token_attention(q, segments, block_table, pool, 0, SCALE, 20)
    # keys 0 to 15; the window of the first query begins at 18
    pool[block_table[0, :2]] = float("nan")
    assert whole.isfinite().all()
    torch.testing.assert_close(
        multi_token_attention(q, segments, block_table, pool, 0, SCALE, 20), whole
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_is_accumulated_in_float32(dtype, tolerance):
    batch = random_batch(1, 4, 2, dtype)
    fast = multi_token_attention(*batch, 1, SCALE)
    slow = multi_token_attention_slow(*batch, 1, SCALE)
    assert fast.dtype == dtype
    torch.testing.assert_close(fast, slow, atol=tolerance / 4, rtol=tolerance)


def test_rows_of_no_segment_are_zero():
    q, segments, block_table, pool = random_batch(3, 4, 2)
    covered = torch.zeros(len(q), dtype=torch.bool)
    for q_start, q_len, *_ in segments.tolist():
        covered[q_start : q_start + q_len] = True
    assert not covered.all()
    for attention in (multi_token_attention, multi_token_attention_slow):
        o = attention(q, segments, block_table, pool, 0, SCALE)
        assert (o[~covered] == 0).all() and o[covered].abs().sum(dim=(1, 2)).min() > 0


def test_a_batch_of_padding_only_and_segments_without_queries():
    q, segments, block_table, pool = random_batch(3, 4, 2)
    assert (multi_token_attention(q, segments[:0], block_table, pool, 0, SCALE) == 0).all()
    idle = torch.tensor([[0, 0, 0, 0, 0]], dtype=torch.int32)
    assert (multi_token_attention(q, idle, block_table, pool, 0, SCALE) == 0).all()


def test_a_query_sees_the_keys_from_kv_start_to_its_own():
    """With equal scores the result is the mean of the visible values, which can be computed by
    hand."""
    pool = torch.zeros(3, 1, 2, 1, 4, 1)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    for coordinate in range(12):
        pool[table[0, coordinate // 4], 0, 1, 0, coordinate % 4] = coordinate
    segments = torch.tensor([[0, 2, 3, 9, 0], [2, 1, 0, 1, 0]], dtype=torch.int32)
    q = torch.ones(3, 1, 1)
    for attention in (multi_token_attention, multi_token_attention_slow):
        o = attention(q, segments, table, pool, 0, 1.0)
        assert o.flatten().tolist() == pytest.approx([(3 + 7) / 2, (3 + 8) / 2, 0.0])


def test_many_long_segments_are_gathered_in_several_groups(monkeypatch):
    batch = random_batch(5, 4, 2, seats=8)
    whole = multi_token_attention(*batch, 0, SCALE)
    monkeypatch.setattr("pensieve.plugins.attention.reference.GATHERED", 1)
    torch.testing.assert_close(multi_token_attention(*batch, 0, SCALE), whole)


def test_rotation_turns_pairs_half_the_rotary_dimensions_apart():
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0, 5.0]]])
    angles = torch.tensor([[math.pi / 2, math.pi]])
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
    # Pair (1, 0) turned by 90 degrees is (0, 1); pair (0, 2) by 180 is (0, -2); the fifth dimension
    # stays.
    torch.testing.assert_close(rotate(x, rotary), torch.tensor([[[0.0, 0.0, 1.0, -2.0, 5.0]]]))


@pytest.mark.parametrize("rotary_dims", [0, 8, HEAD_DIM])
def test_write_kv_writes_one_layer_of_the_tokens_that_have_a_slot(rotary_dims):
    q, k, v = torch.randn(5, 4, HEAD_DIM), torch.randn(5, 2, HEAD_DIM), torch.randn(5, 2, HEAD_DIM)
    angles = torch.randn(5, rotary_dims // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.tensor([3 * CHUNK + 7, -1, 0, 4 * CHUNK, -1], dtype=torch.int32)
    pool = torch.zeros(6, LAYERS, 2, 2, CHUNK, HEAD_DIM)
    expected = pool.clone()
    for token, (slot, offset) in {0: (3, 7), 2: (0, 0), 3: (4, 0)}.items():
        expected[slot, 1, 0, :, offset] = rotate(k, rotary)[token] if rotary_dims else k[token]
        expected[slot, 1, 1, :, offset] = v[token]

    turned = write_kv(q, k, v, rotary, slots, pool, 1)

    assert torch.equal(pool, expected)
    assert torch.equal(turned, rotate(q, rotary) if rotary_dims else q)
    assert turned.data_ptr() != q.data_ptr()
