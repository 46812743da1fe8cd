"""The plugin functions under TensorRT's contract: descriptors and symbolic shapes when an engine is built, addresses,
attributes and a stream when it runs. `tensorrt.plugin` is NVIDIA's own; below it is the twin.
"""

from __future__ import annotations

import pytest
import torch

from pensieve.plugins.attention.reference import multi_token_attention, write_kv
from pensieve.plugins.collectives.protocol import TENSOR_PARALLEL, ThreadRanks, register_group, release_group
from pensieve.plugins.torch_ops import register_pool, release_pool
from tests.tensorrt import twin

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 4, 2, 16, 5
SHAPE = dict(heads=HEADS, kv_heads=KV_HEADS, layer=1)
SCALE = HEAD_DIM**-0.5


@pytest.fixture(scope="module", autouse=True)
def plugins():
    with twin.install():
        from pensieve.plugins.tensorrt import plugins as tensorrt_plugins

        with twin.as_on_a_gpu(tensorrt_plugins):
            yield tensorrt_plugins


@pytest.fixture
def pool():
    """(tensor, handle) of a pool of 6 slots, 2 layers, 4 tokens a chunk."""
    torch.manual_seed(0)
    tensor = torch.randn(6, 2, 2, KV_HEADS, 4, HEAD_DIM)
    handle = register_pool(tensor)
    yield tensor, handle
    release_pool(handle)


def call(name, *tensors, **attributes):
    """Runs a plugin as an engine does: made from its attributes, asked for types and shapes, then enqueued."""
    import tensorrt.plugin as trtp

    types = {kind: dtype for dtype, kind in twin.TORCH_TYPES.items()}
    inputs = [twin.ITensor(types[x.dtype], x.shape, [], lambda: None) for x in tensors]
    _, shape_inputs, plugin = getattr(trtp.op.pensieve, name)(*inputs, **attributes)()
    assert not shape_inputs and plugin.attrs == attributes
    plugin.get_output_data_types([x.dtype for x in inputs], [len(x.shape) for x in inputs])
    return twin.PluginCall(plugin)(*tensors)


def fused(dtype=torch.float32):
    return torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)


def parts(qkv):
    return qkv.view(TOKENS, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)


SLOTS = torch.tensor([3, 4, -1, 9, 20], dtype=torch.int32)
SEGMENTS = torch.tensor([[0, 3, 0, 7, 1], [3, 1, 2, 5, 0]], dtype=torch.int32)  # the last token is of none
TABLE = torch.tensor([[1, 5], [0, 2]], dtype=torch.int32)


@pytest.mark.parametrize("rotary_dims", [HEAD_DIM, 0])
def test_write_kv_writes_the_running_pool_and_rotates(rotary_dims, plugins, pool):
    tensor, handle = pool
    qkv, rotary = fused(), torch.randn(TOKENS, rotary_dims)
    expected_pool = tensor.clone()
    expected = write_kv(*parts(qkv), rotary, SLOTS, expected_pool, 1)
    with plugins.running(handle):
        if rotary_dims:
            q = call("write_kv", qkv, rotary, SLOTS, **SHAPE)
        else:
            q = call("write_kv_unrotated", qkv, SLOTS, **SHAPE)
    assert torch.equal(q, expected.flatten(1)) and torch.equal(tensor, expected_pool)


def test_attention_reads_the_running_pool(plugins, pool):
    tensor, handle = pool
    q = torch.randn(TOKENS, HEADS * HEAD_DIM)
    expected = multi_token_attention(q.view(TOKENS, HEADS, -1), SEGMENTS, TABLE, tensor, 1, SCALE)
    with plugins.running(handle):
        o = call("multi_token_attention", q, SEGMENTS, TABLE, heads=HEADS, layer=1, scale=SCALE)
    assert torch.equal(o, expected.flatten(1)) and not o[-1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_of_half_precision_arrive_as_they_are(dtype, plugins):
    pool = torch.zeros(6, 2, 2, KV_HEADS, 4, HEAD_DIM, dtype=dtype)
    handle = register_pool(pool)
    qkv = fused(dtype)
    with plugins.running(handle):
        q = call("write_kv_unrotated", qkv, SLOTS, **SHAPE)
    release_pool(handle)
    queries, keys, _ = parts(qkv)
    assert torch.equal(q, queries.flatten(1)) and torch.equal(pool[0, 1, 0, :, 3], keys[0])


def test_gates_are_passed_before_the_layer_is_touched(plugins):
    pool, passed = torch.zeros(6, 2, 2, KV_HEADS, 4, HEAD_DIM), []
    handle = register_pool(pool, gate=lambda layer: passed.append((layer, bool(pool.any()))))
    with plugins.running(handle):
        call("write_kv_unrotated", fused(), SLOTS, **SHAPE)
    release_pool(handle)
    assert passed == [(1, False)] and pool[:, 1].any() and not pool[:, 0].any()


def test_while_an_engine_is_built_outputs_are_cleared_and_nothing_is_read(plugins):
    wild = torch.full((TOKENS,), 2**30, dtype=torch.int32)
    with plugins.building():
        assert not call("write_kv_unrotated", fused(), wild, **SHAPE).any()
        q, segments = torch.randn(TOKENS, HEADS * HEAD_DIM), SEGMENTS + 2**20
        assert not call("multi_token_attention", q, segments, TABLE, heads=HEADS, layer=9, scale=SCALE).any()
        assert not call("all_reduce", q).any()


def test_a_plugin_outside_a_step_fails(plugins, pool):
    _, handle = pool
    with plugins.running(handle):
        pass
    with pytest.raises(AttributeError, match="pool"):
        call("write_kv_unrotated", fused(), SLOTS, **SHAPE)


def test_collectives_are_those_of_the_ranks(plugins):
    table, ids = torch.randn(8, 6), torch.tensor([0, 7, 3, 4], dtype=torch.int32)
    group = ThreadRanks(2)
    register_group(TENSOR_PARALLEL, group)

    def work(rank):
        x = call("all_reduce", call("vocabulary_embed", ids, table[4 * rank : 4 * rank + 4].contiguous()))
        return x, call("all_gather", x[:, :2] + rank, ranks=2, columns=3)

    try:
        said = group.run(work)
    finally:
        release_group(TENSOR_PARALLEL)
    for embedded, gathered in said:
        assert torch.equal(embedded, table[ids.long()])
        assert torch.equal(gathered, torch.cat((embedded[:, :2], embedded[:, :1] + 1), dim=1))


def test_tensorrt_checks_attributes(plugins):
    inputs = (fused(), SLOTS)
    with pytest.raises(ValueError, match="Unexpected type"):
        call("write_kv_unrotated", *inputs, **SHAPE | {"layer": 1.0})
    with pytest.raises(ValueError, match="Unexpected schema"):
        call("write_kv_unrotated", *inputs, heads=HEADS, kv_heads=KV_HEADS)
