"""How large everything is that is served with: pools, contexts, the disk's room, and what it is expected to cost."""

from __future__ import annotations

import argparse
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..builder.checkpoints.config import Shard
from ..builder.manifest import Manifest
from ..plugins.kv_forms.forms import FP8, PACKED, Form, record_bytes
from ..runtime.device.memory import GIB, activation_bytes, check_pool_fits, divide
from ..runtime.device.protocol import Device
from ..runtime.disk.record import record_bytes as disk_record_bytes
from ..runtime.disk.speed import measure_disk
from ..runtime.disk.store import DiskSettings
from ..runtime.engine import Engine
from ..scheduler.config import SchedulerConfig
from ..scheduler.context_window import KEEP, RECOMPUTE
from ..scheduler.cost import CostProfile, analytic_profile
from ..scheduler.planning.plan_builder import MOST_SCORED
from ..scheduler.types import SettingError, Tier
from .serve_options import DEFAULT_DISK_KV, DEFAULT_GPU_KV, DEFAULT_HOST_KV, changed
from .sizes import parse_bytes

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks

log = logging.getLogger("pensieve")

# What a core or two do, and one Hopper GPU, for the cost estimate of an engine that has not been measured: arithmetic,
# copies between the tiers, and the least time of a step.
ESTIMATES = {
    "cpu": dict(flops_per_s=5e10, link_bytes_per_s=5e9, step_base_seconds=2e-3),
    "cuda": dict(flops_per_s=4e14, link_bytes_per_s=5e10, step_base_seconds=8e-3),
}


def scheduler_config(args: argparse.Namespace, engine: Engine, device: Device) -> SchedulerConfig:
    """SettingError names the flag at fault."""
    if args.chunk_tokens < 1:
        raise SettingError("--chunk-tokens", f"must be at least 1, not {args.chunk_tokens}")
    if args.device != "cuda" and changed(args, "gpu_memory_utilization"):
        raise SettingError("--gpu-memory-utilization", "needs --device cuda; on a CPU, give --gpu-kv-bytes")
    record = engine.chunk_bytes(args.chunk_tokens)
    if args.device == "cuda" and args.gpu_kv_chunks is None and args.gpu_kv_bytes is None:
        gpu_chunks = free_gpu_bytes(args, engine, device) // record
    else:
        gpu_chunks = kv_chunks(args, Tier.GPU, DEFAULT_GPU_KV, record)
    if gpu_chunks < 1:
        raise SettingError(pool_setting(args, Tier.GPU), f"must be at least one chunk, which takes {record} bytes")
    form = host_form(args, engine)
    host_record = record_bytes(engine.kv_shape(1, args.chunk_tokens), engine.dtype, form)
    host_chunks = kv_chunks(args, Tier.HOST, DEFAULT_HOST_KV, host_record)
    disk_chunks = kv_chunks(args, Tier.DISK, DEFAULT_DISK_KV, disk_record_bytes(host_record))
    # Before anything is made that grows with their number.
    for tier, chunks, size in ((Tier.GPU, gpu_chunks, record), (Tier.HOST, host_chunks, host_record)):
        check_pool_fits(pool_setting(args, tier), chunks, chunks * size, device.memory(tier).free)
    quota = None if args.owner_kv_bytes is None else parse_bytes(args.owner_kv_bytes, "--owner-kv-bytes") // record
    settings = dict(
        gpu_kv_chunks=gpu_chunks,
        host_kv_chunks=host_chunks,
        disk_kv_chunks=disk_chunks,
        owner_kv_chunks=quota,
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
        queue_order=args.queue_order,
        queue_timeout=args.queue_timeout,
        conversation_ttl=args.conversation_ttl,
        overflow=overflow_mode(args.overflow, engine.manifest),
        overflow_ratio=args.overflow_ratio,
        reuse=args.reuse,
        copies_may_fail=form is not None and form.holds is not None,
        seed=kv_seed(engine.manifest, args.lower_tier_kv),
    )
    longest = engine.manifest.max_model_len
    if args.max_model_len is None:
        fits = SchedulerConfig(max_model_len=1, **settings).largest_context
        if fits < longest:
            log.warning(
                "contexts are limited to %d tokens (the model's: %d): the GPU cache holds no more", fits, longest
            )
        longest = min(fits, longest)
    elif args.max_model_len > longest:
        raise SettingError("--max-model-len", f"{args.max_model_len} is more than the model's own {longest} tokens")
    else:
        longest = args.max_model_len
    config = SchedulerConfig(max_model_len=longest, **settings)
    refuse_idle_options(args, config)
    return config


