"""Products of few rows in Triton whose work is divided evenly: for products.py, no engine uses them.

The product is x W^T with the weight as the first operand (a matrix unit wants 64 rows there; x may have 16). The inputs
of all tiles of outputs are one line of steps, of which every program gets an equal share, whatever the sizes are:

    steps      |---- tile 0 ----|---- tile 1 ----|---- tile 2 ----|
    programs   |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|

A program has at most two tiles that others share, its first and its last. Their sums go to memory, and whoever comes
last of a tile adds them up in the order of the programs: a row's bits depend neither on who that is, nor on its
neighbours. Tiles are copied by the tensor memory accelerator, some steps ahead. (With `warp_specialize` Triton 3.6 and
3.9 make the same code for sm_90.)
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LEAST_ROWS = 16  # of a matrix unit's operand
MOST_ROWS = 256
SHARED = 226 * 2**10  # bytes of a multiprocessor
LEAST_STAGES, MOST_STAGES = 3, 8


class Cut(NamedTuple):
    """How the work is divided.

    outputs, inputs   multiplied in a step
    stages            steps whose tiles are on their way
    warps, programs   warps of a program, programs of a multiprocessor
    """

    outputs: int
    inputs: int
    stages: int
    warps: int
    programs: int

    def fits(self, outputs: int, inputs: int) -> bool:
        return outputs % self.outputs == 0 and inputs % self.inputs == 0


def padded(rows: int) -> int:
    return max(LEAST_ROWS, triton.next_power_of_2(rows))


def cuts(rows: int) -> list[Cut]:
    """Those worth a try for so many rows in bf16 on Hopper: as many stages as the shared memory holds beside what the
    sums are rearranged in, and at most 128 registers of a thread for the sums."""
    found = []
    for outputs, inputs, programs in itertools.product((64, 128), (64, 128), (1, 2)):
        warps = 8 if outputs * padded(rows) > 128 * 128 else 4
        room = SHARED // programs - 4 * outputs * padded(rows)
        stages = min(MOST_STAGES, room // (2 * inputs * (outputs + padded(rows))))
        if stages >= LEAST_STAGES and outputs * padded(rows) <= 128 * 32 * warps and outputs >= 16 * warps:
            found.append(Cut(outputs, inputs, stages, warps, programs))
    return found


def product(x: Tensor, weight: Tensor, cut: Cut, processors: int, early: bool = False) -> Tensor:
    """x W^T, [rows, outputs], of x [rows, inputs] and weight [outputs, inputs], both contiguous, on `processors`
    multiprocessors; ValueError if `cut` does not divide them.

    early: the kernel may begin, and fetch weights, while the one before it still runs (compute capability 9.0).
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if not (0 < rows <= MOST_ROWS and x.is_contiguous() and weight.is_contiguous() and cut.fits(outputs, inputs)):
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit {cut}")
    steps = inputs // cut.inputs
    total = outputs // cut.outputs * steps
    programs = min(processors * cut.programs, total)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    partial, arrivals = _workspace(x.device, programs, cut.outputs, padded(rows), outputs // cut.outputs)
    _product[(programs,)](
        TensorDescriptor.from_tensor(weight, [cut.outputs, cut.inputs]),
        TensorDescriptor.from_tensor(x, [padded(rows), cut.inputs]),
        weight, out, partial, arrivals, rows, outputs, inputs, steps, total,
        ROWS=padded(rows), OUTPUTS=cut.outputs, INPUTS=cut.inputs, EARLY=early, STAGES=cut.stages,
        num_warps=cut.warps, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


@functools.cache
def _workspace(device: torch.device, programs: int, outputs: int, rows: int, tiles: int) -> tuple[Tensor, Tensor]:
    """(Sums of the first and the last tile of each program, how many of a tile have arrived: zero between kernels)."""
    sums = torch.empty((2 * programs, outputs, rows), dtype=torch.float32, device=device)
    return sums, torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit
def _program_of(step, programs, total):
    """The program that has a step: the last whose first step, program * total // programs, is not behind it."""
    return ((step + 1) * programs - 1) // total


@triton.jit(do_not_specialize=["rows", "steps", "total"])
def _product(weights, values, weight, out, partial, arrivals, rows, outputs, inputs, steps, total,
             ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """weights, values: descriptors, of blocks [OUTPUTS, INPUTS] and [ROWS, INPUTS]; `steps` a tile, `total` of all."""
    me, programs = tl.program_id(0), tl.num_programs(0)
    begin, end = me * total // programs, (me + 1) * total // programs
    output, row = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    if EARLY:
        # Weights never change: the first tiles may be fetched before what the kernel depends on is there.
        column = begin % steps * INPUTS
        line = weight + (begin // steps * OUTPUTS + output).to(tl.int64) * inputs + column
        ahead = tl.minimum(inputs - column, STAGES * INPUTS) * 2  # bytes
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r", [line.to(tl.int64, bitcast=True), ahead], tl.int32, False, 1,
        )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = partial + output[:, None] * ROWS + row[None, :]
    inside = (row < rows)[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        tile, column = step // steps, step % steps
        a = weights.load([tile * OUTPUTS, column * INPUTS])
        b = values.load([0, column * INPUTS])
        sums = tl.dot(a, b.T, sums)
        if (column == steps - 1) | (step == end - 1):
            # Nothing but stores, or the compiler would copy no step ahead.
            if (begin <= tile * steps) & (column == steps - 1):
                target = out + row[:, None] * outputs + (tile * OUTPUTS + output)[None, :]
                tl.store(target, sums.T.to(out.dtype.element_ty), mask=inside)
            else:
                mine = 2 * me + tl.where(begin // steps == tile, 0, 1)
                tl.store(place + mine * (OUTPUTS * ROWS), sums)
            sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    # All threads' sums are stored before the release; the acquire is before the reads of the others'.
    tl.debug_barrier()
    for which in tl.static_range(2):
        tile = (begin if which == 0 else end - 1) // steps
        first = _program_of(tile * steps, programs, total)
        last = _program_of(tile * steps + steps - 1, programs, total)
        if (first < last) & ((which == 0) | (tile > begin // steps)):
            arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
            if arrived == last - first:
                tl.store(arrivals + tile, 0)
                whole = tl.zeros((OUTPUTS, ROWS), tl.float32)
                for program in range(first, last + 1):
                    at = 2 * program + tl.where(program * total // programs // steps == tile, 0, 1)
                    whole += tl.load(place + at * (OUTPUTS * ROWS), cache_modifier=".cg")
                target = out + row[:, None] * outputs + (tile * OUTPUTS + output)[None, :]
                tl.store(target, whole.T.to(out.dtype.element_ty), mask=inside)
