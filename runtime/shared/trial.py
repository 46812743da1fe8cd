"""Tries a store: puts a few records, gets them back and removes them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from ..disk.segments import aligned_buffer
from .engine import Parts, SharedEngine, StoreOutcome

READERS = 4  # calls at once, as many as `SharedStore` makes
TRIED_BYTES = 16 * 2**20  # of a call
ROUNDS = 2  # the better one counts: the first may open connections

Call = Callable[[Sequence[str], Sequence[Parts]], list[StoreOutcome]]
Together = Callable[[Call, Sequence[str], np.ndarray], list[StoreOutcome]]


class StoreTrial(NamedTuple):
    """Bytes a second; 0 if the step named by `failed` failed."""

    read: float = 0.0
    write: float = 0.0
    failed: str = ""


def try_store(engine: SharedEngine, record_bytes: int) -> StoreTrial:
    """Blocks as long as the store does."""
    count = READERS * min(4, max(1, TRIED_BYTES // record_bytes))
    memory = np.frombuffer(aligned_buffer(2 * count * record_bytes), np.uint8)
    engine.register(memory)
    source, target = memory.reshape(2, count, record_bytes)
    source[:] = np.random.default_rng().integers(0, 256, (1, record_bytes), np.uint8)
    with ThreadPoolExecutor(READERS - 1) as pool:
        return _rounds(engine, source, target, partial(_together, pool))


def _together(
    pool: ThreadPoolExecutor, call: Call, keys: Sequence[str], records: np.ndarray
) -> list[StoreOutcome]:
    """The outcomes of `call`, made by this thread and the pool's, each with its part of the
    records."""
    parts = [
        (keys[number::READERS], [[record] for record in records[number::READERS]])
        for number in range(READERS)
    ]
    others = [pool.submit(call, *part) for part in parts[1:]]
    own = call(*parts[0])
    return [outcome for some in (own, *(each.result() for each in others)) for outcome in some]


def _rounds(
    engine: SharedEngine, source: np.ndarray, target: np.ndarray, together: Together
) -> StoreTrial:
    count = len(source)
    writes = []
    reads = []
    for _ in range(ROUNDS):
        target[:] = 0
        keys = [f"pensieve/trial/{uuid.uuid4().hex}" for _ in range(count)]
        try:
            began = time.perf_counter()
            put = together(engine.put, keys, source)
            written = time.perf_counter()
            engine.drop_cached(keys)
            dropped = time.perf_counter()
            got = together(engine.get, keys, target)
            ended = time.perf_counter()
        finally:
            removed = engine.remove(keys)
        if StoreOutcome.FULL in put:
            return StoreTrial(failed="it is full")
        for step, outcomes in (("put", put), ("get", got), ("remove", removed)):
            if set(outcomes) != {StoreOutcome.DONE}:
                return StoreTrial(failed=f"{step} fails")
        if not np.array_equal(source, target):
            return StoreTrial(failed="get returns other bytes than were put")
        writes.append(source.nbytes / max(1e-6, written - began))
        reads.append(source.nbytes / max(1e-6, ended - dropped))
    return StoreTrial(max(reads), max(writes))
