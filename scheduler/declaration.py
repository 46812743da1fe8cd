"""How a setting is declared: once, as a field of a frozen dataclass with a `Declaration`.

The command line, the TOML file, `LLM(...)`, `--help` and docs/use/options.md derive from the
declarations (`runtime/launch/options.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Flag, auto
from typing import Any

from .types import SettingError


class User(Flag):
    """Who may give a setting."""

    SERVER = auto()
    TRITON = auto()
    OFFLINE = auto()


SERVERS = User.SERVER | User.TRITON
ALL = SERVERS | User.OFFLINE


@dataclass(frozen=True, slots=True)
class Declaration:
    """help    what the setting does; "": only benchmarks set it, and no help or page shows it
    group      heading in the help and the page
    users      who may give it
    unit       the word for a value in the help; SIZE and TOKENS are also read in their own ways
    choices    allowed values; of a bool the words for True and False
    compared   more values, for benchmarks only
    unset      what None means
    least      the smallest allowed value
    common     shown by `--help`, not only by `--help-all`
    page       the page that says more
    """

    help: str
    group: str = ""
    users: User = ALL
    unit: str | None = None
    choices: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    unset: str = ""
    least: int | None = None
    common: bool = False
    page: str = ""


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field with the `Declaration` of `help` and `more`. `default` MISSING: it must be given."""
    return field(default=default, metadata={"declaration": Declaration(help, **more)})


def flag(name: str) -> str:
    """The name of a setting on the command line."""
    return "--" + name.replace("_", "-")


def check_declared(settings: Any, *, compared: bool = False) -> None:
    """SettingError for a value that its declaration does not allow. `compared`: those for
    benchmarks are allowed."""
    for one in fields(settings):
        declared: Declaration | None = one.metadata.get("declaration")
        value = getattr(settings, one.name)
        if declared is None or value is None:
            continue
        allowed = declared.choices + declared.compared * compared
        if allowed and not isinstance(value, bool) and value not in allowed:
            message = f"must be one of {', '.join(allowed)}, not {value!r}"
            raise SettingError(flag(one.name), message)
        if declared.least is not None and not value >= declared.least:
            raise SettingError(flag(one.name), f"must be at least {declared.least}, not {value}")
