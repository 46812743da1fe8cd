"""The options of `pensieve serve`: from the command line, and from a TOML file with the same names.

Where vLLM has an option of the same meaning, ours has its name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime.observe.logs import LOG_FORMATS, LOG_LEVELS
from ..scheduler.config import BATCHING_MODES, EVICTION_POLICIES, QUEUE_ORDERS, SAVE_MODES
from ..scheduler.context_window import OVERFLOW_MODES
from ..scheduler.types import SettingError

DEFAULT_GPU_KV = "512MiB"
DEFAULT_HOST_KV = "2GiB"
DEFAULT_DISK_KV = "0GiB"
DEFAULT_MAX_BODY = "32MiB"

RIVALS = (
    {"--gpu-kv-chunks", "--gpu-kv-bytes", "--gpu-memory-utilization"},
    {"--host-kv-chunks", "--host-kv-bytes"},
    {"--disk-kv-chunks", "--disk-kv-bytes"},
)
"""Flags of which one is given at most: a flag overrides its rivals in the file too."""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """What the flags say, else the file of `--config`, else the defaults. SettingError for a wrong file."""
    made = parser()
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config", type=Path)
    path = file.parse_known_args(argv)[0].config
    words = [] if path is None else _words_of_file(made, path, {word.partition("=")[0] for word in argv})
    return made.parse_args([*words, *argv])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="pensieve serve",
        description="Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns.",
        allow_abbrev=False,  # the file knows no abbreviations either
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these options, without the dashes")
    _engine_options(made)
    _cache_options(made)
    _http_options(made)
    return made


def _engine_options(made: argparse.ArgumentParser) -> None:
    option = made.add_argument_group("engine and batch").add_argument
    option("--engine", required=True, metavar="DIR|demo", help="an engine directory, or a small model made on the spot")
    option("--device", default="cpu", choices=["cpu", "cuda"], help="where the engine runs (default %(default)s)")
    option("--enforce-eager", default=False, action=argparse.BooleanOptionalAction,
           help="on a GPU: launch every kernel by itself, no CUDA graphs")  # fmt: skip
    option("--state-dir", type=Path, default=default_state_dir(), metavar="DIR",
           help="of this server alone: histories, and the disk tier unless --disk-dir says otherwise "
           "(default %(default)s)")  # fmt: skip
    option("--max-model-len", type=int, metavar="N", help="longest context, tokens (default: the model's own)")
    option("--max-num-seqs", type=int, default=64, metavar="N", help="running requests (default %(default)s)")
    option("--max-num-batched-tokens", type=int, default=1024, metavar="N", help="tokens a step (default %(default)s)")
    option("--batching", default="unified", choices=BATCHING_MODES, help="(default %(default)s)")
    option("--queue-order", default="bounded-ratio", choices=QUEUE_ORDERS,
           help="which request joins first: the one with the longest wait for what its prompt costs, with a bound on "
           "overtaking or without, or the earliest (default %(default)s)")  # fmt: skip
    option("--max-queue", type=int, default=1024, metavar="N", help="waiting requests, then 429 (default %(default)s)")
    option("--queue-timeout", type=float, metavar="SECONDS", help="longest wait for a seat, then 503 (default: none)")
    option(
        "--shutdown-timeout",
        type=float,
        default=30.0,
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
        sizes = group.add_mutually_exclusive_group()
        sizes.add_argument(f"--{tier}-kv-chunks", type=int, metavar="N", help=f"{tier.upper()} cache, in chunks")
        sizes.add_argument(f"--{tier}-kv-bytes", metavar="SIZE", help=f"or in bytes, as 40GiB (default {default})")
        if tier == "gpu":
            sizes.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE",
                               help="or, on a GPU, what this share of its memory leaves: of all that the process uses "
                               "(default %(default)s)")  # fmt: skip
    option("--disk-dir", type=Path, metavar="DIR",
           help="where the disk cache is, on a local disk (default: kv in --state-dir)")  # fmt: skip
    option("--save", default="async", choices=SAVE_MODES,
           help="an ended turn's KV goes to disk: soon, behind other work; before its reply ends; or only when host "
           "memory needs the room (default %(default)s)")  # fmt: skip
    option("--prefetch", default="on", choices=["on", "off"],
           help="read from disk what requests in the queue will need (default %(default)s)")  # fmt: skip
    option("--lower-tier-kv", default="same", choices=["same", "packed", "fp8"],
           help="KV outside the GPU: as it is there; the same in four fifths of the bytes (bfloat16 only); or rounded "
           "to 8 bits a number (default %(default)s)")  # fmt: skip
    option("--chunk-tokens", type=int, default=32, metavar="N", help="tokens of a chunk (default %(default)s)")
    option("--conversation-ttl", type=float, default=86400.0, metavar="SECONDS",
           help="a conversation claims its KV for so long after its last turn (default %(default)s)")  # fmt: skip
    option("--owner-kv-bytes", metavar="SIZE",
           help="of each API key's conversations, the latest so many bytes of KV are kept while there is other KV to "
           "evict (default: keys are not told apart)")  # fmt: skip
    option("--eviction", default="retention", choices=EVICTION_POLICIES, help="(default %(default)s)")
    option("--swap-out-below", type=float, metavar="SHARE",
           help="copy out ahead (default: as `pensieve profile` measured, else 0.25)")  # fmt: skip
    option("--generation-reserve", type=float, default=0.10, metavar="SHARE", help="(default %(default)s)")
    option("--swap-in", default="pipelined", choices=["pipelined", "first"],
           help="by groups of layers while a step computes, or whole before it (default %(default)s)")  # fmt: skip
    option("--link", default="duplex", choices=["duplex", "in-first"],
           help="both directions at once, or copies ahead of time after swap-ins (default %(default)s)")  # fmt: skip
    option("--overflow", choices=OVERFLOW_MODES,
           help="what a context that outgrows the model's still sees keeps its KV, or is computed again (default: "
           "keep with rotary positions, else recompute); restart-positions is for comparison")  # fmt: skip
    option("--overflow-ratio", type=float, default=0.5, metavar="SHARE",
           help="of the context, what goes then at once (default %(default)s)")  # fmt: skip
    option("--reuse", default=True, action=argparse.BooleanOptionalAction,
           help="off: compute every history anew, for comparison: the other options may stay as they are")  # fmt: skip


def _http_options(made: argparse.ArgumentParser) -> None:
    option = made.add_argument_group("HTTP").add_argument
    option("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    option("--port", type=int, default=8000, help="port to listen on, 0: any free one (default %(default)s)")
    option(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the names clients may use, the first one is told (default: the engine's directory name)",
    )
    option("--chat-template", type=Path, metavar="FILE", help="Jinja template (default: the engine's own)")
    option("--api-key", nargs="+", action="extend", default=[], metavar="KEY",
           help="clients need one of these keys (default: none)")  # fmt: skip
    option("--api-key-file", type=Path, metavar="FILE", help="more keys, one a line")
    option("--history-ttl", type=float, metavar="SECONDS",
           help="stored conversations are deleted so long after their last turn (default: never)")  # fmt: skip
    option("--max-requests-per-client", type=int, metavar="N",
           help="open sequences, each prompt times n; then 429, or 400 for a single request with more "
           "(default: any number)")  # fmt: skip
    option("--max-conversations-per-owner", type=int, metavar="N",
           help="that are stored; more are refused with 429 (default: any number)")  # fmt: skip
    option("--max-body-bytes", default=DEFAULT_MAX_BODY, metavar="SIZE", help="then 413 (default %(default)s)")
    option("--max-connections", type=int, default=4096, metavar="N", help="then 503 (default %(default)s)")
    option("--client-timeout", type=float, default=30.0, metavar="SECONDS",
           help="for a client to send a request, or to take an answer (default %(default)s)")  # fmt: skip
    option("--otlp-traces-endpoint", metavar="URL",
           help="send a span for each request there, as http://HOST:4318/v1/traces (default: none)")  # fmt: skip
    option("--trace", type=Path, metavar="FILE", help="write what each step did and when, for ui.perfetto.dev")
    option("--log-format", default="text", choices=LOG_FORMATS, help="(default %(default)s)")
    option("--log-level", default="info", choices=LOG_LEVELS, help="(default %(default)s)")


def changed(args: argparse.Namespace, name: str) -> bool:
    """Whether the option is not at its default."""
    return bool(getattr(args, name) != parser().get_default(name))


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pensieve"


def _words_of_file(made: argparse.ArgumentParser, path: Path, given: set[str]) -> list[str]:
    """The file's options as words of a command line, less those whose rival is among the flags `given`."""
    try:
        options = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError("--config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("--config", f"{path} is not TOML: {error}") from error
    known = {flag: action for action in made._actions for flag in action.option_strings if flag.startswith("--")}
    for flag in ("--help", "--config"):
        del known[flag]
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if flag not in known:
            near = difflib.get_close_matches(flag, known, 1)
            hint = f"; did you mean {near[0][2:]}?" if near else ""
            raise SettingError("--config", f"{path}: there is no option {name!r}{hint}")
        if not any(flag in rivals and rivals - {flag} & given for rivals in RIVALS):
            words += _words(path, flag, known[flag], value)
    return words


def _words(path: Path, flag: str, action: argparse.Action, value: Any) -> list[str]:
    """One option as on the command line; whether the value will do is argparse's to say."""
    switch, several = action.nargs == 0, action.nargs == "+"
    if switch and isinstance(value, bool):
        opposite = "--" + flag[5:] if flag.startswith("--no-") else "--no-" + flag[2:]
        return [flag if value else opposite]
    values = value if several and isinstance(value, list) else [value]
    if switch or not values or any(isinstance(one, bool) or not isinstance(one, str | int | float) for one in values):
        wanted = "true or false" if switch else "a value, or a list of them" if several else "one value"
        raise SettingError("--config", f"{path}: {flag[2:]} takes {wanted}, not {value!r}")
    return [flag, *map(str, values)] if several else [f"{flag}={value}"]
