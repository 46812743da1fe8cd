"""The settings of `pensieve serve`, checked as far as neither a file nor the engine is needed."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ...builder.choices import DEVICES, DTYPES, KV_CACHE_DTYPES
from ...scheduler.config import BATCHING_MODES, EVICTION_POLICIES, QUEUE_ORDERS, SAVE_MODES, SPECULATION
from ...scheduler.context_window import OVERFLOW_MODES
from ...scheduler.types import SettingError
from ..observe.logs import LOG_FORMATS, LOG_LEVELS

DEFAULT_GPU_KV = "512MiB"
DEFAULT_HOST_KV = "2GiB"
DEFAULT_DISK_KV = "0GiB"

HISTORY_FILE = "history.sqlite"  # in the state directory
HISTORY_URL = "PENSIEVE_HISTORY_URL"  # environment variable, read where no option names a database

RIVALS = (
    ("gpu_kv_chunks", "gpu_kv_bytes", "gpu_memory_utilization"),
    ("host_kv_chunks", "host_kv_bytes"),
    ("disk_kv_chunks", "disk_kv_bytes"),
    ("history_url", "history_url_file"),
)
"""Options of which at most one may be given: a flag overrides the others in the file too."""

CHOICES: dict[str, tuple[str, ...]] = {
    "device": DEVICES,
    "dtype": ("auto", *DTYPES, "half", "float"),  # with vLLM's names too
    "batching": BATCHING_MODES,
    "queue_order": QUEUE_ORDERS,
    "speculate": SPECULATION,
    "save": SAVE_MODES,
    "prefetch": ("on", "off"),
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "lower_tier_kv": ("same", "packed", "fp8"),
    "eviction": EVICTION_POLICIES,
    "swap_in": ("pipelined", "first"),
    "link": ("duplex", "in-first"),
    "overflow": OVERFLOW_MODES,
    "log_format": tuple(LOG_FORMATS),
    "log_level": tuple(LOG_LEVELS),
}


NOT_WITH_TRITON = (
    "host",
    "port",
    "served_model_name",
    "chat_template",
    "api_key",
    "api_key_file",
    "strict_fields",
    "max_requests_per_client",
    "max_body_bytes",
    "max_connections",
    "client_timeout",
    "cors_origins",
    "owner_kv_bytes",
    "otlp_traces_endpoint",
)
"""Options for HTTP clients only: with `--attach` Triton serves the clients."""


AT_LEAST_ONE = (
    "tensor_parallel_size",
    "max_requests_per_client",
    "max_conversations_per_owner",
    "max_connections",
    "chunk_tokens",
)


def default_state_dir() -> Path:
    """The directory in which each engine has its own state directory, unless `--state-dir` names one."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve"


@dataclass(frozen=True)
class ServeSettings:
    """The options by name, each as described by `pensieve serve --help-all`; sizes as text ("40GiB").

    `state_dir` None: the engine's own (`resolve.state_directory`). Values are checked here as far as neither a file nor
    the engine is needed. SettingError names the flag at fault.
    """

    engine: str
    config: Path | None = None
    attach: Path | None = None
    device: str = "cpu"
    dtype: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    enforce_eager: bool = False
    state_dir: Path | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    target_ms_per_token: float | None = None
    batching: str = "unified"
    queue_order: str = "bounded-ratio"
    speculate: str = "off"
    max_queue: int = 1024
    queue_timeout: float | None = None
    shutdown_timeout: float = 30.0

    gpu_kv_chunks: int | None = None
    gpu_kv_bytes: str | None = None
    gpu_memory_utilization: float = 0.9
    host_kv_chunks: int | None = None
    host_kv_bytes: str | None = None
    disk_kv_chunks: int | None = None
    disk_kv_bytes: str | None = None
    disk_dir: Path | None = None
    save: str = "async"
    prefetch: str = "on"
    kv_cache_dtype: str = "auto"
    lower_tier_kv: str = "same"
    chunk_tokens: int = 32
    conversation_ttl: float = 86400.0
    owner_kv_bytes: str | None = None
    eviction: str = "lru"
    swap_out_below: float | None = None
    generation_reserve: float = 0.10
    swap_in: str = "pipelined"
    link: str = "duplex"
    overflow: str | None = None
    overflow_ratio: float = 0.5
    reuse: bool = True

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] | None = None
    chat_template: Path | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None
    strict_fields: bool = False
    history_url: str | None = None
    history_url_file: Path | None = None
    history_ttl: float | None = None
    max_requests_per_client: int | None = None
    max_conversations_per_owner: int | None = None
    max_body_bytes: str = "32MiB"
    max_connections: int = 4096
    client_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    otlp_traces_endpoint: str | None = None
    trace: Path | None = None
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (value is None and DEFAULTS[name] is None):
                raise SettingError(flag(name), f"must be one of {', '.join(allowed)}, not {value!r}")
        for name in NOT_WITH_TRITON if self.attach is not None else ():
            if self.changed(name):
                raise SettingError(flag(name), "has no meaning here: Triton serves the clients")
        for rivals in RIVALS:
            given = [name for name in rivals if self.changed(name)]
            if len(given) > 1:
                raise SettingError(flag(given[1]), f"cannot be given beside {flag(given[0])}")
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(flag(name), f"must be at least 1, not {value}")
        for name in ("history_ttl", "client_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingError(flag(name), f"must be more than 0 seconds, not {value}")
        if not self.shutdown_timeout >= 0:
            raise SettingError("--shutdown-timeout", f"must not be negative, not {self.shutdown_timeout}")
        if self.owner_kv_bytes is not None and not self.api_key and self.api_key_file is None:
            raise SettingError("--owner-kv-bytes", "needs --api-key: without keys there is one owner")
        if self.kv_cache_dtype != "auto" and self.lower_tier_kv != "same":
            message = f"cannot be given beside --kv-cache-dtype {self.kv_cache_dtype}, whose KV is equal on every tier"
            raise SettingError("--lower-tier-kv", message)
        if self.enforce_eager and self.device != "cuda":
            raise SettingError("--enforce-eager", "there are no CUDA graphs without --device cuda")
        if self.device != "cuda" and self.changed("gpu_memory_utilization"):
            raise SettingError("--gpu-memory-utilization", "needs --device cuda; on a CPU, give --gpu-kv-bytes")

    def changed(self, name: str) -> bool:
        """True if the option is not at its default."""
        return bool(getattr(self, name) != DEFAULTS[name])

    @property
    def state_directory(self) -> Path:
        """The state directory; only allowed after it is resolved."""
        assert self.state_dir is not None
        return self.state_dir

    @property
    def disk_directory(self) -> Path:
        return self.disk_dir or self.state_directory / "kv"


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(ServeSettings) if one.default is not MISSING}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
