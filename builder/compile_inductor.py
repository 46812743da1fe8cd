"""Compiles a decoder with AOTInductor into a package of machine code, tries it, and measures its errors.

    python -m pensieve.builder.compile_inductor DIRECTORY

does so for the engine in the making there, in a process of its own: what crashes there takes nothing else along. It
writes the package and prints one JSON object a line: {"stage": ...} as it goes, and {"compiled": ...}, the manifest's
`Compiled`, or {"refused": ...} at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ..plugins import norm_reference
from ..scheduler.types import SettingError
from .manifest import PACKAGE, Compiled, Manifest, files_digest, weights_file
from .model import Decoder
from .package import Package, laid_out
from .parity import check_ranks
from .random_weights import random_weights
from .weights import load_weights

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "cpp.dynamic_threads": True,  # as many as the process that runs it is told to use, not the one that compiles
}

PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.pensieve.norm.default: norm_reference.norm,
    torch.ops.pensieve.add_norm.default: norm_reference.add_norm,
    torch.ops.pensieve.silu_gate.default: norm_reference.silu_gate,
}
"""Operations that exist so that the eager decoder is quick: the compiler gets what they are made of, and fuses that."""


class Compilable(Decoder):
    """The decoder with its pool's handle in a tensor: a plain number would become a constant of the package."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        segments: Tensor,
        block_table: Tensor,
        sample_rows: Tensor,
        pool: Tensor,
    ) -> Tensor:
        return super().forward(token_ids, positions, slots, segments, block_table, sample_rows, pool.item())


def export(decoder: Compilable) -> ExportedProgram:
    """The decoder as a graph, for any batch: one token, or no sample, is nothing special."""
    device = decoder.embed.weight.device
    tokens, segments, seats, blocks, rows = 6, 2, 3, 4, 5  # all different: equal ones would be taken for the same

    def example(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    batch = [example(tokens) for _ in range(3)]
    batch += [example(segments, 5), example(seats, blocks), example(rows), torch.tensor(0)]
    token = Dim("tokens")
    shapes = ({0: token},) * 3 + ({0: Dim("segments")}, {0: Dim("seats"), 1: Dim("blocks")}, {0: Dim("rows")}, None)
    program = torch.export.export(decoder, tuple(batch), dynamic_shapes=shapes)
    return program.run_decompositions(PLAIN)


def compile_package(decoder: Compilable, path: Path) -> None:
    """Writes the package, without weights."""
    import torch._inductor
    from torch.fx.experimental import _config

    with torch.no_grad(), _config.patch(backed_size_oblivious=True):  # sizes of 0 and 1 are sizes like others
        torch._inductor.aoti_compile_and_package(export(decoder), package_path=str(path), inductor_configs=OPTIONS)


def compile_engine(directory: Path, say: Callable[[str], None]) -> Compiled:
    """Adds the package, of all ranks, to an engine in the making, whose manifest and weights are there.

    SettingError as parity.
    """
    manifest = Manifest.read(directory)
    config, ranks = manifest.decoder, manifest.tensor_parallel
    weights = [laid_out(_weights(directory, manifest, rank)) for rank in range(ranks)]
    path = directory / PACKAGE
    start = time.perf_counter()
    say("compiling")
    compile_package(Compilable.from_weights(config, weights[0], ranks), path)
    compiled = time.perf_counter()
    say("loading")
    first = Package(path, config, weights[0])
    loaded = time.perf_counter()
    say("comparing with the reference")
    parity = check_ranks([first, *(Package(path, config, own) for own in weights[1:])], config, weights)
    return Compiled(
        package=files_digest([path]),
        package_bytes=path.stat().st_size,
        compile_seconds=round(compiled - start, 2),
        load_seconds=round(loaded - compiled, 3),
        parity=parity,
    )


def _weights(directory: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    ranks, dtype = manifest.tensor_parallel, getattr(torch, manifest.dtype)
    if manifest.random_seed is not None:
        return random_weights(manifest.decoder, dtype, manifest.device, manifest.random_seed, rank, ranks)
    stored = load_weights(directory / weights_file(rank, ranks))
    return {name: tensor.to(manifest.device) for name, tensor in stored.items()}


def end_with_parent() -> None:
    """Ends this process once nobody waits for it any more: its input ends."""
    sys.stdin.read()
    os._exit(1)


def main(directory: Path) -> None:
    def tell(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    out, sys.stdout = sys.stdout, sys.stderr  # the compiler may talk
    try:
        compiled = compile_engine(directory, lambda stage: tell(stage=stage))
    except SettingError as error:
        tell(refused=str(error).removeprefix(f"{error.setting}: "))
    else:
        tell(compiled=asdict(compiled))


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]))
