"""The addresses of a KV pool's records, and the HOST pool of a CUDA device: page-locked memory in
pieces."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np

from ...builder.progress import show_progress
from ...scheduler.types import InvariantError
from .memory import GIB

LARGEST_PIECE = 4 * GIB


class Records(NamedTuple):
    """A pool of `slots` records of `record` bytes, in pieces. Each piece is contiguous and ends
    with a whole record."""

    pieces: np.ndarray
    """[pieces] uint64, their addresses"""
    slots_a_piece: int
    slots: int
    record: int

    def check(self, slots: np.ndarray) -> None:
        """InvariantError for a slot that does not exist."""
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.slots:
            raise InvariantError(
                f"slots {slots.min()} to {slots.max()} of a pool of {self.slots} are to be copied"
            )

    def addresses(self, slots: np.ndarray, offset: int) -> np.ndarray:
        """Returns [n] uint64: the address of byte `offset` of each slot's record. InvariantError
        for a slot that does not exist."""
        self.check(slots)
        piece, index = np.divmod(slots.astype(np.int64), self.slots_a_piece)
        return self.pieces[piece] + (index * self.record + offset).astype(np.uint64)


class PinnedMemory(Protocol):
    """The methods of `CudaRuntime` that a pool uses."""

    def allocate_pinned(self, size: int) -> int: ...

    def free_pinned(self, address: int) -> None: ...


class PinnedPool:
    """Page-locked host memory in pieces of at most `largest_piece` bytes, fresh from the system and
    thus zero.

    Pinning takes 0.4 s per GiB; with pieces it can report its progress.
    """

    def __init__(
        self, memory: PinnedMemory, slots: int, record: int, largest_piece: int = LARGEST_PIECE
    ):
        self._memory = memory
        a_piece = max(1, largest_piece // record)
        self._addresses: list[int] = []
        for first in range(0, slots, a_piece):
            self._addresses.append(memory.allocate_pinned(min(a_piece, slots - first) * record))
            pinned = min(first + a_piece, slots) * record
            show_progress("pinning host memory", pinned / GIB, slots * record / GIB, " GiB")
        self.records = Records(np.array(self._addresses, np.uint64), a_piece, slots, record)

    def record(self, slot: int) -> np.ndarray:
        """The bytes of a slot's record, not a copy."""
        address = int(self.records.addresses(np.array([slot]), 0)[0])
        return np.frombuffer(
            memoryview((ctypes.c_uint8 * self.records.record).from_address(address)), np.uint8
        )

    def free(self) -> None:
        while self._addresses:
            self._memory.free_pinned(self._addresses.pop())
