"""Tries a store: puts a few records, gets them back and removes them. As in a transfer, each record
is summed up for its checksum."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..disk.record import checksum
from ..disk.segments import aligned_buffer
from .engine import Parts, SharedEngine, StoreOutcome

READERS = 8  # calls at once, as many as `SharedStore` makes
WRITERS = 2
TRIED_BYTES = 8 * 2**20  # of a call, at most, unless one record is larger
ROUNDS = 2  # the better one counts: the first may open connections

Call = Callable[[Sequence[str], Sequence[Parts]], list[StoreOutcome]]


class StoreTrial(NamedTuple):
    """Bytes a second; 0 if the step named by `failed` failed."""

    read: float = 0.0
    write: float = 0.0
    failed: str = ""


def trial_memory(record_bytes: int) -> np.ndarray:
    """Memory for a trial with records of this size: 2 x records x bytes."""
    count = READERS * min(4, max(1, TRIED_BYTES // record_bytes))
    memory = np.frombuffer(aligned_buffer(2 * count * record_bytes), np.uint8)
    return memory.reshape(2, count, record_bytes)


def try_store(
    engine: SharedEngine, record_bytes: int, memory: np.ndarray | None = None
) -> StoreTrial:
    """Blocks as long as the store does. `memory`: of `trial_memory`, registered; None: it takes its
    own."""
    if memory is None:
        memory = trial_memory(record_bytes)
        engine.register(memory)
    source, target = memory
    count = len(source)
    source[:] = np.random.default_rng().integers(0, 256, (1, record_bytes), np.uint8)
    writes = []
    reads = []
    for _ in range(ROUNDS):
        target[:] = 0
        keys = [f"pensieve/trial/{uuid.uuid4().hex}" for _ in range(count)]
        try:
            began = time.perf_counter()
            put = _together(WRITERS, engine.put, keys, source)
            written = time.perf_counter()
            engine.drop_cached(keys)
            dropped = time.perf_counter()
            got = _together(READERS, engine.get, keys, target)
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


def _together(
    threads: int, call: Call, keys: Sequence[str], records: np.ndarray
) -> list[StoreOutcome]:
    """The outcomes of `call`, made by so many threads at once, each with its part of the records.
    They are daemons, and this one is the first: a call that hangs does not keep the process from
    ending."""
    outcomes: list[StoreOutcome] = []
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            parts = [[record] for record in records[first::threads]]
            outcomes.extend(call(keys[first::threads], parts))
            for record in records[first::threads]:
                checksum(record.data)
        except BaseException as error:
            errors.append(error)

    others = [
        threading.Thread(target=run, args=(number,), daemon=True) for number in range(1, threads)
    ]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()
    if errors:
        raise errors[0]
    return outcomes
