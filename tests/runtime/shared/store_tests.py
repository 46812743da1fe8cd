"""What the tier does with every engine, in real threads. A test class of an engine derives from
`StoreTests` and has the fixture `open_engine`, which opens a client of one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pensieve.runtime.disk.segments import aligned_buffer
from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig
from pensieve.runtime.shared.engine import SharedEngine
from pensieve.runtime.shared.store import SharedSettings, SharedStore
from pensieve.scheduler.plan import KeyBatch, Promotion, Spill, TierReport, TierWork
from pensieve.scheduler.types import ChunkKey, Tier

BYTES = 2 * 4096
SLOTS = 8
CONFIG = SharedConfig(DirectoryOptions(Path("/not/used"), 1), "test")

Opens = Callable[[], SharedEngine]


def chunk_key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def host_pool(seed: int = 0) -> np.ndarray:
    """HOST slots, [slots, bytes]; zeros for seed 0."""
    pool = np.frombuffer(aligned_buffer(SLOTS * BYTES), np.uint8).reshape(SLOTS, BYTES)
    if seed:
        pool[:] = np.random.default_rng(seed).integers(0, 256, pool.shape, np.uint8)
    return pool


def settings(fingerprint: str = "ab", ranks: int = 1, rank: int = 0) -> SharedSettings:
    return SharedSettings(CONFIG, fingerprint, SLOTS, ranks, rank)


def writes(*numbers: int) -> TierWork:
    """HOST slot n is written as the chunk of key n."""
    spills = tuple(Spill(number, 100 + number, chunk_key(number), 16) for number in numbers)
    return TierWork(Tier.SHARED, spills=spills)


def reads(*numbers: int) -> TierWork:
    promotions = tuple(Promotion(200 + number, number, chunk_key(number)) for number in numbers)
    return TierWork(Tier.SHARED, promotions=promotions)


def finds(*numbers: int) -> TierWork:
    batch = KeyBatch(7, tuple(chunk_key(number) for number in numbers))
    return TierWork(Tier.SHARED, finds=(batch,))


def removals(*numbers: int) -> TierWork:
    batch = KeyBatch(8, tuple(chunk_key(number) for number in numbers))
    return TierWork(Tier.SHARED, removals=(batch,))


def done(store: SharedStore, work: TierWork) -> TierReport:
    """Begins the work and returns the report when all of it has ended."""
    store.begin(work)
    parts: list[TierReport] = []
    until = time.monotonic() + 60
    while store.busy:
        assert time.monotonic() < until
        store.wait(1.0)
        parts.append(store.take())
    joined = [sum((part[field] for part in parts), ()) for field in range(1, 8)]
    return TierReport(Tier.SHARED, *joined)


class StoreTests:
    @pytest.fixture
    def stores(self, open_engine: Opens) -> Iterator[Callable[..., SharedStore]]:
        opened: list[SharedStore] = []

        def open_store(pool: np.ndarray, *of: object, **named: object) -> SharedStore:
            parts = settings(*of, **named)  # type: ignore[arg-type]
            opened.append(SharedStore(open_engine(), parts, 16, pool.__getitem__))
            return opened[-1]

        yield open_store
        for store in opened:
            store.close()

    def test_what_one_server_writes_another_reads(self, stores: Callable[..., SharedStore]) -> None:
        pool = host_pool(1)
        empty = host_pool()
        assert done(stores(pool), writes(1, 2, 5)).spilled == (101, 102, 105)
        other = stores(empty)
        assert done(other, finds(1, 3, 2)).looked_up == ((7, (True, False, True)),)
        report = done(other, reads(1, 2, 3))
        assert set(report.promoted) == {201, 202} and report.failed == (203,)
        assert np.array_equal(empty[1:3], pool[1:3])
        assert not empty[5].any()

    def test_a_removed_record_is_gone_for_all(self, stores: Callable[..., SharedStore]) -> None:
        writer = stores(host_pool(1))
        other = stores(host_pool())
        done(writer, writes(1, 2))
        assert done(other, removals(1, 3)).removed == ((8, (True, True)),)
        assert done(writer, finds(1, 2)).looked_up == ((7, (False, True)),)
        assert done(writer, reads(1)).failed == (201,)

    def test_another_model_finds_nothing(self, stores: Callable[..., SharedStore]) -> None:
        done(stores(host_pool(1)), writes(1))
        assert done(stores(host_pool(), "cd"), finds(1)).looked_up == ((7, (False,)),)

    def test_a_chunk_is_there_if_all_ranks_have_written_it(
        self, stores: Callable[..., SharedStore]
    ) -> None:
        first = stores(host_pool(1), ranks=2, rank=0)
        second = stores(host_pool(2), ranks=2, rank=1)
        done(first, writes(1))
        assert done(first, finds(1)).looked_up == ((7, (False,)),)
        done(second, writes(1))
        assert done(first, finds(1)).looked_up == ((7, (True,)),)
        done(first, removals(1))
        assert done(second, reads(1)).failed == (201,)
