"""The experts of a sparse MLP on a GPU in Triton. Twins: `expert_reference.grouped` and
`one_by_one`.

    route   puts the pairs of a token and an expert in the order of their experts, in blocks of one
            expert's rows
    up      a block's tokens times the expert's gates and values, the bias, the gate: a gated row of
            each pair
    down    a block's gated rows times the expert's outputs, the bias: a made row of each pair
    add     the sum over a token's pairs of share * made, in float32

A block reads a tile of the expert's weights once for all of its rows. Sums are taken in a fixed
order, so for given tiles a token's result does not depend on the other tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import Launch
from .expert_reference import Experts

CHUNK = 1024  # pairs that a program of `route` reads at once
ADDED = 1024  # columns of a program of `add`
LEAST_BINS = 32  # of a histogram: one for each thread of a warp


class ExpertTile(NamedTuple):
    """Of one product: the outputs and the inputs of a tile of weights, and the compiler's
    options."""

    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4


class Tiles(NamedTuple):
    """rows of a block: 1 (no tensor cores, and no `route`), or 16 or more."""

    rows: int
    up: ExpertTile
    down: ExpertTile


def tiles_for(pairs: int, experts: int, tokens: int) -> Tiles:
    """The tiles for the mean number of rows of an expert: the fastest that were measured."""
    if tokens == 1:
        return Tiles(1, ExpertTile(8, 512), ExpertTile(8, 512))
    mean = pairs / experts
    if mean <= 12:
        return Tiles(16, ExpertTile(32, 256, stages=3), ExpertTile(32, 256, stages=3))
    if mean <= 24:
        return Tiles(32, ExpertTile(64, 128, stages=3), ExpertTile(64, 128, stages=3))
    if mean <= 96:
        return Tiles(64, ExpertTile(64, 64), ExpertTile(64, 64))
    return Tiles(
        128, ExpertTile(128, 64, warps=8, stages=3), ExpertTile(256, 64, warps=8, stages=3)
    )


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Most blocks of any routing: each expert with pairs has a block, and one more for each `rows`
    pairs beyond."""
    owners = min(pairs, experts)
    return owners + (pairs - owners) // rows


