"""The compiler's side of `compile_parent.compile_apart`: shared by the processes that compile an
unfinished engine.

It prints one JSON object per line: {"stage": ...} for each stage, and at the end {"compiled": ...},
the manifest's `Compiled`, or {"refused": ...}.
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

from ...scheduler.types import SettingError
from ..forward_batch import Forward
from ..manifest import Compiled, Manifest, Parity, files_digest, weights_file
from ..random_weights import random_weights
from ..weights import load_weights

Say = Callable[[str], None]


def engine_weights(directory: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """One rank's weights on the engine's device: from its file, or random."""
    ranks = manifest.tensor_parallel
    dtype = getattr(torch, manifest.dtype)
    if manifest.random_seed is not None:
        seed, device = manifest.random_seed, manifest.device
        return random_weights(
            manifest.decoder, dtype, device, seed, rank, ranks, manifest.fp8, manifest.int4
        )
    stored = load_weights(directory / weights_file(rank, ranks))
    return {name: tensor.to(manifest.device) for name, tensor in stored.items()}


def compile_and_try(
    path: Path,
    say: Say,
    write: Callable[[], None],
    load: Callable[[], Forward],
    compare: Callable[[Forward], Parity],
) -> Compiled:
    """Writes the compiled file at `path`, loads it, and compares its results. Raises the exceptions
    of the three calls."""
    start = time.perf_counter()
    say("compiling")
    write()
    compiled = time.perf_counter()
    say("loading")
    forward = load()
    loaded = time.perf_counter()
    say("comparing with the reference")
    parity = compare(forward)
    return Compiled(
        package=files_digest([path]),
        package_bytes=path.stat().st_size,
        compile_seconds=round(compiled - start, 2),
        load_seconds=round(loaded - compiled, 3),
        parity=parity,
    )


def serve_parent(compile_engine: Callable[[Say], Compiled]) -> None:
    """The main function of such a process. The process ends when its parent ends, at any time."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report(compile_engine)


def report(compile_engine: Callable[[Say], Compiled]) -> None:
    """Calls it and prints its stages and result."""
    out, sys.stdout = sys.stdout, sys.stderr  # compilers may print

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    try:
        compiled = compile_engine(lambda stage: tell(stage=stage))
    except SettingError as error:
        tell(refused=str(error).removeprefix(f"{error.setting}: "))
    else:
        tell(compiled=asdict(compiled))


def _end_with_parent() -> None:
    """Ends this process when its input ends, because the parent is gone."""
    sys.stdin.read()
    os._exit(1)
