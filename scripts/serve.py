"""Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import torch

from ..builder.build import build_engine
from ..builder.checkpoint import DEMO_CHECKPOINT
from ..builder.config import Shard
from ..builder.manifest import Manifest
from ..plugins.kv_fp8_reference import CODED, record_bytes
from ..runtime.api_keys import key_digest
from ..runtime.cpu_device import CpuDevice
from ..runtime.device import Device
from ..runtime.disk_directory import locked
from ..runtime.disk_records import record_bytes as disk_record_bytes
from ..runtime.disk_speed import measure_disk
from ..runtime.disk_store import DiskSettings
from ..runtime.engine import Engine, open_engine
from ..runtime.executor import GROUP_LAYERS, Executor
from ..runtime.grammar import open_grammars
from ..runtime.history_store import HistoryStore
from ..runtime.http_process import listen, serve_http
from ..runtime.http_settings import HTTPSettings
from ..runtime.logs import configure_logging
from ..runtime.memory import GIB, activation_bytes, divide
from ..runtime.messages import Ready
from ..runtime.profile import load_profile
from ..runtime.service import Service
from ..runtime.text import ChatTemplate
from ..runtime.trace_file import TraceFile
from ..scheduler.batcher import MOST_SCORED
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import CostProfile, analytic_profile, propose_swap_out_below
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import SettingError, Tier
from ..scheduler.windows import KEEP, RECOMPUTE
from .serve_options import DEFAULT_DISK_KV, DEFAULT_GPU_KV, DEFAULT_HOST_KV, parse_options
from .sizes import parse_bytes

log = logging.getLogger("pensieve")

# What a core or two do, and one Hopper GPU, for the cost estimate of an engine that has not been measured: arithmetic,
# copies between the tiers, and the least time of a step.
ESTIMATES = {
    "cpu": dict(flops_per_s=5e10, link_bytes_per_s=5e9, step_base_seconds=2e-3),
    "cuda": dict(flops_per_s=4e14, link_bytes_per_s=5e10, step_base_seconds=8e-3),
}
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = parse_options(sys.argv[1:] if argv is None else argv)
        configure_logging(args.log_format, args.log_level)
        with locked_directories(args):
            serve(args)
    except SettingError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return 2
    return 0


def serve(args: argparse.Namespace) -> None:
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
        service, ready = make_service(args, ours)
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


def http_settings(args: argparse.Namespace) -> HTTPSettings:
    """SettingError names the flag at fault."""
    if args.max_requests_per_client is not None and args.max_requests_per_client < 1:
        raise SettingError("--max-requests-per-client", f"must be at least 1, not {args.max_requests_per_client}")
    if args.history_ttl is not None and not args.history_ttl > 0:
        raise SettingError("--history-ttl", f"must be more than 0 seconds, not {args.history_ttl}")
    if args.max_connections < 1:
        raise SettingError("--max-connections", f"must be at least 1, not {args.max_connections}")
    if not args.client_timeout > 0:
        raise SettingError("--client-timeout", f"must be more than 0 seconds, not {args.client_timeout}")
    if args.otlp_traces_endpoint is not None:
        check_traces_endpoint(args.otlp_traces_endpoint)
    return HTTPSettings(
        max_requests_per_client=args.max_requests_per_client,
        max_body_bytes=parse_bytes(args.max_body_bytes, "--max-body-bytes"),
        max_connections=args.max_connections,
        client_timeout=args.client_timeout,
        chat_template=None if args.chat_template is None else read_chat_template(args.chat_template),
        api_keys=tuple(key_digest(key) for key in read_api_keys(args.api_key, args.api_key_file)),
        history_file=str(args.state_dir / "history.sqlite"),
        history_ttl=args.history_ttl,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        log_format=args.log_format,
        log_level=args.log_level,
    )


def check_traces_endpoint(endpoint: str) -> None:
    """SettingError if it is no URL, or nothing is installed to send spans. Whether it answers is not asked."""
    setting, exporter = "--otlp-traces-endpoint", "opentelemetry-exporter-otlp-proto-http"
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SettingError(setting, f"must be a URL as http://127.0.0.1:4318/v1/traces, not {endpoint!r}")
    try:
        importlib.metadata.version(exporter)
    except importlib.metadata.PackageNotFoundError:
        raise SettingError(setting, f"needs more packages: pip install {exporter}") from None


def read_api_keys(keys: list[str], path: Path | None) -> list[str]:
    """Those of the command line and those of the file, whose empty lines and lines with # say nothing."""
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError("--api-key-file", f"cannot read {path}: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise SettingError("--api-key-file", f"{path} holds no key")
        keys = [*keys, *found]
    if not all(key.strip() for key in keys):
        raise SettingError("--api-key", "a key must not be empty")
    return keys


def read_chat_template(path: Path) -> str:
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--chat-template", f"cannot read {path}: {error}") from error
    ChatTemplate(source, {}, "--chat-template")  # whether it parses
    return source


def drain_on_signals(service: Service, seconds: float) -> None:
    """The first SIGTERM or SIGINT lets requests finish within `seconds`, the second ends them, the third kills."""
    patience = [0.0, seconds]

    def drain(*_: object) -> None:
        service.drain(patience.pop())
        if not patience:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)


def make_service(args: argparse.Namespace, connection: Connection) -> tuple[Service, Ready]:
    device = make_device(args)
    trace = None if args.trace is None else TraceFile(args.trace)
    if trace is not None:
        device.watch(trace.work)
    directory = Path(args.engine)
    if args.engine == "demo":
        directory = demo_engine(args.state_dir, args.device)
    ranks = Manifest.read(directory).tensor_parallel
    if ranks != 1:
        raise SettingError("--engine", f"{directory} is divided among {ranks} ranks; ranks over MPI do not exist yet")
    engine = open_engine(directory, args.device)
    config = scheduler_config(args, engine, device)
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
    group_layers = GROUP_LAYERS if args.swap_in == "pipelined" else engine.manifest.layers
    in_first, disk = args.link == "in-first", disk_settings(args, config)
    executor = Executor(device, engine, config, group_layers, grammars, in_first, host_dtype(args, engine), disk)
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


def disk_settings(args: argparse.Namespace, config: SchedulerConfig) -> DiskSettings | None:
    """Where the disk tier is and what may be read from it; None without one."""
    if not config.disk_kv_chunks:
        if args.disk_dir is not None:
            raise SettingError("--disk-dir", "needs --disk-kv-bytes or --disk-kv-chunks: how much it may hold")
        return None
    return DiskSettings(disk_directory(args), config.disk_kv_chunks, config.seed.hex())


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
