"""Compiles the Triton kernels of a layer for `native/launch.cpp`, which launches them without
Python.

`write_kernels` asks Triton's JIT itself to compile each launch that a layer makes. So a kernel is
the same as on other backends, with all that the JIT assumes of its parameters. A folder holds
N.cubin and N.ptx for each kernel, and `kernels.txt`, lines of words:

    pool LAYERS LAYER_STRIDE          of the pool, in elements
    shape HEADS KV_HEADS HEAD_DIM ITEM_BYTES ROTARY_DIMS     of the layer's values
    kernel NAME THREADS SHARED DEPENDENT GRID FACTOR ROWS CLASS
                                      The grid is X by ROWS. GRID says what X is. `fixed`: FACTOR.
                                      `tokens`: tokens times FACTOR. `rows`: tokens divided by
                                      FACTOR, rounded up. DEPENDENT: 1 if it may begin once all
                                      programs of the kernel before it have begun. CLASS: of tiles,
                                      or 0
    value TYPE ALIGNED BITS           the kernel's next parameter: always this number, as bits
    given TYPE ALIGNED NAME           the kernel's next parameter: differs between launches. It is a
                                      multiple of ALIGNED, 1 or 16. TYPE: pointer, i32, i64 or fp32
    norm KERNEL
    add_norm KERNEL
    silu_gate KERNEL                  of models that have it
    write_kv KERNEL
    attend LEAST_ROWS KERNEL...       the launches, in order, of a step whose longest segment has so
                                      many rows (queries times heads of a group) or more. The lines
                                      are in descending order of LEAST_ROWS.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...scheduler.types import InvariantError
from ..attention import kernel as attention_kernel
from ..attention import kv_write_kernel
from ..attention.work_list import WorkList
from ..linear import norm_kernel
from ..triton_launch import Launch

DESCRIPTION = "kernels.txt"
GIVEN = ("layer_offset", "tokens", "blocks", "count")
"""The numbers that differ between launches. All pointers do."""


class Norms(NamedTuple):
    """A layer's two norms; `norm_reference.norm` says what they compute."""

    size: int
    eps: float
    rms: bool
    weighted: bool
    biased: bool


def write_kernels(
    folder: Path,
    pool: Tensor,
    work: WorkList,
    dtype: torch.dtype,
    rotary_dims: int,
    norms: Norms,
    silu_width: int = 0,
) -> None:
    """Compiles for the active GPU the launches of a layer on pools and work lists of these shapes.

    pool          `[slot, layers, 2, kv_heads, chunk_tokens, head_dim]` of `dtype`, or `fp8_pool`'s
    dtype         of the layer's values
    rotary_dims   of `write_kv`; 0 without rotary
    silu_width    of the result of `silu_gate`; 0 without
    InvariantError if a kernel needs something that the library does not give it.
    """
    layers, kv_heads = pool.shape[1], pool.shape[3]
    _, heads, head_dim = work.partial.shape
    kernels = _Kernels(folder)
    batch = _ExampleBatch(pool, work, dtype, rotary_dims)
    values = torch.empty(0, dtype=dtype, device=pool.device)
    norm, add_norm = (
        kernels.add(one, "rows", one.settings["ROWS"]) for one in _norm_launches(values, norms)
    )
    write_kv = kernels.add(batch.write_kv(), "tokens", 1)
    gate = []
    if silu_width:
        launch = norm_kernel.silu_gate_launch(
            values.new_empty(1, 2 * silu_width), values.new_empty(1, silu_width)
        )
        gate.append(f"silu_gate {kernels.add(launch, 'tokens', 1)}")
    attend = []
    for classes in reversed(range(1, len(work.tiles) + 1)):
        least_rows = work.tiles[classes - 2].rows + 1 if classes > 1 else 0
        numbers = [
            kernels.add(launch, "fixed", launch.grid[0], kind)
            for kind, launch in batch.attend(classes)
        ]
        attend.append(f"attend {least_rows} {' '.join(map(str, numbers))}")
    lines = [
        f"pool {layers} {pool.stride(1)}",
        f"shape {heads} {kv_heads} {head_dim} {dtype.itemsize} {rotary_dims}",
        *kernels.lines,
        f"norm {norm}",
        f"add_norm {add_norm}",
        f"write_kv {write_kv}",
        *gate,
        *attend,
    ]
    (folder / DESCRIPTION).write_text("".join(f"{line}\n" for line in lines))


