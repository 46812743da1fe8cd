"""The options of `pensieve serve`: from the command line, and from a TOML file with the same names.

An option with the meaning of a vLLM option has its name, or accepts it too.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ...scheduler.config import BATCH, CACHE
from ...scheduler.declaration import Declaration, flag
from ...scheduler.types import SettingError
from ..http.settings import HTTP
from .command_line import CommandParser, did_you_mean
from .settings import DECLARED, DEFAULTS, RIVALS, ServeSettings, size_text

GROUPS = {
    BATCH: None,
    CACHE: "With several ranks, sizes in bytes are what each of them may use.",
    HTTP: None,
}
"""In the order of the help, with the sentence below the heading."""

PATH_HELP = (
    "an engine, or a Hugging Face checkpoint or GGUF file, of which an engine is built on first "
    "use; ORG/NAME, ORG/NAME:REVISION or ORG/NAME:Q4_K_M of the Hugging Face Hub; smollm2: a small "
    "chat model, downloaded on first use; demo: a tiny one that comes along (default: smollm2)"
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
"""Names of options of vLLM and of `build_engine` that have the meaning of one of ours. The file
accepts only ours."""

ELSEWHERE = {
    "--swap-space": "--host-kv-bytes=4GiB keeps KV in host memory",
    "--kv-offloading-size": "--host-kv-bytes=4GiB keeps KV in host memory, so much for each rank",
    "--scheduling-policy": (
        "--queue-order says which request joins next; smaller priorities always come first"
    ),
    "--enable-chunked-prefill": "prompts are always cut to --max-num-batched-tokens",
    "--no-enable-chunked-prefill": "prompts are always cut to --max-num-batched-tokens",
    "--swap-in": "KV is copied in by groups of layers while a step computes; leave it out",
    "--allowed-origins": "--cors-origins takes them as words",
    "--uvicorn-log-level": "use --log-level",
    "--disable-log-requests": "--log-level=warning leaves them out of the log",
    "--no-enable-log-requests": "--log-level=warning leaves them out of the log",
    "--enable-auto-tool-choice": "tool calls are always read",
    "--seed": "requests take a seed (offline: SamplingParams(seed=0))",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--tokenizer": "the tokenizer is that of the checkpoint's directory",
    "--enable-lora": "LoRA adapters are not supported; merge them into the checkpoint",
    "--lora-modules": "LoRA adapters are not supported; merge them into the checkpoint",
    "--load-format": "a checkpoint's weights are safetensors",
    "--revision": "PATH takes it: ORG/NAME:REVISION",
    "--backend": "`build_engine` makes an engine with another backend; then serve its directory",
    "--pipeline-parallel-size": "--tensor-parallel-size divides a model over several GPUs",
    "-pp": "--tensor-parallel-size divides a model over several GPUs",
    "--data-parallel-size": "a server is one replica; docs/use/ray-serve.md runs several",
    "-dp": "a server is one replica; docs/use/ray-serve.md runs several",
    "--kv-transfer-config": "--host-kv-bytes and --disk-kv-bytes keep KV outside the GPU",
    "--default-chat-template-kwargs": "requests take chat_template_kwargs",
    "--enable-log-requests": "the log has each request, except with --log-level=warning",
    "--ssl-keyfile": "put a proxy with TLS before the server",
    "--ssl-certfile": "put a proxy with TLS before the server",
    "--hf-token": "HF_TOKEN of the environment is used, or that of `hf auth login`",
    "--download-dir": "HF_HUB_CACHE of the environment names it",
    "--max-batch-size": "use --max-num-seqs",
    "--max-num-tokens": "use --max-num-batched-tokens",
    "--max-seq-len": "use --max-model-len",
    "--tp-size": "use --tensor-parallel-size",
}
"""Frequent options of vLLM, TensorRT-LLM and `build_engine` without an equal here, with the
suggestion for each. Those of TensorRT-LLM are typed with underscores."""

ARGPARSE_TYPES = {int: int, float: float, Path: Path}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line, derived from a setting's declaration.

    kind     the type of the value, or of each of several values
    default  as on the command line: a text for a size or for a switch with words
    """

    name: str
    kind: type
    several: bool
    default: Any
    declared: Declaration

    @property
    def is_switch(self) -> bool:
        """True for --NAME and --no-NAME."""
        return self.kind is bool and not self.declared.choices

    @property
    def unit(self) -> str:
        """The word for a value in the help."""
        return self.declared.unit or ("N" if self.kind is int else self.name.upper())

    @property
    def default_text(self) -> str:
        """What holds without the option; "" where its meaning says that."""
        if self.declared.unset or self.is_switch or self.default in (None, []):
            return self.declared.unset
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def read(self, value: Any) -> Any:
        """The setting's value for the parser's. SettingError for a wrong size or word."""
        if isinstance(value, list):
            return tuple(value)
        if not isinstance(value, str):
            return value
        if self.declared.unit == "SIZE":
            return parse_bytes(value, flag(self.name))
        words = self.declared.choices
        if self.kind is bool:
            if value not in words:
                message = f"must be one of {', '.join(words)}, not {value!r}"
                raise SettingError(flag(self.name), message)
            return value == words[0]
        return value

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        declared = self.declared
        help = argparse.SUPPRESS
        if declared.help:
            help = declared.help + (f" (default: {self.default_text})" if self.default_text else "")
        if self.is_switch:
            parser.add_argument(flag(self.name), action=argparse.BooleanOptionalAction, help=help)
            return
        how: dict[str, Any] = {}
        if declared.choices:
            how["choices"] = declared.choices
        else:
            how["metavar"] = self.unit
        if declared.unit != "SIZE" and self.kind in ARGPARSE_TYPES:
            how["type"] = token_count if declared.unit == "TOKENS" else ARGPARSE_TYPES[self.kind]
        if self.several:
            how |= {"nargs": "+", "action": "store" if self.default is None else "extend"}
        parser.add_argument(flag(self.name), help=help, **how)


