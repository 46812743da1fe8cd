"""A store in memory that fails, hangs and lies when told to, and threads on a virtual clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pensieve.runtime.shared.engine import Parts, StoreOutcome


class FaultyEngine:
    """A `SharedEngine`.

    records     the store's content; tests change it
    fails       every call fails
    full        no record is stored
    gate        calls wait until it is set; `register` if `registration_hangs`
    spends      called by each call with the number of its keys
    buffers     registered memory: its addresses
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.fails = self.full = self.registration_hangs = False
        self.gate = threading.Event()
        self.gate.set()
        self.spends: Callable[[int], None] = lambda keys: None
        self.calls: list[str] = []
        self.buffers: list[range] = []

    def _enter(self, call: str, keys: Sequence[str]) -> None:
        self.calls.append(call)
        self.spends(len(keys))
        if not self.gate.is_set():
            settled = getattr(threading.current_thread(), "settled", None)
            if settled is not None:
                settled.set()
            assert self.gate.wait(60)

    def register(self, buffer: np.ndarray) -> None:
        assert buffer.dtype == np.uint8 and buffer.flags.c_contiguous
        if self.registration_hangs:
            self._enter("register", [])
        self.buffers.append(range(buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes))

    def _check(self, records: Sequence[Parts]) -> None:
        for part in (part for parts in records for part in parts):
            assert any(part.ctypes.data in buffer for buffer in self.buffers)

    def exists(self, keys: Sequence[str]) -> list[bool] | None:
        self._enter("exists", keys)
        return None if self.fails else [key in self.records for key in keys]

    def put(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        self._check(records)
        self._enter("put", keys)
        if self.fails or self.full:
            return [StoreOutcome.FAILED if self.fails else StoreOutcome.FULL] * len(keys)
        for key, parts in zip(keys, records, strict=True):
            self.records.setdefault(key, b"".join(part.tobytes() for part in parts))
        return [StoreOutcome.DONE] * len(keys)

    def get(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        self._check(records)
        self._enter("get", keys)
        outcomes = []
        for key, parts in zip(keys, records, strict=True):
            record = self.records.get(key)
            outcomes.append(StoreOutcome.DONE if record else StoreOutcome.MISSING)
            for part in parts if record else ():
                part[:] = np.frombuffer(record[: len(part)], np.uint8)
                record = record[len(part) :]
        return [StoreOutcome.FAILED] * len(keys) if self.fails else outcomes

    def remove(self, keys: Sequence[str]) -> list[StoreOutcome]:
        self._enter("remove", keys)
        if self.fails:
            return [StoreOutcome.FAILED] * len(keys)
        for key in keys:
            self.records.pop(key, None)
        return [StoreOutcome.DONE] * len(keys)

    def drop_cached(self, keys: Sequence[str]) -> None:
        """Nothing."""

    def close(self) -> None:
        self.calls.append("close")


class VirtualCalls:
    """`Calls` on a clock that tests move. `settle` runs what was submitted until each call has
    ended or hangs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._submitted: list[Callable[[], None]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._threads: list[threading.Thread] = []

    def clock(self) -> float:
        return self.now

    def submit(self, lane: str, call: Callable[[], None]) -> None:
        self._submitted.append(call)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._later.append((self.now + seconds, call))

    def settle(self) -> None:
        while self._submitted:
            call = self._submitted.pop(0)
            settled = threading.Event()

            def run(call: Callable[[], None] = call, settled: threading.Event = settled) -> None:
                call()
                settled.set()

            thread = threading.Thread(target=run, daemon=True)
            thread.settled = settled  # type: ignore[attr-defined]
            thread.start()
            self._threads.append(thread)
            assert settled.wait(60)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [call for time, call in self._later if time <= self.now]
        self._later = [(time, call) for time, call in self._later if time > self.now]
        for call in due:
            call()
        self.settle()

    def join(self) -> None:
        """Waits for calls that hung and were let go."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def close(self) -> None:
        self._submitted.clear()
        self._later.clear()
