"""The options of `pensieve serve`: from the command line, and from a TOML file with the same names.

Where vLLM has an option of the same meaning, ours has its name.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...scheduler.config import BATCHING_MODES, EVICTION_POLICIES, QUEUE_ORDERS, SAVE_MODES
from ...scheduler.context_window import OVERFLOW_MODES
from ...scheduler.types import SettingError
from ..http.auth import key_digest
from ..http.settings import HTTPSettings
from ..observe.logs import LOG_FORMATS, LOG_LEVELS
from ..text.tokenizer import ChatTemplate

DEFAULT_GPU_KV = "512MiB"
DEFAULT_HOST_KV = "2GiB"
DEFAULT_DISK_KV = "0GiB"

RIVALS = (
    ("gpu_kv_chunks", "gpu_kv_bytes", "gpu_memory_utilization"),
    ("host_kv_chunks", "host_kv_bytes"),
    ("disk_kv_chunks", "disk_kv_bytes"),
)
"""Options of which one is given at most: a flag overrides its rivals in the file too."""

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("cpu", "cuda"),
    "batching": BATCHING_MODES,
    "queue_order": QUEUE_ORDERS,
    "save": SAVE_MODES,
    "prefetch": ("on", "off"),
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
    "strict_fields",
    "api_key",
    "api_key_file",
    "max_requests_per_client",
    "max_body_bytes",
    "max_connections",
    "client_timeout",
    "owner_kv_bytes",
    "otlp_traces_endpoint",
)
"""Options that concern HTTP clients only: with `--attach` Triton serves the clients."""


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve"


@dataclass(frozen=True)
class ServeSettings:
    """The options by name, each as `pensieve serve --help` describes it; sizes as text ("40GiB").

    Values are checked here as far as they need neither a file nor the engine. SettingError names the flag at fault.
    """

    engine: str
    config: Path | None = None
    attach: Path | None = None
    device: str = "cpu"
    enforce_eager: bool = False
    state_dir: Path = field(default_factory=default_state_dir)
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    batching: str = "unified"
    queue_order: str = "bounded-ratio"
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
    lower_tier_kv: str = "same"
    chunk_tokens: int = 32
    conversation_ttl: float = 86400.0
    owner_kv_bytes: str | None = None
    eviction: str = "retention"
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
    strict_fields: bool = False
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None
    history_ttl: float | None = None
    max_requests_per_client: int | None = None
    max_conversations_per_owner: int | None = None
    max_body_bytes: str = "32MiB"
    max_connections: int = 4096
    client_timeout: float = 30.0
    otlp_traces_endpoint: str | None = None
    trace: Path | None = None
    log_format: str = "text"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "overflow" and value is None):
                raise SettingError(flag(name), f"must be one of {', '.join(allowed)}, not {value!r}")
        for name in NOT_WITH_TRITON if self.attach is not None else ():
            if self.changed(name):
                raise SettingError(flag(name), "has no meaning here: Triton serves the clients")
        for rivals in RIVALS:
            given = [name for name in rivals if self.changed(name)]
            if len(given) > 1:
                raise SettingError(flag(given[1]), f"cannot be given beside {flag(given[0])}")
        for name in ("max_requests_per_client", "max_conversations_per_owner", "max_connections", "chunk_tokens"):
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
        if self.enforce_eager and self.device != "cuda":
            raise SettingError("--enforce-eager", "there are no CUDA graphs without --device cuda")
        if self.device != "cuda" and self.changed("gpu_memory_utilization"):
            raise SettingError("--gpu-memory-utilization", "needs --device cuda; on a CPU, give --gpu-kv-bytes")

    def changed(self, name: str) -> bool:
        """Whether the option is not at its default."""
        return bool(getattr(self, name) != DEFAULTS[name])

    @property
    def disk_directory(self) -> Path:
        return self.disk_dir or self.state_dir / "kv"


DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(ServeSettings) if one.default is not MISSING}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_options(argv: Sequence[str]) -> ServeSettings:
    """What the flags say, else the file of `--config`, else the defaults. SettingError for wrong values."""
    made = parser()
    path = early_options(argv).config
    if path is not None:
        given = {word.partition("=")[0] for word in argv}
        values = {name: value for name, value in read_file(made, path).items() if not _rivals(name) & given}
        made.set_defaults(**values)
        for action in made._actions:
            action.required &= action.dest not in values
    return settings_of(made.parse_args(argv))


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """SettingError for values that cannot work."""
    values: dict[str, Any] = vars(args)
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return ServeSettings(**(values | lists))


def early_options(argv: Sequence[str]) -> argparse.Namespace:
    """`config` and `attach`, which no file sets: they are known even if other options are wrong."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--attach", type=Path)
    return early.parse_known_args(argv)[0]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pensieve serve",
        description="Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns.",
        allow_abbrev=False,  # the file knows no abbreviations either
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these options, without the dashes")
    made.add_argument("--attach", type=Path, metavar="SOCKET",
                      help="serve Triton's model, which listens there and adds this option itself, and no HTTP clients"
                      )  # fmt: skip
    _engine_options(made)
    _cache_options(made)
    _http_options(made)
    made.set_defaults(**DEFAULTS | {"api_key": []}, state_dir=default_state_dir())  # a list, which the flag extends
    return made


