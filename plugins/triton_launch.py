"""The launch of a Triton kernel as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: Triton's JIT runs it here, and `plugins.tensorrt.kernels` compiles it for a
    library without Python.

    arguments   of the kernel's parameters, in order, without its compile-time constants
    settings    compile-time constants by name, and options of the compiler
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    settings: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.settings)
