"""Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..builder.build import build_engine
from ..builder.checkpoint import DEMO_CHECKPOINT
from ..builder.config import Shard
from ..builder.manifest import Manifest
from ..plugins.collectives import TENSOR_PARALLEL, register_group
from ..plugins.kv_fp8_reference import CODED, record_bytes
from ..runtime.cpu_device import CpuDevice
from ..runtime.device import Device
from ..runtime.disk_directory import locked
from ..runtime.disk_records import record_bytes as disk_record_bytes
from ..runtime.disk_speed import measure_disk
from ..runtime.disk_store import DiskSettings
from ..runtime.engine import Engine, open_engine
from ..runtime.executor import GROUP_LAYERS, Executor
from ..runtime.grammar import Grammars, open_grammars
from ..runtime.history_store import HistoryStore
from ..runtime.http_process import listen, serve_http
from ..runtime.logs import configure_logging
from ..runtime.memory import GIB, activation_bytes, check_pool_fits, divide
from ..runtime.messages import Ready
from ..runtime.profile import load_profile
from ..runtime.ranks_launch import DRAIN, run_ranks, under_mpi
from ..runtime.service import Service
from ..runtime.trace_file import TraceFile
from ..scheduler.batcher import MOST_SCORED
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import CostProfile, analytic_profile, propose_swap_out_below
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import SettingError, Tier
from ..scheduler.windows import KEEP, RECOMPUTE
from .ranks_command import run_rank, take_share
from .serve_http import http_settings
from .serve_options import DEFAULT_DISK_KV, DEFAULT_GPU_KV, DEFAULT_HOST_KV, parse_options
from .sizes import parse_bytes

if TYPE_CHECKING:
    from ..runtime.ranks import Ranks

log = logging.getLogger("pensieve")

# What a core or two do, and one Hopper GPU, for the cost estimate of an engine that has not been measured: arithmetic,
# copies between the tiers, and the least time of a step.
ESTIMATES = {
    "cpu": dict(flops_per_s=5e10, link_bytes_per_s=5e9, step_base_seconds=2e-3),
    "cuda": dict(flops_per_s=4e14, link_bytes_per_s=5e10, step_base_seconds=8e-3),
}
ENDS = (signal.SIGTERM, signal.SIGINT, DRAIN)
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse_options(words)
        configure_logging(args.log_format, args.log_level)
        if under_mpi():
            for number in ENDS:
                signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to end; its HTTP process inherits this
            return run_rank("pensieve serve", engine_ranks(args), partial(serve_rank, args))
        if (ranks := engine_ranks(args)) > 1:
            return run_ranks(ranks, [sys.executable, "-m", f"{__package__}.pensieve", "serve", *words])
        with locked_directories(args):
            serve(args)
    except SettingError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return 2
    return 0


def engine_ranks(args: argparse.Namespace) -> int:
    return 1 if args.engine == "demo" else Manifest.read(Path(args.engine)).tensor_parallel


def serve_rank(args: argparse.Namespace, ranks: Ranks) -> int:
    """As one of the processes that mpirun started: rank 0 serves, the others follow it."""
    if ranks.rank == 0:
        with locked_directories(args):
            serve(args, ranks if ranks.size > 1 else None)
    else:
        logging.getLogger().setLevel(logging.ERROR)  # what else it would say rank 0 says
        follow_rank(args, ranks)
    return 0


def serve(args: argparse.Namespace, ranks: Ranks | None = None) -> None:
    """Starts the HTTP process, then becomes the loop. SettingError before anything is served."""
    settings = http_settings(args)
    HistoryStore(settings.history_file).close()  # whether it can be used is known before anything else starts
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    http = spawn.Process(target=serve_http, args=(theirs, listener, settings), name="http")
    http.start()  # it imports while the weights load
    listener.close()
    theirs.close()
    try:
        service, ready = make_service(args, ours, ranks)
        drain_on_signals(service, args.shutdown_timeout)
        gc.collect()
        gc.freeze()  # what is here stays: collections need not look at it again and hold up steps
        log.info("serving %s on http://%s:%d", ready.model, host, port)
        service.run(ready)
    finally:
        gc.unfreeze()
        ours.close()
        http.join(HTTP_EXIT_SECONDS)
        http.kill()  # it ignores other signals; after a clean end it is gone already


@contextmanager
def locked_directories(args: argparse.Namespace) -> Iterator[None]:
    """While this is open no other server has them. SettingError."""
    with ExitStack() as locks:
        locks.enter_context(locked(args.state_dir, "--state-dir"))
        if args.disk_dir is not None:
            locks.enter_context(locked(args.disk_dir, "--disk-dir"))
        yield


def drain_on_signals(service: Service, seconds: float) -> None:
    """The first SIGTERM, SIGINT or (passed on by mpirun) SIGUSR1 lets requests finish within `seconds`, the second ends
    them, the third kills."""
    patience = [0.0, seconds]

    def drain(*_: object) -> None:
        service.drain(patience.pop())
        if not patience:
            for number in ENDS:
                signal.signal(number, signal.SIG_DFL)

    for number in ENDS:
        signal.signal(number, drain)


class Prepared(NamedTuple):
    """What one rank serves with, all of it sized alike on all ranks."""

    directory: Path
    device: Device
    engine: Engine
    config: SchedulerConfig


def prepare(args: argparse.Namespace) -> Prepared:
    """SettingError for an engine of several ranks."""
    device = make_device(args)
    directory = Path(args.engine)
    if args.engine == "demo":
        directory = demo_engine(args.state_dir, args.device)
    divided = Manifest.read(directory).tensor_parallel
    if divided != 1:
        raise SettingError(
            "--engine", f"{directory} is divided among {divided} ranks, which only `pensieve serve` starts"
        )
    engine = open_engine(directory, args.device)
    return Prepared(directory, device, engine, scheduler_config(args, engine, device))


def prepare_rank(args: argparse.Namespace, ranks: Ranks) -> Prepared:
    """All ranks call it, side by side; what is wrong with one is raised by all. Pools are as the smallest rank's."""
    directory = Path(args.engine)
    ranks.together(lambda: take_share(args.device, ranks))
    device = ranks.together(lambda: make_device(args))
    engine = ranks.together(lambda: open_engine(directory, args.device, ranks.rank))
    ranks.check_equal("--engine", "engine", engine.manifest.fingerprint)
    register_group(TENSOR_PARALLEL, ranks.open_group(args.device, engine.dtype))
    config = ranks.together(lambda: scheduler_config(args, engine, device))
    gpu, host, disk, longest = ranks.smallest(
        config.gpu_kv_chunks, config.host_kv_chunks, config.disk_kv_chunks, config.max_model_len
    )
    record = record_bytes(engine.kv_shape(1, config.chunk_tokens), host_dtype(args, engine))
    size = host * record * ranks.local_size
    ranks.together(lambda: check_pool_fits(Tier.HOST, host, size, device.memory(Tier.HOST).free))
    agreed = replace(config, gpu_kv_chunks=gpu, host_kv_chunks=host, disk_kv_chunks=disk, max_model_len=longest)
    return Prepared(directory, device, engine, agreed)


