"""Opens the engine that `--kv-shared-config` names."""

from __future__ import annotations

from .config import SharedConfig
from .directory import DirectoryEngine
from .engine import SharedEngine


def open_engine(config: SharedConfig) -> SharedEngine:
    """SettingError('kv_shared_config') if the store cannot be used."""
    return DirectoryEngine(config.options)
