"""The options of `pensieve serve`: from the command line, and from a TOML file with the same names.

An option with the meaning of a vLLM option has its name, or accepts it too.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...scheduler.types import SettingError
from .command_line import CommandParser, did_you_mean
from .settings import (
    CHOICES,
    DEFAULT_GPU_KV,
    DEFAULT_HOST_KV,
    DEFAULTS,
    HISTORY_URL,
    RIVALS,
    ServeSettings,
    default_state_dir,
    flag,
)

ALIASES = {
    "--model": "--engine",
    "--tensor-parallel": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--kv-cache-memory-bytes": "--gpu-kv-bytes",
    "--num-gpu-blocks-override": "--gpu-kv-chunks",
    "--block-size": "--chunk-tokens",
    "--enable-prefix-caching": "--reuse",
    "--no-enable-prefix-caching": "--no-reuse",
}
"""Names of options of vLLM and of `build_engine` that have the meaning of one of ours. The file accepts only ours."""

ELSEWHERE = {
    "--swap-space": "--host-kv-bytes=4GiB keeps KV in host memory",
    "--kv-offloading-size": "--host-kv-bytes=4GiB keeps KV in host memory, so much for each rank",
    "--scheduling-policy": "--queue-order says which request joins next; smaller priorities always come first",
    "--enable-chunked-prefill": "prompts are always cut to --max-num-batched-tokens",
    "--no-enable-chunked-prefill": "--batching=separate computes prompts apart from generation",
    "--allowed-origins": "--cors-origins takes them as words",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": "--log-level=warning leaves them out of the log",
    "--no-enable-log-requests": "--log-level=warning leaves them out of the log",
    "--enable-auto-tool-choice": "tool calls are always read",
    "--tool-call-parser": "tool calls are always read",
    "--seed": "requests take a seed (offline: SamplingParams(seed=0))",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--tokenizer": "the tokenizer is that of the checkpoint's directory",
    "--generation-config": "generation_config.json gives only end-of-sequence ids; requests have their own sampling",
    "--enable-lora": "LoRA adapters are not supported; merge them into the checkpoint",
    "--lora-modules": "LoRA adapters are not supported; merge them into the checkpoint",
    "--load-format": "a checkpoint's weights are safetensors",
    "--revision": "nothing is downloaded; PATH is a directory",
    "--backend": "`build_engine` makes an engine with another backend; then serve its directory",
    "--pipeline-parallel-size": "--tensor-parallel-size divides a model over several GPUs",
    "-pp": "--tensor-parallel-size divides a model over several GPUs",
    "--data-parallel-size": "a server is one replica; docs/use/ray-serve.md runs several",
    "-dp": "a server is one replica; docs/use/ray-serve.md runs several",
    "--kv-transfer-config": "--host-kv-bytes and --disk-kv-bytes keep KV outside the GPU",
    "--reasoning-parser": "a reply's reasoning stays in its content",
    "--default-chat-template-kwargs": "requests take chat_template_kwargs",
    "--enable-log-requests": "the log has each request, except with --log-level=warning",
    "--ssl-keyfile": "put a proxy with TLS before the server",
    "--ssl-certfile": "put a proxy with TLS before the server",
    "--hf-token": "nothing is downloaded; PATH is a directory",
    "--download-dir": "nothing is downloaded; PATH is a directory",
    "--max-batch-size": "use --max-num-seqs",
    "--max-num-tokens": "use --max-num-batched-tokens",
    "--max-seq-len": "use --max-model-len",
    "--tp-size": "use --tensor-parallel-size",
}
"""Frequent options of vLLM, TensorRT-LLM and `build_engine` without an equal here, with the suggestion for each. Those
of TensorRT-LLM are typed with underscores."""

COMMON = (
    "path", "config", "device", "dtype", "quantization", "tensor_parallel_size", "max_model_len", "max_num_seqs",
    "gpu_kv_bytes", "gpu_memory_utilization", "host_kv_bytes", "disk_kv_bytes", "state_dir", "host", "port",
    "served_model_name", "api_key", "help", "help_all",
)  # fmt: skip
"""Options shown by `--help`; `--help-all` shows all."""


def parse_options(argv: Sequence[str]) -> ServeSettings:
    """Reads the flags, else the file of `--config`, else the defaults. SettingError for wrong values."""
    made = parser()
    path = early_options(argv).config
    if path is not None:
        given = {word.partition("=")[0] for word in made.own_words(argv)}
        values = {name: value for name, value in read_file(made, path).items() if not _rivals(name) & given}
        made.set_defaults(**values)
    return settings_of(made.parse_args(argv))


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """SettingError for impossible values."""
    values: dict[str, Any] = vars(args)
    if values["engine"] is None:
        raise SettingError(
            "PATH", "name an engine or a checkpoint's directory (pensieve serve PATH), or `demo` for a small model"
        )
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return ServeSettings(**(values | lists))


def early_options(argv: Sequence[str]) -> argparse.Namespace:
    """Returns `config` and `attach`, which cannot be set in the file. They are known even if other options are
    wrong."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--attach", type=Path)
    return early.parse_known_args(argv)[0]