def follow_rank(args: argparse.Namespace, ranks: Ranks) -> None:
    """Another rank than 0, until rank 0 ends it."""
    from ..runtime.ranks_executor import follow  # and MPI

    prepared = prepare_rank(args, ranks)
    follow(ranks, make_executor(args, prepared, disk_settings(args, prepared.config, ranks), ranks))


def make_service(args: argparse.Namespace, connection: Connection, ranks: Ranks | None = None) -> tuple[Service, Ready]:
    """With `ranks`, rank 0's."""
    prepared = prepare(args) if ranks is None else prepare_rank(args, ranks)
    directory, device, engine, config = prepared
    trace = None if args.trace is None else TraceFile(args.trace)
    if trace is not None:
        device.watch(trace.work)
    measured = load_profile(directory, engine, config.chunk_tokens)
    host_record = record_bytes(engine.kv_shape(1, config.chunk_tokens), host_dtype(args, engine))
    cost = replace(measured or estimated_cost(engine, config), chunk_bytes=host_record)
    if config.disk_kv_chunks:
        cost = with_disk_speed(cost, disk_directory(args), config.max_model_len)
    if measured is not None and args.swap_out_below is None:
        config = replace(config, swap_out_below=propose_swap_out_below(cost, config))
    scheduler = Scheduler(config, cost)
    tokenizer = str(directory) if (directory / "tokenizer.json").exists() else ""
    grammars = open_grammars(tokenizer, engine.vocab_size, engine.manifest.stop_ids)
    disk = disk_settings(args, config, ranks)
    executor = make_executor(args, prepared, disk, ranks, grammars)
    records = executor.disk_records()
    scheduler.adopt(records, time.monotonic())
    model, *aliases = args.served_model_name or [directory.resolve().name]
    ready = Ready(
        model=model,
        aliases=tuple(aliases),
        overflow=config.windows is not None,
        max_model_len=config.max_model_len,
        vocab_size=engine.manifest.vocab_size,
        stop_ids=engine.manifest.stop_ids,
        tokenizer=tokenizer,
    )
    if disk is not None:
        log.info("disk cache %d chunks in %s, %d of them from earlier", disk.slots, disk.directory, len(records))
    log.info(
        "%s: GPU cache %d chunks of %d bytes, host cache %d of %d bytes, %d tokens each, contexts up to %d tokens",
        ready.model,
        config.gpu_kv_chunks,
        engine.chunk_bytes(config.chunk_tokens),
        config.host_kv_chunks,
        host_record,
        config.chunk_tokens,
        config.max_model_len,
    )
    return Service(scheduler, executor, connection, trace), ready


