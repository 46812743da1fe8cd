"""Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns."""

from __future__ import annotations

import argparse
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

from ..builder.build import build_engine
from ..builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ..builder.manifest import Manifest
from ..plugins.kv_forms.forms import record_bytes
from ..runtime.conversations.store import HistoryStore
from ..runtime.device.cpu import CpuDevice
from ..runtime.device.memory import check_pool_fits
from ..runtime.device.protocol import Device
from ..runtime.disk.directory import locked
from ..runtime.disk.store import DiskSettings
from ..runtime.engine import Engine, open_engine
from ..runtime.executor import GROUP_LAYERS, Executor
from ..runtime.http.process import listen, serve_http
from ..runtime.measure.profile import load_profile
from ..runtime.messages import Ready
from ..runtime.observe.chrome_trace import TraceFile
from ..runtime.observe.logs import configure_logging
from ..runtime.ranks.launch import DRAIN, run_ranks, under_mpi
from ..runtime.service import Service
from ..runtime.step.grammar import Grammars, open_grammars
from ..runtime.system import ASKED, tell_when_asked
from ..runtime.text.tokenizer import Tokenizer
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import propose_swap_out_below
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_timing import StepTiming
from ..scheduler.types import SettingError, Tier
from .ranks_command import open_rank, run_rank
from .serve_http import http_settings, read_chat_template
from .serve_options import parse_options
from .serve_sizes import (
    check_disk_holds,
    disk_directory,
    disk_settings,
    estimated_cost,
    host_form,
    pool_setting,
    scheduler_config,
    with_disk_speed,
)

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks

log = logging.getLogger("pensieve")

ENDS = (signal.SIGTERM, signal.SIGINT, DRAIN)
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse_options(words)
        configure_logging(args.log_format, args.log_level)
        if under_mpi():
            return run_rank("pensieve serve", engine_ranks(args), partial(serve_rank, args))
        if (ranks := engine_ranks(args)) > 1:
            return run_ranks(ranks, [sys.executable, "-P", "-m", f"{__package__}.pensieve", "serve", *words])
        tell_when_asked()
        with locked_directories(args):
            return serve(args)
    except SettingError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return 2


def engine_ranks(args: argparse.Namespace) -> int:
    return 1 if args.engine == "demo" else Manifest.read(Path(args.engine)).tensor_parallel


def serve_rank(args: argparse.Namespace, ranks: Ranks) -> int:
    """As one of the processes that mpirun started: rank 0 serves, the others follow it."""
    if ranks.rank == 0:
        with locked_directories(args):
            return serve(args, ranks if ranks.size > 1 else None)
    logging.getLogger().setLevel(logging.ERROR)  # what else it would say rank 0 says
    follow_rank(args, ranks)
    return 0


def serve(args: argparse.Namespace, ranks: Ranks | None = None) -> int:
    """Starts the HTTP process, then becomes the loop; the exit status. SettingError before anything is served."""
    settings = http_settings(args)
    HistoryStore(settings.history_file).close()  # whether it can be used is known before anything else starts
    listener = listen(args.host, args.port)
    host, port = listener.getsockname()[:2]
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    http = spawn.Process(target=serve_http, args=(theirs, listener, settings), name="http")
    ours_alone = [DRAIN, ASKED]
    signal.pthread_sigmask(signal.SIG_BLOCK, ours_alone)  # mpirun tells the HTTP process too, which inherits this
    http.start()  # it imports while the weights load
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours_alone)
    listener.close()
    theirs.close()
    try:
        service, ready = make_service(args, ours, ranks)
        drain_on_signals(service, args.shutdown_timeout)
        log.info("serving %s on http://%s:%d", ready.model, host, port)
        service.run(ready)
    finally:
        ours.close()
        http.join(HTTP_EXIT_SECONDS)
        status = http.exitcode
        http.kill()  # it ignores other signals; after a clean end it is gone already
    if status:  # nobody asked for an end: whoever restarts servers that fail is to know
        log.error("the HTTP process has ended with status %d, and the server with it", status)
        return 1
    return 0


