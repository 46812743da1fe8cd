"""Opens the engine that `--kv-shared-config` names."""

from __future__ import annotations

from .config import MooncakeOptions, SharedConfig
from .directory import DirectoryEngine
from .engine import SharedEngine
from .mooncake import MooncakeEngine


def open_engine(config: SharedConfig) -> SharedEngine:
    """SettingError('kv_shared_config') if the store cannot be used."""
    if isinstance(config.options, MooncakeOptions):
        return MooncakeEngine(config.options)
    return DirectoryEngine(config.options)