def parser(prog: str = "pensieve serve") -> CommandParser:
    made = CommandParser(
        prog=prog,
        usage="%(prog)s PATH [options]",
        description="Serves a model over HTTP (OpenAI API), with a KV cache that survives between turns.",
        epilog="SIZE is a number of bytes, or one with a unit: 40GiB. docs/use/options.md has more.",
        add_help=False,
        aliases=ALIASES,
        elsewhere=ELSEWHERE,
    )
    made.add_argument("path", nargs="?", action=_Path, default=argparse.SUPPRESS, metavar="PATH",
                      help="an engine, or a Hugging Face checkpoint, of which an engine is built on first use; "
                      "`demo`: a small model that comes along")  # fmt: skip
    made.add_argument(
        "--help", "-h", action=_Help, nargs=0, default=argparse.SUPPRESS, help="show what most people need"
    )
    made.add_argument("--help-all", action="help", help="show all options")
    made.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these options, without the dashes")
    made.add_argument("--attach", type=Path, metavar="SOCKET",
                      help="serve Triton's model, which listens there and adds this option itself, and no HTTP clients"
                      )  # fmt: skip
    _engine_options(made)
    _cache_options(made)
    _http_options(made)
    # values that repeated flags extend
    lists: dict[str, list[str]] = {name: [] for name, value in DEFAULTS.items() if value == ()}
    made.set_defaults(**DEFAULTS | lists, engine=None)
    return made


class _Path(argparse.Action):
    """PATH is `--engine`; the last of both counts."""

    def __call__(self, _: argparse.ArgumentParser, namespace: argparse.Namespace, path: Any, __: Any = None) -> None:
        namespace.engine = path


