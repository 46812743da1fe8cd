"""Products of few rows: what torch gives, and the same bits for a row whatever its neighbours."""

import pytest
import torch

from .kernel_cases import CUDA, DEVICE, needs_interpreter, needs_kernels, run_in_the_interpreter

pytest.importorskip("triton")
from pensieve.plugins.few_rows_kernel import Tile, product

DTYPES = (torch.bfloat16, torch.float16, torch.float32) if CUDA else (torch.float16, torch.float32)


@pytest.mark.slow
@needs_interpreter
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", [Tile(32, 32, 1, 2), Tile(16, 32, 2, 2)], ids=str)
def test_a_product_is_torch_s_and_a_row_has_no_neighbours(tile, dtype):
    weight, x = random(64, 128, dtype=dtype), random(40, 140, dtype=dtype, seed=1)[:, :128]
    exact = x.double() @ weight.double().t()
    every = product(x, weight, tile)
    assert every.dtype == dtype and (every - exact).norm() < {torch.float32: 1e-6}.get(dtype, 5e-3) * exact.norm()
    for rows in (0, 1, 17):
        assert torch.equal(product(x[:rows], weight, tile), every[:rows])


@needs_kernels
@pytest.mark.parametrize("rows, outputs, inputs", [(65, 128, 128), (1, 100, 128), (1, 128, 96)])
def test_what_does_not_fit_is_refused(rows, outputs, inputs):
    with pytest.raises(ValueError, match="do not fit"):
        product(
            torch.zeros(rows, inputs, device=DEVICE), torch.zeros(outputs, inputs, device=DEVICE), Tile(64, 64, 1, 2)
        )


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0")
@pytest.mark.parametrize("splits", [1, 2])
def test_an_early_kernel_waits_for_what_it_depends_on(splits):
    """A chain of products, captured: none begins before the one before it has ended."""
    weights = [random(512, 512, dtype=torch.bfloat16, seed=seed) / 22 for seed in range(40)]
    start = random(4, 512, dtype=torch.bfloat16, seed=99)

    def chain(early):
        x = start
        for weight in weights:
            x = product(x, weight, Tile(64, 64, splits, 3), early)
        return x

    expected = chain(False)
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = chain(True)
    for _ in range(20):
        ours.zero_()
        graph.replay()
        assert torch.equal(ours, expected)