def experts(
    x: Tensor, chosen: Tensor, shares: Tensor, of: Experts, tiles: Tiles | None = None
) -> Tensor:
    """`expert_reference.grouped`, with products in float32 until the gate and until the bias of
    `down`.

    ValueError if the weights are not contiguous.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        tiles = tiles or tiles_for(chosen.numel(), len(of.down) // x.shape[1], len(x))
        for launch in launches(
            x.contiguous(), chosen.contiguous(), shares.contiguous(), of, y, tiles
        ):
            launch.run()
    return y


def launches(
    x: Tensor, chosen: Tensor, shares: Tensor, of: Experts, y: Tensor, tiles: Tiles
) -> list[Launch]:
    """The launches of `experts`, in order, for one token or more. ValueError if a tensor is not
    contiguous."""
    if not all(tensor.is_contiguous() for tensor in (x, chosen, shares, of.up, of.down)):
        raise ValueError("x, chosen, shares and the weights must be contiguous")
    (tokens, hidden), width, own = x.shape, of.down.shape[1], chosen.shape[1]
    count = len(of.down) // hidden
    pairs = chosen.numel()
    blocks = pairs if tiles.rows == 1 else most_blocks(pairs, count, tiles.rows)
    kernels = []
    order = table = chosen
    if tiles.rows > 1:
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        table = torch.empty((blocks, 3), dtype=torch.int32, device=x.device)
        bins = max(triton.next_power_of_2(count), LEAST_BINS)
        settings = dict(EXPERTS=count, BINS=bins, ROWS=tiles.rows, CHUNK=CHUNK)
        kernels.append(Launch(_route, (count,), (chosen, order, table, pairs, blocks), settings))
    gated = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    results = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    up_scale, up_groups = _groups(of.up_scale)
    down_scale, down_groups = _groups(of.down_scale)
    up = (x, of.up, up_scale, of.up_bias, order, table, gated, of.limit, of.slope)
    settings = dict(
        OUTPUTS=width,
        INPUTS=hidden,
        OWN=own,
        CLAMPED=of.limit != 0,
        GROUPS=up_groups,
        **_settings(tiles.rows, tiles.up, 2, x),
    )
    kernels.append(Launch(_up, (blocks * triton.cdiv(width, tiles.up.outputs),), up, settings))
    down = (gated, of.down, down_scale, of.down_bias, order, table, results)
    settings = dict(
        OUTPUTS=hidden, INPUTS=width, GROUPS=down_groups, **_settings(tiles.rows, tiles.down, 1, x)
    )
    kernels.append(
        Launch(_down, (blocks * triton.cdiv(hidden, tiles.down.outputs),), down, settings)
    )
    block = min(triton.next_power_of_2(hidden), ADDED)
    grid = (tokens, triton.cdiv(hidden, block))
    settings = dict(HIDDEN=hidden, OWN=own, BLOCK=block)
    return [*kernels, Launch(_add, grid, (results, shares, y), settings)]


def linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`fp8.widening` of few tokens: the last product of one expert, which all tokens have chosen.
    ValueError if a tensor is not contiguous."""
    if not all(tensor.is_contiguous() for tensor in (x, weight, scale)):
        raise ValueError("x, the weight and its scales must be contiguous")
    tokens, inputs = x.shape
    results = torch.empty((tokens, len(weight)), dtype=x.dtype, device=x.device)
    if not tokens:
        return results
    tiles = tiles_for(tokens, 1, tokens)
    blocks = triton.cdiv(tokens, tiles.rows)
    if tiles.rows == 1:
        order = table = torch.zeros(tokens, dtype=torch.int64, device=x.device)
    else:
        order = torch.arange(tokens, dtype=torch.int32, device=x.device)
        firsts = tiles.rows * torch.arange(blocks, dtype=torch.int32, device=x.device)
        ends = (firsts + tiles.rows).clamp_max(tokens)
        table = torch.stack((torch.zeros_like(firsts), firsts, ends), dim=1)
    _, groups = _groups(scale)
    settings = dict(
        OUTPUTS=len(weight), INPUTS=inputs, GROUPS=groups, **_settings(tiles.rows, tiles.down, 1, x)
    )
    arguments = (x, weight, scale, bias, order, table, results)
    grid = (blocks * triton.cdiv(len(weight), tiles.down.outputs),)
    Launch(_down, grid, arguments, settings).run()
    return results


def _groups(scale: Tensor | None) -> tuple[Tensor | None, int]:
    """The scales of a weight, and those of a row."""
    return scale, 1 if scale is None or scale.dim() == 1 else scale.shape[1]