class _Help(argparse.Action):
    """Shows the options in COMMON only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            if action.dest not in COMMON:
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def _engine_options(made: argparse.ArgumentParser) -> None:
    option = made.add_argument_group("engine and batch").add_argument
    option("--engine", metavar="PATH", help="PATH as an option; the last one counts")
    option("--device", choices=CHOICES["device"], help="where the engine runs (default %(default)s)")
    option("--dtype", choices=CHOICES["dtype"], help="of a checkpoint's weights and KV (default: its own)")
    option("--quantization", metavar="NAME", help="fp8: round a checkpoint's weights to 8 bits (default: as they are)")
    option("--tensor-parallel-size", type=int, metavar="N", help="divide a checkpoint over so many ranks (default 1)")
    option("--enforce-eager", action=argparse.BooleanOptionalAction,
           help="on a GPU: launch every kernel by itself, no CUDA graphs")  # fmt: skip
    option("--state-dir", type=Path, metavar="DIR",
           help="of this server alone: histories, and the disk tier unless --disk-dir says otherwise "
           f"(default: one for each engine in {default_state_dir()})")  # fmt: skip
    option("--max-model-len", type=token_count, metavar="N",
           help="longest context, tokens; 32k is 32,000, 32K is 32,768 (default: the model's own)")  # fmt: skip
    option("--max-num-seqs", type=int, metavar="N", help="running requests (default %(default)s)")
    option("--max-num-batched-tokens", type=token_count, metavar="N", help="tokens a step (default %(default)s)")
    option("--target-ms-per-token", type=float, metavar="MS",
           help="beside generation, a step computes as many prompt tokens as this time allows (default: all it can)"
           )  # fmt: skip
    option("--batching", choices=CHOICES["batching"], help="(default %(default)s)")
    option("--queue-order", choices=CHOICES["queue_order"],
           help="which request joins first: the one with the largest ratio of wait to prompt cost, with a bound on "
           "overtaking or without, or the earliest (default %(default)s)")  # fmt: skip
    option("--speculate", choices=CHOICES["speculate"],
           help="lookup: draft tokens from the conversation's own and check several in one step, where that pays "
           "(default %(default)s)")  # fmt: skip
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
    tiers = (
        ("gpu", "on the GPU", f"{DEFAULT_GPU_KV}; on a GPU as --gpu-memory-utilization says"),
        ("host", "in host memory", DEFAULT_HOST_KV),
        ("disk", "on disk", "none"),
    )
    for tier, where, default in tiers:
        option(f"--{tier}-kv-bytes", metavar="SIZE", help=f"KV {where}, as 40GiB (default {default})")
        option(f"--{tier}-kv-chunks", type=int, metavar="N", help="or in chunks")
        if tier == "gpu":
            option("--gpu-memory-utilization", type=float, metavar="SHARE",
                   help="or what this share of the GPU's memory leaves beside all else that the process needs "
                   "(default %(default)s)")  # fmt: skip
    option("--disk-dir", type=Path, metavar="DIR",
           help="where the disk cache is, on a local disk (default: kv in --state-dir)")  # fmt: skip
    option("--save", choices=CHOICES["save"],
           help="an ended turn's KV goes to disk: soon, behind other work; before its reply ends; or only when host "
           "memory needs the room (default %(default)s)")  # fmt: skip
    option("--prefetch", choices=CHOICES["prefetch"],
           help="read from disk the KV that requests in the queue will need (default %(default)s)")  # fmt: skip
    option("--kv-cache-dtype", choices=CHOICES["kv_cache_dtype"],
           help="of KV on every tier: the engine's own, or 8 bits a number (default %(default)s)")  # fmt: skip
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
           help="when a context outgrows the model's: keep the KV of its latest tokens, or compute it again (default: "
           "keep with rotary positions, else recompute); restart-positions is for comparison")  # fmt: skip
    option("--overflow-ratio", type=float, metavar="SHARE",
           help="part of the context that is then truncated at once (default %(default)s)")  # fmt: skip
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
    option("--api-key", nargs="+", action="extend", metavar="KEY",
           help="clients need one of these keys (default: none)")  # fmt: skip
    option("--api-key-file", type=Path, metavar="FILE", help="more keys, one a line")
    option("--strict-fields", action=argparse.BooleanOptionalAction,
           help="refuse unknown fields of requests (default: ignore them and name them in a header)")  # fmt: skip
    option("--history-url", metavar="URL",
           help="a PostgreSQL database for conversations, which several servers share, as postgresql://USER@HOST/NAME; "
           f"without a password (default: {HISTORY_URL} of the environment, else a file in --state-dir)")  # fmt: skip
    option("--history-url-file", type=Path, metavar="FILE", help="that URL, which may have a password")
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
    option("--cors-origins", nargs="+", action="extend", metavar="ORIGIN",
           help="web pages of these origins may use the API, as https://chat.example.org; *: all (default: none)"
           )  # fmt: skip
    option("--otlp-traces-endpoint", metavar="URL",
           help="send a span for each request there, as http://HOST:4318/v1/traces (default: none)")  # fmt: skip
    option("--trace", type=Path, metavar="FILE", help="write what each step did and when, for ui.perfetto.dev")
    option("--log-format", choices=CHOICES["log_format"], help="(default %(default)s)")
    option("--log-level", choices=CHOICES["log_level"], help="(default %(default)s)")


def read_file(made: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """Returns the file's options, by the names of the parser's values. Numbers become text, which the parser reads as a
    flag's value."""
    try:
        options = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError("--config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("--config", f"{path} is not TOML: {error}") from error
    known = {word: action for action in made._actions for word in action.option_strings if word.startswith("--")}
    for word in ("--help", "--help-all", "--version", "--config", "--attach"):
        del known[word]
    values: dict[str, Any] = {}
    for name, value in options.items():
        word = flag(name)
        if word not in known:
            hint = did_you_mean(name.replace("_", "-"), [word[2:] for word in known])
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
    """The flags that exclude this one."""
    return {flag(other) for rivals in RIVALS if name in rivals for other in rivals if other != name}


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


_COUNT = re.compile(r"(-?\d+(?:\.\d+)?)([kKmM]?)", re.ASCII)
_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


def token_count(text: str) -> int:
    """Tokens of "32768", "32K" (the same) or "32k" (32,000), as in vLLM. Raises argparse.ArgumentTypeError."""
    match = _COUNT.fullmatch(text.strip())
    count = Fraction(match[1]) * _THOUSANDS[match[2]] if match else None
    if count is None or count.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens; write 32768, 32K (the same) or 32k (32,000)"
        )
    return int(count)
