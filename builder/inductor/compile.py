"""Compiles a decoder with AOTInductor into a package of machine code, tests it, and measures its
errors.

    python -m pensieve.builder.inductor.compile DIRECTORY

does this for the unfinished engine in DIRECTORY. It is a separate process, so a crash affects
nothing else. Its output is described in `compile_worker`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ...plugins.linear import norm_reference
from ..forward_batch import BLOCKS, INPUTS, ROWS, SEATS, SEGMENTS, TOKENS, Forward, ForwardBatch
from ..manifest import PACKAGE, Compiled, Manifest, Parity
from ..model import Decoder
from ..parity import check_ranks
from .compile_worker import Say, compile_and_try, engine_weights, serve_parent
from .package import Package, laid_out

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    # else small weights, such as sinks, become part of the code
    "always_keep_tensor_constants": True,
    # the number of threads is set in the process that runs it, not here
    "cpp.dynamic_threads": True,
}

PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.pensieve.norm.default: norm_reference.norm,
    torch.ops.pensieve.add_norm.default: norm_reference.add_norm,
    torch.ops.pensieve.silu_gate.default: norm_reference.silu_gate,
}
"""Operations that only make the eager decoder fast: the compiler gets their parts, and fuses them
itself."""


EXAMPLE = {TOKENS: 6, SEGMENTS: 2, SEATS: 3, BLOCKS: 4, ROWS: 5}
"""Sizes of the batch that is traced. All differ: the compiler would take equal ones for the same
size."""


class Compilable(Decoder):
    """The decoder with its pool's handle in a tensor: a plain number would become a constant of the
    package."""

    def forward(self, batch: ForwardBatch, pool: Tensor) -> Tensor:  # type: ignore[override]
        handle: Any = pool.item()
        return super().forward(batch, handle)


def traced_batch(device: torch.device) -> tuple[ForwardBatch, list[dict[int, Dim]]]:
    """A batch for `torch.export`, and of each of its tensors the axes whose sizes may differ."""
    named = {name: Dim(name) for name in EXAMPLE}
    tensors = []
    differing = []
    for one in INPUTS.values():
        tensors.append(torch.zeros(one.shape(EXAMPLE), dtype=torch.int32, device=device))
        differing.append(
            {axis: named[size] for axis, size in enumerate(one.sizes) if isinstance(size, str)}
        )
    return ForwardBatch(*tensors), differing


def export(decoder: Compilable) -> ExportedProgram:
    """The decoder as a graph for any batch; batches of one token or without samples are not special
    cases."""
    batch, differing = traced_batch(decoder.embed.weight.device)
    program = torch.export.export(
        decoder, (batch, torch.tensor(0)), dynamic_shapes=(differing, None)
    )
    decomposed: ExportedProgram = program.run_decompositions(PLAIN)
    return decomposed


def compile_package(decoder: Compilable, path: Path) -> None:
    """Writes the package, without weights."""
    import torch._inductor
    from torch.fx.experimental import _config

    # Sizes of 0 and 1 are not special.
    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        torch._inductor.aoti_compile_and_package(
            export(decoder), package_path=str(path), inductor_configs=OPTIONS
        )


def compile_engine(directory: Path, say: Say) -> Compiled:
    """Adds the package for all ranks to an unfinished engine that has its manifest and weights.

    SettingError as in `parity`.
    """
    manifest = Manifest.read(directory)
    config, ranks = manifest.decoder, manifest.tensor_parallel
    weights = [laid_out(engine_weights(directory, manifest, rank)) for rank in range(ranks)]
    path = directory / PACKAGE

    def compare(first: Forward) -> Parity:
        return check_ranks(
            [first, *(Package(path, config, own) for own in weights[1:])], config, weights
        )

    return compile_and_try(
        path,
        say,
        write=lambda: compile_package(Compilable.from_weights(config, weights[0], ranks), path),
        load=lambda: Package(path, config, weights[0]),
        compare=compare,
    )


if __name__ == "__main__":
    serve_parent(partial(compile_engine, Path(sys.argv[1])))
