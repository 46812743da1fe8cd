"""Makes an engine, its device, the scheduler and the executor from the options."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...builder.build import build_engine
from ...builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ...builder.choices import GPU_TIER_NAMES
from ...builder.manifest import Manifest
from ...plugins.kv_forms.forms import record_bytes
from ...scheduler.config import SchedulerConfig
from ...scheduler.cost import CostProfile
from ...scheduler.kv.chunk_store import ChunkStore
from ...scheduler.kv.noted_store import NotedStores
from ...scheduler.scheduler import Scheduler
from ...scheduler.types import SettingError, Tier
from ..device.cpu import CpuDevice
from ..device.memory import GIB, check_pool_fits
from ..device.protocol import Device
from ..disk.directory import locked
from ..engine import Engine, open_engine
from ..executor import GROUP_LAYERS, Executor
from ..frontend.reply_forms import check_parsers
from ..measure.profile import load_profile
from ..messages import Ready
from ..observe.chrome_trace import TraceFile
from ..step.grammar import Grammars, open_grammars
from ..text.tokenizer import Tokenizer
from .checks import pool_setting
from .generation_config import sampling_defaults
from .http_options import read_chat_template
from .ranks import open_rank
from .settings import ServeSettings
from .sizing import (
    check_disk_holds,
    disk_settings,
    estimated_cost,
    host_form,
    scheduler_config,
    shared_settings,
    with_disk_speed,
)

if TYPE_CHECKING:
    from ..kv_events.publisher import KVEventPublisher
    from ..ranks.mpi import Ranks

log = logging.getLogger("pensieve")

NO_TOKENIZER = (
    "%s: there is no tokenizer.json, and its checkpoint had no vocab.json with merges.txt: only "
    "completions of token "
    "ids are served"
)
NO_TEMPLATE = (
    "%s: there is no chat_template.jinja, and no chat_template in tokenizer_config.json: chats are "
    "refused; "
    "--chat-template FILE gives a template"
)

FLOAT16_ON_CPU = (
    "%s computes in float16, which is slow on most CPUs: build it, or load its checkpoint, with "
    "dtype float32 or bfloat16"
)


class Prepared(NamedTuple):
    """The parts of one rank, with the same sizes on all ranks."""

    directory: Path
    device: Device
    engine: Engine
    config: SchedulerConfig


class Assembled(NamedTuple):
    """The parts that a loop needs."""

    scheduler: Scheduler
    executor: Executor
    cost: CostProfile
    trace: TraceFile | None
    ready: Ready
    kv_events: KVEventPublisher | None


def assemble(settings: ServeSettings, ranks: Ranks | None = None) -> Assembled:
    """With `ranks`, called on rank 0. Raises SettingError."""
    prepared = prepare(settings) if ranks is None else prepare_rank(settings, ranks)
    directory, device, engine, config = prepared
    trace = None if settings.trace is None else TraceFile(settings.trace)
    if trace is not None:
        device.watch(trace.work)
    measured = load_profile(directory, engine, config.chunk_tokens)
    host_record = host_record_bytes(settings, engine)
    cost = replace(measured or estimated_cost(engine, config), chunk_bytes=host_record)
    if config.disk_kv_chunks:
        cost = with_disk_speed(cost, settings.disk_directory, config.max_model_len)
        sharing = 1 if ranks is None else ranks.local_size
        check_disk_holds(settings, config.disk_kv_chunks, host_record, sharing)
    stores = NotedStores()
    kv_events = settings.kv_events
    scheduler = Scheduler(config, cost, ChunkStore if kv_events is None else stores)
    tokenizer = str(directory) if (directory / "tokenizer.json").exists() else ""
    if tokenizer:  # it must be readable before requests are served
        template = settings.chat_template
        loaded = Tokenizer.load(
            tokenizer, None if template is None else read_chat_template(template)
        )
        check_parsers(settings.reasoning_parser, settings.tool_call_parser)
        if not loaded.has_template:
            log.warning(NO_TEMPLATE, directory)
    elif settings.chat_template is not None:
        raise SettingError(
            "--chat-template", f"{directory} has no tokenizer, and without one there are no chats"
        )
    else:
        log.warning(NO_TOKENIZER, directory)
    if settings.device == "cpu" and engine.manifest.dtype == "float16":
        log.warning(FLOAT16_ON_CPU, directory)
    sampling = sampling_defaults(settings.generation_config, directory)
    grammars = open_grammars(tokenizer, engine.vocab_size, engine.manifest.stop_ids)
    executor = make_executor(settings, prepared, ranks, grammars)
    records = executor.stored_records()
    scheduler.lower.adopt(records, time.monotonic())
    model, *aliases = settings.served_model_name or [directory.resolve().name]
    ready = Ready(
        model=model,
        aliases=tuple(aliases),
        overflow=config.windows is not None,
        max_model_len=config.max_model_len,
        vocab_size=engine.manifest.vocab_size,
        stop_ids=engine.manifest.stop_ids,
        tokenizer=tokenizer,
        chunk_tokens=config.chunk_tokens,
        gpu_kv_chunks=config.gpu_kv_chunks,
        sampling=sampling,
        device=settings.device,
        states=config.states is not None,
    )
    if config.disk_kv_chunks:
        log.info(
            "disk cache %d chunks in %s, %d of them from earlier",
            config.disk_kv_chunks,
            settings.disk_directory,
            len(records.get(Tier.DISK, ())),
        )
    log.info(
        "%s: %s cache %d chunks of %d bytes, host cache %d of %d bytes, %d tokens each, contexts "
        "up to %d tokens",
        ready.model,
        GPU_TIER_NAMES[settings.device],
        config.gpu_kv_chunks,
        engine.chunk_bytes(config.chunk_tokens),
        config.host_kv_chunks,
        host_record,
        config.chunk_tokens,
        config.max_model_len,
    )
    if config.host_kv_growth:
        log.info(
            "the host cache grows to %.1f GiB in the background",
            config.most_host_kv_chunks * host_record / GIB,
        )
    publisher = None
    if kv_events is not None:
        from ..kv_events.publisher import KVEventPublisher  # imported here because of its packages

        publisher = KVEventPublisher(
            kv_events,
            stores.store,
            config.seed,
            config.chunk_tokens,
            has_states=config.states is not None,
        )
    return Assembled(scheduler, executor, cost, trace, ready, publisher)


def prepare(settings: ServeSettings) -> Prepared:
    """Raises SettingError, also for an engine of several ranks."""
    device = make_device(settings.device, settings.enforce_eager)
    directory = settings.engine_directory
    divided = Manifest.read(directory).tensor_parallel
    if divided != 1:
        raise SettingError(
            "--engine",
            f"{directory} is divided among {divided} ranks, which only `pensieve serve` starts",
        )
    log.info("loading the weights of %s", directory)
    began = time.monotonic()
    engine = open_engine(directory, settings.device, kv_cache_dtype=settings.kv_cache_dtype)
    log_loaded(engine, began)
    return Prepared(directory, device, engine, scheduler_config(settings, engine, device))


def prepare_rank(settings: ServeSettings, ranks: Ranks) -> Prepared:
    """Called on all ranks at the same time. A wrong setting on one rank is raised on it and on rank
    0. Pools have the smallest rank's sizes."""
    directory = settings.engine_directory
    make = partial(make_device, settings.device, settings.enforce_eager)
    log.info("loading the weights of %s, of each rank its own", directory)
    began = time.monotonic()
    device, engine = open_rank(directory, settings.device, make, ranks, settings.kv_cache_dtype)
    log_loaded(engine, began)
    config = ranks.together(lambda: scheduler_config(settings, engine, device, ranks.local_size))
    gpu, host, growth, disk, longest = ranks.smallest(
        config.gpu_kv_chunks,
        config.host_kv_chunks,
        config.host_kv_growth,
        config.disk_kv_chunks,
        config.max_model_len,
    )
    size = host * host_record_bytes(settings, engine) * ranks.local_size
    setting = pool_setting(settings, Tier.HOST)
    ranks.together(lambda: check_pool_fits(setting, host, size, device.memory(Tier.HOST).free))
    agreed = replace(
        config,
        gpu_kv_chunks=gpu,
        host_kv_chunks=host,
        host_kv_growth=growth,
        disk_kv_chunks=disk,
        max_model_len=longest,
    )
    return Prepared(directory, device, engine, agreed)


