"""The kernel that writes KV gives its reference's results, bit for bit."""

import pytest
import torch

from ..kernel_cases import CUDA, DEVICE, in_eight_bits, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.attention import kv_write_kernel
from pensieve.plugins.attention import reference as attention_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)


def inputs(tokens, heads, kv_heads, head_dim, dims, dtype, slots=9, chunk=8):
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    qkv = torch.randn(
        tokens, heads + 2 * kv_heads, head_dim, generator=generator, device=DEVICE
    ).to(dtype)
    angles = (
        torch.rand(tokens, dims // 2, generator=generator, device=DEVICE, dtype=torch.float64)
        * 1000
    )
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    places = torch.randperm(slots * chunk, generator=generator, device=DEVICE)[:tokens].int()
    places[1::3] = -1
    pool = torch.randn(
        slots, 3, 2, kv_heads, chunk, head_dim, generator=generator, device=DEVICE
    ).to(dtype)
    return *qkv.split((heads, kv_heads, kv_heads), dim=1), rotary, places, pool


@needs_kernels
@pytest.mark.parametrize("eight_bits", [False, True], ids=["", "eight-bits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, dims",
    [(4, 2, 16, 16), (12, 10, 16, 0), (3, 3, 24, 8), (9, 1, 80, 80), (2, 2, 128, 64)],
)
def test_the_kernel_is_its_reference(heads, kv_heads, head_dim, dims, dtype, eight_bits):
    q, k, v, rotary, places, pool = inputs(13, heads, kv_heads, head_dim, dims, dtype)
    if eight_bits:
        pool, _ = in_eight_bits(pool)
        k[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        v[2], v[3, 0, 1:], v[5] = 0.0, -0.0, 1e-30
    before = q.clone()
    expected = pool.clone()
    rotated = kv_write_kernel.write_kv(q, k, v, rotary, places, pool, 1)
    reference = attention_reference.write_kv(q, k, v, rotary, places, expected, 1)
    assert torch.equal(rotated, reference) and torch.equal(pool, expected)
    assert torch.equal(q, before) and rotated.data_ptr() != q.data_ptr()


@needs_kernels
def test_no_tokens_write_nothing():
    q, k, v, rotary, places, pool = inputs(13, 4, 2, 16, 16, torch.float32)
    before = pool.clone()
    empty = kv_write_kernel.write_kv(q[:0], k[:0], v[:0], rotary[:0], places[:0], pool, 1)
    kv_write_kernel.write_kv(q, k, v, rotary, torch.full_like(places, -1), pool, 1)
    assert empty.shape == (0, 4, 16) and torch.equal(pool, before)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_slots_beyond_four_billion_elements():
    pool = torch.zeros(1200, 64, 2, 8, 32, 128, dtype=torch.bfloat16, device="cuda")  # 10 GB
    q, k, v, rotary, _, _ = inputs(2, 8, 8, 128, 128, torch.bfloat16)
    places = torch.tensor([1199 * 32 + 31, 5], dtype=torch.int32, device="cuda")
    kv_write_kernel.write_kv(q, k, v, rotary, places, pool, 63)
    assert torch.equal(pool[1199, 63, 1, :, 31], v[0]) and torch.equal(pool[0, 63, 1, :, 5], v[1])
    assert int((pool[1199] != 0).any(-1).sum()) == 16 and int((pool[0] != 0).any(-1).sum()) == 16
