"""KV in eight bits in the GPU's pool: its layout, its error, and bits that depend on nothing but
the token."""

import pytest
import torch

from pensieve.plugins.attention import fp8_pool
from pensieve.plugins.attention import reference as attention_reference

from ..kernel_cases import error, in_eight_bits, random_batch

SLOTS, LAYERS, HEADS, CHUNK, HEAD_DIM = 3, 2, 2, 8, 16
SHAPE = (SLOTS, LAYERS, 2, HEADS, CHUNK, HEAD_DIM)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def empty():
    return torch.zeros(*SHAPE[:-1], HEAD_DIM + 1, dtype=fp8_pool.DTYPE)


def whole(pool, layer):
    """K and V of a layer, decoded: [slots, 2, heads, chunk, head_dim]."""
    slot = torch.arange(SLOTS).view(-1, 1)
    head = torch.arange(HEADS)
    return torch.stack([fp8_pool.read(pool, layer, i, slot, head) for i in (0, 1)], dim=1)


def some_tokens(dtype, count=SLOTS * CHUNK):
    """q, k, v, rotary; the sizes of k's heads are very unlike."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, count, HEADS, HEAD_DIM, generator=generator).to(dtype)
    k *= torch.randn(count, HEADS, 1, generator=generator).mul(3).exp().to(dtype)
    angles = torch.rand(count, HEAD_DIM // 2, generator=generator) * 100
    return q, k, v, torch.cat((angles.cos(), angles.sin()), dim=1)


def test_codes_and_exponents_are_all_of_a_layer():
    pool = empty()
    for layer in range(LAYERS):
        for number, part in enumerate(fp8_pool.parts(pool, layer), start=1):
            part += number
            assert part.shape[:4] == (SLOTS, 2, HEADS, CHUNK)
    rows = pool.view(SLOTS, LAYERS, -1)
    codes = 2 * HEADS * CHUNK * HEAD_DIM
    assert (rows[..., :codes] == 1).all() and (rows[..., codes:] == 2).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_how_a_chunk_was_filled(dtype):
    q, k, v, rotary = some_tokens(dtype)
    places = torch.randperm(len(q), generator=torch.Generator().manual_seed(1)).int()
    pools = []
    for size in (len(q), 1, 5):
        pool = empty()
        for part in torch.arange(len(q)).split(size):
            attention_reference.write_kv(
                q[part], k[part], v[part], rotary[part], places[part], pool, 1
            )
        pools.append(pool)
    assert torch.equal(pools[0], pools[1]) and torch.equal(pools[0], pools[2])
    assert pools[0][:, 1].any() and not pools[0][:, 0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_a_sixteenth_at_most(dtype):
    """Of numbers below 1/14336 of the largest of their token and head, half of the last bit of a
    subnormal code."""
    q, k, v, rotary = some_tokens(dtype)
    places = torch.arange(len(q), dtype=torch.int32)
    pool = empty()
    exact = torch.zeros(SHAPE, dtype=dtype)
    for target in (pool, exact):
        attention_reference.write_kv(q, k, v, rotary, places, target, 0)
    wanted = exact[:, 0].double()
    got = whole(pool, 0).double()
    largest = wanted.abs().amax(-1, keepdim=True)
    assert ((got - wanted).abs() <= torch.maximum(wanted.abs() / 16, largest * 2.0**-17)).all()
    assert 0.01 < error(got, wanted) < 0.03


def test_attention_is_that_of_the_decoded_numbers():
    batch = random_batch(3, 4, 2, 16, torch.float32, (1, 31, 33, 70, 110))
    q, segments, block_table, pool = (part.cpu() for part in batch)  # the reference's device
    codes, decoded = in_eight_bits(pool)
    ours, plain, exact = (
        attention_reference.multi_token_attention(q, segments, block_table, kv, 1, 0.25)
        for kv in (codes, decoded.float(), pool)
    )
    assert torch.equal(ours, plain)
    assert 0.01 < error(ours, exact.double()) < 0.04  # of normally distributed KV
