"""Opens the engine for `pensieve profile`: in this process, or its parts on all ranks side by
side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...builder.manifest import Manifest
from ...scheduler.config import SchedulerConfig
from ...scheduler.types import SettingError, Tier
from ..device.protocol import Device
from ..engine import Engine, open_engine
from ..measure.profile import COPIED_BYTES
from ..measure.step_bench import StepBench
from ..ranks.launch import run_ranks, under_mpi
from .assemble import make_device
from .options import parse_bytes
from .ranks import open_rank, run_rank
from .sizing import state_config

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks

Work = Callable[[StepBench, Engine, int], None]
"""Called with the bench, the engine and the rank."""


def run(args: argparse.Namespace, words: Sequence[str], work: Work) -> int:
    """Calls `work` on all ranks of the engine; returns the exit status. `args` are `words`, parsed.
    SettingError."""
    count = Manifest.read(args.engine).tensor_parallel
    if under_mpi():
        return run_rank("pensieve profile", count, partial(_on_rank, args, work))
    if count > 1:
        return run_ranks(
            count, [sys.executable, "-P", "-m", "pensieve.scripts.profile_engine", *words]
        )
    engine = open_engine(args.engine, args.device, kv_cache_dtype=args.kv_cache_dtype)
    device = make_device(args.device)
    with (
        closing(device),
        StepBench(
            device,
            engine,
            bench_config(args, engine, device),
            args.seconds,
            states=engine.state_shape,
        ) as bench,
    ):
        work(bench, engine, 0)
    return 0


def _on_rank(args: argparse.Namespace, work: Work, ranks: Ranks) -> int:
    device, engine = open_rank(
        args.engine, args.device, lambda: make_device(args.device), ranks, args.kv_cache_dtype
    )
    config = ranks.together(lambda: bench_config(args, engine, device))
    chunks, longest = ranks.smallest(config.gpu_kv_chunks, config.max_model_len)
    batch = config.max_num_batched_tokens
    if config.states is not None:
        batch = of_one_row(batch, longest, config.chunk_tokens)
    config = replace(
        config, gpu_kv_chunks=chunks, max_model_len=longest, max_num_batched_tokens=batch
    )
    with ranks.together(
        lambda: StepBench(
            device, engine, config, args.seconds, ranks.slowest, states=engine.state_shape
        )
    ) as bench:
        work(bench, engine, ranks.rank)
    return 0


def bench_config(args: argparse.Namespace, engine: Engine, device: Device) -> SchedulerConfig:
    """Returns pools as large as the batches can use, and contexts as long as the GPU's pool holds.
    SettingError if nothing fits."""
    size = args.chunk_tokens
    longest = args.max_model_len or engine.manifest.max_model_len
    if longest > engine.manifest.max_model_len:
        raise SettingError(
            "--max-model-len", f"{longest} is more than the model's {engine.manifest.max_model_len}"
        )
    record = engine.chunk_bytes(size)
    rows = args.max_num_seqs
    batch = args.max_num_batched_tokens
    states = None
    free = device.memory(Tier.GPU).free
    if engine.state_shape is None:
        rows = max(rows, batch // size)
    else:
        states = state_config(size, rows, engine.state_shape, record, device)
        free -= states.slots * states.chunks * record
    if args.gpu_kv_bytes is not None:
        gpu_chunks = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes") // record
    else:
        gpu_chunks = min(free // 2 // record, (rows + 1) * (-(-longest // size) + 1))
    settings = dict(
        gpu_kv_chunks=gpu_chunks,
        host_kv_chunks=2 * -(-COPIED_BYTES // record),
        max_num_seqs=args.max_num_seqs,
        chunk_tokens=size,
        states=states,
    )
    reserved = SchedulerConfig(
        max_model_len=1, max_num_batched_tokens=batch, **settings
    ).reserved_chunks
    fits = (gpu_chunks - max(reserved, rows)) * size
    longest = max(1, min(longest, fits))
    if states is not None:
        batch = of_one_row(batch, longest, size)
    return SchedulerConfig(max_model_len=longest, max_num_batched_tokens=batch, **settings)


def of_one_row(batch: int, longest: int, chunk_tokens: int) -> int:
    """Tokens of a full batch that is one row: contexts twice as long show what attention costs."""
    return min(batch, max(chunk_tokens, longest // 2))