def log_loaded(engine: Engine, began: float) -> None:
    size = engine.manifest.weight_bytes / 2**20
    log.info("%.1f MiB of weights are loaded after %.1f s", size, time.monotonic() - began)


def host_record_bytes(settings: ServeSettings, engine: Engine) -> int:
    """Bytes of a chunk in HOST."""
    form = host_form(settings.lower_tier_kv, settings.chunk_tokens, engine)
    return record_bytes(engine.kv_shape(1, settings.chunk_tokens), engine.kv_dtype, form)


def make_executor(
    settings: ServeSettings,
    prepared: Prepared,
    ranks: Ranks | None,
    grammars: Grammars | None = None,
) -> Executor:
    _, device, engine, config = prepared
    make: Callable[..., Executor] = Executor
    if ranks is not None and ranks.rank == 0:
        from ..ranks.executor import RankedExecutor  # imported here because it imports MPI

        make = partial(RankedExecutor, ranks)
    form = host_form(settings.lower_tier_kv, settings.chunk_tokens, engine)
    return make(
        device,
        engine,
        config,
        GROUP_LAYERS,
        grammars,
        settings.link == "in-first",
        form,
        disk_settings(settings, config, ranks),
        shared_settings(settings, config, ranks),
        engine.state_shape,
    )


def make_device(name: str, enforce_eager: bool = False) -> Device:
    if name == "cpu":
        return CpuDevice()
    from ..device.cuda import CudaDevice  # imported here because only it needs cuda-python

    return CudaDevice(enforce_eager=enforce_eager)


def demo_engine(state_dir: Path, device: str) -> Path:
    """Builds the demo engine on first use, in a second.

    Its dtype is float32, the fastest on CPUs. It is not compiled: that takes 25 s on two idle cores
    and needs a C++ compiler, and the demo should answer at once.
    """
    # the name in requests
    directory = (state_dir if device == "cpu" else state_dir / device) / "demo"
    try:
        built = build_engine(
            DEMO_CHECKPOINT, directory, "reference", dtype="float32", device=device
        )
    except SettingError as error:
        if error.setting != "--output":
            raise
        raise SettingError("--state-dir", str(error).removeprefix("--output: ")) from None
    log.info(
        "%s the demo engine in %s (reference backend, which starts sooner)",
        built.outcome,
        directory,
    )
    return directory


@contextmanager
def locked_directories(settings: ServeSettings) -> Iterator[None]:
    """While this is open no other server can use these directories. Raises SettingError."""
    with ExitStack() as locks:
        locks.enter_context(locked(settings.state_directory, "--state-dir"))
        disk = settings.disk_directory
        if disk.resolve() != settings.state_directory.resolve():
            locks.enter_context(locked(disk, "--disk-dir"))
        yield