def _engine_options(made: argparse.ArgumentParser) -> None:
    option = made.add_argument_group("engine and batch").add_argument
    option("--engine", required=True, metavar="DIR|demo", help="an engine directory, or a small model made on the spot")
    option("--device", choices=CHOICES["device"], help="where the engine runs (default %(default)s)")
    option("--enforce-eager", action=argparse.BooleanOptionalAction,
           help="on a GPU: launch every kernel by itself, no CUDA graphs")  # fmt: skip
    option("--state-dir", type=Path, metavar="DIR",
           help="of this server alone: histories, and the disk tier unless --disk-dir says otherwise "
           "(default %(default)s)")  # fmt: skip
    option("--max-model-len", type=int, metavar="N", help="longest context, tokens (default: the model's own)")
    option("--max-num-seqs", type=int, metavar="N", help="running requests (default %(default)s)")
    option("--max-num-batched-tokens", type=int, metavar="N", help="tokens a step (default %(default)s)")
    option("--batching", choices=CHOICES["batching"], help="(default %(default)s)")
    option("--queue-order", choices=CHOICES["queue_order"],
           help="which request joins first: the one with the longest wait for what its prompt costs, with a bound on "
           "overtaking or without, or the earliest (default %(default)s)")  # fmt: skip
    option("--max-queue", type=int, metavar="N", help="waiting requests, then 429 (default %(default)s)")
    option("--queue-timeout", type=float, metavar="SECONDS", help="longest wait for a seat, then 503 (default: none)")
    option(
        "--shutdown-timeout",
        type=float,
        metavar="SECONDS",
        help="for running requests after SIGTERM; a second signal ends them (default %(default)s)",
    )


