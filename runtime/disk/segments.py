"""The files of a disk tier: records of fixed size in segments that are allocated whole, on first
use.

Reads and writes bypass the page cache (O_DIRECT) where the file system allows it: KV is read once
and kept in the HOST tier, so a second copy in the page cache would only displace others. Every
method except `close` may be called by several threads.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from ..system import allow_open_files
from .record import PAGE

log = logging.getLogger(__name__)

SEGMENT_BYTES = 2**30
OTHER_FILES = 128  # of the process, besides segments: devices, pipes, libraries


@dataclass(frozen=True)
class SystemCalls:
    """The system calls; tests replace them."""

    read: Callable[[int, Sequence[Any], int], int] = os.preadv
    write: Callable[[int, Sequence[Any], int], int] = os.pwritev
    allocate: Callable[[int, int, int], None] = os.posix_fallocate


class Segments:
    """`slots` records of `record` bytes each (whole pages) in `directory`, which exists."""

    def __init__(
        self,
        directory: Path,
        slots: int,
        record: int,
        system: SystemCalls = SystemCalls(),
        segment_bytes: int = SEGMENT_BYTES,
    ):
        """Deletes files beyond `slots`, so at most `slots * record` bytes are used. Raises OSError,
        also if the process may not open so many files."""
        self._directory = directory
        self._record = record
        self._system = system
        self.slots = slots
        self.slots_a_segment = max(1, segment_bytes // record)
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}  # by segment
        self._whole: set[int] = set()  # segments known to be fully allocated
        self._direct = True
        used = {self._path(segment) for segment in range(-(-slots // self.slots_a_segment))}
        wanted = len(used) + OTHER_FILES
        if (allowed := allow_open_files(wanted)) < wanted:
            limit = (
                f"this process may open {allowed}: raise the limit to {wanted} (ulimit -Hn, "
                "LimitNOFILE=)"
            )
            raise OSError(f"the tier has {len(used)} files beside others, and {limit}")
        for path in directory.glob("*.kv"):
            if path not in used:
                path.unlink()
        for segment, path in enumerate(sorted(used)):
            if path.exists() and path.stat().st_size > self._size(segment):
                os.truncate(path, self._size(segment))

    def present(self) -> list[int]:
        """Slots within existing files, ascending."""
        slots: list[int] = []
        for first in range(0, self.slots, self.slots_a_segment):
            path = self._path(first // self.slots_a_segment)
            if path.exists():
                slots += range(first, first + path.stat().st_size // self._record)
        return slots

    def neighbours(self, slot: int, following: int) -> bool:
        """Returns whether one call can read or write both records, the second after the first."""
        return following == slot + 1 and following % self.slots_a_segment != 0

    def read(self, slot: int, buffers: Sequence[Any]) -> None:
        """Fills the buffers, whole pages, from the beginning of the slot's record. OSError, also if
        the file is too short."""
        self._transfer(self._system.read, slot, buffers, make=False)

    def write(self, slot: int, buffers: Sequence[Any], make: bool = True) -> None:
        """Writes the buffers, whole pages, from the beginning of the slot's record. `make`: first
        creates and allocates the file. OSError."""
        self._transfer(self._system.write, slot, buffers, make)

    def holds(self, slot: int) -> bool:
        """Returns whether the slot can ever have been written: its file exists and is long enough.
        An open file may have been moved since. OSError."""
        segment, index = divmod(slot, self.slots_a_segment)
        file = self._open.get(segment, self._path(segment))
        try:
            return os.stat(file).st_size > index * self._record
        except FileNotFoundError:
            return False

    def flush(self, slots: Sequence[int]) -> None:
        """Returns when the data of these slots survives a power failure. OSError."""
        for segment in sorted({slot // self.slots_a_segment for slot in slots}):
            os.fdatasync(self._descriptor(segment, make=False))

    def close(self) -> None:
        """Closes the files. No call may be in progress. Idempotent."""
        while self._open:
            os.close(self._open.popitem()[1])

    # -- internal

    def _transfer(
        self,
        call: Callable[[int, Sequence[Any], int], int],
        slot: int,
        buffers: Sequence[Any],
        make: bool,
    ) -> None:
        segment, index = divmod(slot, self.slots_a_segment)
        wanted = sum(len(buffer) for buffer in buffers)
        done = call(self._descriptor(segment, make), buffers, index * self._record)
        if done != wanted:
            raise OSError(errno.EIO, f"{done} of {wanted} bytes", str(self._path(segment)))

    def _descriptor(self, segment: int, make: bool) -> int:
        """FileNotFoundError if the file does not exist and `make` is False, ENOSPC if there is no
        room for all of it."""
        opened = self._open.get(segment)
        if opened is not None and (segment in self._whole or not make):
            # without the lock: another thread may hold it for seconds to allocate a file
            return opened
        with self._lock:
            if segment not in self._open:
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0)
                descriptor = os.open(self._path(segment), flags, 0o600)
                try:
                    self._go_direct(descriptor)
                except OSError:
                    os.close(descriptor)
                    raise
                # last, because other threads read it without the lock
                self._open[segment] = descriptor
            if make and segment not in self._whole:
                self._allocate(self._open[segment], self._size(segment))
                self._whole.add(segment)
            return self._open[segment]

    def _allocate(self, descriptor: int, size: int) -> None:
        """Allocates the whole segment. A file from a smaller tier, or one whose allocation was
        interrupted, is extended."""
        before = os.fstat(descriptor).st_size
        try:
            self._system.allocate(descriptor, 0, size)
        except OSError:
            # frees the part that was allocated: it is of no use here and the disk is full
            os.ftruncate(descriptor, before)
            raise

    def _go_direct(self, descriptor: int) -> None:
        """Turns O_DIRECT on. Some file systems refuse it when it is set, others when it is used."""
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(descriptor, [aligned_buffer(PAGE)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            if self._direct:
                self._direct = False
                log.info("%s: no O_DIRECT here, KV goes through the page cache", self._directory)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06}.kv"

    def _size(self, segment: int) -> int:
        first = segment * self.slots_a_segment
        return min(self.slots_a_segment, self.slots - first) * self._record


def aligned_buffer(size: int) -> memoryview:
    """Zeroed memory that begins on a page, as O_DIRECT requires."""
    return memoryview(mmap(-1, size))
