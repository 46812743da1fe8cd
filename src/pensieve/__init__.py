"""Pensieve, a stateful serving engine. `LLM` and `SamplingParams` are loaded when they are first
used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pensieve.runtime.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("LLM", "SamplingParams"):
        from pensieve.runtime import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
