"""Projections in int4: the layout of PyTorch's product, the operation on every device, and the
GPU's ways against their twin."""

import pytest
import torch
import torch.nn.functional as F

from pensieve.plugins.linear import int4
from pensieve.plugins.linear.int4 import packed, scales_and_zeros, unpacked, widened
from pensieve.plugins.linear.int4_format import GROUPS, packed_shape

from ..kernel_cases import CUDA, DEVICE, needs_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
on_a_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(
        shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE
    ).to(dtype)


def random_numbers(outputs, inputs, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, 16, (outputs, inputs), generator=generator, device=DEVICE).to(
        torch.uint8
    )


def quantised(outputs, inputs, group, dtype):
    """(Packed weight, its scales and zeros, scales, zero points)."""
    scales = random(outputs, inputs // group).abs() + 0.1
    zero_points = random_numbers(outputs, inputs // group, seed=1).float() + 1
    pairs = scales_and_zeros(scales, zero_points, dtype)
    return packed(random_numbers(outputs, inputs)), pairs, scales, zero_points


def test_a_word_has_the_numbers_of_the_tensor_core_s_layout():
    numbers = random_numbers(24, 256)
    words = packed(numbers)
    assert words.shape == packed_shape(24, 256) and words.dtype == torch.int32
    for n in (0, 5, 23):
        for k in range(256):
            # PyTorch's comment: a lane has the inputs 2t, 2t + 1, 8 later and so on of a block of
            # 32, even ones first
            word = words[n // 8, k // 128, n % 8 * 4 + k % 8 // 2, k % 128 // 32].item()
            assert word >> 4 * (k % 32 // 8 + 4 * (k % 2)) & 15 == numbers[n, k]
    assert torch.equal(unpacked(words), numbers)


@pytest.mark.parametrize("group", GROUPS)
def test_values_are_numbers_less_their_zero_point_times_the_scale(group):
    weight, pairs, scales, zero_points = quantised(16, 512, group, torch.float32)
    numbers = random_numbers(16, 512).float()
    expected = (numbers - zero_points.repeat_interleave(group, 1)) * scales.repeat_interleave(
        group, 1
    )
    torch.testing.assert_close(widened(weight, pairs, torch.float32), expected)


@pytest.mark.parametrize("group", GROUPS)
def test_bfloat16_loses_a_sixth_of_a_step_at_most(group):
    weight, pairs, scales, zero_points = quantised(16, 512, group, torch.bfloat16)
    numbers = random_numbers(16, 512).float()
    steps = scales.repeat_interleave(group, 1)
    exact = (numbers - zero_points.repeat_interleave(group, 1)) * steps
    lost = (widened(weight, pairs, torch.bfloat16).float() - exact) / steps
    assert lost.abs().max() <= 5 / 32 and lost.square().mean() ** 0.5 < 1 / 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_operation_is_the_product_with_the_values(tokens, biased, dtype):
    weight, pairs, *_ = quantised(48, 256, 64, dtype)
    x = random(tokens, 256, dtype=dtype, seed=2)
    bias = random(48, dtype=dtype, seed=3) if biased else None
    ours = torch.ops.pensieve.int4_linear(x, weight, pairs, bias)
    assert ours.dtype == dtype and ours.shape == (tokens, 48)
    exact = F.linear(
        x.float(), widened(weight, pairs, torch.float32), None if bias is None else bias.float()
    )
    assert (ours - exact).norm() <= (1e-5 if dtype == torch.float32 else 0.01) * exact.norm()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "outputs, inputs, group", [(24, 128, 64), (40, 256, 32), (72, 256, 128), (64, 512, 256)]
)
def test_the_kernel_widens_as_its_twin_does(outputs, inputs, group, dtype):
    pytest.importorskip("triton")
    from pensieve.plugins.linear.int4_kernel import widen

    weight, pairs, *_ = quantised(outputs, inputs, group, dtype)
    # On a GPU a product and a sum may be rounded once, and the interpreter rounds bfloat16 in
    # another way.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(
        widen(weight, pairs, dtype), widened(weight, pairs, dtype), rtol=tolerance, atol=1e-6
    )


@pytest.mark.gpu
@on_a_gpu
def test_words_are_pytorch_s():
    numbers = random_numbers(256, 512)
    in_bytes = numbers[:, ::2] << 4 | numbers[:, 1::2]
    assert torch.equal(
        packed(numbers), torch.ops.aten._convert_weight_to_int4pack(in_bytes.contiguous(), 8)
    )


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 16, 63, 128, 129])
def test_the_gpu_s_product_is_its_twin_s(tokens, biased, group):
    weight, pairs, *_ = quantised(264, 512, group, torch.bfloat16)
    x = random(tokens, 512, dtype=torch.bfloat16, seed=2)
    bias = random(264, seed=3).bfloat16() if biased else None
    ours = torch.ops.pensieve.int4_linear(x, weight, pairs, bias)
    twin = int4.widening(x, weight, pairs, bias)
    assert ours.shape == (tokens, 264) and ours.dtype == torch.bfloat16
    assert (ours.float() - twin.float()).norm() <= 0.01 * twin.float().norm()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("tokens", [4, 200])
def test_the_gpu_s_product_can_be_captured(tokens):
    weight, pairs, *_ = quantised(256, 512, 128, torch.bfloat16)
    x = random(tokens, 512, dtype=torch.bfloat16, seed=2)
    torch.ops.pensieve.int4_linear(x, weight, pairs, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.pensieve.int4_linear(x, weight, pairs, None)
    x.copy_(random(tokens, 512, dtype=torch.bfloat16, seed=3))
    graph.replay()
    assert torch.equal(y, torch.ops.pensieve.int4_linear(x, weight, pairs, None))
