"""`--trace FILE`: the work of the loop and the device as a Chrome trace, for
https://ui.perfetto.dev.

One track for the loop, one for each lane of the device, and counters for the shape of the batch:

    loop      plan | launch |  wait   | apply | send | plan | ...
    compute          |----- step 7 -----|   |----- step 8 -----|
    swap in        |--|
    swap out               |------|
    batch     rows that generate, prompt tokens; chunks swapped in and out

The file is a JSON array of events, written by a separate thread while the server runs. It can be
viewed even without its last bracket (after the server was killed). About 10 events for each step,
1.1 kB.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ...scheduler.plan import Lane, StepPlan
from ...scheduler.types import SettingError
from ..device.protocol import Work

log = logging.getLogger(__name__)

MOST_QUEUED = 100_000  # entries that wait for the file; about 20 MB
LOOP = 0  # number of the loop's track; the lanes' numbers follow
TRACKS = {LOOP: "loop", **{1 + lane: f"device: {lane.name.lower()}" for lane in Lane}}


class TraceFile:
    """Filled by the loop's thread and the device's. No method except `close` waits for the disk."""

    def __init__(self, path: Path):
        """SettingError if the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SettingError("--trace", f"cannot write {path}: {error.strerror}") from error
        self._started = time.perf_counter()
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._ended = False
        # of steps that compute and whose work is not reported yet
        self._shapes: deque[dict[str, int]] = deque()
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def part(self, name: str, start: float, end: float, step: int) -> None:
        """Adds a part of the loop's work for that step; seconds of `time.perf_counter`."""
        self._slice(LOOP, name, start, end, {"step": step})

    def launched(self, plan: StepPlan) -> None:
        """Adds the plan. Called before the device can have done any of it."""
        rows = {"generating_rows": len(plan.generate), "given_tokens": len(plan.token_ids)}
        moved = {
            f"swapped_{way}": _chunks(plan, lane)
            for way, lane in (("in", Lane.IN), ("out", Lane.OUT))
        }
        if any(rows.values()):
            self._shapes.append({"step": plan.step, **rows, **moved})
        now = self._microseconds(time.perf_counter())
        for name, shape in (("batch", rows), ("chunks swapped", moved)):
            self._put({"ph": "C", "name": name, "ts": now, "args": shape})

    def work(self, work: Work) -> None:
        """Adds a report of `Device.watch`."""
        if work.lane is Lane.COMPUTE:
            shape = self._shapes.popleft()
            self._slice(1 + work.lane, f"step {shape['step']}", work.start, work.end, shape)
        else:
            speed = _speed(work.size, work.end - work.start)
            self._slice(
                1 + work.lane, "copy", work.start, work.end, {"bytes": work.size, "GB/s": speed}
            )

    def close(self) -> None:
        """Writes the queued entries and ends the file. Idempotent."""
        self._end()
        self._thread.join()

    def _slice(
        self, track: int, name: str, start: float, end: float, args: Mapping[str, Any]
    ) -> None:
        times = {"ts": self._microseconds(start), "dur": round(1e6 * (end - start), 3)}
        self._put({"ph": "X", "tid": track, "name": name, **times, "args": args})

    def _put(self, event: dict[str, Any]) -> None:
        if self._ended:
            return
        self._queue.put(event)
        if self._queue.qsize() > MOST_QUEUED:
            log.error("the trace ends here: the disk takes it too slowly")
            self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queue.put(None)

    def _write(self) -> None:
        """Thread: until the end of the queue. A full disk ends the trace, not the server."""
        try:
            with self._file as file:
                file.write("[\n" + ",\n".join(map(_line, _head())))
                while (event := self._queue.get()) is not None:
                    file.write(",\n" + _line(event))
                    if self._queue.empty():
                        file.flush()
                file.write("\n]\n")
        except OSError as error:
            log.error("the trace ends here: %s", error)
            self._ended = True

    def _microseconds(self, moment: float) -> float:
        return round(1e6 * (moment - self._started), 3)


def _head() -> Iterator[dict[str, Any]]:
    """The names of the tracks, and their order."""
    yield {"ph": "M", "name": "process_name", "args": {"name": "pensieve"}}
    for track, name in TRACKS.items():
        yield {"ph": "M", "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _line(event: Mapping[str, Any]) -> str:
    return json.dumps({"pid": os.getpid(), **event})


def _chunks(plan: StepPlan, lane: Lane) -> int:
    """How many are copied on that lane."""
    return sum(len(batch.sources) for batch in plan.copies if batch.lane is lane)


def _speed(size: int, seconds: float) -> float | None:
    return round(size / seconds / 1e9, 2) if seconds > 0 else None