@contextmanager
def locked_directories(args: argparse.Namespace) -> Iterator[None]:
    """While this is open no other server has them. SettingError."""
    with ExitStack() as locks:
        locks.enter_context(locked(args.state_dir, "--state-dir"))
        disk = disk_directory(args)
        if disk.resolve() != args.state_dir.resolve():
            locks.enter_context(locked(disk, "--disk-dir"))
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
    """All ranks call it, side by side; what is wrong with one it and rank 0 raise. Pools are as the smallest rank's."""
    directory = Path(args.engine)
    device, engine = open_rank(directory, args.device, lambda: make_device(args), ranks)
    config = ranks.together(lambda: scheduler_config(args, engine, device))
    gpu, host, disk, longest = ranks.smallest(
        config.gpu_kv_chunks, config.host_kv_chunks, config.disk_kv_chunks, config.max_model_len
    )
    record = record_bytes(engine.kv_shape(1, config.chunk_tokens), engine.dtype, host_form(args, engine))
    size, setting = host * record * ranks.local_size, pool_setting(args, Tier.HOST)
    ranks.together(lambda: check_pool_fits(setting, host, size, device.memory(Tier.HOST).free))
    agreed = replace(config, gpu_kv_chunks=gpu, host_kv_chunks=host, disk_kv_chunks=disk, max_model_len=longest)
    return Prepared(directory, device, engine, agreed)


def follow_rank(args: argparse.Namespace, ranks: Ranks) -> None:
    """Another rank than 0, until rank 0 ends it. Signals are for rank 0: before it serves it dies of them, and mpirun
    ends all."""
    from ..runtime.ranks.executor import follow  # and MPI

    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
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
    host_record = record_bytes(engine.kv_shape(1, config.chunk_tokens), engine.dtype, host_form(args, engine))
    cost = replace(measured or estimated_cost(engine, config), chunk_bytes=host_record)
    if config.disk_kv_chunks:
        cost = with_disk_speed(cost, disk_directory(args), config.max_model_len)
        sharing = 1 if ranks is None else ranks.local_size
        check_disk_holds(args, config.disk_kv_chunks, host_record, sharing)
    if measured is not None and args.swap_out_below is None:
        config = replace(config, swap_out_below=propose_swap_out_below(cost, config))
    scheduler = Scheduler(config, cost)
    tokenizer = str(directory) if (directory / "tokenizer.json").exists() else ""
    if tokenizer:  # whether it can be read is known before anything is served
        Tokenizer.load(tokenizer, None if args.chat_template is None else read_chat_template(args.chat_template))
    elif args.chat_template is not None:
        raise SettingError("--chat-template", f"{directory} has no tokenizer, and without one there are no chats")
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
    return Service(scheduler, executor, connection, StepTiming(cost), trace), ready


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
        from ..runtime.ranks.executor import RankedExecutor  # and MPI

        make = partial(RankedExecutor, ranks)
    group_layers = GROUP_LAYERS if args.swap_in == "pipelined" else engine.manifest.layers
    in_first = args.link == "in-first"
    return make(device, engine, config, group_layers, grammars, in_first, host_form(args, engine), disk)


def make_device(args: argparse.Namespace) -> Device:
    if args.device == "cuda":
        from ..runtime.device.cuda import CudaDevice  # and cuda-python, which nobody else needs

        return CudaDevice(enforce_eager=args.enforce_eager)
    if args.enforce_eager:
        raise SettingError("--enforce-eager", "there are no CUDA graphs without --device cuda")
    return CpuDevice()


def demo_engine(state_dir: Path, device: str) -> Path:
    """Builds the demo engine on first use, in a second.

    In float32, which CPUs are quickest with. It is not compiled: that takes 25 s on two idle cores and needs a C++
    compiler, and the demo shall answer at once.
    """
    directory = state_dir / ("demo" if device == "cpu" else f"demo-{device}")
    try:
        built = build_engine(DEMO_CHECKPOINT, directory, "reference", dtype="float32", device=device)
    except SettingError as error:
        if error.setting != "--output":
            raise
        raise SettingError("--state-dir", str(error).removeprefix("--output: ")) from None
    log.info("%s the demo engine in %s (reference backend, which starts sooner)", built.outcome, directory)
    return directory
