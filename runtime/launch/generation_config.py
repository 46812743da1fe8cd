"""Reads the sampling defaults of a checkpoint: generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ...scheduler.types import RequestError, Sampling, SettingError
from ..messages import SAMPLING_DEFAULTS, SamplingDefaults

SETTING = "--generation-config"
FILE = "generation_config.json"
NO_FOLDER = ("auto", "vllm")
FIELDS = {name: name for name in SamplingDefaults._fields} | {"max_tokens": "max_new_tokens"}
"""The file's field for each default."""

log = logging.getLogger("pensieve")


def sampling_defaults(source: str, engine: Path) -> SamplingDefaults:
    """Returns the sampling defaults of requests. The log names the values that the file gives.

    source   "auto": the engine's file, if it has one; "vllm": no file; else a folder with a file

    Raises SettingError if the file cannot be read, or no request could be answered with it.
    """
    if source == "vllm":
        return SAMPLING_DEFAULTS
    path = (engine if source == "auto" else Path(source)) / FILE
    if source == "auto" and not path.exists():
        return SAMPLING_DEFAULTS
    given = read_fields(path)
    try:
        defaults = SamplingDefaults(**given)
        Sampling(**{name: value for name, value in given.items() if name != "max_tokens"})
    except RequestError as error:
        raise SettingError(SETTING, f"{path}: {error.message}") from None
    if given:
        told = ", ".join(f"{FIELDS[name]} {value}" for name, value in given.items())
        log.info("%s gives the defaults of requests: %s", path, told)
    return defaults


def read_fields(path: Path) -> dict[str, Any]:
    """The values of a generation_config.json that are not null. Raises SettingError."""
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(SETTING, f"cannot read {path}: {error}") from None
    if not isinstance(fields, dict):
        raise SettingError(SETTING, f"{path} is not a JSON object")
    given = {name: fields[own] for name, own in FIELDS.items() if fields.get(own) is not None}
    for name, value in given.items():
        whole = name in ("top_k", "max_tokens")
        if type(value) not in ((int,) if whole else (int, float)):
            kind = "a whole number" if whole else "a number"
            raise SettingError(SETTING, f"{path}: {FIELDS[name]} must be {kind}, not {value!r}")
    if given.get("max_tokens", 1) < 1:
        raise SettingError(SETTING, f"{path}: max_new_tokens must be at least 1")
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return given
