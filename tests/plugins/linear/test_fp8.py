"""Projections in FP8: the precision of rounding, the operation on every device, and the GPU's
product against its twin."""

import pytest
import torch
import torch.nn.functional as F

from pensieve.plugins.linear import fp8 as fp8_linear
from pensieve.plugins.linear.fp8 import in_fp8, rounded, row_scales
from pensieve.plugins.linear.fp8_format import FP8, MOST, widened

from ..kernel_cases import CUDA, DEVICE, needs_kernels

needs_hopper = pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() < fp8_linear.OLDEST_CAPABILITY,
    reason="needs FP8 products",
)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(
        shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE
    ).to(dtype)


def quantised(weight):
    scale = row_scales(weight)
    return rounded(weight, scale), scale


def test_rounding_keeps_a_row_s_largest_value_and_three_bits_of_all():
    weight = random(40, 64) * torch.logspace(-6, 6, 40, device=DEVICE).unsqueeze(1)
    weight[7] = 0.0
    values, scale = quantised(weight)
    assert values.dtype == FP8 and scale.dtype == torch.float32
    largest = values.float().abs().amax(dim=1)
    assert largest[7] == 0 and largest[torch.arange(40, device=DEVICE) != 7].eq(MOST).all()
    wide = widened(values, scale, torch.float32)
    assert ((wide - weight).abs() <= weight.abs() / 16 + scale.unsqueeze(1) * 2**-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_operation_is_as_near_as_its_rounding(tokens, biased, dtype):
    weight = random(48, 64)
    bias = random(48, dtype=dtype, seed=2) if biased else None
    x = random(tokens, 64, dtype=dtype, seed=1)
    values, scale = quantised(weight)
    exact = F.linear(
        x.float(), widened(values, scale, torch.float32), None if bias is None else bias.float()
    )
    for ours in (
        torch.ops.pensieve.fp8_linear(x, values, scale, bias),
        in_fp8(x, values, scale, bias),
    ):
        assert ours.dtype == dtype and ours.shape == (tokens, 48)
        assert (ours - exact).norm() <= 0.05 * exact.norm()


def test_scales_that_belong_to_other_rows_would_show():
    weight = random(48, 64) * torch.arange(1, 49, device=DEVICE).unsqueeze(1)
    x = random(9, 64, seed=1)
    values, scale = quantised(weight)
    wrong = torch.ops.pensieve.fp8_linear(x, values, scale.flip(0), None)
    assert (wrong - F.linear(x, weight)).norm() > 0.3 * F.linear(x, weight).norm()


@needs_kernels
def test_rows_are_rounded_as_the_twin_does():
    pytest.importorskip("triton")
    from pensieve.plugins.linear.fp8_kernel import quantise_rows

    for tokens, size in ((0, 64), (1, 100), (33, 64)):
        x = random(tokens, size + 12, dtype=torch.float32)[:, :size] * 30
        values, scales = quantise_rows(x)
        torch.testing.assert_close(scales, row_scales(x), rtol=1e-6, atol=0)
        expected = rounded(x, scales).float()
        if CUDA:  # the interpreter halves numbers that round up to a power of two
            torch.testing.assert_close(values.float(), expected, rtol=0.13, atol=2**-8)  # one step
        differ = (values.float() != expected).float().mean()
        assert not tokens or differ < (0.001 if CUDA else 0.05)


@needs_kernels
def test_rows_are_scaled_behind_their_product():
    pytest.importorskip("triton")
    from pensieve.plugins.linear.fp8_kernel import SCALED_WIDTH, scale_rows

    for rows, size in ((1, 64), (3, SCALED_WIDTH + 8)):
        product, row_scale, scale = random(rows, size), random(rows, seed=1), random(size, seed=2)
        expected = product * row_scale.unsqueeze(1) * scale
        scale_rows(product, row_scale, scale)
        torch.testing.assert_close(product, expected)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 256, 257])
def test_the_gpu_s_product_is_its_twin_s(tokens, biased):
    weight = random(256, 512)
    bias = random(256, dtype=torch.bfloat16, seed=2) if biased else None
    x = random(tokens, 512, dtype=torch.bfloat16, seed=1)
    values, scale = quantised(weight)
    ours = torch.ops.pensieve.fp8_linear(x, values, scale, bias)
    twin = in_fp8(x, values, scale, bias)
    assert ours.shape == (tokens, 256) and ours.dtype == torch.bfloat16
    assert (ours.float() - twin.float()).norm() <= 0.01 * twin.float().norm()


@pytest.mark.gpu
@needs_hopper
def test_the_gpu_s_product_can_be_captured():
    values, scale = quantised(random(256, 512))
    x = random(4, 512, dtype=torch.bfloat16, seed=1)
    torch.ops.pensieve.fp8_linear(x, values, scale, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.pensieve.fp8_linear(x, values, scale, None)
    x.copy_(random(4, 512, dtype=torch.bfloat16, seed=3))
    graph.replay()
    assert torch.equal(y, torch.ops.pensieve.fp8_linear(x, values, scale, None))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_what_fp8_products_do_not_take_is_widened():
    for shape, dtype in (((250, 512), torch.bfloat16), ((256, 512), torch.float16)):
        weight, x = random(*shape), random(5, shape[1], dtype=dtype, seed=1)
        values, scale = quantised(weight)
        ours = torch.ops.pensieve.fp8_linear(x, values, scale, None)
        assert torch.equal(ours, F.linear(x, widened(values, scale, dtype)))
