"""Whether TensorRT is here, and new enough. Importable without it."""

from __future__ import annotations

from ...scheduler.types import SettingError

OLDEST = (11, 1)  # strongly typed networks only; plugins written in Python that are told their stream
INSTALL = f'pip install "tensorrt-cu13>={OLDEST[0]}.{OLDEST[1]}"'


def tensorrt_version() -> str:
    """Its version. SettingError('--backend', ...) that says what to install if it cannot be used here."""
    try:
        import tensorrt
        import tensorrt.plugin
    except ImportError as error:  # also if its libraries are missing
        raise SettingError("--backend", f"tensorrt needs NVIDIA TensorRT ({error}): {INSTALL}") from None
    version = str(tensorrt.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise SettingError("--backend", f"tensorrt {version} is too old: {INSTALL}")
    return version