def make_executor(
    args: argparse.Namespace,
    prepared: Prepared,
    disk: DiskSettings | None,
    ranks: Ranks | None,
    grammars: Grammars | None = None,
) -> Executor:
    _, device, engine, config = prepared
    make: Callable[..., Executor] = Executor
    if ranks is not None and ranks.rank == 0:
        from ..runtime.ranks_executor import RankedExecutor  # and MPI

        make = partial(RankedExecutor, ranks)
    group_layers = GROUP_LAYERS if args.swap_in == "pipelined" else engine.manifest.layers
    in_first = args.link == "in-first"
    return make(device, engine, config, group_layers, grammars, in_first, host_dtype(args, engine), disk)


def make_device(args: argparse.Namespace) -> Device:
    if args.device == "cuda":
        from ..runtime.cuda_device import CudaDevice  # and cuda-python, which nobody else needs

        return CudaDevice(enforce_eager=args.enforce_eager)
    if args.enforce_eager:
        raise SettingError("--enforce-eager", "there are no CUDA graphs without --device cuda")
    return CpuDevice()


def demo_engine(state_dir: Path, device: str) -> Path:
    """Builds the demo engine on first use, in a second.

    It is not compiled: that takes 25 s on two idle cores and needs a C++ compiler, and the demo shall answer at once.
    """
    directory = state_dir / ("demo" if device == "cpu" else f"demo-{device}")
    built = build_engine(DEMO_CHECKPOINT, directory, "reference", dtype="float32", device=device)  # quickest on CPUs
    log.info("%s the demo engine in %s (reference backend, which starts sooner)", built.outcome, directory)
    return directory


def scheduler_config(args: argparse.Namespace, engine: Engine, device: Device) -> SchedulerConfig:
    """SettingError names the flag at fault."""
    if args.chunk_tokens < 1:
        raise SettingError("--chunk-tokens", f"must be at least 1, not {args.chunk_tokens}")
    record = engine.chunk_bytes(args.chunk_tokens)
    if args.device == "cuda" and args.gpu_kv_chunks is None and args.gpu_kv_bytes is None:
        gpu_chunks = free_gpu_bytes(args, engine, device) // record
    else:
        gpu_chunks = kv_chunks(args.gpu_kv_chunks, args.gpu_kv_bytes or DEFAULT_GPU_KV, "--gpu-kv-bytes", record)
    host_record = record_bytes(engine.kv_shape(1, args.chunk_tokens), host_dtype(args, engine))
    host_chunks = kv_chunks(args.host_kv_chunks, args.host_kv_bytes or DEFAULT_HOST_KV, "--host-kv-bytes", host_record)
    disk_chunks = kv_chunks(
        args.disk_kv_chunks, args.disk_kv_bytes or DEFAULT_DISK_KV, "--disk-kv-bytes", disk_record_bytes(host_record)
    )
    settings = dict(
        gpu_kv_chunks=gpu_chunks,
        host_kv_chunks=host_chunks,
        disk_kv_chunks=disk_chunks,
        save=args.save,
        prefetch=args.prefetch == "on",
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        chunk_tokens=args.chunk_tokens,
        max_queue=args.max_queue,
        eviction=args.eviction,
        **({} if args.swap_out_below is None else dict(swap_out_below=args.swap_out_below)),
        generation_reserve=args.generation_reserve,
        batching=args.batching,
        queue_timeout=args.queue_timeout,
        conversation_ttl=args.conversation_ttl,
        overflow=overflow_mode(args.overflow, engine.manifest),
        overflow_ratio=args.overflow_ratio,
        reuse=args.reuse,
        seed=kv_seed(engine.manifest, args.lower_tier_kv),
    )
    longest = engine.manifest.max_model_len
    if args.max_model_len is None:
        fits = SchedulerConfig(max_model_len=1, **settings).largest_context
        if fits < longest:
            log.warning(
                "contexts are limited to %d tokens (the model's: %d): the GPU cache holds no more", fits, longest
            )
        return SchedulerConfig(max_model_len=min(fits, longest), **settings)
    if args.max_model_len > longest:
        raise SettingError("--max-model-len", f"{args.max_model_len} is more than the model's own {longest} tokens")
    return SchedulerConfig(max_model_len=args.max_model_len, **settings)


