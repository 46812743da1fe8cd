"""The operations as torch sees them: pools by handle, gates, no aliasing, fake shapes."""

import pytest
import torch

from pensieve.plugins.attention import reference as attention_reference
from pensieve.plugins.torch_ops import register_pool, release_pool

HEADS, KV_HEADS, HEAD_DIM, CHUNK = 4, 2, 8, 4
ops = torch.ops.pensieve


@pytest.fixture
def inputs():
    # as the model hands them over: views of one tensor
    qkv = torch.randn(6, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    return q, k, v, torch.randn(6, HEAD_DIM), torch.arange(6, dtype=torch.int32)


@pytest.fixture
def pool():
    tensor = torch.zeros(3, 2, 2, KV_HEADS, CHUNK, HEAD_DIM)
    handle = register_pool(tensor)
    yield tensor, handle
    release_pool(handle)


def test_the_operations_agree_with_the_reference(inputs, pool):
    tensor, handle = pool
    expected = tensor.clone()
    q = ops.write_kv(*inputs, handle, 1)
    torch.testing.assert_close(q, attention_reference.write_kv(*inputs, expected, 1))
    torch.testing.assert_close(tensor, expected)
    segments = torch.tensor([[0, 6, 0, 6, 0]], dtype=torch.int32)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    o = ops.multi_token_attention(q, segments, table, handle, 1, 0.5)
    torch.testing.assert_close(
        o, attention_reference.multi_token_attention(q, segments, table, expected, 1, 0.5)
    )
    sinks = torch.randn(HEADS)
    o = ops.multi_token_attention(q, segments, table, handle, 1, 0.5, 3, sinks)
    torch.testing.assert_close(
        o, attention_reference.multi_token_attention(q, segments, table, expected, 1, 0.5, 3, sinks)
    )


def test_what_torch_promises_of_an_operation_holds(inputs, pool):
    _, handle = pool
    q = inputs[0].contiguous()
    table = torch.zeros(1, 2, dtype=torch.int32)
    segments = torch.tensor([[0, 6, 0, 6, 0]], dtype=torch.int32)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.write_kv.default, (*inputs, handle, 0), test_utils=checks)
    no_rotary = (*inputs[:3], torch.empty(6, 0), inputs[4])
    torch.library.opcheck(ops.write_kv.default, (*no_rotary, handle, 0), test_utils=checks)
    torch.library.opcheck(
        ops.multi_token_attention.default, (q, segments, table, handle, 0, 0.5), test_utils=checks
    )
    of_window = (q, segments, table, handle, 0, 0.5, 3, torch.zeros(HEADS))
    torch.library.opcheck(ops.multi_token_attention.default, of_window, test_utils=checks)


def test_the_gate_opens_before_the_layer_is_touched(inputs):
    tensor = torch.zeros(3, 2, 2, KV_HEADS, CHUNK, HEAD_DIM)
    seen = []
    handle = register_pool(
        tensor, gate=lambda layer: seen.append((layer, bool(tensor[:, layer].any())))
    )
    for layer in (0, 1):
        ops.write_kv(*inputs, handle, layer)
    release_pool(handle)
    assert seen == [(0, False), (1, False)] and tensor[0].any()


def test_a_released_handle_is_never_another_pool(inputs):
    tensor = torch.zeros(3, 2, 2, KV_HEADS, CHUNK, HEAD_DIM)
    handle = register_pool(tensor)
    release_pool(handle)
    other = register_pool(tensor)
    assert other != handle
    with pytest.raises(KeyError):
        ops.write_kv(*inputs, handle, 0)
    with pytest.raises(KeyError):
        release_pool(handle)
    release_pool(other)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, 2, 2, 2), torch.zeros(3, 2, 2, 2, 4, 8).transpose(0, 1)]
)
def test_only_pools_of_whole_records_are_registered(wrong):
    with pytest.raises(ValueError, match="contiguous"):
        register_pool(wrong)
