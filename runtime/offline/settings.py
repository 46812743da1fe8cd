"""The offline API's settings: those of `pensieve serve`, and the build settings of the engine."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ...builder.engine_cache import engine_for
from ...builder.model_names import find_model
from ...scheduler.declaration import User
from ...scheduler.types import SettingError
from ..launch.options import ALIASES, ELSEWHERE, parser, settings_of
from ..launch.settings import DECLARED, ServeSettings

DEMO = "demo"

log = logging.getLogger("pensieve")

ARGUMENTS = frozenset(
    {"model", "dtype", "quantization", "backend", "tensor_parallel_size", "state_dir"}
)
"""Arguments that `LLM` names itself."""

OPTIONS = (
    frozenset(name for name, declared in DECLARED.items() if User.OFFLINE in declared.users)
    - ARGUMENTS
)
"""The other options of `pensieve serve` that `LLM` takes, by their names without dashes."""


def read_settings(
    engine: str | Path, state_dir: str | Path | None, options: Mapping[str, Any]
) -> ServeSettings:
    """Parses the options like `pensieve serve`, with its aliases. TypeError for an unknown one,
    SettingError for a wrong one."""
    words = [f"--engine={engine}"]
    for name, value in options.items():
        own = _name(ALIASES.get(_flag(name), _flag(name)))
        if own not in OPTIONS:
            raise TypeError(f"LLM takes no option {name!r}{_hint(name, value)}")
        if value is not None:
            words.append(_flag(own, value) if isinstance(value, bool) else f"{_flag(own)}={value}")
    parsing = parser()

    def refuse(message: str) -> NoReturn:
        raise SettingError("LLM", message)

    parsing.error = refuse  # type: ignore[method-assign]
    args = parsing.parse_args(words)
    if state_dir is not None:
        args.state_dir = Path(state_dir)
    elif args.disk_kv_bytes is not None or args.disk_kv_chunks:
        raise SettingError(
            "state_dir", "must name a directory: the disk tier is for conversations that are stored"
        )
    return settings_of(args)


def _flag(name: str, value: Any = True) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _hint(name: str, value: Any) -> str:
    """The end of the message about an option that `LLM` does not have: the suggestion of `serve`,
    or close names."""
    names = OPTIONS | ARGUMENTS
    if name in DECLARED and not DECLARED[name].help:
        return ": only benchmarks set it; leave it out"
    elsewhere = ELSEWHERE.get(_flag(name, value), "")
    if elsewhere and all(_name(flag) in names for flag in re.findall(r"--[\w-]+", elsewhere)):
        return ": " + re.sub(
            r"--([\w-]+)(=\w+)?", lambda match: _python(*match.groups()), elsewhere
        )
    near = difflib.get_close_matches(name, sorted(names), 3)
    return (
        f"; did you mean {' or '.join(near)}?"
        if near
        else "; docs/use/offline.md says what it takes"
    )


def _python(flag: str, value: str | None) -> str:
    """A flag of `serve` as an argument of `LLM`."""
    return _name(flag) + (f'="{value[1:]}"' if value else "")


def model_engine(
    model: str | Path,
    *,
    dtype: str | None,
    quantization: str | None,
    backend: str | None,
    device: str,
) -> Path:
    """Returns the engine's directory; it is built first for "demo" and for a checkpoint.
    SettingError."""
    if model == DEMO:
        # the fastest dtype on CPUs
        model = DEMO_CHECKPOINT
        dtype = dtype or "float32"
    try:
        place = find_model(str(model), log.info)
        return engine_for(
            place.path,
            name=place.name,
            dtype=dtype,
            quantization=quantization,
            backend=backend,
            device=device,
        )
    except SettingError as error:
        if error.setting != "PATH":
            raise
        raise SettingError("model", str(error).removeprefix("PATH: ")) from None