def refuse_idle_options(args: argparse.Namespace, config: SchedulerConfig) -> None:
    """SettingError names an option that is not at its default and would do nothing."""
    no_host, no_disk = not config.host_kv_chunks, not config.disk_kv_chunks
    for_host = "needs --host-kv-bytes or --host-kv-chunks above 0: all KV stays on the GPU"
    for_disk = "needs --disk-kv-bytes or --disk-kv-chunks above 0: no KV goes to disk"
    for_overflow = (
        f"no context can overflow: --overflow-ratio {args.overflow_ratio:g} of {config.max_model_len} tokens is less "
        f"than a chunk of {config.chunk_tokens}; make it larger, or --chunk-tokens smaller"
    )
    for idle, name, needs in (
        (no_host, "lower_tier_kv", for_host),
        (no_host and args.swap_out_below != 0.0, "swap_out_below", for_host),  # 0 says the same as no host memory
        (no_host, "swap_in", for_host),
        (no_host, "link", for_host),
        (no_disk, "disk_dir", for_disk),
        (no_disk, "save", for_disk),
        (no_disk, "prefetch", for_disk),
        (config.windows is None, "overflow", for_overflow),
        (config.windows is None, "overflow_ratio", for_overflow),
    ):
        if idle and changed(args, name):
            raise SettingError(f"--{name.replace('_', '-')}", needs)


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


def pool_setting(args: argparse.Namespace, tier: Tier) -> str:
    """The option that says how large a tier's pool is."""
    name = tier.name.lower()
    return f"--{name}-kv-bytes" if getattr(args, f"{name}_kv_chunks") is None else f"--{name}-kv-chunks"


def kv_chunks(args: argparse.Namespace, tier: Tier, default: str, record: int) -> int:
    name = tier.name.lower()
    chunks: int | None = getattr(args, f"{name}_kv_chunks")
    if chunks is not None:
        return chunks
    setting = pool_setting(args, tier)
    size = parse_bytes(getattr(args, f"{name}_kv_bytes") or default, setting)
    if 0 < size < record:
        raise SettingError(setting, f"{size} bytes are less than one chunk, which takes {record} bytes")
    return size // record


def host_form(args: argparse.Namespace, engine: Engine) -> Form | None:
    """Of the records in HOST."""
    if args.lower_tier_kv != "packed":
        return FP8 if args.lower_tier_kv == "fp8" else None
    if engine.dtype != torch.bfloat16:
        kind = str(engine.dtype).removeprefix("torch.")
        raise SettingError("--lower-tier-kv", f"packed is for engines built with bfloat16, and this one's is {kind}")
    shape = engine.kv_shape(1, args.chunk_tokens)
    try:
        PACKED.layer_bytes(shape)
    except ValueError as error:
        raise SettingError("--chunk-tokens", f"packed cannot hold such chunks: {error}") from error
    return PACKED


def disk_settings(args: argparse.Namespace, config: SchedulerConfig, ranks: Ranks | None = None) -> DiskSettings | None:
    """Where the disk tier is and what may be read from it; None without one."""
    if not config.disk_kv_chunks:
        return None
    count, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    return DiskSettings(disk_directory(args), config.disk_kv_chunks, config.seed.hex(), count, rank)


def disk_directory(args: argparse.Namespace) -> Path:
    return args.disk_dir or args.state_dir / "kv"


def check_disk_holds(args: argparse.Namespace, chunks: int, chunk_bytes: int, ranks: int = 1) -> None:
    """SettingError if records of so many chunks are more than the whole disk of the directory, which is there and is
    shared by so many ranks."""
    directory = disk_directory(args)
    size, total = ranks * chunks * disk_record_bytes(chunk_bytes), shutil.disk_usage(directory).total
    if size > total:
        message = f"{chunks} chunks need {size / GIB:.1f} GiB and the disk of {directory} has {total / GIB:.1f}"
        raise SettingError(pool_setting(args, Tier.DISK), message)


def with_disk_speed(cost: CostProfile, directory: Path, longest: int) -> CostProfile:
    """Measured just now. Says from which speed on reading pays at all."""
    speed = measure_disk(directory, cost.chunk_bytes)
    if speed is None:
        log.warning("%s: the disk takes nothing now, so its speed is a guess", directory)
        return cost
    log.info(
        "%s: reads %.2f GB/s, writes %.2f GB/s; on an idle device reading beats computing again from %.3g GB/s for %d "
        "tokens, from %.3g GB/s for %d",
        directory,
        *(size / 1e9 for size in speed),
        *(part for tokens in (cost.chunk_tokens, longest) for part in (cost.break_even_disk(tokens) / 1e9, tokens)),
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
