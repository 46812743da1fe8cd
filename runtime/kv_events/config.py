"""The settings of KV events, with vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from ...scheduler.types import SettingError

SETTING = "kv_events_config"
PUBLISHERS = ("zmq", "null")
PACKAGES = ("zmq", "msgspec")
WANTED = {
    bool: "true or false",
    int: "a number of at least 1",
    str: "a text",
    type(None): "a text or null",
}
"""By type of a field's default: its values in words."""
LEAST_QUEUE = 100  # to start over costs as much as a walk over all chunks


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """enable_kv_cache_events
                     publish at all
    publisher        "zmq", or "null": publish nothing; None: "zmq" if events are enabled
    endpoint         address to bind the PUB socket to; port 0 is any free one
    replay_endpoint  address to bind the ROUTER socket to, which repeats batches; None: no replay
    buffer_steps     batches that are kept to be repeated, 256 MiB at most
    hwm              batches that wait in memory for each slow subscriber; later ones are lost to it
    max_queue_size   steps whose changes may wait for the publisher's thread, at least 100
    topic            first frame of each message
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 100_000
    topic: str = ""


def read_config(text: str) -> KVEventsConfig | None:
    """Returns the settings of a JSON object, or None if nothing is to be published. SettingError
    for a wrong one."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError(SETTING, f"is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise SettingError(SETTING, f"must be a JSON object, not {text}")
    kinds = {one.name: type(one.default) for one in fields(KVEventsConfig)}
    for name, value in given.items():
        if name not in kinds:
            near = get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(kinds)}"
            raise SettingError(SETTING, f"there is no field {name!r}; {hint}")
        _check(name, value, kinds[name])
    config = KVEventsConfig(**given)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        message = f"needs {' and '.join(missing)}: pip install 'pensieve[events]'"
        raise SettingError(SETTING, message)
    return config


def _check(name: str, value: Any, kind: type) -> None:
    """`kind` NoneType: a text or nothing."""
    wanted = WANTED[kind]
    right = type(value) is kind
    if kind is type(None):
        right = value is None or isinstance(value, str)
    elif kind is int:
        right = right and value >= 1
    if not right:
        raise SettingError(SETTING, f"{name} must be {wanted}, not {value!r}")
    if name == "max_queue_size" and value < LEAST_QUEUE:
        raise SettingError(SETTING, f"{name} must be at least {LEAST_QUEUE}, not {value}")
    if name == "publisher" and value not in (None, *PUBLISHERS):
        raise SettingError(SETTING, f"publisher must be one of {', '.join(PUBLISHERS)}")
