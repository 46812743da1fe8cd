"""The CPU's operations agree with the reference, and layers of one step share its plans."""

import pytest
import torch

from pensieve.plugins.attention import cpu, fp8_pool, reference
from pensieve.plugins.attention.cpu import StepPlans

from .test_reference import CHUNK, HEAD_DIM, LAYERS, SCALE, random_batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_attention_of_all_layers_with_one_plan(seed, heads, kv_heads, dtype):
    batch = random_batch(seed, heads, kv_heads, dtype)
    plans = StepPlans()
    for layer in range(LAYERS):
        for window in (0, 13):
            torch.testing.assert_close(
                cpu.multi_token_attention(*batch, layer, SCALE, window, None, plans),
                reference.multi_token_attention(*batch, layer, SCALE, window),
            )


@pytest.mark.parametrize("window", [0, 5, 80])
def test_attention_with_sinks(window):
    sinks = torch.tensor([0.5, -2.0, 30.0, -torch.inf, 0.0, 4.0])
    batch = random_batch(2, 6, 2)
    torch.testing.assert_close(
        cpu.multi_token_attention(*batch, 1, SCALE, window, sinks, StepPlans()),
        reference.multi_token_attention(*batch, 1, SCALE, window, sinks),
    )


def test_one_row_of_each_segment():
    """A step of generation: no segment is padded in its queries."""
    q, _, block_table, pool = random_batch(7, 4, 2)
    pool = pool.nan_to_num(0.5)
    lengths = [40, 9, 8, 80]
    segments = torch.tensor([[i, 1, 0, length, i] for i, length in enumerate(lengths)])
    arguments = (q, segments.int(), block_table, pool, 1, SCALE)
    torch.testing.assert_close(
        cpu.multi_token_attention(*arguments, 0, None, StepPlans()),
        reference.multi_token_attention(*arguments),
    )


def test_attention_without_segments_or_queries():
    q, segments, block_table, pool = random_batch(3, 4, 2)
    idle = torch.zeros(1, 5, dtype=torch.int32)
    for nothing in (segments[:0], idle):
        o = cpu.multi_token_attention(q, nothing, block_table, pool, 0, SCALE, 0, None, StepPlans())
        assert o.shape == q.shape and not o.any()


@pytest.mark.parametrize("slots", [(15, -1, 0, 24, -1), (15, 1, 0, 24, 9)])
@pytest.mark.parametrize("rotary_dims", [0, 8, HEAD_DIM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_of_all_layers_with_one_plan(dtype, rotary_dims, slots):
    # as the model hands them over: views of one tensor
    q, k, v = torch.randn(5, 8, HEAD_DIM).to(dtype).split((4, 2, 2), dim=1)
    angles = torch.randn(5, rotary_dims // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.tensor(slots, dtype=torch.int32)
    pool = torch.zeros(6, LAYERS, 2, 2, CHUNK, HEAD_DIM, dtype=dtype)
    expected = pool.clone()
    plans = StepPlans()
    for layer in range(LAYERS):
        turned = cpu.write_kv(q, k, v, rotary, slots, pool, layer, plans)
        twin = reference.write_kv(q, k, v, rotary, slots, expected, layer)
        torch.testing.assert_close(turned, twin)
        assert turned.data_ptr() != q.data_ptr()
    torch.testing.assert_close(pool, expected)


def test_cleared_plans_follow_the_next_step():
    q, segments, block_table, pool = random_batch(1, 4, 2)
    plans = StepPlans()
    cpu.multi_token_attention(q, segments, block_table, pool, 0, SCALE, 0, None, plans)
    fewer = segments[:2]
    plans.clear()
    torch.testing.assert_close(
        cpu.multi_token_attention(q, fewer, block_table, pool, 0, SCALE, 0, None, plans),
        reference.multi_token_attention(q, fewer, block_table, pool, 0, SCALE),
    )


def test_a_pool_in_eight_bits_is_the_references():
    pool = torch.zeros(2, 1, 2, 2, CHUNK, HEAD_DIM + 1, dtype=fp8_pool.DTYPE)
    expected = pool.clone()
    q, k, v = torch.randn(3, 8, HEAD_DIM).split((4, 2, 2), dim=1)
    slots = torch.arange(3, dtype=torch.int32)
    rotary = torch.empty(3, 0)
    q = cpu.write_kv(q, k, v, rotary, slots, pool, 0, StepPlans())
    reference.write_kv(q, k, v, rotary, slots, expected, 0)
    assert torch.equal(pool, expected)
    segments = torch.tensor([[0, 3, 0, 3, 0]], dtype=torch.int32)
    table = torch.tensor([[0]], dtype=torch.int32)
    assert torch.equal(
        cpu.multi_token_attention(q, segments, table, pool, 0, SCALE, 0, None, StepPlans()),
        reference.multi_token_attention(q, segments, table, expected, 0, SCALE),
    )
