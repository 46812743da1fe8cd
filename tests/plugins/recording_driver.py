"""Triton's JIT without a GPU: it compiles for one that is not there, and what it launches is
written down."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

STREAM = 77


class Launched(NamedTuple):
    """image: the kernel's machine code. values: of its parameters, as bits; those of 32 bits have
    zeros above."""

    image: bytes
    grid: tuple[int, ...]
    threads: int
    shared: int
    dependent: bool
    stream: int
    values: tuple[int, ...]


class RecordingDriver:
    """Triton's driver of a GPU of compute capability 9.0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._launched: list[Launched] = []
        self.utils = self  # Triton asks it for the next two functions
        monkeypatch.setattr(driver, "_active", self)

    def load_binary(
        self, name: str, image: bytes, shared: int, device: int
    ) -> tuple[None, bytes, int, int, int]:
        return None, image, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 227 * 1024,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
        }

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Makes the function that Triton calls to launch a kernel."""

        def launch(
            x: int,
            y: int,
            z: int,
            stream: int,
            image: bytes,
            packed: Any,
            about: Any,
            enter: Any,
            leave: Any,
            *arguments: Any,
        ) -> None:
            given = zip(source.signature.values(), arguments, strict=True)
            values = tuple(_bits(kind, value) for kind, value in given if kind != "constexpr")
            threads = 32 * metadata.num_warps
            dependent = bool(metadata.launch_pdl)
            self._launched.append(
                Launched(image, (x, y, z), threads, metadata.shared, dependent, stream, values)
            )

        return launch

    def take(self) -> list[Launched]:
        """The launches since the last call."""
        launched = self._launched
        self._launched = []
        return launched


def _bits(kind: str, value: Any) -> int:
    if kind.startswith("*"):
        return value.data_ptr()
    return int.from_bytes(
        struct.pack({"i32": "<i", "i64": "<q", "fp32": "<f"}[kind], value), "little"
    )
