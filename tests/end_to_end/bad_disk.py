"""A disk that fails on purpose, in the system's place."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter

from pensieve.runtime.disk.record import PAGE
from pensieve.runtime.disk.segments import SystemCalls, aligned_buffer

ON_READ = "EIO on read", "slow read"
ON_WRITE = "ENOSPC", "EIO on write", "torn", "flipped", "misdirected"


class BadDisk:
    """Lies and refuses at random: each kind at least once in `every` occasions. `happened` counts
    the kinds."""

    def __init__(self, seed, slots, record, every=12):
        self.happened = Counter()
        self._spared = Counter()  # occasions in a row on which a kind did not happen
        self._slots = slots
        self._record = record
        self._every = every
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def calls(self):
        return SystemCalls(read=self.read, write=self.write)

    def _chance(self, kind):
        with self._lock:
            happens = (
                self._random.randrange(self._every) == 0 or self._spared[kind] + 1 == self._every
            )
            self._spared[kind] = 0 if happens else self._spared[kind] + 1
            self.happened[kind] += happens
        return happens

    def read(self, file, buffers, offset):
        if self._chance("EIO on read"):
            raise OSError(errno.EIO, "a bad sector")
        if self._chance("slow read"):
            time.sleep(0.02)
        return os.preadv(file, buffers, offset)

    def write(self, file, buffers, offset):
        whole = aligned_buffer(sum(map(len, buffers)))
        whole[:] = b"".join(buffers)
        if len(whole) == PAGE:  # an erasure
            return os.pwrite(file, whole, offset)
        if self._chance("ENOSPC"):
            raise OSError(errno.ENOSPC, "full")
        if self._chance("EIO on write"):
            raise OSError(errno.EIO, "broken")
        if self._chance("torn"):
            os.pwrite(file, whole[: len(whole) // PAGE // 2 * PAGE], offset)
            return len(whole)
        if self._chance("flipped"):
            whole[self._random.randrange(len(whole))] ^= 1 << self._random.randrange(8)
        if self._chance("misdirected"):  # over another chunk's record
            offset = self._random.randrange(self._slots - len(whole) // self._record) * self._record
        return os.pwrite(file, whole, offset)
