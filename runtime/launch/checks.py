"""Checks of the options of `pensieve serve` that need no engine. Imports nothing that takes long: a
mistake is answered at once."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ...builder.model_names import check_name
from ...scheduler.config import SchedulerConfig, SchedulerSettings
from ...scheduler.declaration import flag
from ...scheduler.types import SettingError, Tier
from ..frontend.reply_forms import check_parsers
from ..http.listener import listen
from .generation_config import FILE, NO_FOLDER, read_fields
from .http_options import client_settings
from .settings import DEFAULT_DISK_KV, DEFAULT_GPU_KV, DEFAULT_HOST_KV, ServeSettings

MANY_CHUNKS = 2**40  # more than any GPU holds


def check_settings(settings: ServeSettings) -> None:
    """SettingError for what is wrong with any engine: no such model, a value, a file that cannot be
    read, a port that is taken."""
    check_engine(settings)
    check_values(settings)
    client_settings(settings)
    check_parsers(settings.reasoning_parser, settings.tool_call_parser)
    if settings.generation_config not in NO_FOLDER:
        read_fields(Path(settings.generation_config) / FILE)
    if settings.attach is None:
        listen(settings.host, settings.port).close()


def check_engine(settings: ServeSettings) -> None:
    """SettingError if there is no such model, or an option is not for it."""
    if settings.engine != "demo":
        if settings.engine is not None:
            check_name(settings.engine)
        return
    for name in ("dtype", "quantization", "tensor_parallel_size"):
        if settings.changed(name):
            raise SettingError(
                flag(name), "is for a checkpoint; the demo engine is always the same"
            )


def check_values(settings: ServeSettings) -> None:
    """SettingError for a value that is wrong with any engine: known before a port or a directory is
    taken."""
    gpu, host, disk = (
        kv_chunks(settings, tier, default, 1)
        for tier, default in (
            (Tier.GPU, DEFAULT_GPU_KV),
            (Tier.HOST, DEFAULT_HOST_KV),
            (Tier.DISK, DEFAULT_DISK_KV),
        )
    )
    if gpu < 1:
        raise SettingError(pool_setting(settings, Tier.GPU), "must be at least one chunk")
    check_disk_has_host(settings, host, disk)
    if settings.gpu_kv_chunks is None:
        gpu = MANY_CHUNKS  # their size is not known yet
    length = 1 if settings.max_model_len is None else settings.max_model_len
    plain = plain_values(settings)
    SchedulerConfig(
        gpu_kv_chunks=gpu, host_kv_chunks=host, disk_kv_chunks=disk, max_model_len=length, **plain
    )


def plain_values(settings: ServeSettings) -> dict[str, Any]:
    """Those of SchedulerConfig's values that do not depend on the engine."""
    return {one.name: getattr(settings, one.name) for one in fields(SchedulerSettings)}


def check_disk_has_host(settings: ServeSettings, host_chunks: int, disk_chunks: int) -> None:
    if disk_chunks > 0 and not host_chunks:
        why = "all KV to and from the disk passes through host memory"
        raise SettingError(
            pool_setting(settings, Tier.DISK),
            f"needs {pool_setting(settings, Tier.HOST)} above 0: {why}",
        )


def pool_setting(settings: ServeSettings, tier: Tier) -> str:
    """The option that sets the size of a tier's pool."""
    name = tier.name.lower()
    return (
        f"--{name}-kv-bytes"
        if getattr(settings, f"{name}_kv_chunks") is None
        else f"--{name}-kv-chunks"
    )


def kv_chunks(settings: ServeSettings, tier: Tier, default: int, record: int) -> int:
    name = tier.name.lower()
    chunks: int | None = getattr(settings, f"{name}_kv_chunks")
    if chunks is not None:
        return chunks
    given: int | None = getattr(settings, f"{name}_kv_bytes")
    size = default if given is None else given
    if 0 < size < record:
        raise SettingError(
            pool_setting(settings, tier),
            f"{size} bytes are less than one chunk, which takes {record} bytes",
        )
    return size // record
