"""The settings of `pensieve serve`, checked as far as neither a file nor the engine is needed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ...builder.choices import DEVICES, DTYPES, KV_CACHE_DTYPES
from ...builder.small_model import SMALL_MODEL
from ...scheduler.config import BATCH, CACHE, SchedulerConfig, SchedulerSettings
from ...scheduler.declaration import SERVERS, Declaration, User, check_declared, flag, setting
from ...scheduler.types import SettingError
from ..http.settings import HTTP, MIB, HTTPOptions
from ..kv_events.config import KVEventsConfig, read_config
from ..shared.config import read_config as read_shared_config

DEFAULT_GPU_KV = 512 * MIB
DEFAULT_HOST_KV = 2048 * MIB
DEFAULT_DISK_KV = 0

HISTORY_FILE = "history.sqlite"  # in the state directory
HISTORY_URL = "PENSIEVE_HISTORY_URL"  # environment variable, read where no option names a database

RIVALS = (
    ("gpu_kv_chunks", "gpu_kv_bytes", "gpu_memory_utilization"),
    ("host_kv_chunks", "host_kv_bytes"),
    ("disk_kv_chunks", "disk_kv_bytes"),
    ("history_url", "history_url_file"),
)
"""Options of which at most one may be given: a flag overrides the others in the file too."""


def default_state_dir() -> Path:
    """The directory in which each engine has its own state directory, unless `--state-dir` names
    one."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve"


def size_text(size: int) -> str:
    """The size with the largest unit that divides it: 2147483648 is 2GiB."""
    power = next((power for power in (4, 3, 2, 1) if size and size % 1024**power == 0), 0)
    return f"{size // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


_engine = partial(setting, group=BATCH)
_cache = partial(setting, group=CACHE)
_http = partial(setting, group=HTTP, users=User.SERVER)


