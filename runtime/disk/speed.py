"""The speed of the disk tier's disk, measured at each start, because it depends on other users and
on free space."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...scheduler.plan import Promotion, Spill, TierWork
from ...scheduler.types import ChunkKey, SettingError
from .segments import aligned_buffer
from .store import DiskSettings, DiskStore

MEASURED_BYTES = 32 * 2**20  # bytes of one round
ROUNDS = 3  # the best one counts: other programs may use the disk only now


class DiskSpeed(NamedTuple):
    """Bytes of KV per second, as the disk tier itself reads and writes them."""

    read: float
    write: float


def measure_disk(directory: Path, chunk_bytes: int) -> DiskSpeed | None:
    """Writes and reads records in a temporary folder, for a second or less on a solid-state disk.

    Returns None if the disk does not accept them, for example because it is full.
    SettingError('--disk-dir') as `DiskStore`.
    """
    count = min(256, max(8, MEASURED_BYTES // chunk_bytes))
    host = np.frombuffer(aligned_buffer(count * chunk_bytes), np.uint8).reshape(count, chunk_bytes)
    keys = [ChunkKey(number.to_bytes(32, "little")) for number in range(count)]
    spills = tuple(Spill(number, number, key, 0) for number, key in enumerate(keys))
    promotions = tuple(Promotion(number, number, key) for number, key in enumerate(keys))
    folder = directory / "speed"
    store = DiskStore(DiskSettings(folder, count, engine=""), 0, host.__getitem__)
    try:
        write = min(_seconds(store, TierWork(store.tier, spills=spills)) for _ in range(ROUNDS))
        read = min(
            _seconds(store, TierWork(store.tier, promotions=promotions)) for _ in range(ROUNDS)
        )
        return None if store.counters.errors else DiskSpeed(host.nbytes / read, host.nbytes / write)
    finally:
        store.close()
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise SettingError("--disk-dir", f"cannot use {folder}: {error}") from error


def _seconds(store: DiskStore, work: TierWork) -> float:
    began = time.perf_counter()
    store.begin(work)
    while store.busy:
        store.wait(1.0)
        store.take()
    return time.perf_counter() - began
