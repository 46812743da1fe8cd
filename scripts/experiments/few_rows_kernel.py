"""Projections of few rows on a GPU in Triton, bound by reading their weights.

A program reads OUTPUTS rows of the weight, or the share of their columns that one of the splits has, and multiplies all
rows of x with them. Shares are summed in their order by whoever of a tile comes last. A row's result depends on neither
its neighbours nor their number: padding with zeros to another ROWS leaves its sums as they are.

No engine uses it: it brings 1% at one row and costs 10% at 64. decode_floor.py measures it beside cuBLAS.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
AHEAD = tl.constexpr(4)  # tiles that an early program fetches
LINE = tl.constexpr(64)  # values in a line of the cache
LEAST_ROWS = 16  # of a matrix unit's operand


class Tile(NamedTuple):
    """How a product is cut: outputs and inputs that a program multiplies at once, and splits of the inputs."""

    outputs: int
    inputs: int
    splits: int
    stages: int
    warps: int = 4

    def fits(self, outputs: int, inputs: int) -> bool:
        return outputs % self.outputs == 0 and inputs % (self.splits * self.inputs) == 0


def product(x: Tensor, weight: Tensor, tile: Tile, early: bool = False) -> Tensor:
    """x W^T, [rows, outputs], of x [rows, inputs], dense in its last dimension, and a contiguous weight, cut by `tile`.

    early: the kernel may begin to fetch weights while the one before it still runs (compute capability 9.0 or newer).
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if not (rows <= MOST_ROWS and x.stride(1) == 1 and weight.is_contiguous() and tile.fits(outputs, inputs)):
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} do not fit {tile}")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    padded = max(LEAST_ROWS, triton.next_power_of_2(rows))
    partial = arrivals = None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, outputs, padded), dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device, outputs // tile.outputs)
    _product[(outputs // tile.outputs, tile.splits)](
        x, weight, out, partial, arrivals, rows, inputs, outputs, x.stride(0), inputs // tile.splits,
        ROWS=padded, OUTPUTS=tile.outputs, INPUTS=tile.inputs, SPLIT=tile.splits > 1, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


@functools.cache
def _arrivals(device: torch.device, tiles: int) -> Tensor:
    """Zero between any two kernels of one stream: who comes last sees to it."""
    return torch.zeros(tiles, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _product(x, weight, out, partial, arrivals, rows, inputs, outputs, x_stride, share,
             ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SPLIT: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    """One program a tile of outputs and a share of the inputs. partial [splits, outputs, ROWS] float32."""
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = split * share + tl.arange(0, INPUTS)
    weights = weight + output[:, None].to(tl.int64) * inputs + column[None, :]
    values = x + row[None, :] * x_stride + column[:, None]
    inside = row[None, :] < rows
    if EARLY:
        # Weights never change, so the first tiles may be fetched before what the kernel depends on is there.
        ahead = (tl.arange(0, AHEAD * INPUTS // LINE) * LINE) % share
        lines = weight + output[:, None].to(tl.int64) * inputs + (split * share + ahead)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64, bitcast=True)], tl.int32, False, 1
        )
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, share, INPUTS):
        a = tl.load(weights + first, eviction_policy="evict_first")
        b = tl.load(values + first, mask=inside, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    target = out + row[None, :] * outputs + output[:, None]
    if SPLIT:
        place = partial + output[:, None] * ROWS + row[None, :]
        tl.store(place + split * outputs * ROWS, total)
        splits = tl.num_programs(1)
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == splits - 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for part in range(splits):
                total += tl.load(place + part * outputs * ROWS)
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)