def overflow_mode(asked: str | None, manifest: Manifest) -> str:
    """Kept KV stays valid only where positions matter as differences; a learned table also has an end."""
    if manifest.decoder.rotary is not None:
        return asked or KEEP
    if asked == KEEP:
        message = f"{KEEP}: {manifest.decoder.architecture} has learned positions, which do not run on"
        raise SettingError("--overflow", message)
    return asked or RECOMPUTE


def free_gpu_bytes(args: argparse.Namespace, engine: Engine, device: Device) -> int:
    """What `--gpu-memory-utilization` leaves for KV."""
    context = args.max_model_len or engine.manifest.max_model_len
    activations = activation_bytes(
        Shard(engine.manifest.decoder, engine.manifest.tensor_parallel),
        engine.dtype.itemsize,
        tokens=args.max_num_batched_tokens,
        sampled=args.max_num_seqs,
        scored=MOST_SCORED,
        context=context,
    )
    memory = device.memory(Tier.GPU)
    division = divide(memory, args.gpu_memory_utilization, engine.weight_bytes, activations)
    log.info(
        "GPU memory: %.1f GiB, of which weights %.1f, activations %.1f, CUDA and its graphs %.1f, KV %.1f",
        *(size / GIB for size in (memory.total, *division)),
    )
    return division.kv


def kv_chunks(chunks: int | None, size: str, setting: str, record: int) -> int:
    if chunks is not None:
        return chunks
    return parse_bytes(size, setting) // record


def host_dtype(args: argparse.Namespace, engine: Engine) -> torch.dtype:
    """Of the HOST pool."""
    return CODED if args.lower_tier_kv == "fp8" else engine.dtype


def disk_settings(args: argparse.Namespace, config: SchedulerConfig, ranks: Ranks | None = None) -> DiskSettings | None:
    """Where the disk tier is and what may be read from it; None without one."""
    if not config.disk_kv_chunks:
        if args.disk_dir is not None:
            raise SettingError("--disk-dir", "needs --disk-kv-bytes or --disk-kv-chunks: how much it may hold")
        return None
    count, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    return DiskSettings(disk_directory(args), config.disk_kv_chunks, config.seed.hex(), count, rank)


def disk_directory(args: argparse.Namespace) -> Path:
    return args.disk_dir or args.state_dir / "kv"


def with_disk_speed(cost: CostProfile, directory: Path, longest: int) -> CostProfile:
    """Measured just now. Says from which speed on reading pays at all."""
    speed = measure_disk(directory, cost.chunk_bytes)
    if speed is None:
        log.warning("%s: the disk takes nothing now, so its speed is a guess", directory)
        return cost
    even = [cost.chunk_bytes / cost.recompute(end) for end in (cost.chunk_tokens, longest)]
    log.info(
        "%s: reads %.2f GB/s, writes %.2f GB/s; reading beats computing again from %.3f GB/s at a context's beginning, "
        "from %.3f GB/s at %d tokens",
        directory,
        *(size / 1e9 for size in (speed.read, speed.write, *even)),
        longest,
    )
    return replace(cost, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)


def kv_seed(manifest: Manifest, lower_tier_kv: str) -> bytes:
    """Engines of one fingerprint compute equal KV, and equal lower tiers keep it equally; no others share chunks."""
    return bytes.fromhex(manifest.fingerprint) + (b"" if lower_tier_kv == "same" else lower_tier_kv.encode())


def estimated_cost(engine: Engine, config: SchedulerConfig) -> CostProfile:
    shard = Shard(engine.manifest.decoder, engine.manifest.tensor_parallel)
    return analytic_profile(
        chunk_tokens=config.chunk_tokens,
        parameters=engine.parameters,
        layers=shard.config.layers,
        attention_width=shard.heads * shard.config.head_dim,
        chunk_bytes=engine.chunk_bytes(config.chunk_tokens),
        max_context=config.max_model_len,
        **ESTIMATES[engine.manifest.device],
    )
