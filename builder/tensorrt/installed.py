"""Whether TensorRT is here, and new enough."""

from __future__ import annotations

from ...plugins.tensorrt.installation import STRONGLY_TYPED, check_version, find_tensorrt, text
from ...plugins.tensorrt.library import load_library
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig


def tensorrt_version() -> str:
    """Its version. SettingError('--backend', ...) that says what to install or set if it cannot be
    used here."""
    version = load_library().version
    check_version(version)
    return text(version)


def describe_tensorrt() -> str:
    """Its version, where it is, and that library, headers and plugins fit. SettingError as
    `tensorrt_version`."""
    version = tensorrt_version()
    tensorrt = find_tensorrt()
    headers = f"headers of {text(tensorrt.headers_version)} in {tensorrt.headers}"
    return f"{version} from {tensorrt.source}, {headers}; the plugins fit"


def check_decoder(config: DecoderConfig, dtype: str) -> None:
    """SettingError if there is no network for this decoder, or as `check_type`."""
    missing = {
        "experts": config.experts > 0,
        "sinks": config.sinks,
        "sliding windows": any(config.windows),
        "norms behind attention and MLP": config.norm_results,
        "norms by 1 + weight": config.norm_plus_one,
        "several rotary embeddings": len(config.rotaries) > 1,
        "scores scaled by YaRN": any(rotary.length != 1.0 for rotary in config.rotaries),
        "scores scaled by query_pre_attn_scalar": config.query_size > 0,
    }
    for what, needed in missing.items():
        if needed:
            raise SettingError(
                "--backend",
                f"tensorrt's engines with {what} ({config.architecture}) do not exist yet",
            )
    check_type(dtype)


def check_type(dtype: str) -> None:
    """SettingError('--dtype', ...) if this TensorRT does not compute in this type."""
    version = load_library().version
    if dtype == "bfloat16" and version < STRONGLY_TYPED:
        raise SettingError(
            "--dtype", f"TensorRT {text(version)} has no bfloat16: use float16, or install 10"
        )
