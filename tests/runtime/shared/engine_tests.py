"""What every engine of the shared tier must do. A test class of an engine derives from
`EngineTests` and has the fixture `engine`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pensieve.runtime.shared.engine import Parts, SharedEngine, StoreOutcome

PAGE = 4096
PAYLOAD = 3 * PAGE
DONE = StoreOutcome.DONE
MISSING = StoreOutcome.MISSING


def key(number: int, folder: str = "pensieve/1/origin/0") -> str:
    return f"{folder}/{number:064x}"


def record(engine: SharedEngine, seed: int, payload: int = PAYLOAD) -> Parts:
    """A header page and a payload of numbers that differ by seed; 0: zeros."""
    generator = np.random.default_rng(seed)
    parts = [generator.integers(0, 256, size, np.uint8) * (seed > 0) for size in (PAGE, payload)]
    for part in parts:
        engine.register(part)
    return parts


def same(one: Parts, other: Parts) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class EngineTests:
    def test_a_record_is_read_as_it_was_put(self, engine: SharedEngine) -> None:
        keys = [key(1), key(2)]
        records = [record(engine, 1), record(engine, 2)]
        assert engine.exists(keys) == [False, False]
        assert engine.put(keys, records) == [DONE, DONE]
        assert engine.exists([key(2), key(3), key(1)]) == [True, False, True]
        read = [record(engine, 0), record(engine, 0), record(engine, 0)]
        assert engine.get([key(2), key(3), key(1)], read) == [DONE, MISSING, DONE]
        assert same(read[0], records[1]) and same(read[2], records[0])

    def test_a_second_put_of_a_key_is_done(self, engine: SharedEngine) -> None:
        for _ in range(2):
            assert engine.put([key(1)], [record(engine, 1)]) == [DONE]
        read = record(engine, 0)
        assert engine.get([key(1)], [read]) == [DONE]
        assert same(read, record(engine, 1))

    def test_a_removed_record_is_gone_even_after_a_read(self, engine: SharedEngine) -> None:
        engine.put([key(1), key(2)], [record(engine, 1), record(engine, 2)])
        read = record(engine, 0)
        assert engine.get([key(1)], [read]) == [DONE]
        assert engine.remove([key(1), key(3)]) == [DONE, DONE]
        assert engine.exists([key(1), key(2)]) == [False, True]
        assert engine.get([key(1)], [read]) == [MISSING]
        assert engine.put([key(1)], [record(engine, 4)]) == [DONE]
        assert engine.get([key(1)], [read]) == [DONE]
        assert same(read, record(engine, 4))

    def test_a_record_of_another_size_is_missing_and_removed(self, engine: SharedEngine) -> None:
        engine.put([key(1)], [record(engine, 1)])
        assert engine.get([key(1)], [record(engine, 0, PAYLOAD + PAGE)]) == [MISSING]
        assert engine.exists([key(1)]) == [False]

    def test_threads_may_call_it_at_the_same_time(self, engine: SharedEngine) -> None:
        records = [record(engine, 1 + seed % 3) for seed in range(12)]

        def put(number: int) -> list[StoreOutcome]:
            return engine.put([key(number % 3)], [records[number]])

        def read(number: int) -> tuple[list[StoreOutcome], Parts]:
            parts = record(engine, 0)
            return engine.get([key(number % 3)], [parts]), parts

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(put, range(12))) == [[DONE]] * 12
            for number, (outcomes, parts) in enumerate(threads.map(read, range(12))):
                assert outcomes == [DONE] and same(parts, records[number % 3])

    def test_it_can_be_closed_twice(self, engine: SharedEngine) -> None:
        engine.close()
        engine.close()
