"""Compiles a decoder with TensorRT into a plan, tests it, and measures its errors. Imports TensorRT.

    python -m pensieve.builder.tensorrt.compile DIRECTORY [WORKSPACE_MIB]

does this for the unfinished engine in DIRECTORY; its output is described in `compile_worker`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tensorrt as trt
from torch import Tensor

from ...plugins.tensorrt import plugins as tensorrt_plugins
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig
from ..inductor.compile_worker import Say, compile_and_try, engine_weights, serve_parent
from ..manifest import PLAN, Compiled, Manifest
from ..parity import check_parity
from .network import DecoderNetwork
from .package import Logger, Sizes, TensorRTPackage

MOST_TOKENS = 4096
"""Most tokens of a step. Memory for the plan's largest step is allocated when it is loaded."""

LEAST = Sizes(1, 1, 1, 1, 1)
PROFILES = (  # (most frequent, largest); the first that fits is used
    (Sizes(64, 64, 64, 256, 128), Sizes(256, 256, 256, 4096, 2**17)),  # generation
    (Sizes(1024, 128, 64, 256, 128), Sizes(MOST_TOKENS, MOST_TOKENS, MOST_TOKENS, 4096, 2**17)),  # prompts too
)


def build_plan(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    ranks: int = 1,
    workspace: int | None = None,
    cache: Path | None = None,
) -> bytes:
    """Returns a plan for any rank, without weights.

    weights     one rank's, on the CPU, in the engine's dtype
    workspace   most bytes of GPU memory for one layer; None: no limit
    cache       file of TensorRT's measured times from earlier builds; read, then updated
    SettingError('--backend', ...) if TensorRT cannot build it.
    """
    logger = Logger()
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    written = DecoderNetwork(network, config, weights, ranks)
    settings = builder.create_builder_config()
    _apply(settings, workspace)
    for usual, most in PROFILES:
        _add_profile(builder, settings, config, usual, most)
    if cache is not None:
        _attach_cache(settings, cache)
    with tensorrt_plugins.building():
        plan = builder.build_serialized_network(network, settings)
    del written  # the network's weights had to stay until here
    if plan is None:
        raise SettingError("--backend", "TensorRT cannot build the engine; its log says why")
    if cache is not None:
        _write(cache, settings.get_timing_cache().serialize())
    return bytes(plan)


def _apply(settings: trt.IBuilderConfig, workspace: int | None) -> None:
    settings.max_aux_streams = 0  # our operations need a single stream
    settings.clear_flag(trt.BuilderFlag.TF32)  # full float32 precision
    settings.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    settings.set_flag(trt.BuilderFlag.STRIP_PLAN)
    if workspace is not None:
        settings.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)


def _add_profile(
    builder: trt.Builder, settings: trt.IBuilderConfig, config: DecoderConfig, usual: Sizes, most: Sizes
) -> None:
    profile = builder.create_optimization_profile()
    sizes = zip(*(one.shapes(config).items() for one in (LEAST, usual, most)), strict=True)
    for (name, least_shape), (_, usual_shape), (_, most_shape) in sizes:
        profile.set_shape(name, least_shape, usual_shape, most_shape)
    if settings.add_optimization_profile(profile) < 0:
        raise SettingError("--backend", "TensorRT refuses an optimization profile; its log says why")


def timing_cache_path() -> Path:
    """The file in which a user's builds keep TensorRT's measured times."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pensieve" / "tensorrt.timing"


def _attach_cache(settings: trt.IBuilderConfig, path: Path) -> None:
    """Attaches the file's times; times of another GPU or version are ignored."""
    known = settings.create_timing_cache(path.read_bytes() if path.exists() else b"")
    if known is None or not settings.set_timing_cache(known, False):
        settings.set_timing_cache(settings.create_timing_cache(b""), False)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_bytes(content)
    os.replace(aside, path)


def compile_engine(directory: Path, workspace: int | None, say: Say) -> Compiled:
    """Adds the plan to an unfinished engine that has its manifest and weights. SettingError as in `parity`."""
    manifest = Manifest.read(directory)
    config = manifest.decoder
    weights = engine_weights(directory, manifest, rank=0)
    path = directory / PLAN

    def write() -> None:
        on_host = {name: tensor.cpu() for name, tensor in weights.items()}
        path.write_bytes(build_plan(config, on_host, manifest.tensor_parallel, workspace, timing_cache_path()))

    return compile_and_try(
        path,
        say,
        write,
        load=lambda: TensorRTPackage(path, config, weights, manifest.device),
        compare=lambda package: check_parity(package, config, weights),
    )


if __name__ == "__main__":
    most = int(sys.argv[2]) * 2**20 if len(sys.argv) > 2 else None
    serve_parent(partial(compile_engine, Path(sys.argv[1]), most))