@dataclass(frozen=True)
class ServeSettings(HTTPOptions, SchedulerSettings):
    """The options by name; sizes in bytes. SettingError names the flag at fault.

    `state_dir` None: the engine's own (`resolve.state_directory`). Values are checked as far as
    neither a file nor the engine is needed.
    """

    engine: str | None = _engine(
        None,
        "PATH as an option; the last one counts",
        f"{SMALL_MODEL}, or demo if that cannot be downloaded",
        unit="PATH",
        users=SERVERS,
    )
    config: Path | None = setting(
        None,
        "a TOML file of these options, without the dashes",
        unit="FILE",
        users=SERVERS,
        common=True,
    )
    attach: Path | None = setting(
        None,
        "serve Triton's model, which listens there and adds this option itself; no HTTP clients",
        unit="SOCKET",
        users=SERVERS,
        page="docs/use/triton.md",
    )
    device: str = _engine("cpu", "where the engine runs", choices=DEVICES, common=True)
    dtype: str | None = _engine(
        None,
        "of a checkpoint's weights and KV",
        "its own",
        choices=("auto", *DTYPES, "half", "float"),  # with vLLM's names too
        common=True,
    )
    quantization: str | None = _engine(
        None, "fp8: round a checkpoint's weights to 8 bits", "as they are", unit="NAME", common=True
    )
    tensor_parallel_size: int | None = _engine(
        None,
        "divide a checkpoint over so many ranks",
        "1",
        least=1,
        common=True,
        page="docs/use/tensor-parallel.md",
    )
    enforce_eager: bool = _engine(False, "on a GPU: launch every kernel by itself, no CUDA graphs")
    state_dir: Path | None = _engine(
        None,
        "of this server alone: histories, and the disk tier unless --disk-dir says otherwise",
        "one for each engine in ~/.local/state/pensieve, or where XDG_STATE_HOME says",
        unit="DIR",
        common=True,
    )
    max_model_len: int | None = _engine(
        None,
        "longest context; 32k is 32,000, 32K is 32,768",
        "the model's own",
        unit="TOKENS",
        common=True,
    )
    shutdown_timeout: float = _engine(
        30.0,
        "for running requests after SIGTERM; a second signal ends them",
        unit="SECONDS",
        least=0,
        users=SERVERS,
    )

    gpu_kv_bytes: int | None = _cache(
        None,
        "KV on the GPU, as 40GiB",
        f"{size_text(DEFAULT_GPU_KV)}; on a GPU as --gpu-memory-utilization says",
        unit="SIZE",
        common=True,
    )
    gpu_kv_chunks: int | None = _cache(None, "or in chunks")
    gpu_memory_utilization: float = _cache(
        0.9,
        "or what this share of the GPU's memory leaves beside all else that the process needs",
        unit="SHARE",
        common=True,
    )
    host_kv_bytes: int | None = _cache(
        None,
        "KV in host memory, as 40GiB",
        f"{size_text(DEFAULT_HOST_KV)}; on a GPU it grows until 0.7 of the memory is in use",
        unit="SIZE",
        common=True,
        page="docs/use/operations.md",
    )
    host_kv_chunks: int | None = _cache(None, "or in chunks")
    disk_kv_bytes: int | None = _cache(
        None,
        "KV on disk, as 40GiB",
        "none",
        unit="SIZE",
        common=True,
    )
    disk_kv_chunks: int | None = _cache(None, "or in chunks")
    disk_dir: Path | None = _cache(
        None,
        "where the disk cache is, on a local disk",
        "kv in --state-dir",
        unit="DIR",
    )
    kv_shared_config: str | None = _cache(
        None,
        'JSON of a store that servers of one model share, as {"engine": "directory", "path": '
        '"/mnt/kv", "max_bytes": 1000000000000}',
        "none",
        unit="JSON",
        users=SERVERS,
        page="docs/use/shared-kv.md",
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "of KV on every tier: the engine's own, or 8 bits a number",
        choices=KV_CACHE_DTYPES,
        page="docs/design/kv-in-eight-bits.md",
    )
    lower_tier_kv: str = _cache(
        "same",
        "KV outside the GPU: as it is there; the same in four fifths of the bytes (bfloat16 only); "
        "or rounded to 8 bits a number",
        choices=("same", "packed", "fp8"),
        page="docs/design/lower-tier.md",
    )
    owner_kv_bytes: int | None = _cache(
        None,
        "of each API key's conversations, the latest KV of this size is kept while other KV can go",
        "keys are not told apart",
        unit="SIZE",
        users=User.SERVER,
    )
    link: str = _cache("duplex", "", choices=("duplex", "in-first"), users=SERVERS)

    host: str = _http("127.0.0.1", "address to listen on", common=True)
    port: int = _http(8000, "port to listen on, 0: any free one", unit="PORT", common=True)
    served_model_name: tuple[str, ...] | None = _http(
        None,
        "the names clients may use, the first one is told",
        "ORG/NAME of the Hub, else the name of the directory or file",
        unit="NAME",
        common=True,
    )
    chat_template: Path | None = _http(
        None,
        "Jinja template",
        "the engine's own",
        unit="FILE",
        users=User.SERVER | User.OFFLINE,
    )
    generation_config: str = _http(
        "auto",
        "the folder whose generation_config.json gives the sampling of requests that set none; "
        "auto: the engine's own; vllm: none",
        unit="FOLDER",
        users=User.SERVER | User.TRITON | User.OFFLINE,
    )
    api_key: tuple[str, ...] = _http(
        (),
        "clients need one of these keys",
        "none",
        unit="KEY",
        common=True,
    )
    api_key_file: Path | None = _http(None, "more keys, one a line", unit="FILE")
    history_url: str | None = _http(
        None,
        "a PostgreSQL database for conversations, which several servers share, as "
        "postgresql://USER@HOST/NAME; without a password",
        f"{HISTORY_URL} of the environment, else a file in --state-dir",
        unit="URL",
        users=SERVERS,
        page="docs/use/shared-histories.md",
    )
    history_url_file: Path | None = _http(
        None,
        "that URL, which may have a password",
        unit="FILE",
        users=SERVERS,
    )
    kv_events_config: str | None = _http(
        None,
        "tell routers, in vLLM's format, which KV is here: a JSON object",
        "they are told nothing",
        unit="JSON",
        users=SERVERS,
        page="docs/use/routers.md",
    )
    trace: Path | None = _http(
        None, "write what each step did and when, for ui.perfetto.dev", unit="FILE", users=SERVERS
    )

    def __post_init__(self) -> None:
        check_declared(self)
        SchedulerSettings.__post_init__(self)
        for name, declared in DECLARED.items():
            if self.attach is not None and User.TRITON not in declared.users and self.changed(name):
                raise SettingError(flag(name), "has no meaning here: Triton serves the clients")
        for rivals in RIVALS:
            changed = [name for name in rivals if self.changed(name)]
            if len(changed) > 1:
                raise SettingError(flag(changed[1]), f"cannot be given beside {flag(changed[0])}")
        if self.owner_kv_bytes is not None and not self.api_key and self.api_key_file is None:
            message = "needs --api-key: without keys there is one owner"
            raise SettingError("--owner-kv-bytes", message)
        if self.kv_cache_dtype != "auto" and self.lower_tier_kv != "same":
            given = f"--kv-cache-dtype {self.kv_cache_dtype}"
            message = f"cannot be given beside {given}, whose KV is equal on every tier"
            raise SettingError("--lower-tier-kv", message)
        if self.kv_events is not None and not self.reuse:
            raise SettingError("--kv-events-config", "cannot be given beside --no-reuse")
        if self.kv_shared_config is not None:
            read_shared_config(self.kv_shared_config)
        if self.enforce_eager and self.device != "cuda":
            raise SettingError("--enforce-eager", "there are no CUDA graphs without --device cuda")
        if self.device != "cuda" and self.changed("gpu_memory_utilization"):
            message = "needs --device cuda; on a CPU, give --gpu-kv-bytes"
            raise SettingError("--gpu-memory-utilization", message)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """None: there are none. SettingError for a wrong setting."""
        return None if self.kv_events_config is None else read_config(self.kv_events_config)

    def changed(self, name: str) -> bool:
        """True if the option is not at its default."""
        return bool(getattr(self, name) != DEFAULTS[name])

    @property
    def host_grows(self) -> bool:
        """True if the HOST pool takes what the machine's memory has room for."""
        given = self.changed("host_kv_bytes") or self.changed("host_kv_chunks")
        return self.device == "cuda" and not given

    @property
    def engine_directory(self) -> Path:
        """The engine's directory; only allowed after it is resolved."""
        assert self.engine is not None
        return Path(self.engine)

    @property
    def state_directory(self) -> Path:
        """The state directory; only allowed after it is resolved."""
        assert self.state_dir is not None
        return self.state_dir

    @property
    def disk_directory(self) -> Path:
        return self.disk_dir or self.state_directory / "kv"


DECLARED: dict[str, Declaration] = {
    one.name: one.metadata["declaration"]
    for one in fields(ServeSettings)  # by name
}
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(ServeSettings)}


SETTINGS = frozenset(one.name for part in (ServeSettings, SchedulerConfig) for one in fields(part))


def in_flags(error: SettingError) -> str:
    """The error in words of the command line: settings have the names of their flags."""
    name = error.setting
    message = re.sub(
        r"`(\w+)`",
        lambda match: flag(match[1]) if match[1] in SETTINGS else match[0],
        error.message,
    )
    return f"{flag(name) if name in SETTINGS else name}: {message}"
