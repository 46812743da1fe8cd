"""The sizes of a server: pools, contexts, the disk tier, and the expected costs."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...builder.checkpoints.config import Shard
from ...builder.choices import GPU_TIER_NAMES
from ...builder.manifest import Manifest
from ...plugins.kv_forms.forms import FP8, PACKED, Form, record_bytes
from ...plugins.state.pool import ALIGNMENT, StateShape
from ...scheduler.config import SchedulerConfig, StateConfig
from ...scheduler.context_window import KEEP, RECOMPUTE
from ...scheduler.cost import CostProfile
from ...scheduler.cost_estimate import analytic_profile, break_even_disk
from ...scheduler.declaration import flag
from ...scheduler.planning.plan_builder import MOST_SCORED
from ...scheduler.types import SettingError, Tier
from ..device.memory import GIB, activation_bytes, check_pool_fits, divide, host_pool_bytes
from ..device.protocol import Device
from ..disk.record import record_bytes as disk_record_bytes
from ..disk.speed import measure_disk
from ..disk.store import DiskSettings
from ..engine import Engine
from ..shared.config import read_config
from ..shared.store import SharedSettings
from .checks import check_disk_has_host, kv_chunks, plain_values, pool_setting
from .settings import DEFAULT_DISK_KV, DEFAULT_GPU_KV, DEFAULT_HOST_KV, ServeSettings

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks

log = logging.getLogger("pensieve")

# Speeds of one or two cores and of one Hopper GPU, for the cost estimate of an engine that has not
# been measured: arithmetic, copies between the tiers, and the least time of a step.
ESTIMATES = {
    "cpu": dict(flops_per_s=5e10, link_bytes_per_s=5e9, step_base_seconds=2e-3),
    "cuda": dict(flops_per_s=4e14, link_bytes_per_s=5e10, step_base_seconds=8e-3),
}

# Chunks in the logs of conversations for each chunk of KV that the tiers hold. A chunk in a log
# takes 150 to 500 bytes, a chunk of KV about a megabyte. Agents share long prompts, so logs of
# sessions are many times larger than their KV.
LOGGED_FOR_EACH_HELD = 32


def scheduler_config(
    settings: ServeSettings, engine: Engine, device: Device, sharing: int = 1
) -> SchedulerConfig:
    """sharing: ranks of this machine, which share its memory. SettingError names the flag at
    fault."""
    check_overflow(settings.overflow, engine.manifest)
    record = engine.chunk_bytes(settings.chunk_tokens)
    states = None
    if engine.state_shape is not None:
        refuse_for_states(settings, engine.manifest)
        states = state_config(
            settings.chunk_tokens, settings.max_num_seqs, engine.state_shape, record, device
        )
    for_states = 0 if states is None else states.slots * states.chunks * record
    if (
        settings.device == "cuda"
        and settings.gpu_kv_chunks is None
        and settings.gpu_kv_bytes is None
    ):
        free = free_gpu_bytes(settings, engine, device)
        if for_states and free - for_states < record:
            raise states_do_not_fit(settings.max_num_seqs, for_states, free)
        gpu_chunks = (free - for_states) // record
    else:
        gpu_chunks = kv_chunks(settings, Tier.GPU, DEFAULT_GPU_KV, record)
    if gpu_chunks < 1:
        raise SettingError(
            pool_setting(settings, Tier.GPU),
            f"must be at least one chunk, which takes {record} bytes",
        )
    form = host_form(settings.lower_tier_kv, settings.chunk_tokens, engine)
    host_record = record_bytes(engine.kv_shape(1, settings.chunk_tokens), engine.kv_dtype, form)
    host_chunks = kv_chunks(settings, Tier.HOST, DEFAULT_HOST_KV, host_record)
    disk_chunks = kv_chunks(settings, Tier.DISK, DEFAULT_DISK_KV, disk_record_bytes(host_record))
    # Before anything is made that grows with their number.
    for tier, chunks, size in (
        (Tier.GPU, gpu_chunks, record),
        (Tier.HOST, host_chunks, host_record),
    ):
        # on a CPU both tiers are in the memory where the states are
        taken = for_states if tier is Tier.GPU or settings.device == "cpu" else 0
        free = device.memory(tier).free - taken
        check_pool_fits(pool_setting(settings, tier), chunks, chunks * size, free)
    check_disk_has_host(settings, host_chunks, disk_chunks)
    if states is not None:
        warn_of_few_states(settings, host_chunks, states)
    growth = 0
    if settings.host_grows:
        size = host_pool_bytes(device.memory(Tier.HOST), gpu_chunks * record, sharing)
        growth = max(0, size // host_record - host_chunks)
    quota = settings.owner_kv_bytes
    shared = None if settings.kv_shared_config is None else read_config(settings.kv_shared_config)
    values: dict[str, Any] = plain_values(settings) | dict(
        gpu_kv_chunks=gpu_chunks,
        host_kv_chunks=host_chunks,
        disk_kv_chunks=disk_chunks,
        shared_min_tokens=0 if shared is None else shared.min_tokens,
        host_kv_growth=growth,
        owner_kv_chunks=None if quota is None else quota // record,
        log_chunks=LOGGED_FOR_EACH_HELD * (gpu_chunks + host_chunks + growth + disk_chunks),
        copies_may_fail=form is not None and form.is_exact is not None,
        states=states,
        seed=kv_seed(engine, settings.lower_tier_kv),
    )
    longest = engine.manifest.max_model_len
    if settings.max_model_len is None:
        fits = SchedulerConfig(max_model_len=1, **values).largest_context
        if fits < longest:
            log.warning(
                "contexts are limited to %d tokens (the model's: %d): the %s cache holds no more",
                fits,
                longest,
                GPU_TIER_NAMES[settings.device],
            )
        longest = min(fits, longest)
    elif settings.max_model_len > longest:
        raise SettingError(
            "--max-model-len",
            f"{settings.max_model_len} is more than the model's own {longest} tokens",
        )
    else:
        longest = settings.max_model_len
    config = SchedulerConfig(max_model_len=longest, **values)
    refuse_idle_options(settings, config)
    return config


def refuse_for_states(settings: ServeSettings, manifest: Manifest) -> None:
    """SettingError names an option that is not built for a model with states."""
    for name in (
        "overflow",
        "kv_cache_dtype",
        "lower_tier_kv",
    ):
        if settings.changed(name) and getattr(settings, name) not in (0, RECOMPUTE, "auto"):
            raise SettingError(
                flag(name),
                f"is not supported yet for linear attention ({manifest.architecture}); leave it "
                "out",
            )
    if settings.kv_shared_config is not None and manifest.tensor_parallel > 1:
        raise SettingError(
            flag("kv_shared_config"),
            f"is not supported yet for linear attention ({manifest.architecture}) on several ranks",
        )


def state_config(
    chunk_tokens: int, seats: int, shape: StateShape, record: int, device: Device
) -> StateConfig:
    """The slots of states, in whole chunks of `record` bytes. SettingError if they do not fit."""
    if record % ALIGNMENT:
        raise SettingError(
            "--chunk-tokens",
            f"a chunk of {chunk_tokens} tokens has {record} bytes; with linear attention "
            f"it must have a multiple of {ALIGNMENT}",
        )
    states = StateConfig.of_size(shape.nbytes, record, chunk_tokens, seats)
    size = states.slots * states.chunks * record
    free = device.memory(Tier.GPU).free
    if size > free:
        raise states_do_not_fit(seats, size, free)
    return states


def states_do_not_fit(seats: int, size: int, free: int) -> SettingError:
    return SettingError(
        "--max-num-seqs",
        f"the states of {seats} requests take "
        f"{size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free for them and KV",
    )


def warn_of_few_states(settings: ServeSettings, host_chunks: int, states: StateConfig) -> None:
    """A turn begins at a state in HOST, and leaves one or two there."""
    held = host_chunks // states.chunks
    if settings.reuse and held < 2 * settings.max_num_seqs:
        log.warning(
            "host memory holds %d states, fewer than two for each of --max-num-seqs %d: many turns "
            "will compute their history again; raise --host-kv-bytes",
            held,
            settings.max_num_seqs,
        )


def refuse_idle_options(settings: ServeSettings, config: SchedulerConfig) -> None:
    """SettingError names an option that is not at its default and would have no effect."""
    no_host, no_disk = not config.host_kv_chunks, not config.disk_kv_chunks
    for_host = "needs --host-kv-bytes or --host-kv-chunks above 0: all KV stays on the GPU"
    for_disk = "needs --disk-kv-bytes or --disk-kv-chunks above 0: no KV goes to disk"
    not_saved = no_disk and not config.shared_min_tokens
    for_save = "needs --disk-kv-bytes or --disk-kv-chunks above 0, or --kv-shared-config"
    for_overflow = (
        f"no context can overflow: --overflow-ratio {settings.overflow_ratio:g} of "
        f"{config.max_model_len} tokens is "
        f"less than a chunk of {config.chunk_tokens}; make it larger, or --chunk-tokens smaller"
    )
    for idle, name, needs in (
        (no_host, "lower_tier_kv", for_host),
        # 0 is right without host memory
        (no_host and settings.swap_out_below != 0.0, "swap_out_below", for_host),
        (no_host, "link", for_host),
        (no_disk, "disk_dir", for_disk),
        (not_saved, "save", for_save),
        (no_disk, "prefetch", for_disk),
        (config.windows is None, "overflow", for_overflow),
        (config.windows is None, "overflow_ratio", for_overflow),
    ):
        if idle and settings.changed(name):
            raise SettingError(flag(name), needs)


def check_overflow(mode: str, manifest: Manifest) -> None:
    """Kept KV stays valid only with relative positions; a table of learned positions also has an
    end."""
    if mode == KEEP and manifest.decoder.rotary is None:
        message = (
            f"{KEEP}: {manifest.decoder.architecture} has learned positions, which do not run on"
        )
        raise SettingError("--overflow", message)


def free_gpu_bytes(settings: ServeSettings, engine: Engine, device: Device) -> int:
    """The bytes that `--gpu-memory-utilization` leaves for KV."""
    context = settings.max_model_len or engine.manifest.max_model_len
    activations = activation_bytes(
        Shard(engine.manifest.decoder, engine.manifest.tensor_parallel),
        engine.dtype.itemsize,
        tokens=settings.max_num_batched_tokens,
        sampled=settings.max_num_seqs,
        scored=MOST_SCORED,
        context=context,
    )
    activations += engine.widened_bytes
    memory = device.memory(Tier.GPU)
    division = divide(memory, settings.gpu_memory_utilization, engine.weight_bytes, activations)
    log.info(
        "GPU memory: %.1f GiB, of which weights %.1f, activations %.1f, CUDA and its graphs %.1f, "
        "KV %.1f",
        *(size / GIB for size in (memory.total, *division)),
    )
    return division.kv


def host_form(lower_tier_kv: str, chunk_tokens: int, engine: Engine) -> Form | None:
    """The form of the records in HOST; None: as on the GPU."""
    if lower_tier_kv != "packed":
        return FP8 if lower_tier_kv == "fp8" else None
    if engine.dtype != torch.bfloat16:
        kind = str(engine.dtype).removeprefix("torch.")
        raise SettingError(
            "--lower-tier-kv",
            f"packed is for engines built with bfloat16, and this one's is {kind}",
        )
    shape = engine.kv_shape(1, chunk_tokens)
    try:
        PACKED.layer_bytes(shape)
    except ValueError as error:
        raise SettingError("--chunk-tokens", f"packed cannot hold such chunks: {error}") from error
    return PACKED


def disk_settings(
    settings: ServeSettings, config: SchedulerConfig, ranks: Ranks | None = None
) -> DiskSettings | None:
    """The disk tier's directory and the origin of its records; None without a disk tier."""
    if not config.disk_kv_chunks:
        return None
    count, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    return DiskSettings(
        settings.disk_directory, config.disk_kv_chunks, config.seed.hex(), count, rank
    )


