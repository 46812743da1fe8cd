"""What the loop counts of its own work: time of a step by part, batch sizes, and how long the device was busy."""

from __future__ import annotations

import time
from collections import deque

from ..scheduler.plan import StepPlan
from .device import TransferSeconds
from .messages import LoopStats, PowerCounts


class Stopwatch:
    """Adds up the seconds of its `with` blocks, which do not nest."""

    __slots__ = ("_since", "seconds")

    def __init__(self) -> None:
        self.seconds = self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


class Sizes:
    """A histogram of positive integers whose buckets end at powers of two."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._total = 0

    def add(self, size: int) -> None:
        bucket = (size - 1).bit_length()  # the least power of two that is not below the size
        if bucket >= len(self._counts):
            self._counts += [0] * (bucket + 1 - len(self._counts))
        self._counts[bucket] += 1
        self._total += size

    def read(self) -> PowerCounts:
        return PowerCounts(tuple(self._counts), self._total)


class LoopCounters:
    """Written by the loop's thread. `plan`, `launch`, `wait` and `apply` time these parts of its steps."""

    def __init__(self) -> None:
        self.plan, self.launch, self.wait, self.apply = (Stopwatch() for _ in range(4))
        self._steps = 0
        self._in_flight: deque[bool] = deque()  # whether the device has anything to do, by plan
        self._tokens, self._requests = Sizes(), Sizes()
        self._busy = self._busy_since = 0.0

    def launched(self, plan: StepPlan) -> None:
        """To be told when the plan is handed to the device. One that only awaits the disk counts as no step."""
        works = bool(plan.tokens or plan.copies)
        if works and not any(self._in_flight):
            self._busy_since = time.perf_counter()
        self._in_flight.append(works)
        self._steps += works
        if plan.tokens:
            self._tokens.add(plan.tokens)
            self._requests.add(len(plan.generate) + len({span.seat for span in plan.spans}))

    def finished(self) -> None:
        """To be told when the oldest plan's result is here."""
        if self._in_flight.popleft() and not any(self._in_flight):
            self._busy += time.perf_counter() - self._busy_since

    def read(self, transfers: TransferSeconds) -> LoopStats:
        busy = self._busy + (time.perf_counter() - self._busy_since if any(self._in_flight) else 0.0)
        parts = {name: getattr(self, name).seconds for name in ("plan", "launch", "wait", "apply")}
        return LoopStats(self._steps, parts, self._tokens.read(), self._requests.read(), busy, *transfers)
