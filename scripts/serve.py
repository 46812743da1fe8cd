"""Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ..builder.build import build_engine
from ..builder.demo import write_demo_checkpoint
from ..builder.manifest import Manifest
from ..runtime.cpu_device import CpuDevice
from ..runtime.engine import Engine, open_engine
from ..runtime.executor import Executor
from ..runtime.messages import Ready
from ..runtime.openai_api import listen, serve_http
from ..runtime.service import Service
from ..scheduler.config import BATCHING_MODES, EVICTION_POLICIES, SchedulerConfig
from ..scheduler.cost import CostProfile, analytic_profile
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import SettingError
from .sizes import parse_bytes

log = logging.getLogger("pensieve")

DEFAULT_GPU_KV = "512MiB"
DEFAULT_HOST_KV = "2GiB"
# What one CPU core or two do, for the cost estimate of an engine that has not been measured.
CPU_FLOPS_PER_S = 5e10
CPU_COPY_BYTES_PER_S = 5e9
CPU_STEP_BASE_S = 2e-3
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="pensieve serve", description=__doc__)
    option = made.add_argument
    option("--engine", required=True, metavar="DIR|demo", help="an engine directory, or a small model made on the spot")
    option("--served-model-name", metavar="NAME", help="the name clients use (default: the engine's directory name)")
    option("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    option("--port", type=int, default=8000, help="port to listen on, 0: any free one (default %(default)s)")
    option("--device", default="cpu", choices=["cpu"], help="where the engine runs (default %(default)s)")
    option("--state-dir", type=Path, default=default_state_dir(), metavar="DIR", help="(default %(default)s)")
    for tier, default in (("gpu", DEFAULT_GPU_KV), ("host", DEFAULT_HOST_KV)):
        sizes = made.add_mutually_exclusive_group()
        sizes.add_argument(f"--{tier}-kv-chunks", type=int, metavar="N", help=f"{tier.upper()} cache, in chunks")
        sizes.add_argument(f"--{tier}-kv-bytes", metavar="SIZE", help=f"or in bytes, as 40GiB (default {default})")
    option("--chunk-tokens", type=int, default=32, metavar="N", help="tokens of a chunk (default %(default)s)")
    option("--max-model-len", type=int, metavar="N", help="longest context, tokens (default: the model's own)")
    option("--max-num-seqs", type=int, default=64, metavar="N", help="running requests (default %(default)s)")
    option("--max-num-batched-tokens", type=int, default=1024, metavar="N", help="tokens a step (default %(default)s)")
    option("--max-queue", type=int, default=1024, metavar="N", help="waiting requests, then 429 (default %(default)s)")
    option("--eviction", default="retention", choices=EVICTION_POLICIES, help="(default %(default)s)")
    option("--swap-out-below", type=float, default=0.25, metavar="SHARE", help="copy out ahead (default %(default)s)")
    option("--generation-reserve", type=float, default=0.10, metavar="SHARE", help="(default %(default)s)")
    option("--batching", default="unified", choices=BATCHING_MODES, help="(default %(default)s)")
    option("--no-reuse", action="store_true", help="compute every history anew, for comparison")
    option("--shutdown-grace", type=float, default=30.0, metavar="SECONDS", help="after SIGTERM (default %(default)s)")
    return made


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        serve(args)
    except SettingError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return 2
    return 0


def serve(args: argparse.Namespace) -> None:
    """Starts the HTTP process, then becomes the loop. SettingError before anything is served."""
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    ours, theirs = multiprocessing.Pipe()
    http = multiprocessing.get_context("spawn").Process(target=serve_http, args=(theirs, listener), name="http")
    http.start()  # it imports while the weights load
    listener.close()
    theirs.close()
    try:
        service, ready = make_service(args, ours)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.drain(args.shutdown_grace))
        gc.collect()
        gc.freeze()  # what is here stays: collections need not look at it again and hold up steps
        log.info("serving %s on http://%s:%d", ready.model, host, port)
        service.run(ready)
    finally:
        ours.close()
        http.join(HTTP_EXIT_SECONDS)
        http.kill()  # it ignores other signals; after a clean end it is gone already


def make_service(args: argparse.Namespace, connection: Connection) -> tuple[Service, Ready]:
    directory = Path(args.engine)
    if args.engine == "demo":
        directory = demo_engine(args.state_dir)
    engine = open_engine(directory, args.device)
    config = scheduler_config(args, engine)
    executor = Executor(CpuDevice(), engine, config)
    scheduler = Scheduler(config, estimated_cost(engine, config))
    tokenizer = str(directory) if (directory / "tokenizer.json").exists() else ""
    ready = Ready(
        model=args.served_model_name or directory.resolve().name,
        max_model_len=config.max_model_len,
        vocab_size=engine.manifest.vocab_size,
        stop_ids=engine.manifest.stop_ids,
        tokenizer=tokenizer,
    )
    log.info(
        "%s: GPU cache %d chunks, host cache %d chunks of %d tokens (%d bytes each), contexts up to %d tokens",
        ready.model,
        config.gpu_kv_chunks,
        config.host_kv_chunks,
        config.chunk_tokens,
        engine.chunk_bytes(config.chunk_tokens),
        config.max_model_len,
    )
    return Service(scheduler, executor, connection), ready


def demo_engine(state_dir: Path) -> Path:
    """Builds the demo engine on first use (a second later on)."""
    checkpoint, directory = state_dir / "demo-checkpoint", state_dir / "demo"
    write_demo_checkpoint(checkpoint)
    built = build_engine(checkpoint, directory)
    log.info("%s the demo engine in %s", built.outcome, directory)
    return directory


def scheduler_config(args: argparse.Namespace, engine: Engine) -> SchedulerConfig:
    """SettingError names the flag at fault."""
    if args.chunk_tokens < 1:
        raise SettingError("--chunk-tokens", f"must be at least 1, not {args.chunk_tokens}")
    record = engine.chunk_bytes(args.chunk_tokens)
    gpu_chunks = kv_chunks(args.gpu_kv_chunks, args.gpu_kv_bytes or DEFAULT_GPU_KV, "--gpu-kv-bytes", record)
    host_chunks = kv_chunks(args.host_kv_chunks, args.host_kv_bytes or DEFAULT_HOST_KV, "--host-kv-bytes", record)
    settings = dict(
        gpu_kv_chunks=gpu_chunks,
        host_kv_chunks=host_chunks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        chunk_tokens=args.chunk_tokens,
        max_queue=args.max_queue,
        eviction=args.eviction,
        swap_out_below=args.swap_out_below,
        generation_reserve=args.generation_reserve,
        batching=args.batching,
        reuse=not args.no_reuse,
        seed=kv_seed(engine.manifest),
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


def kv_chunks(chunks: int | None, size: str, setting: str, record: int) -> int:
    if chunks is not None:
        return chunks
    return parse_bytes(size, setting) // record


def kv_seed(manifest: Manifest) -> bytes:
    """Engines of one fingerprint compute equal KV; no others share chunks."""
    return bytes.fromhex(manifest.fingerprint)


def estimated_cost(engine: Engine, config: SchedulerConfig) -> CostProfile:
    decoder = engine.manifest.decoder
    return analytic_profile(
        chunk_tokens=config.chunk_tokens,
        parameters=engine.parameters,
        layers=decoder.layers,
        attention_width=decoder.heads * decoder.head_dim,
        chunk_bytes=engine.chunk_bytes(config.chunk_tokens),
        max_context=config.max_model_len,
        flops_per_s=CPU_FLOPS_PER_S,
        link_bytes_per_s=CPU_COPY_BYTES_PER_S,
        step_base_seconds=CPU_STEP_BASE_S,
    )