def shared_settings(
    settings: ServeSettings, config: SchedulerConfig, ranks: Ranks | None = None
) -> SharedSettings | None:
    """The shared tier's store and the origin of this rank's records; None without such a tier."""
    if settings.kv_shared_config is None:
        return None
    count, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    return SharedSettings(
        read_config(settings.kv_shared_config),
        config.seed.hex(),
        config.most_host_kv_chunks,
        count,
        rank,
        config.states is not None,
    )


def check_disk_holds(
    settings: ServeSettings, chunks: int, chunk_bytes: int, ranks: int = 1
) -> None:
    """SettingError if records of so many chunks are larger than the whole disk of the directory,
    which exists and is shared by `ranks` ranks."""
    directory = settings.disk_directory
    size = ranks * chunks * disk_record_bytes(chunk_bytes)
    total = shutil.disk_usage(directory).total
    if size > total:
        message = (
            f"{chunks} chunks need {size / GIB:.1f} GiB and the disk of {directory} has "
            f"{total / GIB:.1f}"
        )
        raise SettingError(pool_setting(settings, Tier.DISK), message)


def with_disk_speed(cost: CostProfile, directory: Path, longest: int) -> CostProfile:
    """Returns the costs with the disk's speed, measured now. Logs the speed from which reading is
    worthwhile."""
    speed = measure_disk(directory, cost.chunk_bytes)
    if speed is None:
        log.warning("%s: the disk takes nothing now, so its speed is a guess", directory)
        return cost
    pays = {tokens: break_even_disk(cost, tokens) / 1e9 for tokens in (cost.chunk_tokens, longest)}
    log.info(
        "%s: reads %.2f GB/s, writes %.2f GB/s; on an idle device reading %s",
        directory,
        *(size / 1e9 for size in speed),
        ", ".join(
            f"{tokens} tokens pays from {least:.3g} GB/s"
            if least < math.inf
            else f"{tokens} tokens never pays"
            for tokens, least in pays.items()
        ),
    )
    return replace(cost, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)


def kv_seed(engine: Engine, lower_tier_kv: str) -> bytes:
    """Engines of one fingerprint compute equal KV for pools of one dtype, and equal lower tiers
    keep it equally, as do equal shapes states. All others share no chunks."""
    lower = b"" if lower_tier_kv == "same" else lower_tier_kv.encode()
    return (
        bytes.fromhex(engine.manifest.fingerprint)
        + lower
        + (b"" if engine.kv_cache_dtype == "auto" else b"pool fp8")
        + (b"" if engine.state_shape is None else repr(engine.state_shape).encode())
    )


def estimated_cost(engine: Engine, config: SchedulerConfig) -> CostProfile:
    shard = Shard(engine.manifest.decoder, engine.manifest.tensor_parallel)
    return analytic_profile(
        chunk_tokens=config.chunk_tokens,
        parameters=engine.active_parameters,
        layers=shard.config.kv_layers,
        attention_width=shard.heads * shard.config.head_dim,
        chunk_bytes=engine.chunk_bytes(config.chunk_tokens),
        max_context=config.max_model_len,
        windows=shard.config.windows,
        **ESTIMATES[engine.manifest.device],
    )