def _settings(rows: int, tile: ExpertTile, matrices: int, x: Tensor) -> dict[str, int]:
    """Of `_up` or `_down`. matrices: how many weights a program reads a tile of (gate and value:
    2)."""
    stages = tile.stages
    if x.is_cuda and rows > 1:
        stage = (rows + matrices * tile.outputs) * tile.inputs * x.itemsize
        stages = max(1, min(stages, _shared_memory(x.device.index) // stage))
    return dict(
        ROWS=rows, BLOCK=tile.outputs, STEP=tile.inputs, num_warps=tile.warps, num_stages=stages
    )


@cache
def _shared_memory(device: int) -> int:
    """Most bytes of a program: a small GPU has room for fewer stages."""
    most: int = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return most


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _route(
    chosen,
    order,
    table,
    pairs,
    blocks,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each expert. order: pairs by expert. table: of each block its expert (-1:
    none), its first place in the order, and the place behind its last one."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=0).to(tl.int32)
        counts += tl.histogram(expert, BINS, mask=pair < pairs)
    start = tl.sum(tl.where(bins < own, counts, 0), 0)
    count = tl.sum(tl.where(bins == own, counts, 0), 0)
    blocks_of = (counts + ROWS - 1) // ROWS
    block = tl.sum(tl.where(bins < own, blocks_of, 0), 0)
    place = start
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        is_own = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == own).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own != 0)
        place += tl.sum(is_own, 0)
    for first in range(0, count, ROWS):
        tl.store(table + block * 3, own)
        tl.store(table + block * 3 + 1, start + first)
        tl.store(table + block * 3 + 2, tl.minimum(start + first + ROWS, start + count))
        block += 1
    if own == EXPERTS - 1:
        for unused in range(block, blocks):
            tl.store(table + unused * 3, -1)
            tl.store(table + unused * 3 + 1, 0)
            tl.store(table + unused * 3 + 2, 0)


@triton.jit
def _block(order, table, block, ROWS: tl.constexpr):
    """(Expert, places of the block's rows, their pairs, mask). Without a table, `order` is every
    pair's expert."""
    if ROWS == 1:
        place = block + tl.arange(0, 1)
        return tl.load(order + block).to(tl.int32), place, place, place >= 0
    else:
        expert = tl.load(table + block * 3)
        place = tl.load(table + block * 3 + 1) + tl.arange(0, ROWS)
        there = place < tl.load(table + block * 3 + 2)
        return expert, place, tl.load(order + place, mask=there, other=0), there


@triton.jit
def _widened(weights, scales, mask, dtype: tl.constexpr):
    """The values of a tile of weights in FP8. scales: pointers."""
    return (weights.to(tl.float32) * tl.load(scales, mask=mask, other=0.0)).to(dtype)


@triton.jit(do_not_specialize=["limit", "slope"])
def _up(x, up, scale, bias, order, table, gated, limit, slope, OUTPUTS: tl.constexpr,
        INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
        OWN: tl.constexpr, CLAMPED: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """BLOCK gated values of each row of a block. OWN: experts of a token."""
    tiles = tl.cdiv(OUTPUTS, BLOCK)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert, place, pair, there = _block(order, table, block, ROWS)
    if expert < 0:
        return
    output = tile * BLOCK + tl.arange(0, BLOCK)
    valid = output < OUTPUTS
    step = tl.arange(0, STEP)
    rows = (pair // OWN)[:, None]
    row_inputs = step[None, :]
    has_row = there[:, None]
    if ROWS == 1:
        weights = output[:, None]
        weight_inputs = step[None, :]
        has_output = valid[:, None]
        gate = tl.zeros((BLOCK, STEP), tl.float32)
        value = tl.zeros((BLOCK, STEP), tl.float32)
    else:
        weights = output[None, :]
        weight_inputs = step[:, None]
        has_output = valid[None, :]
        gate = tl.zeros((ROWS, BLOCK), tl.float32)
        value = tl.zeros((ROWS, BLOCK), tl.float32)
    own = up + expert.to(tl.int64) * (2 * OUTPUTS * INPUTS)
    row_at = x + rows.to(tl.int64) * INPUTS + row_inputs
    gate_at = own + weights * INPUTS + weight_inputs
    value_at = gate_at + OUTPUTS * INPUTS
    for first in range(0, INPUTS, STEP):
        if INPUTS % STEP == 0:
            row = tl.load(row_at + first, mask=has_row, other=0.0)
            mask = has_output
        else:
            row = tl.load(row_at + first, mask=has_row & (first + row_inputs < INPUTS), other=0.0)
            mask = has_output & (first + weight_inputs < INPUTS)
        gates = tl.load(gate_at + first, mask=mask, other=0.0)
        values = tl.load(value_at + first, mask=mask, other=0.0)
        if scale is not None:
            group = (first + weight_inputs) // (INPUTS // GROUPS)
            scales = scale + (expert.to(tl.int64) * (2 * OUTPUTS) + weights) * GROUPS + group
            gates = _widened(gates, scales, mask, row.dtype)
            values = _widened(values, scales + OUTPUTS * GROUPS, mask, row.dtype)
        if ROWS == 1:
            gate += gates.to(tl.float32) * row.to(tl.float32)
            value += values.to(tl.float32) * row.to(tl.float32)
        else:
            gate = tl.dot(row, gates, gate, input_precision="ieee")
            value = tl.dot(row, values, value, input_precision="ieee")
    if ROWS == 1:
        gate = tl.sum(gate, 1)[None, :]
        value = tl.sum(value, 1)[None, :]
    column = output[None, :]
    mask = valid[None, :] & there[:, None]
    if bias is not None:
        bias_at = bias + expert.to(tl.int64) * (2 * OUTPUTS) + column
        gate += tl.load(bias_at, mask=column < OUTPUTS, other=0.0).to(tl.float32)
        value += tl.load(bias_at + OUTPUTS, mask=column < OUTPUTS, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        value = tl.minimum(tl.maximum(value, -limit), limit) + 1.0
        product = value * gate / (1.0 + tl.exp(-slope * gate))
    else:
        product = value * gate / (1.0 + tl.exp(-gate))
    tl.store(
        gated + place[:, None].to(tl.int64) * OUTPUTS + column,
        product.to(gated.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _down(
    gated,
    down,
    scale,
    bias,
    order,
    table,
    results,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """BLOCK outputs of each row of a block."""
    tiles = tl.cdiv(OUTPUTS, BLOCK)
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert, place, pair, there = _block(order, table, block, ROWS)
    if expert < 0:
        return
    output = tile * BLOCK + tl.arange(0, BLOCK)
    valid = output < OUTPUTS
    step = tl.arange(0, STEP)
    rows = place[:, None]
    row_inputs = step[None, :]
    has_row = there[:, None]
    if ROWS == 1:
        weights = output[:, None]
        weight_inputs = step[None, :]
        has_output = valid[:, None]
        total = tl.zeros((BLOCK, STEP), tl.float32)
    else:
        weights = output[None, :]
        weight_inputs = step[:, None]
        has_output = valid[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
    row_at = gated + rows.to(tl.int64) * INPUTS + row_inputs
    weight_at = down + expert.to(tl.int64) * (OUTPUTS * INPUTS) + weights * INPUTS + weight_inputs
    for first in range(0, INPUTS, STEP):
        if INPUTS % STEP == 0:
            row = tl.load(row_at + first, mask=has_row, other=0.0)
            mask = has_output
        else:
            row = tl.load(row_at + first, mask=has_row & (first + row_inputs < INPUTS), other=0.0)
            mask = has_output & (first + weight_inputs < INPUTS)
        values = tl.load(weight_at + first, mask=mask, other=0.0)
        if scale is not None:
            group = (first + weight_inputs) // (INPUTS // GROUPS)
            scales = scale + (expert.to(tl.int64) * OUTPUTS + weights) * GROUPS + group
            values = _widened(values, scales, mask, row.dtype)
        if ROWS == 1:
            total += values.to(tl.float32) * row.to(tl.float32)
        else:
            total = tl.dot(row, values, total, input_precision="ieee")
    if ROWS == 1:
        total = tl.sum(total, 1)[None, :]
    column = output[None, :]
    mask = valid[None, :] & there[:, None]
    if bias is not None:
        bias_at = bias + expert.to(tl.int64) * OUTPUTS + column
        total += tl.load(bias_at, mask=column < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(
        results + pair[:, None].to(tl.int64) * OUTPUTS + column,
        total.to(results.dtype.element_ty),
        mask=mask,
    )


@triton.jit
def _add(results, shares, y, HIDDEN: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for pair in range(OWN):
        row = results + (token * OWN + pair) * HIDDEN
        share = tl.load(shares + token * OWN + pair)
        total += tl.load(row + column, mask=column < HIDDEN, other=0.0).to(tl.float32) * share
    tl.store(y + token * HIDDEN + column, total.to(y.dtype.element_ty), mask=column < HIDDEN)
