"""The experiment with products of few rows: its kernels compute products, and compile for the GPU that they are for."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.plugins.kernel_cases import CUDA, DEVICE, INTERPRETED, needs_kernels

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "experiments"))
import cublaslt
import product_kernels
import triton
from product_kernels import Cut
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.slow

DTYPES = (torch.float16, torch.bfloat16) if CUDA else (torch.float16, torch.float32)  # the interpreter has no bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CUT = Cut(64, 64, stages=3, warps=4, programs=1)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run here directly")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


def draw(rows, outputs, inputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    return x, torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(DEVICE, dtype)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "rows, tiles, steps, processors",
    [
        (5, 3, 5, 2),  # programs that share a tile, and one that has a whole one too
        (17, 2, 4, 3),
        (1, 7, 2, 1),  # nothing is shared
        (3, 1, 9, 4),  # all share one tile
        (16, 2, 1, 8),  # fewer steps than processors
    ],
)
def test_shares_of_all_sizes(rows, tiles, steps, processors, dtype):
    x, weight = draw(rows, tiles * CUT.outputs, steps * CUT.inputs, dtype)
    first = product_kernels.product(x, weight, CUT, processors)
    torch.testing.assert_close(
        first.float(), x.float() @ weight.float().t(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(product_kernels.product(x, weight, CUT, processors), first)  # what is counted is zero again


@needs_kernels
def test_a_row_is_the_same_whatever_its_neighbours_are():
    x, weight = draw(9, 128, 192, DTYPES[-1])
    together = product_kernels.product(x, weight, CUT, 4)
    for row in range(len(x)):
        alone = product_kernels.product(x[row : row + 1].contiguous(), weight, CUT, 4)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_begun_early_a_chain_of_products_is_the_same():
    x, weight = draw(24, 2048, 2048, torch.bfloat16)
    results = []
    for early in (False, True):
        y = x
        for _ in range(20):
            y = product_kernels.product(y, weight, CUT, 100, early)
        results.append(y)
    assert torch.equal(*results) and results[0].norm() > 0


@needs_kernels
def test_sizes_that_do_not_fit():
    for rows, outputs, inputs in ((0, 64, 64), (257, 64, 64), (1, 65, 64), (1, 64, 96)):
        with pytest.raises(ValueError, match="do not fit"):
            product_kernels.product(*draw(rows, outputs, inputs), CUT, 1)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled there")
@pytest.mark.parametrize("rows, early", [(1, False), (24, True), (128, False), (256, True)])
def test_what_is_tried_compiles_for_hopper_and_copies_ahead(rows, early):
    for cut in product_kernels.cuts(rows):
        kernel = compiled(cut, product_kernels.padded(rows), early)
        stage = 2 * cut.inputs * (cut.outputs + product_kernels.padded(rows))
        assert cut.stages * stage <= kernel.metadata.shared <= 227 * 2**10 // cut.programs
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"] and "wgmma" in kernel.asm["ptx"] and kernel.asm["cubin"]
        waits = len(re.findall(r"griddepcontrol\.(wait|launch_dependents)", kernel.asm["ptx"]))
        assert waits == (2 if early else 0)


def compiled(cut, rows, early):
    """The kernel as `product` would launch it for bf16, made without a GPU."""
    types = {
        "weights": f"tensordesc<bf16[{cut.outputs}, {cut.inputs}]>",
        "values": f"tensordesc<bf16[{rows}, {cut.inputs}]>",
        "weight": "*bf16",
        "out": "*bf16",
        "partial": "*fp32",
        "arrivals": "*i32",
        **dict.fromkeys(("rows", "outputs", "inputs", "steps", "total"), "i32"),
    }
    constants = {"ROWS": rows, "OUTPUTS": cut.outputs, "INPUTS": cut.inputs, "EARLY": early, "STAGES": cut.stages}
    names = [*types, *constants]
    aligned = ("weight", "out", "partial", "arrivals", "outputs", "inputs")
    source = ASTSource(
        product_kernels._product,
        types | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": cut.warps, **({"launch_pdl": True} if early else {})}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def test_structures_are_as_large_as_the_headers():
    assert ctypes.sizeof(cublaslt.Algorithm) == 64 and ctypes.sizeof(cublaslt.Proposal) == 96
    assert cublaslt.Proposal.workspace.offset == 64 and cublaslt.Proposal.waves.offset == 76
