"""Chunks in eight bits: the error of a round trip, the numbers that it keeps, and equal results of
kernels and reference."""

import math

import pytest
import torch

from pensieve.plugins.kv_forms import fp8_reference as kv_fp8_reference
from pensieve.plugins.kv_forms.forms import FP8, record_bytes
from pensieve.plugins.kv_forms.fp8_reference import ALIGNMENT, CODES, layer_bytes

from ..kernel_cases import CUDA, DEVICE, needs_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_DTYPES = DTYPES if CUDA else (torch.float32, torch.float16)
SHAPES = [(3, 3, 2, 2, 8, 16), (2, 2, 2, 3, 5, 6), (3, 2, 2, 1, 32, 80), (2, 1, 2, 1, 1, 1)]


def random_pool(shape, dtype, seed=0, device="cpu"):
    """Heads of very unlike sizes, numbers within a head too, and some zeros."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(*shape[:4], 1, 1, generator=generator) * 2.5
    pool = (
        torch.randn(shape, generator=generator)
        * (heads + torch.randn(shape, generator=generator)).exp()
    )
    pool[torch.rand(shape, generator=generator) < 0.05] = 0.0
    return pool.to(dtype).to(device)


def round_trip(pool):
    return kv_fp8_reference.decode(kv_fp8_reference.encode(pool), pool.shape, pool.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_is_one_aligned_piece_and_records_are_about_half(shape):
    assert layer_bytes(shape) % ALIGNMENT == 0
    assert kv_fp8_reference.encode(torch.zeros(shape)).shape == (
        shape[0],
        shape[1],
        layer_bytes(shape),
    )
    assert record_bytes(shape, torch.float16, FP8) == shape[1] * layer_bytes(shape)
    assert record_bytes(shape, torch.float16) == math.prod(shape[1:]) * 2
    large = (1, 40, 2, 10, 32, 128)
    assert (
        0.5 < record_bytes(large, torch.bfloat16, FP8) / record_bytes(large, torch.bfloat16) < 0.501
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_error_is_a_sixteenth_at_most(shape, dtype):
    """At most 1/16 of a number; of numbers below 1/14336 of their head's largest, which are
    subnormal, half of the last bit."""
    pool = random_pool(shape, dtype).double()
    largest = pool.abs().amax((-2, -1), keepdim=True)
    error = (round_trip(pool.to(dtype)).double() - pool).abs()
    assert (error <= torch.maximum(pool.abs() / 16, largest * 2.0**-17)).all()
    assert error.any() or pool.numel() < 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_second_round_trip_changes_nothing(dtype):
    once = round_trip(random_pool(SHAPES[0], dtype))
    assert torch.equal(round_trip(once), once)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_tokens_leave_decoded_ones_as_they_are(dtype):
    """A tail is filled up after it came back: a larger scale is a power of two larger."""
    once = round_trip(torch.randn(SHAPES[0], generator=torch.Generator().manual_seed(1)).to(dtype))
    filled = once.clone()
    filled[..., -1, :] = 30.0
    again = round_trip(filled)
    normal = once.abs() >= 30.0 * 2.0**-14
    assert torch.equal(again[normal], filled[normal]) and normal[..., :-1, :].float().mean() > 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_changes_nothing_else(dtype):
    pool = random_pool((2, 2, 2, 2, 8, 16), dtype)
    not_finite = pool.clone()
    not_finite[0, 0, 0, 0, 7, :3] = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype)
    pool[0, 0, 0, 0, 7, :3] = 0.0
    got, wanted = round_trip(not_finite), round_trip(pool)
    assert got[0, 0, 0, 0, 7, 0].isnan() and not got[0, 0, 0, 0, 7, 1:3].isinf().any()
    assert got[0, 0, 0, 0, 7, 1] > 0 > got[0, 0, 0, 0, 7, 2]
    got[0, 0, 0, 0, 7, :3] = 0.0
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_a_dtype(dtype):
    """Zeros stay zeros, the largest numbers stay finite."""
    ends = torch.finfo(dtype)
    pool = torch.zeros(1, 4, 2, 1, 2, 2, dtype=dtype)
    pool[0, 1] = ends.max
    pool[0, 2] = ends.min
    pool[0, 3] = ends.smallest_normal
    got = round_trip(pool)
    assert torch.equal(got[0, 0], pool[0, 0])
    assert got.isfinite().all() and ((got[0, 1:3] - pool[0, 1:3]).abs() <= ends.max / 16).all()
    assert ((got[0, 3] - pool[0, 3]).abs() <= max(ends.smallest_normal / 16, 2.0**-100)).all()


def test_scales_are_powers_of_two_and_codes_use_their_range():
    pool = random_pool((6, 4, 2, 5, 8, 16), torch.float32)
    records = kv_fp8_reference.encode(pool)
    first = kv_fp8_reference.scales_offset(pool.shape)
    scales = records[..., first : first + 40].contiguous().view(torch.float32)
    assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))
    fraction = pool.abs().amax((-2, -1)).flatten(2) / scales
    assert (fraction <= 448).all() and (fraction > 224).all()


def test_powers_of_two_are_no_worse_than_the_largest_number_over_the_largest_code():
    pool = torch.randn(20, 4, 2, 4, 32, 64, generator=torch.Generator().manual_seed(0))
    scales = pool.abs().amax((-2, -1), keepdim=True) / 448
    by_largest = (pool / scales).to(CODES).float() * scales
    ours, theirs = ((other - pool).norm() / pool.norm() for other in (round_trip(pool), by_largest))
    assert ours < 1.01 * theirs < 0.03


# The kernels.


def special(shape, dtype):
    """Every exponent, ties between codes, infinities and NaN."""
    pool = random_pool(shape, dtype, seed=3)
    codes = torch.arange(256, dtype=torch.uint8).view(CODES).float()
    ties = (codes + codes.roll(1)) / 2
    flat = pool.view(shape[0], -1)
    numbers = torch.cat(
        (codes, ties, ties * (1 + 2**-9), torch.tensor([math.inf, -math.inf, 0.0, -0.0]))
    )
    flat[0, : min(len(numbers), flat.shape[1])] = numbers.to(dtype)[: flat.shape[1]]
    flat[-1] = 0.0
    return pool.to(DEVICE)


def slots_of(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_their_reference(shape, dtype):
    from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel

    pool = special(shape, dtype)
    order = slots_of(*reversed(range(shape[0])))
    for layers in (range(shape[1]), range(shape[1] - 1, shape[1])):
        own = pool[order.long(), layers.start : layers.stop]
        records = torch.zeros(
            shape[0], len(layers), layer_bytes(shape), dtype=torch.uint8, device=DEVICE
        )
        kv_fp8_kernel.encode(pool, order, layers, records)
        assert torch.equal(records, kv_fp8_reference.encode(own))

        decoded = torch.ones_like(pool)
        kv_fp8_kernel.decode(records, order, layers, decoded)
        wanted = torch.ones_like(pool)
        wanted[order.long(), layers.start : layers.stop] = kv_fp8_reference.decode(
            records, shape, dtype
        )
        nan = wanted.isnan()
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(decoded.isnan(), nan)
        # zeros have signs
        assert torch.equal(decoded[~nan].view(integer), wanted[~nan].view(integer))


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_the_kernels_at_the_ends_of_a_dtype(dtype):
    from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel

    ends = torch.finfo(dtype)
    sizes = [ends.max, -ends.max, ends.smallest_normal, ends.eps]
    pool = (
        torch.tensor(sizes, device=DEVICE).to(dtype).view(4, 1, 1, 1, 1, 1).repeat(1, 1, 2, 1, 4, 4)
    )
    records = torch.zeros(4, 1, layer_bytes(pool.shape), dtype=torch.uint8, device=DEVICE)
    kv_fp8_kernel.encode(pool, slots_of(0, 1, 2, 3), range(1), records)
    assert torch.equal(records, kv_fp8_reference.encode(pool))
    wanted = kv_fp8_reference.decode(records, pool.shape, dtype)
    kv_fp8_kernel.decode(records, slots_of(0, 1, 2, 3), range(1), pool)
    assert torch.equal(pool, wanted) and pool.isfinite().all()


@needs_kernels
def test_few_programs_do_all_and_no_tasks_do_nothing(monkeypatch):
    from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel

    monkeypatch.setattr(kv_fp8_kernel, "TILE", 512)  # 4 heads at once, of 36
    monkeypatch.setattr(kv_fp8_kernel, "PROGRAMS", 4)
    pool = random_pool(SHAPES[0], torch.float32, device=DEVICE)
    records = torch.zeros(3, 3, layer_bytes(SHAPES[0]), dtype=torch.uint8, device=DEVICE)
    kv_fp8_kernel.encode(pool, slots_of(), range(3), records[:0])
    kv_fp8_kernel.encode(pool, slots_of(0, 1, 2), range(3), records)
    assert torch.equal(records, kv_fp8_reference.encode(pool))
    kv_fp8_kernel.decode(records, slots_of(0, 1, 2), range(3), pool)
    assert torch.equal(pool, kv_fp8_reference.decode(records, pool.shape, pool.dtype))
    with pytest.raises(ValueError, match=r"records must be contiguous and \[3, 3,"):
        kv_fp8_kernel.encode(pool, slots_of(0, 1, 2), range(3), records[:, :, :128])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_slots_beyond_four_billion_numbers():
    from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel

    pool = torch.zeros(1200, 64, 2, 8, 32, 128, dtype=torch.bfloat16, device="cuda")  # 10 GB
    pool[1199] = torch.randn(pool.shape[1:], device="cuda")
    records = torch.zeros(1, 64, layer_bytes(pool.shape), dtype=torch.uint8, device="cuda")
    kv_fp8_kernel.encode(pool, slots_of(1199), range(64), records)
    assert torch.equal(records, kv_fp8_reference.encode(pool[1199:]))
    kv_fp8_kernel.decode(records, slots_of(1198), range(64), pool)
    assert torch.equal(pool[1198:1199], kv_fp8_reference.decode(records, pool.shape, pool.dtype))
