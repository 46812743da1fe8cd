"""What the tier does with every engine, in real threads. A test class of an engine derives from
`StoreTests` and has the fixture `open_engine`, which opens a client of one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pensieve.runtime.disk.record import PAGE, pack_header
from pensieve.runtime.disk.segments import aligned_buffer
from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig
from pensieve.runtime.shared.engine import SharedEngine, StoreOutcome
from pensieve.runtime.shared.store import SharedSettings, SharedStore
from pensieve.scheduler.kv.piece_keys import StatePiece, piece_key, state_key
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


def settings(
    fingerprint: str = "ab", ranks: int = 1, rank: int = 0, states: bool = False
) -> SharedSettings:
    return SharedSettings(CONFIG, fingerprint, SLOTS, ranks, rank, states)


def writes(*numbers: int) -> TierWork:
    """HOST slot n is written as the chunk of key n."""
    spills = tuple(Spill(number, 100 + number, chunk_key(number), 16) for number in numbers)
    return TierWork(Tier.SHARED, spills=spills)


def reads(*numbers: int) -> TierWork:
    promotions = tuple(Promotion(200 + number, number, chunk_key(number)) for number in numbers)
    return TierWork(Tier.SHARED, promotions=promotions)


def piece_of(chunk: int, number: int, computation: bytes) -> ChunkKey:
    return piece_key(chunk_key(chunk), StatePiece(number, computation))


def state_writes(chunk: int, *hosts: int, computation: bytes = b"computed") -> TierWork:
    """These HOST slots are written as the pieces of the state at the chunk's end."""
    spills = (
        Spill(host, 100 + host, piece_of(chunk, number, computation), 16)
        for number, host in enumerate(hosts)
    )
    return TierWork(Tier.SHARED, spills=tuple(spills))


def state_reads(chunk: int, *hosts: int) -> TierWork:
    promotions = (
        Promotion(200 + host, host, piece_of(chunk, number, b"made up."))
        for number, host in enumerate(hosts)
    )
    return TierWork(Tier.SHARED, promotions=tuple(promotions))


def put_state(
    engine: SharedEngine,
    store: SharedStore,
    pool: np.ndarray,
    keys: Sequence[ChunkKey],
    ends: Sequence[int] = (16, 16),
    damaged: int | None = None,
) -> None:
    """Puts a record of these pieces where the state of chunk 1 is looked for."""
    parts = []
    for slot, (key, end) in enumerate(zip(keys, ends, strict=True)):
        header = pack_header(key, end, store._origin, 1.0, pool[slot])
        page = np.frombuffer(aligned_buffer(PAGE), np.uint8)
        page[:] = np.frombuffer(header, np.uint8)
        parts += [page, pool[slot]]
    if damaged is not None:
        pool[damaged, 77] ^= 1
    for part in parts:
        engine.register(part)
    name = store._name(piece_of(1, 0, b"computed"))
    assert engine.put([name], [parts]) == [StoreOutcome.DONE]


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
    def stores(
        self, open_engine: Opens, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., SharedStore]]:
        """Their calls may last for a minute: a busy machine makes no call late."""
        monkeypatch.setattr("pensieve.runtime.shared.store.DEADLINE_S", 60.0)
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

    def test_a_state_is_one_record(self, stores: Callable[..., SharedStore]) -> None:
        """It is read as another computation's, which the reader makes up."""
        pool = host_pool(1)
        empty = host_pool()
        writer = stores(pool, states=True)
        assert done(writer, state_writes(1, 3, 1, 2)).spilled == (103, 101, 102)
        other = stores(empty, states=True)
        batch = KeyBatch(7, (state_key(chunk_key(1)), state_key(chunk_key(2)), chunk_key(1)))
        work = TierWork(Tier.SHARED, finds=(batch,))
        assert done(other, work).looked_up == ((7, (True, False, False)),)
        assert done(other, state_reads(1, 4, 5, 6)).promoted == (204, 205, 206)
        assert np.array_equal(empty[[4, 5, 6]], pool[[3, 1, 2]])
        assert done(other, state_reads(2, 4, 5, 6)).failed == (204, 205, 206)
        assert done(other, state_reads(1, 4, 5)).failed == (204, 205), "it has another size"

    def test_the_first_of_two_computations_stays(self, stores: Callable[..., SharedStore]) -> None:
        first = stores(host_pool(1), states=True)
        done(first, state_writes(1, 0, 1))
        done(stores(host_pool(2), states=True), state_writes(1, 0, 1, computation=b"another."))
        empty = host_pool()
        done(stores(empty, states=True), state_reads(1, 0, 1))
        assert np.array_equal(empty[:2], host_pool(1)[:2])

    def test_a_state_goes_with_its_chunk(self, stores: Callable[..., SharedStore]) -> None:
        store = stores(host_pool(1), states=True)
        done(store, state_writes(1, 0, 1))
        assert done(store, removals(1)).removed == ((8, (True,)),)
        assert done(store, state_reads(1, 0, 1)).failed == (200, 201)

    @pytest.mark.parametrize(
        "wrong",
        [
            dict(keys=(piece_of(1, 0, b"computed"), piece_of(1, 1, b"another."))),
            dict(keys=(piece_of(1, 0, b"computed"), piece_of(2, 1, b"computed"))),
            dict(keys=(piece_of(2, 0, b"computed"), piece_of(2, 1, b"computed"))),
            dict(keys=(piece_of(1, 1, b"computed"), piece_of(1, 0, b"computed"))),
            dict(keys=(piece_of(1, 0, b"computed"), piece_of(1, 0, b"computed"))),
            dict(ends=(16, 32)),
            dict(damaged=0),
            dict(damaged=1),
        ],
        ids=str,
    )
    def test_a_state_of_wrong_pieces_is_not_read(
        self, stores: Callable[..., SharedStore], open_engine: Opens, wrong: dict[str, Any]
    ) -> None:
        """Neither of other pieces, nor of other positions, nor damaged ones. It is removed."""
        pool = host_pool(1)
        store = stores(pool, states=True)
        right = dict(keys=(piece_of(1, 0, b"computed"), piece_of(1, 1, b"computed")))
        put_state(open_engine(), store, pool, **(right | wrong))
        find = TierWork(Tier.SHARED, finds=(KeyBatch(7, (state_key(chunk_key(1)),)),))
        assert done(store, find).looked_up == ((7, (True,)),)
        assert done(store, state_reads(1, 4, 5)).failed == (204, 205)
        until = time.monotonic() + 60
        while done(store, find).looked_up != ((7, (False,)),):  # it is removed after the report
            assert time.monotonic() < until

    def test_a_right_state_that_is_put_so_is_read(
        self, stores: Callable[..., SharedStore], open_engine: Opens
    ) -> None:
        """So the test before it is no test of `put_state`."""
        pool = host_pool(1)
        store = stores(pool, states=True)
        keys = (piece_of(1, 0, b"computed"), piece_of(1, 1, b"computed"))
        put_state(open_engine(), store, pool, keys)
        assert done(store, state_reads(1, 4, 5)).promoted == (204, 205)

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
