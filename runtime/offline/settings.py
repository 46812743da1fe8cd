"""The offline API's settings: those of `pensieve serve`, and the build settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ...builder.engine_cache import engine_for
from ...scheduler.types import SettingError
from ..launch.options import parser, settings_of
from ..launch.settings import ServeSettings

DEMO = "demo"

OPTIONS = frozenset(
    {
        "device",
        "enforce_eager",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "target_ms_per_token",
        "batching",
        "queue_order",
        "speculate",
        "gpu_kv_chunks",
        "gpu_kv_bytes",
        "gpu_memory_utilization",
        "host_kv_chunks",
        "host_kv_bytes",
        "disk_kv_chunks",
        "disk_kv_bytes",
        "disk_dir",
        "save",
        "prefetch",
        "kv_cache_dtype",
        "lower_tier_kv",
        "chunk_tokens",
        "conversation_ttl",
        "eviction",
        "swap_out_below",
        "generation_reserve",
        "swap_in",
        "link",
        "overflow",
        "overflow_ratio",
        "reuse",
        "chat_template",
    }
)
"""Options of `pensieve serve` that `LLM` takes, by their names without dashes."""


def read_settings(engine: str | Path, state_dir: str | Path | None, options: Mapping[str, Any]) -> ServeSettings:
    """Parses the options like `pensieve serve`. TypeError for an unknown one, SettingError for a wrong one."""
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"LLM takes no option {sorted(unknown)[0]!r}; it takes {', '.join(sorted(OPTIONS))}")
    words = [f"--engine={engine}"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is not None:
            words.append(
                f"--{flag}={value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}"
            )
    made = parser()

    def refuse(message: str) -> NoReturn:
        raise SettingError("LLM", message)

    made.error = refuse  # type: ignore[method-assign]
    args = made.parse_args(words)
    if state_dir is not None:
        args.state_dir = Path(state_dir)
    elif args.disk_kv_bytes is not None or args.disk_kv_chunks:
        raise SettingError("state_dir", "must name a directory: the disk tier is for conversations that are stored")
    return settings_of(args)


def model_engine(
    model: str | Path, *, dtype: str | None, quantization: str | None, backend: str | None, device: str
) -> Path:
    """Returns the engine's directory; it is built first for "demo" and for a checkpoint. SettingError."""
    if model == DEMO:
        model, dtype = DEMO_CHECKPOINT, dtype or "float32"  # the fastest dtype on CPUs
    return engine_for(model, dtype=dtype, quantization=quantization, backend=backend, device=device)
