"""How a setting is declared: once, as a field of a frozen dataclass with a `Declaration`.

The command line, the TOML file, `LLM(...)`, `--help` and docs/use/options.md derive from the
declarations (`runtime/launch/options.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Flag, auto
from math import inf
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
    """help       what the setting does; "": only benchmarks set it, and no help or page shows it
    unset         what the default None means
    unit          the word for a value in the help; SIZE and TOKENS are read in their own ways
    group         heading in the help and the page
    users         who may give it
    choices       allowed values; of a bool the words for True and False
    compared      more values, for benchmarks only
    least, most   bounds of a number
    between       the bounds themselves are not allowed
    common        shown by `--help`, not only by `--help-all`
    page          the page that says more
    """

    help: str
    unset: str = ""
    unit: str = ""
    group: str = ""
    users: User = ALL
    choices: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    between: bool = False
    common: bool = False
    page: str = ""

    def fault(self, value: Any, *, compared: bool) -> str:
        """What is wrong with the value; "" if nothing is. `compared`: those for benchmarks are
        allowed."""
        allowed = self.choices + self.compared * compared
        if allowed and not isinstance(value, bool) and value not in allowed:
            return f"must be one of {', '.join(allowed)}, not {value!r}"
        if self.least is None:
            return ""
        if self.between:
            right = value > self.least and (self.most is None or value < self.most)
        else:
            right = value >= self.least and (self.most is None or value <= self.most)
        return "" if right else f"must be {self._range()}, not {value}"

    def _range(self) -> str:
        """The bounds in words."""
        if self.most in (None, inf):
            unit = {"SECONDS": " seconds", "MS": " ms"}.get(self.unit, "")
            return f"{'more than' if self.between else 'at least'} {self.least}{unit}"
        if self.between:
            return f"more than {self.least} and less than {self.most}"
        return f"between {self.least} and {self.most}"


def setting(default: Any, help: str, unset: str = "", **more: Any) -> Any:
    """A field with the `Declaration` of the rest. `default` MISSING: it must be given."""
    return field(default=default, metadata={"declaration": Declaration(help, unset, **more)})


def flag(name: str) -> str:
    """The name of a setting on the command line."""
    return "--" + name.replace("_", "-")


def check_declared(settings: Any, *, compared: bool = False) -> None:
    """SettingError for a value that its declaration does not allow."""
    for one in fields(settings):
        declared: Declaration | None = one.metadata.get("declaration")
        value = getattr(settings, one.name)
        if declared is None or value is None:
            continue
        if fault := declared.fault(value, compared=compared):
            raise SettingError(one.name, fault)
