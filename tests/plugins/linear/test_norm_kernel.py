"""Norms and the SiLU gate: one pass gives the results of plain PyTorch."""

import pytest
import torch

from pensieve.plugins.linear import norm_ops, norm_reference  # noqa: F401  registers the operations

from ..kernel_cases import CUDA, DEVICE, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.linear import norm_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16) if CUDA else (torch.float32, torch.float16)
ops = torch.ops.pensieve


def random(*shape, dtype, seed=0, device=DEVICE):
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return (3 * torch.randn(shape, generator=generator, device=device) + 0.5).to(dtype)


def assert_near(actual, expected):
    """Equal up to the last bits, since sums are taken in another order; in 16 bits that seldom
    shows."""
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert expected.dtype == torch.float32 or (actual != expected).float().mean() < 0.02


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
@pytest.mark.parametrize("tokens, size", [(1, 64), (7, 100), (40, 96), (3, 5120), (2, 16384)])
def test_norms(tokens, size, rms, dtype):
    x, y = random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype)
    bias = None if rms else random(size, dtype=dtype, seed=1)
    for parameters in ((weight, bias), (None, None)):
        normed, total = norm_kernel.add_norm(x, y, *parameters, 1e-5, rms)
        assert torch.equal(total, x + y)
        assert_near(normed, norm_reference.norm(total, *parameters, 1e-5, rms))
        assert_near(
            norm_kernel.norm(x, *parameters, 1e-5, rms),
            norm_reference.norm(x, *parameters, 1e-5, rms),
        )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_to_which_1_is_added(dtype):
    x, y, weight = (random(7, 100, dtype=dtype, seed=seed) for seed in range(3))
    expected = norm_reference.norm(x, weight[0], None, 1e-5, True, plus_one=True)
    exact = norm_reference.norm(x.double(), weight[0].double() + 1, None, 1e-5, True)
    assert_near(expected, exact.to(dtype))
    assert_near(norm_kernel.norm(x, weight[0], None, 1e-5, True, plus_one=True), expected)
    normed, total = norm_kernel.add_norm(x, y, weight[0], None, 1e-5, True, plus_one=True)
    assert torch.equal(total, x + y)
    assert_near(normed, norm_reference.norm(total, weight[0], None, 1e-5, True, plus_one=True))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, head_dim", [(8, 16), (3, 80), (2, 128)])
def test_norms_of_heads_that_are_parts_of_a_projection(heads, head_dim, dtype):
    q, k, _ = random(11, heads + 2, head_dim, dtype=dtype).split((heads, 1, 1), dim=1)
    weight = random(head_dim, dtype=dtype)
    for part in (q, k):
        normed = norm_kernel.norm(part, weight, None, 1e-6, True)
        assert_near(normed, norm_reference.norm(part, weight, None, 1e-6, True))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 16), (5, 100), (3, 1024), (2, 5000)])
def test_the_gate(tokens, width, dtype):
    x = random(tokens, 2 * width, dtype=dtype)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    assert_near(norm_kernel.silu_gate(x), norm_reference.silu_gate(x))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens, width", [(1, 16), (5, 100), (3, 1024), (2, 5000)])
def test_the_clamped_gate(tokens, width, dtype):
    x, bias = random(tokens, 2 * width, dtype=dtype), random(4, 2 * width, dtype=dtype, seed=1)
    x[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    experts = torch.tensor([3, 0, 2, 2, 1])[:tokens].to(DEVICE)
    for own in (bias, None):
        expected = norm_reference.clamped_gate(x, own, experts, 2.5, 1.702)
        assert_near(norm_kernel.clamped_gate(x, own, experts, 2.5, 1.702), expected)


@needs_kernels
def test_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(norm_kernel, "MOST_PROGRAMS", 3)
    x, y = random(50, 600, dtype=torch.float32), random(50, 600, dtype=torch.float32, seed=1)
    normed, total = norm_kernel.add_norm(x, y, None, None, 1e-5, True)
    assert torch.equal(total, x + y)
    assert_near(normed, norm_reference.norm(total, None, None, 1e-5, True))
    assert_near(norm_kernel.silu_gate(x), norm_reference.silu_gate(x))


@needs_kernels
def test_nothing_of_nothing():
    empty = torch.empty(0, 64, device=DEVICE)
    assert norm_kernel.norm(empty, None, None, 1e-5, True).shape == (0, 64)
    assert norm_kernel.add_norm(empty, empty, None, None, 1e-5, False)[1].shape == (0, 64)
    assert norm_kernel.silu_gate(empty).shape == (0, 32)
    assert norm_kernel.clamped_gate(empty, None, torch.empty(0).long(), 1.0, 1.0).shape == (0, 32)


@needs_kernels
def test_what_the_kernels_cannot_read_is_refused():
    x = torch.zeros(4, 64, device=DEVICE)
    for wrong in (x.t(), torch.zeros(1, norm_kernel.MOST_SIZE + 1, device=DEVICE), x[0]):
        with pytest.raises(ValueError, match="size"):
            norm_kernel.norm(wrong, None, None, 1e-5, True)
    with pytest.raises(ValueError, match="contiguous"):
        norm_kernel.add_norm(x[:, :32], x[:, :32], None, None, 1e-5, True)
    with pytest.raises(ValueError, match="contiguous"):
        norm_kernel.silu_gate(x[:, :32])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_the_operations_are_captured():
    x, y = random(64, 4096, dtype=torch.bfloat16), random(64, 4096, dtype=torch.bfloat16, seed=1)
    weight = random(4096, dtype=torch.bfloat16)

    def step():
        normed, total = ops.add_norm(x, y, weight, None, 1e-5, True)
        return ops.norm(normed, weight, None, 1e-5, True), ops.silu_gate(total)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    x.copy_(random(64, 4096, dtype=torch.bfloat16, seed=2))
    graph.replay()
    assert all(
        torch.equal(replayed, eager) for replayed, eager in zip(results, step(), strict=True)
    )


@pytest.mark.skipif(CUDA, reason="of the CPU")
@pytest.mark.parametrize("rms", [True, False], ids=["rms", "layer"])
def test_what_torch_promises_of_the_operations_holds(rms):
    x, weight = random(6, 32, dtype=torch.float32), random(32, dtype=torch.float32)
    bias = None if rms else random(32, dtype=torch.float32, seed=1)
    heads = random(6, 5, 32, dtype=torch.float32)[:, :3]
    checks = dict(test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(ops.norm.default, (x, weight, bias, 1e-5, rms), **checks)
    torch.library.opcheck(ops.norm.default, (heads, weight, bias, 1e-5, rms), **checks)
    torch.library.opcheck(ops.norm.default, (x, None, None, 1e-5, rms), **checks)
    torch.library.opcheck(ops.add_norm.default, (x, x.clone(), weight, bias, 1e-5, rms), **checks)
    torch.library.opcheck(ops.silu_gate.default, (x,), **checks)