def _cache_options(made: argparse.ArgumentParser) -> None:
    group = made.add_argument_group("KV cache", "With several ranks, sizes in bytes are what each of them may use.")
    option = group.add_argument
    defaults = {
        "gpu": f"{DEFAULT_GPU_KV}; on a GPU as --gpu-memory-utilization says",
        "host": DEFAULT_HOST_KV,
        "disk": "none",
    }
    for tier, default in defaults.items():
        option(f"--{tier}-kv-chunks", type=int, metavar="N", help=f"{tier.upper()} cache, in chunks")
        option(f"--{tier}-kv-bytes", metavar="SIZE", help=f"or in bytes, as 40GiB (default {default})")
        if tier == "gpu":
            option("--gpu-memory-utilization", type=float, metavar="SHARE",
                   help="or, on a GPU, what this share of its memory leaves: of all that the process uses "
                   "(default %(default)s)")  # fmt: skip
    option("--disk-dir", type=Path, metavar="DIR",
           help="where the disk cache is, on a local disk (default: kv in --state-dir)")  # fmt: skip
    option("--save", choices=CHOICES["save"],
           help="an ended turn's KV goes to disk: soon, behind other work; before its reply ends; or only when host "
           "memory needs the room (default %(default)s)")  # fmt: skip
    option("--prefetch", choices=CHOICES["prefetch"],
           help="read from disk what requests in the queue will need (default %(default)s)")  # fmt: skip
    option("--lower-tier-kv", choices=CHOICES["lower_tier_kv"],
           help="KV outside the GPU: as it is there; the same in four fifths of the bytes (bfloat16 only); or rounded "
           "to 8 bits a number (default %(default)s)")  # fmt: skip
    option("--chunk-tokens", type=int, metavar="N", help="tokens of a chunk (default %(default)s)")
    option("--conversation-ttl", type=float, metavar="SECONDS",
           help="a conversation claims its KV for so long after its last turn (default %(default)s)")  # fmt: skip
    option("--owner-kv-bytes", metavar="SIZE",
           help="of each API key's conversations, the latest so many bytes of KV are kept while there is other KV to "
           "evict (default: keys are not told apart)")  # fmt: skip
    option("--eviction", choices=CHOICES["eviction"], help="(default %(default)s)")
    option("--swap-out-below", type=float, metavar="SHARE",
           help="copy out ahead (default: as `pensieve profile` measured, else 0.25)")  # fmt: skip
    option("--generation-reserve", type=float, metavar="SHARE", help="(default %(default)s)")
    option("--swap-in", choices=CHOICES["swap_in"],
           help="by groups of layers while a step computes, or whole before it (default %(default)s)")  # fmt: skip
    option("--link", choices=CHOICES["link"],
           help="both directions at once, or copies ahead of time after swap-ins (default %(default)s)")  # fmt: skip
    option("--overflow", choices=CHOICES["overflow"],
           help="what a context that outgrows the model's still sees keeps its KV, or is computed again (default: "
           "keep with rotary positions, else recompute); restart-positions is for comparison")  # fmt: skip
    option("--overflow-ratio", type=float, metavar="SHARE",
           help="of the context, what goes then at once (default %(default)s)")  # fmt: skip
    option("--reuse", action=argparse.BooleanOptionalAction,
           help="off: compute every history anew, for comparison: the other options may stay as they are")  # fmt: skip


