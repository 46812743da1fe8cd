"""Pensieve, a stateful serving engine. `LLM` and `SamplingParams` are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pensieve.runtime.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pensieve")
    if name in ("LLM", "SamplingParams"):
        return getattr(importlib.import_module("pensieve.runtime.llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
