"""The addresses of a KV pool's records, and the HOST pool of a CUDA device: page-locked memory in
pieces."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...builder.progress import show_progress
from ...scheduler.types import InvariantError
from .memory import GIB, host_memory, host_room

LARGEST_PIECE = 4 * GIB

GROWING_PIECE = 16 * 2**20
"""Bytes of a piece that is pinned beside running steps. They wait for the driver meanwhile, 6 ms at
most."""

LEAST_GAP = 1e-3
"""Seconds between two such pieces, in which others get the driver's lock; more if a piece takes
more, so that they have it for half of the time."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Records:
    """A pool of `slots` records of `record` bytes, in pieces. Each piece is contiguous and ends
    with a whole record."""

    pieces: np.ndarray
    """[pieces] uint64, their addresses; those of later slots may be missing"""
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

    Pinning takes 0.4 s per GiB; with pieces it can report its progress, and go on while the pool is
    in use (`grow`).
    """

    def __init__(
        self,
        memory: PinnedMemory,
        slots: int,
        record: int,
        most: int = 0,
        largest_piece: int | None = None,
    ):
        """most: slots that the pool may grow to; if they are more, it begins with whole pieces, and
        these are smaller."""
        self._memory = memory
        self._most = max(slots, most)
        if largest_piece is None:
            largest_piece = LARGEST_PIECE if self._most == slots else GROWING_PIECE
        a_piece = max(1, largest_piece // record)
        self.records = Records(np.zeros(-(-self._most // a_piece), np.uint64), a_piece, 0, record)
        self._addresses: list[int] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        while self.records.slots < slots:
            self._pin()
            pinned = self.records.slots * record
            show_progress("pinning host memory", pinned / GIB, slots * record / GIB, " GiB")

    def _pin(self) -> None:
        """Adds a piece. Its slots count last, because other threads use them from then on."""
        records = self.records
        count = min(records.slots_a_piece, self._most - records.slots)
        address = self._memory.allocate_pinned(count * records.record)
        records.pieces[len(self._addresses)] = address
        self._addresses.append(address)
        records.slots += count

    def grow(self, room: Callable[[], int] = lambda: host_room(host_memory())) -> None:
        """Begins to pin the other slots, in another thread. It ends early, with a warning, if
        `room`, bytes, is less than a piece, or if pinning fails."""
        if self.records.slots < self._most:
            self._thread = threading.Thread(
                target=self._grow, args=(room,), name="pinning", daemon=True
            )
            self._thread.start()

    def _grow(self, room: Callable[[], int]) -> None:
        records = self.records
        began = time.monotonic()
        short = ""
        gap = LEAST_GAP
        while records.slots < self._most and not short:
            if self._stopped.wait(gap):
                return
            if room() < records.slots_a_piece * records.record:
                short = "memory is short"
                continue
            started = time.monotonic()
            try:
                self._pin()
            except RuntimeError as error:  # of the driver
                short = str(error)
            gap = max(LEAST_GAP, time.monotonic() - started)
        sizes = (slots * records.record / GIB for slots in (records.slots, self._most))
        if short:
            log.warning("the host cache stays at %.1f of %.1f GiB: %s", *sizes, short)
        else:
            log.info(
                "the host cache has its %.1f GiB after %.0f s",
                next(sizes),
                time.monotonic() - began,
            )

    def record(self, slot: int) -> np.ndarray:
        """The bytes of a slot's record, not a copy."""
        address = int(self.records.addresses(np.array([slot]), 0)[0])
        return np.frombuffer(
            memoryview((ctypes.c_uint8 * self.records.record).from_address(address)), np.uint8
        )

    def free(self, idle: bool = True) -> None:
        """Ends the growth, after the piece that is being pinned. Frees the memory if `idle`: no
        copy uses it. Else a copy, and pinning too, may hang, so nothing is waited for."""
        self._stopped.set()
        if not idle:
            return
        if self._thread is not None:
            self._thread.join()
        while self._addresses:
            self._memory.free_pinned(self._addresses.pop())