def _http_options(made: argparse.ArgumentParser) -> None:
    option = made.add_argument_group("HTTP").add_argument
    option("--host", help="address to listen on (default %(default)s)")
    option("--port", type=int, help="port to listen on, 0: any free one (default %(default)s)")
    option(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the names clients may use, the first one is told (default: the engine's directory name)",
    )
    option("--chat-template", type=Path, metavar="FILE", help="Jinja template (default: the engine's own)")
    option("--strict-fields", action=argparse.BooleanOptionalAction,
           help="refuse unknown fields of requests (default: ignore them and name them in a header)")  # fmt: skip
    option("--api-key", nargs="+", action="extend", metavar="KEY",
           help="clients need one of these keys (default: none)")  # fmt: skip
    option("--api-key-file", type=Path, metavar="FILE", help="more keys, one a line")
    option("--history-ttl", type=float, metavar="SECONDS",
           help="stored conversations are deleted so long after their last turn (default: never)")  # fmt: skip
    option("--max-requests-per-client", type=int, metavar="N",
           help="open sequences, each prompt times n; then 429, or 400 for a single request with more "
           "(default: any number)")  # fmt: skip
    option("--max-conversations-per-owner", type=int, metavar="N",
           help="that are stored; more are refused with 429 (default: any number)")  # fmt: skip
    option("--max-body-bytes", metavar="SIZE", help="then 413 (default %(default)s)")
    option("--max-connections", type=int, metavar="N", help="then 503 (default %(default)s)")
    option("--client-timeout", type=float, metavar="SECONDS",
           help="for a client to send a request, or to take an answer (default %(default)s)")  # fmt: skip
    option("--otlp-traces-endpoint", metavar="URL",
           help="send a span for each request there, as http://HOST:4318/v1/traces (default: none)")  # fmt: skip
    option("--trace", type=Path, metavar="FILE", help="write what each step did and when, for ui.perfetto.dev")
    option("--log-format", choices=CHOICES["log_format"], help="(default %(default)s)")
    option("--log-level", choices=CHOICES["log_level"], help="(default %(default)s)")


def read_file(made: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """The file's options, by the names of the parser's values. Numbers are text, which the parser reads as a flag's."""
    try:
        options = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError("--config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("--config", f"{path} is not TOML: {error}") from error
    known = {word: action for action in made._actions for word in action.option_strings if word.startswith("--")}
    for word in ("--help", "--config", "--attach"):
        del known[word]
    values: dict[str, Any] = {}
    for name, value in options.items():
        word = flag(name)
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"; did you mean {near[0][2:]}?" if near else ""
            raise SettingError("--config", f"{path}: there is no option {name!r}{hint}")
        action = known[word]
        switch, several = action.nargs == 0, action.nargs == "+"
        parts = value if several and isinstance(value, list) else [value]
        if not parts or any(
            isinstance(part, bool) != switch or not isinstance(part, bool | str | int | float) for part in parts
        ):
            wanted = "true or false" if switch else "a value, or a list of them" if several else "one value"
            raise SettingError("--config", f"{path}: {word[2:]} takes {wanted}, not {value!r}")
        if switch:
            values[action.dest] = value != word.startswith("--no-")
        else:
            texts = [str(part) for part in parts]
            values[action.dest] = texts if several else texts[0]
    return values


def _rivals(name: str) -> set[str]:
    """The flags of its rivals."""
    return {flag(other) for rivals in RIVALS if name in rivals for other in rivals if other != name}


def http_settings(settings: ServeSettings) -> HTTPSettings:
    """What the HTTP process is told; reads the files that the options name. SettingError names the flag at fault."""
    keys = read_api_keys(settings.api_key, settings.api_key_file)
    if settings.otlp_traces_endpoint is not None:
        check_traces_endpoint(settings.otlp_traces_endpoint)
    return HTTPSettings(
        max_requests_per_client=settings.max_requests_per_client,
        max_body_bytes=parse_bytes(settings.max_body_bytes, "--max-body-bytes"),
        max_connections=settings.max_connections,
        client_timeout=settings.client_timeout,
        chat_template=None if settings.chat_template is None else read_chat_template(settings.chat_template),
        strict_fields=settings.strict_fields,
        api_keys=tuple(key_digest(key) for key in keys),
        history_file=str(settings.state_dir / "history.sqlite"),
        history_ttl=settings.history_ttl,
        max_conversations_per_owner=settings.max_conversations_per_owner,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
        log_format=settings.log_format,
        log_level=settings.log_level,
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


def read_api_keys(keys: Sequence[str], path: Path | None) -> Sequence[str]:
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
    return list(keys)


def read_chat_template(path: Path) -> str:
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--chat-template", f"cannot read {path}: {error}") from error
    ChatTemplate(source, {}, "--chat-template")  # whether it parses
    return source


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter + "B": 1000**_power, _letter + "IB": 1024**_power}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of "40GiB", "1.5 MB" or "4096"; KiB is 1024 and KB 1000, in any case. SettingError names `setting`."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SettingError(setting, f"{text!r} is not a size; write 40GiB, 512MiB, 1.5GB or a number of bytes")
    return int(Fraction(match[1]) * unit)
