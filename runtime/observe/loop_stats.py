"""The loop's counts of its own work: seconds of a step by part, batch sizes, and the device's busy
time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ...scheduler.plan import StepPlan
from ..counters import LoopStats, PowerCounts
from ..device.protocol import TransferSeconds
from .chrome_trace import TraceFile


class Stopwatch:
    """Adds up the seconds of its `with` blocks, which do not nest. `report` is called with each
    (start, end)."""

    __slots__ = ("_report", "_since", "seconds")

    def __init__(self, report: Callable[[float, float], None] | None = None) -> None:
        self._report = report
        self.seconds = self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.seconds += now - self._since
        if self._report is not None:
            self._report(self._since, now)


class SizeHistogram:
    """A histogram of positive integers whose buckets end at powers of two."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._total = 0

    def add(self, size: int) -> None:
        # exponent of the least power of two that is at least the size
        bucket = (size - 1).bit_length()
        if bucket >= len(self._counts):
            self._counts += [0] * (bucket + 1 - len(self._counts))
        self._counts[bucket] += 1
        self._total += size

    def read(self) -> PowerCounts:
        return PowerCounts(tuple(self._counts), self._total)


PARTS = ("plan", "launch", "wait", "apply", "send")


class LoopCounters:
    """Written by the loop's thread. `plan`, `launch`, `wait`, `apply` and `send` time these parts
    of its steps."""

    def __init__(self, trace: TraceFile | None = None) -> None:
        self._trace = trace
        self.plan, self.launch, self.wait, self.apply, self.send = map(self._stopwatch, PARTS)
        self._steps = 0
        self._in_flight: deque[bool] = deque()  # by plan: whether the device has any work for it
        self._tokens, self._requests = SizeHistogram(), SizeHistogram()
        self._busy = self._busy_since = 0.0

    def _stopwatch(self, part: str) -> Stopwatch:
        """Without a trace, only this comparison is done for it."""
        trace = self._trace
        if trace is None:
            return Stopwatch()

        def report(start: float, end: float) -> None:
            coming = part in ("plan", "launch")
            trace.part(
                part,
                start,
                end,
                self._steps + 1
                if coming
                else self._steps - sum(self._in_flight) + (part == "wait"),
            )

        return Stopwatch(report)

    def launching(self, plan: StepPlan) -> None:
        """Called before the plan is handed to the device."""
        if self._trace is not None:
            self._trace.launched(plan)

    def launched(self, plan: StepPlan) -> None:
        """Called after the plan is handed to the device. A plan that only waits for the disk does
        not count as a step."""
        works = bool(plan.tokens or plan.copies)
        if works and not any(self._in_flight):
            self._busy_since = time.perf_counter()
        self._in_flight.append(works)
        self._steps += works
        if plan.tokens:
            self._tokens.add(plan.tokens)
            self._requests.add(len(plan.generate) + len({span.seat for span in plan.spans}))

    def finished(self) -> None:
        """Called when the oldest plan's result is here."""
        if self._in_flight.popleft() and not any(self._in_flight):
            self._busy += time.perf_counter() - self._busy_since

    def read(self, transfers: TransferSeconds) -> LoopStats:
        busy = self._busy + (
            time.perf_counter() - self._busy_since if any(self._in_flight) else 0.0
        )
        parts = {name: getattr(self, name).seconds for name in PARTS}
        return LoopStats(
            self._steps, parts, self._tokens.read(), self._requests.read(), busy, *transfers
        )
