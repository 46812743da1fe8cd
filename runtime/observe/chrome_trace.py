"""`--trace FILE`: the work of the loop and the device as a Chrome trace, for https://ui.perfetto.dev.

One track for the loop, one for each lane of the device, and counters for the shape of the batch:

    loop      plan | launch |  wait   | apply | send | plan | ...
    compute          |----- step 7 -----|   |----- step 8 -----|
    swap in        |--|
    swap out               |------|
    batch     rows that generate, prompt tokens; chunks swapped in and out

The file is a JSON array of events, written by a separate thread while the server runs. It can be viewed even without
its last bracket (after the server was killed). About 10 events for each step, 1.1 kB.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from ...scheduler.plan import Lane, StepPlan
from ...scheduler.types import SettingError
from ..device.protocol import Work

log = logging.getLogger(__name__)

MOST_QUEUED = 100_000  # entries that wait for the file; about 20 MB
LOOP = 0  # number of the loop's track; the lanes' numbers follow
TRACKS = {LOOP: "loop", **{1 + lane: f"device: {lane.name.lower()}" for lane in Lane}}


class _Part(NamedTuple):
    name: str
    start: float
    end: float
    step: int


class _Batch(NamedTuple):
    """The shape of a step."""

    time: float
    step: int
    generating_rows: int
    prompt_tokens: int
    swapped_in: int
    swapped_out: int


class TraceFile:
    """Filled by the loop's thread and the device's. No method except `close` waits for the disk."""

    def __init__(self, path: Path):
        """SettingError if the file cannot be written."""
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise SettingError("--trace", f"cannot write {path}: {error.strerror}") from error
        self._started = time.perf_counter()
        self._queue: SimpleQueue[_Part | _Batch | Work | None] = SimpleQueue()
        self._ended = False
        self._batches: deque[_Batch] = deque()  # of steps that compute and whose forward passes are not reported yet
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)
        self._thread.start()

    def part(self, name: str, start: float, end: float, step: int) -> None:
        """Adds a part of the loop's work for that step; seconds of `time.perf_counter`."""
        self._put(_Part(name, start, end, step))

    def launched(self, plan: StepPlan) -> None:
        """Adds the plan. Called before the device can have done any of it."""
        moved = [sum(len(batch.sources) for batch in plan.copies if batch.lane is lane) for lane in (Lane.IN, Lane.OUT)]
        self._put(_Batch(time.perf_counter(), plan.step, len(plan.generate), len(plan.token_ids), *moved))

    def work(self, work: Work) -> None:
        """Adds a report of `Device.watch`."""
        self._put(work)

    def close(self) -> None:
        """Writes the queued entries and ends the file. Idempotent."""
        self._end()
        self._thread.join()

    def _put(self, entry: _Part | _Batch | Work) -> None:
        if self._ended:
            return
        self._queue.put(entry)
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
                file.write("[\n" + ",\n".join(map(json.dumps, _head())))
                while (entry := self._queue.get()) is not None:
                    for event in self._events(entry):
                        file.write(",\n" + json.dumps(event))
                    if self._queue.empty():
                        file.flush()
                file.write("\n]\n")
        except OSError as error:
            log.error("the trace ends here: %s", error)
            self._ended = True

    def _events(self, entry: _Part | _Batch | Work) -> Iterator[dict[str, Any]]:
        match entry:
            case _Part(name, start, end, step):
                yield self._slice(LOOP, name, start, end, {"step": step})
            case _Batch():
                yield self._counters("batch", entry, "generating_rows", "prompt_tokens")
                yield self._counters("chunks swapped", entry, "swapped_in", "swapped_out")
                if entry.generating_rows or entry.prompt_tokens:
                    self._batches.append(entry)
            case Work(Lane.COMPUTE, start, end):
                shape = self._batches.popleft()._asdict()
                del shape["time"]
                yield self._slice(1 + Lane.COMPUTE, f"step {shape['step']}", start, end, shape)
            case Work(lane, start, end, size):
                yield self._slice(1 + lane, "copy", start, end, {"bytes": size, "GB/s": _speed(size, end - start)})

    def _slice(self, track: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": self._microseconds(start), "dur": round(1e6 * (end - start), 3)}
        return {"ph": "X", "pid": os.getpid(), "tid": track, "name": name, **times, "args": args}

    def _counters(self, name: str, batch: _Batch, *fields: str) -> dict[str, Any]:
        args = {field: getattr(batch, field) for field in fields}
        return {"ph": "C", "pid": os.getpid(), "name": name, "ts": self._microseconds(batch.time), "args": args}

    def _microseconds(self, moment: float) -> float:
        return round(1e6 * (moment - self._started), 3)


def _head() -> Iterator[dict[str, Any]]:
    """The names of the tracks, and their order."""
    process = {"ph": "M", "pid": os.getpid()}
    yield {**process, "name": "process_name", "args": {"name": "pensieve"}}
    for track, name in TRACKS.items():
        yield {**process, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {**process, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _speed(size: int, seconds: float) -> float | None:
    return round(size / seconds / 1e9, 2) if seconds > 0 else None
