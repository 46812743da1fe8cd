"""Runs blocking calls in threads that a hanging call does not keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Call = Callable[[], None]


class Calls(Protocol):
    """Runs calls elsewhere. Tests have one with a virtual clock."""

    def clock(self) -> float:
        """The time, seconds."""

    def submit(self, lane: str, call: Call) -> None:
        """Runs the call soon, behind earlier ones of its lane."""

    def later(self, seconds: float, call: Call) -> None:
        """Runs a call that does not block after so many seconds."""

    def close(self) -> None:
        """Calls that wait for a thread are given up."""


class CallThreads:
    """`lanes`: threads of each lane. They are daemons: a store that hangs for minutes does not
    delay the end of the process."""

    clock = staticmethod(time.monotonic)

    def __init__(self, lanes: dict[str, int]):
        self._queues = {lane: SimpleQueue[Call | None]() for lane in lanes}
        self._lanes = lanes
        self._timers: set[threading.Timer] = set()
        self._lock = threading.Lock()
        self._closed = False
        for lane, threads in lanes.items():
            for _ in range(threads):
                work = threading.Thread(target=self._work, args=(lane,), daemon=True)
                work.name = f"shared-{lane}"
                work.start()

    def submit(self, lane: str, call: Call) -> None:
        self._queues[lane].put(call)

    def later(self, seconds: float, call: Call) -> None:
        def run() -> None:
            with self._lock:
                self._timers.discard(timer)
            call()

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        with self._lock:
            if self._closed:
                return
            self._timers.add(timer)
            timer.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for timer in self._timers:
                timer.cancel()
        for lane, threads in self._lanes.items():
            for _ in range(threads):
                self._queues[lane].put(None)

    def _work(self, lane: str) -> None:
        while (call := self._queues[lane].get()) is not None:
            if not self._closed:
                call()