def _options() -> tuple[Option, ...]:
    """Of `ServeSettings`; its own fields come before those of its bases."""
    hints = get_type_hints(ServeSettings)
    own = ServeSettings.__annotations__
    options = []
    for name, declared in sorted(DECLARED.items(), key=lambda item: item[0] not in own):
        hint = hints[name]
        default = DEFAULTS[name]
        if get_origin(hint) is UnionType:
            hint = get_args(hint)[0]
        several = get_origin(hint) is tuple
        kind = get_args(hint)[0] if several else hint
        if default == ():
            default = []  # which repeated flags extend
        elif kind is bool and declared.choices:
            default = declared.choices[not default]
        elif declared.unit == "SIZE" and default is not None:
            default = size_text(default)
        options.append(Option(name, kind, several, default, declared))
    return tuple(options)


OPTIONS = _options()
COMMON = tuple(option.name for option in OPTIONS if option.declared.common)


def parse_options(argv: Sequence[str]) -> ServeSettings:
    """Reads the flags, else the file of `--config`, else the defaults. SettingError for wrong
    values."""
    commands = parser()
    path = early_options(argv).config
    if path is not None:
        given = {word.partition("=")[0] for word in commands.own_words(argv)}
        values = {
            name: value
            for name, value in read_file(commands, path).items()
            if not _rivals(name) & given
        }
        commands.set_defaults(**values)
    return settings_of(commands.parse_args(argv))


def settings_of(args: argparse.Namespace) -> ServeSettings:
    """SettingError for impossible values."""
    return ServeSettings(**{one.name: one.read(getattr(args, one.name)) for one in OPTIONS})


def early_options(argv: Sequence[str]) -> argparse.Namespace:
    """Returns `config` and `attach`, which cannot be set in the file. They are known even if other
    options are wrong."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--attach", type=Path)
    return early.parse_known_args(argv)[0]


def parser(prog: str = "pensieve serve") -> CommandParser:
    commands = CommandParser(
        prog=prog,
        usage="%(prog)s [PATH] [options]",
        description=(
            "Serves a model over HTTP (OpenAI API), with a KV cache that survives between turns."
        ),
        epilog=(
            "SIZE is a number of bytes, or one with a unit: 40GiB. docs/use/options.md has more."
        ),
        add_help=False,
        aliases=ALIASES,
        elsewhere=ELSEWHERE,
    )
    commands.add_argument(
        "path",
        nargs="?",
        action=_Path,
        default=argparse.SUPPRESS,
        metavar="PATH",
        help=PATH_HELP,
    )
    commands.add_argument(
        "--help",
        "-h",
        action=_Help,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show what most people need",
    )
    commands.add_argument("--help-all", action="help", help="show all options")
    groups = {name: commands.add_argument_group(name, about) for name, about in GROUPS.items()}
    for option in OPTIONS:
        option.add_to(groups.get(option.declared.group, commands))
    commands.set_defaults(**{option.name: option.default for option in OPTIONS})
    return commands


class _Path(argparse.Action):
    """PATH is `--engine`; the last of both counts."""

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, path: Any, __: Any = None
    ) -> None:
        namespace.engine = path


class _Help(argparse.Action):
    """Shows the common options only."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            if action.dest not in ("path", "help", "help_all", *COMMON):
                action.help = argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def read_file(commands: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    """Returns the file's options, by the names of the parser's values. Numbers become text, which
    the parser reads as a flag's value."""
    try:
        options = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingError("--config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("--config", f"{path} is not TOML: {error}") from error
    settings = {
        word: action
        for action in commands._actions
        for word in action.option_strings
        if word.startswith("--")
    }
    for word in ("--help", "--help-all", "--version", "--config", "--attach"):
        del settings[word]
    values: dict[str, Any] = {}
    for name, value in options.items():
        word = flag(name)
        if word not in settings:
            near = did_you_mean(name.replace("_", "-"), [word[2:] for word in settings])
            hint = f": {ELSEWHERE[word]}" if word in ELSEWHERE else near
            raise SettingError("--config", f"{path}: there is no option {name!r}{hint}")
        action = settings[word]
        switch = action.nargs == 0
        several = action.nargs == "+"
        parts = value if several and isinstance(value, list) else [value]
        if not parts or any(
            isinstance(part, bool) != switch or not isinstance(part, bool | str | int | float)
            for part in parts
        ):
            wanted = (
                "true or false"
                if switch
                else "a value, or a list of them"
                if several
                else "one value"
            )
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
    """Bytes of "40GiB", "1.5 MB" or "4096"; KiB is 1024 and KB 1000, in any case. SettingError
    names `setting`."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SettingError(
            setting, f"{text!r} is not a size; write 40GiB, 512MiB, 1.5GB or a number of bytes"
        )
    return int(Fraction(match[1]) * unit)


_COUNT = re.compile(r"(-?\d+(?:\.\d+)?)([kKmM]?)", re.ASCII)
_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}


def token_count(text: str) -> int:
    """Tokens of "32768", "32K" (the same) or "32k" (32,000), as in vLLM. Raises
    argparse.ArgumentTypeError."""
    match = _COUNT.fullmatch(text.strip())
    count = Fraction(match[1]) * _THOUSANDS[match[2]] if match else None
    if count is None or count.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens; write 32768, 32K (the same) or 32k (32,000)"
        )
    return int(count)
