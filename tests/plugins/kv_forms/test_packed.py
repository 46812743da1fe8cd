"""Exact chunks of about 12.5 bits per number: no loss, failed copies are reported, and kernels
equal their reference."""

import math

import pytest
import torch

from pensieve.plugins.kv_forms import packed_reference as kv_packed_reference
from pensieve.plugins.kv_forms.packed_reference import ALIGNMENT, is_exact, layer_bytes, layout

from ..kernel_cases import CUDA, DEVICE, needs_kernels

SHAPES = [(3, 3, 2, 2, 8, 16), (2, 2, 2, 3, 6, 10), (3, 2, 2, 1, 32, 80), (2, 1, 2, 1, 2, 1)]
ODDITIES = [0.0, -0.0, 2.0**-133, -(2.0**-127), math.inf, -math.inf]
"""Subnormals among them."""


def random_pool(shape, seed=0, device="cpu"):
    """Heads and channels of very unlike sizes, of some numbers far smaller than others, some
    zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(*shape[:4], 1, 1, generator=generator) * 5
    sizes = sizes + torch.randn(*shape[:4], 1, shape[5], generator=generator) * 3
    pool = torch.randn(shape, generator=generator) * sizes.exp()
    pool[torch.rand(shape, generator=generator) < 0.05] = 0.0
    pool[torch.rand(shape, generator=generator) < 0.004] *= 2.0**-20
    return pool.bfloat16().to(device)


def odd_pool(shape, seed=0):
    """With subnormals, signed zeros, infinities and NaN too, in their own channel."""
    pool = random_pool(shape, seed)
    own = pool[-1, -1, -1, -1].view(torch.int16)
    own[:, 0] = (
        torch.tensor(ODDITIES, dtype=torch.bfloat16).view(torch.int16).repeat(len(own))[: len(own)]
    )
    own[:, -1] = torch.arange(0x7F80, 0x7F80 + len(own)).short()  # an infinity and NaNs
    return pool


def bits(pool):
    return pool.view(torch.int16)


def round_trip(pool):
    return kv_packed_reference.decode(kv_packed_reference.encode(pool), pool.shape, pool.dtype)


def held(records, shape):
    return [is_exact(record.numpy(), shape) for record in records.flatten(1).cpu()]


def overfill(pool, slot):
    """In one head the first token is 14 powers of two larger than all others, which are more than
    there is room for."""
    head = pool[slot, -1, 1, 0]
    head[:] = 1.0
    head[0] = 2.0**14
    return pool


@pytest.mark.parametrize("shape", [*SHAPES, (1, 40, 2, 10, 32, 128)], ids=str)
def test_a_layer_is_one_aligned_piece(shape):
    assert layer_bytes(shape) % ALIGNMENT == 0
    assert layout(shape).escapes % 4 == 0
    chunks = torch.zeros(shape, dtype=torch.bfloat16)
    assert kv_packed_reference.encode(chunks).shape == (shape[0], shape[1], layer_bytes(shape))


def test_records_are_less_than_four_fifths():
    large = (1, 40, 2, 10, 32, 128)
    assert 0.78 < layer_bytes(large) * 40 / (math.prod(large) * 2) < 0.79


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_is_lost(shape):
    for seed in range(5):
        for pool in (random_pool(shape, seed), odd_pool(shape, seed)):
            records = kv_packed_reference.encode(pool)
            assert all(held(records, shape))
            again = kv_packed_reference.decode(records, shape, pool.dtype)
            assert torch.equal(bits(again), bits(pool))


def test_every_number_there_is():
    """All 65,536, with one channel for each sign and exponent."""
    pool = torch.arange(65536).short().view(1, 1, 2, 1, 256, 128).transpose(-1, -2)
    pool = pool.reshape(1, 1, 2, 1, 128, 256).contiguous().view(torch.bfloat16)
    assert torch.equal(bits(round_trip(pool)), bits(pool))


def test_thirteen_powers_of_two_fit_and_fourteen_escape():
    pool = torch.ones(1, 1, 2, 1, 4, 8, dtype=torch.bfloat16)
    pool[..., 0, :] = 2.0**13
    at = layout(pool.shape)

    def counts(pool):
        records = kv_packed_reference.encode(pool)
        assert is_exact(records.flatten().numpy(), pool.shape)
        return records[0, 0, at.counts :].view(torch.int32)[:2].tolist(), records[
            0, 0, at.escapes : at.counts
        ]

    assert counts(pool)[0] == [0, 0]
    pool[0, 0, 1, 0, 0, 5] = 2.0**14
    pool[0, 0, 1, 0, 2, 5] = 0.0
    count, escapes = counts(pool)
    one = 0x3F80
    assert count == [0, 2]
    assert escapes.view(torch.int32).tolist() == [0] * 4 + [
        (1 * 8 + 5) << 16 | one,
        (3 * 8 + 5) << 16 | one,
        0,
        0,
    ]


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_a_head_of_too_many_escapes_fails_its_chunk_alone(shape):
    pool = overfill(random_pool(shape), 1)
    records = kv_packed_reference.encode(pool)
    assert held(records, shape) == [slot != 1 for slot in range(shape[0])]
    again = kv_packed_reference.decode(records, shape, pool.dtype)
    assert [torch.equal(bits(a), bits(b)) for a, b in zip(again, pool, strict=True)] == held(
        records, shape
    )


def test_normally_distributed_numbers_hardly_escape():
    """One in 5,700; a head of 4,096 numbers has room for 32."""
    pool = torch.randn(4, 4, 2, 10, 32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    records = kv_packed_reference.encode(pool)
    at = layout(pool.shape)
    counts = records[..., at.counts : at.counts + 80].contiguous().view(torch.int32)
    assert (
        1e-4 < counts.sum() / pool.numel() < 2e-4
        and counts.max() < 10
        and all(held(records, pool.shape))
    )


def test_garbage_is_decoded_to_something():
    shape = SHAPES[0]
    records = torch.randint(
        256, (3, 3, layer_bytes(shape)), generator=torch.Generator().manual_seed(0)
    ).byte()
    assert kv_packed_reference.decode(records, shape, torch.bfloat16).shape == shape


def test_what_cannot_be_packed_is_refused():
    for shape in ((1, 1, 2, 1, 5, 8), (1, 1, 2, 1, 514, 128)):
        with pytest.raises(ValueError, match=f"not {shape[4]} x {shape[5]}"):
            layer_bytes(shape)
        with pytest.raises(ValueError, match="an even number of tokens"):
            kv_packed_reference.encode(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        kv_packed_reference.encode(torch.zeros(SHAPES[0], dtype=torch.float16))
    with pytest.raises(ValueError, match=r"not torch\.float32"):
        kv_packed_reference.decode(
            torch.zeros(1, 1, layer_bytes(SHAPES[0])).byte(), SHAPES[0], torch.float32
        )


# The kernels.


def slots_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def used_records(shape, count, layers):
    """The state of a reused pinned buffer: padding is zero, all else is old data."""
    at = layout(shape)
    heads = math.prod(shape[2:4])
    records = torch.randint(
        1, 256, (count, layers, at.length), generator=torch.Generator().manual_seed(0)
    ).byte()
    records[..., at.bases + heads * shape[5] : at.escapes] = 0
    records[..., at.counts + 4 * heads :] = 0
    return records.to(DEVICE)


@needs_kernels
@pytest.mark.parametrize("failed", [False, True], ids=["exact", "failed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_their_reference(shape, failed):
    from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel

    pool = odd_pool(shape)
    pool = (overfill(pool, 1) if failed else pool).to(DEVICE)
    order = slots_of(*reversed(range(1, shape[0])))
    for layers in (range(shape[1]), range(shape[1] - 1, shape[1])):
        own = pool[order.long(), layers.start : layers.stop]
        records = used_records(shape, len(order), len(layers))
        kv_packed_kernel.encode(pool, order, layers, records)
        assert torch.equal(records, kv_packed_reference.encode(own))

        decoded, wanted = torch.ones_like(pool), torch.ones_like(pool)
        kv_packed_kernel.decode(records, order, layers, decoded)
        wanted[order.long(), layers.start : layers.stop] = kv_packed_reference.decode(
            records, shape, pool.dtype
        )
        assert torch.equal(bits(decoded), bits(wanted))
        if not failed:
            assert torch.equal(
                bits(decoded[order.long()][:, layers.start : layers.stop]), bits(own)
            )


@needs_kernels
def test_garbage_stays_inside_its_chunk():
    from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel

    shape = (3, 3, 2, 2, 8, 16)
    records = torch.randint(
        256, (1, 1, layer_bytes(shape)), generator=torch.Generator().manual_seed(0)
    ).byte()
    at = layout(shape)
    records[..., at.counts : at.counts + 16].view(torch.int32)[..., :] = 2**30
    pool = random_pool(shape, device=DEVICE)
    kept = pool.clone()
    kv_packed_kernel.decode(records.to(DEVICE), slots_of(1), range(1, 2), pool)
    assert not torch.equal(bits(pool), bits(kept))
    pool[1, 1] = kept[1, 1]
    assert torch.equal(bits(pool), bits(kept))


@needs_kernels
def test_few_programs_do_all_and_no_tasks_do_nothing(monkeypatch):
    from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel

    monkeypatch.setattr(kv_packed_kernel, "TILE", 128)  # 8 heads at once, of 36
    monkeypatch.setattr(kv_packed_kernel, "PROGRAMS", 4)
    pool = random_pool(SHAPES[0], device=DEVICE)
    records = used_records(SHAPES[0], 3, 3)
    kv_packed_kernel.encode(pool, slots_of(), range(3), records[:0])
    kv_packed_kernel.encode(pool, slots_of(0, 1, 2), range(3), records)
    assert torch.equal(records, kv_packed_reference.encode(pool))
    decoded = torch.ones_like(pool)
    kv_packed_kernel.decode(records, slots_of(0, 1, 2), range(3), decoded)
    assert torch.equal(bits(decoded), bits(pool))
    with pytest.raises(ValueError, match=r"records must be contiguous and \[3, 3,"):
        kv_packed_kernel.encode(pool, slots_of(0, 1, 2), range(3), records[:, :, :128])
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        kv_packed_kernel.encode(pool.half(), slots_of(0, 1, 2), range(3), records)


@needs_kernels
@pytest.mark.parametrize("tokens, channels", [(256, 256), (2, 32768)])
def test_the_kernels_at_the_largest_head(tokens, channels):
    """Positions need all 16 bits, and half of the numbers are escapes."""
    from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel

    pool = torch.ones(1, 1, 2, 1, tokens, channels, dtype=torch.bfloat16)
    pool[0, 0, 0, 0, : tokens // 2] = 2.0**20
    pool[0, 0, 1, 0, -1, -1] = 2.0**-20
    pool = pool.to(DEVICE)
    records = used_records(pool.shape, 1, 1)
    kv_packed_kernel.encode(pool, slots_of(0), range(1), records)
    assert torch.equal(records, kv_packed_reference.encode(pool))
    decoded = torch.zeros_like(pool)
    kv_packed_kernel.decode(records, slots_of(0), range(1), decoded)
    assert torch.equal(bits(decoded[:, :, 1]), bits(pool[:, :, 1]))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_slots_beyond_four_billion_numbers():
    from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel

    pool = torch.zeros(1200, 64, 2, 8, 32, 128, dtype=torch.bfloat16, device="cuda")  # 10 GB
    pool[1199] = torch.randn(pool.shape[1:], device="cuda")
    records = torch.zeros(1, 64, layer_bytes(pool.shape), dtype=torch.uint8, device="cuda")
    kv_packed_kernel.encode(pool, slots_of(1199), range(64), records)
    assert torch.equal(records, kv_packed_reference.encode(pool[1199:]))
    kv_packed_kernel.decode(records, slots_of(1198), range(64), pool)
    assert torch.equal(bits(pool[1198]), bits(pool[1199]))
