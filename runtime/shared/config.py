"""`--kv-shared-config`: a JSON object with the engine's name, its options, and those of all
engines."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from ...scheduler.types import SettingError

SETTING = "kv_shared_config"
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{0,64}")


@dataclass(frozen=True)
class DirectoryOptions:
    """path     folder on a file system that all servers reach; created if it is missing
    max_bytes   of all records in it; those used longest ago are removed
    """

    path: Path
    max_bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise SettingError(SETTING, f'"path" must be a folder, not {self.path!r}')
        object.__setattr__(self, "path", Path(self.path).expanduser())
        _check_count("max_bytes", self.max_bytes, 1)


Options = DirectoryOptions
ENGINES: dict[str, type[Options]] = {"directory": DirectoryOptions}
"""By the name of the engine: its options."""


@dataclass(frozen=True)
class SharedConfig:
    """options   of the engine
    namespace    part of all keys: deployments with different ones share nothing in one store
    min_tokens   shorter contexts are not written, and fewer missing tokens are not looked for
    """

    options: Options
    namespace: str = ""
    min_tokens: int = 2048

    def __post_init__(self) -> None:
        if not isinstance(self.namespace, str) or not _NAMESPACE.fullmatch(self.namespace):
            raise SettingError(SETTING, '"namespace" must have at most 64 letters, digits, _ and -')
        _check_count("min_tokens", self.min_tokens, 1)


def read_config(text: str) -> SharedConfig:
    """SettingError names what is wrong, unknown fields too."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise SettingError(SETTING, f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise SettingError(SETTING, 'must be an object such as {"engine": "directory", ...}')
    name = given.pop("engine", None)
    names = ", ".join(ENGINES)
    if not isinstance(name, str) or name not in ENGINES:
        raise SettingError(SETTING, f'"engine" must be one of {names}, not {name!r}')
    kind = ENGINES[name]
    own = {field.name: given.pop(field.name) for field in fields(kind) if field.name in given}
    common = {
        field.name: given.pop(field.name)
        for field in fields(SharedConfig)
        if field.name in given and field.name != "options"
    }
    if given:
        raise SettingError(SETTING, f'the engine {name} has no field "{next(iter(given))}"')
    for field in fields(kind):
        if field.name not in own and field.default is MISSING:
            raise SettingError(SETTING, f'the engine {name} needs the field "{field.name}"')
    return SharedConfig(kind(**own), **common)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(SETTING, f'"{name}" must be a whole number from {least}, not {value!r}')
