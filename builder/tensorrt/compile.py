"""Compiles a decoder's layer with TensorRT into a plan, tries it, and measures its errors.

    python -m pensieve.builder.tensorrt.compile DIRECTORY [WORKSPACE_MIB]

does so for the engine in the making there; what it prints `compiling` says.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...plugins.tensorrt.library import Bytes, Library, load_library, sizes
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig
from ..forward_batch import Forward
from ..inductor.compile_worker import Say, compile_and_try, engine_weights, serve_parent
from ..manifest import PLAN, Compiled, Manifest, Parity
from ..parity import check_ranks
from .installed import check_type
from .network import LayerNetwork, layer_inputs
from .package import LEAST, MOST_TOKENS, OptimizationProfile, load_decoder, profiles


def build_plan(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    most_tokens: int = MOST_TOKENS,
    workspace: int = 0,
    cache: Path | None = None,
    ranks: int = 1,
) -> bytes:
    """The plan of a layer of any of the ranks, whose weights have these types and shapes.

    most_tokens   of a step
    workspace     most bytes of GPU memory that one layer may take for itself; 0: all there is
    cache         file of the times that TensorRT measured in earlier builds; read, then brought up
                  to date
    SettingError('--backend', ...) if TensorRT cannot build it.
    """
    check_type(str(weights["embed.weight"].dtype).removeprefix("torch."))
    library = load_library()
    network = library.call("network_new")
    if not network:
        raise SettingError("--backend", library.error())
    try:
        written = LayerNetwork(
            library, network, config, layer_inputs(config, weights, 0, ranks), ranks
        )
        for profile in profiles(config, most_tokens):
            _add_profile(library, network, config, profile)
        plan, times = _build(
            library, network, workspace, cache.read_bytes() if cache and cache.exists() else b""
        )
        del written  # until here the network's constants had to stay
    finally:
        library.call("network_free", network)
    if cache is not None:
        _write(cache, times)
    return plan


def _add_profile(
    library: Library, network: int, config: DecoderConfig, profile: OptimizationProfile
) -> None:
    library.do("profile", network)
    of_each = (LEAST, profile.usual, profile.most)
    for name in LEAST.shapes(config):
        shapes = [one.shapes(config)[name] for one in of_each]
        library.do("profile_input", network, name.encode(), len(shapes[0]), *map(sizes, shapes))


def _build(library: Library, network: int, workspace: int, cache: bytes) -> tuple[bytes, bytes]:
    """The plan and the measured times."""
    outputs = Bytes(), Bytes()
    given = (network, workspace, cache, len(cache))
    try:
        if library.call("build", *given, *map(ctypes.byref, outputs)):
            raise SettingError("--backend", library.error())
        plan, times = (ctypes.string_at(one.data, one.size) for one in outputs)
        return plan, times
    finally:
        for one in outputs:
            library.call("bytes_free", ctypes.byref(one))


def timing_cache_path() -> Path:
    """Where builds of one user keep what TensorRT measured."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pensieve" / "tensorrt.timing"


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    os.replace(aside, path)


def compile_engine(directory: Path, workspace: int | None, say: Say) -> Compiled:
    """Adds the plan of all ranks to an engine in the making, whose manifest and weights are there.
    SettingError as parity."""
    manifest = Manifest.read(directory)
    config, ranks = manifest.decoder, manifest.tensor_parallel
    weights = [engine_weights(directory, manifest, rank) for rank in range(ranks)]
    path = directory / PLAN

    def write() -> None:
        plan = build_plan(
            config, weights[0], workspace=workspace or 0, cache=timing_cache_path(), ranks=ranks
        )
        path.write_bytes(plan)

    def compare(first: Forward) -> Parity:
        others = [load_decoder(path, config, own, ranks) for own in weights[1:]]
        return check_ranks([first, *others], config, weights)

    return compile_and_try(
        path,
        say,
        write,
        load=lambda: load_decoder(path, config, weights[0], ranks),
        compare=compare,
    )


if __name__ == "__main__":
    most = int(sys.argv[2]) * 2**20 if len(sys.argv) > 2 else None
    serve_parent(partial(compile_engine, Path(sys.argv[1]), most))
