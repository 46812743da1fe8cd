"""Checks that TensorRT is installed and new enough. Can be imported without it."""

from __future__ import annotations

from ...scheduler.types import SettingError

OLDEST = (11, 1)  # networks are always strongly typed; Python plugins get their stream
INSTALL = f'pip install "tensorrt-cu13>={OLDEST[0]}.{OLDEST[1]}"'


def tensorrt_version() -> str:
    """Returns its version. SettingError('--backend', ...) with installation advice if it cannot be used here."""
    try:
        import tensorrt
        import tensorrt.plugin
    except ImportError as error:  # also raised if its libraries are missing
        raise SettingError("--backend", f"tensorrt needs NVIDIA TensorRT ({error}): {INSTALL}") from None
    version = str(tensorrt.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise SettingError("--backend", f"tensorrt {version} is too old: {INSTALL}")
    return version