def _norm_launches(values: Tensor, norms: Norms) -> Iterator[Launch]:
    """Of one token: a norm, and a norm of a sum."""
    x = values.new_empty(1, norms.size)
    weight, bias = (x[0] if there else None for there in (norms.weighted, norms.biased))
    for y, total in ((None, None), (x, x)):
        yield norm_kernel.launch(x, y, weight, bias, norms.eps, norms.rms, x, total)


class _ExampleBatch:
    """Launches of one token of the first layer. Every other batch is of the same kernels: see
    `GIVEN`."""

    def __init__(self, pool: Tensor, work: WorkList, dtype: torch.dtype, rotary_dims: int):
        kv_heads = pool.shape[3]
        _, heads, head_dim = work.partial.shape
        qkv = pool.new_empty((1, heads + 2 * kv_heads, head_dim), dtype=dtype)
        self._qkv = qkv.split((heads, kv_heads, kv_heads), dim=1)
        self._q = pool.new_empty((1, heads, head_dim), dtype=dtype)
        self._rotary = pool.new_empty((1, rotary_dims), dtype=torch.float32)
        self._slots = pool.new_empty(1, dtype=torch.int32)
        self._table = pool.new_empty((1, 1), dtype=torch.int32)
        self._pool = pool
        self._work = work

    def write_kv(self) -> Launch:
        q, k, v = self._qkv
        return kv_write_kernel.launch(q, k, v, self._rotary, self._slots, self._pool, 0, self._q)

    def attend(self, classes: int) -> Iterator[tuple[int, Launch]]:
        """(class, launch), in the order of the launches."""
        scale = self._q.shape[2] ** -0.5
        batch = (self._q, self._q, self._table, self._pool, 0, scale, self._work, classes)
        return zip(reversed(range(classes)), attention_kernel.launches(*batch), strict=True)


class _Kernels:
    """The kernels that are in the folder."""

    def __init__(self, folder: Path):
        self.lines: list[str] = []
        self._folder = folder
        self._count = 0

    def add(self, launch: Launch, grid: str, factor: int, kind: int = 0) -> int:
        """Compiles the launch's kernel. Returns its number."""
        compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.settings)
        number = self._count
        self._count = self._count + 1
        (self._folder / f"{number}.cubin").write_bytes(compiled.asm["cubin"])
        (self._folder / f"{number}.ptx").write_text(compiled.asm["ptx"])
        metadata = compiled.metadata
        rows = launch.grid[1] if len(launch.grid) > 1 else 1
        dependent = int(getattr(metadata, "launch_pdl", False))
        words = (
            metadata.name,
            32 * metadata.num_warps,
            metadata.shared,
            dependent,
            grid,
            factor,
            rows,
            kind,
        )
        self.lines.append(f"kernel {' '.join(map(str, words))}")
        parameters = [*_parameters(compiled.src, launch)]
        self.lines += [
            *parameters,
            *["value i64 1 0"] * _scratch_pointers(compiled, len(parameters)),
        ]
        return number


def _parameters(source: Any, launch: Launch) -> Iterator[str]:
    """The lines of a kernel's parameters, as the JIT has specialised them."""
    names = list(source.signature)
    for place, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        kind = source.signature[name]
        if kind == "constexpr":  # compiled in
            continue
        aligned = 16 if ["tt.divisibility", 16] in source.attrs.get((place,), []) else 1
        if kind.startswith("*"):
            yield f"given pointer {aligned} {name}"
        elif name in GIVEN:
            yield f"given {kind} {aligned} {name}"
        else:
            yield f"value {kind} {aligned} {_bits(kind, value)}"


def _scratch_pointers(compiled: Any, parameters: int) -> int:
    """How many pointers to memory of Triton's own the kernel takes behind its parameters: null
    here, none needs any."""
    metadata = compiled.metadata
    for need in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid"):
        if getattr(metadata, need, 0):
            raise InvariantError(f"the library does not supply {need} of {metadata.name}")
    if metadata.num_ctas != 1:
        raise InvariantError(
            f"the library launches no clusters, but {metadata.name} wants {metadata.num_ctas}"
        )
    declared = re.search(r"\.entry\s+\w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    assert declared is not None
    scratch = declared[1].count(".param") - parameters
    if scratch not in (0, 1, 2):
        raise InvariantError(f"{metadata.name} takes {scratch} parameters more than it was given")
    return scratch


def _bits(kind: str, value: float) -> int:
    codes = {"i32": "<i", "i64": "<q", "fp32": "<f"}
    if kind not in codes:
        raise InvariantError(f"the library passes no number of type {kind}")
    return int.from_bytes(struct.pack(codes[kind], value), "little")
