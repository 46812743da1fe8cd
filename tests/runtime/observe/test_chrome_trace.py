"""The trace: reports of the loop and the device become events that a viewer shows in their
places."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pensieve.runtime.device.clock import WINDOW_S, DeviceClock
from pensieve.runtime.device.protocol import TransferSeconds, Work
from pensieve.runtime.device.timing import TransferTimes
from pensieve.runtime.observe import chrome_trace as trace_file
from pensieve.runtime.observe.chrome_trace import TraceFile
from pensieve.runtime.observe.loop_stats import PARTS, LoopCounters
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import SettingError

from ..fake_engine import copy, plan, span
from .test_loop_stats import Clock, FakeEvent


class Timepiece:
    """The host's clock, put forward by hand; seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 50.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Timepiece:
    return Timepiece(monkeypatch)


def slices(path: Path) -> list[tuple[int, str, float, float, dict[str, object]]]:
    """(track, name, start, end, arguments), times in milliseconds."""
    events = [event for event in json.loads(path.read_text()) if event["ph"] == "X"]
    return [
        (e["tid"], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["args"]) for e in events
    ]


def test_two_steps_of_the_loop(tmp_path: Path, host: Timepiece) -> None:
    """Step 2 is planned and launched while step 1 runs; the parts say to which step they belong."""
    trace = TraceFile(tmp_path / "trace.json")
    counters = LoopCounters(trace)
    plans = [
        plan(1, copies=[copy(Lane.IN, 1, {1: 2, 3: 4})], spans=[span(0, 0, 5)], token_ids=range(5)),
        plan(2, copies=[copy(Lane.OUT, 3, {7: 7})], generate={0: 5, 1: 9}),
    ]
    for step in plans:
        with counters.plan:
            host.now += 0.001
        counters.launching(step)
        with counters.launch:
            host.now += 0.001
        counters.launched(step)
    for step in plans:
        with counters.wait:
            host.now += 0.010
            trace.work(Work(Lane.COMPUTE, host.now - 0.008, host.now - 0.002, step.tokens))
        counters.finished()
        for part in (counters.apply, counters.send):
            with part:
                host.now += 0.001
    trace.work(Work(Lane.IN, 50.004, 50.006, 4_000_000))
    trace.close()
    loop = [
        (name, arguments["step"], start)
        for track, name, start, _, arguments in slices(tmp_path / "trace.json")
        if not track
    ]
    assert loop == [
        ("plan", 1, 0),
        ("launch", 1, 1),
        ("plan", 2, 2),
        ("launch", 2, 3),
        ("wait", 1, 4),
        ("apply", 1, 14),
        ("send", 1, 15),
        ("wait", 2, 16),
        ("apply", 2, 26),
        ("send", 2, 27),
    ]
    first, second, copied = (event for event in slices(tmp_path / "trace.json") if event[0])
    shape = {"generating_rows": 0, "given_tokens": 5, "swapped_in": 2, "swapped_out": 0}
    assert first == (1, "step 1", 6, 12, {"step": 1, **shape})
    assert (
        second[1] == "step 2"
        and second[4]["generating_rows"] == 2
        and second[4]["swapped_out"] == 1
    )
    assert copied == (2, "copy", 4, 6, {"bytes": 4_000_000, "GB/s": 2.0})
    assert set(counters.read(TransferSeconds()).parts) == set(PARTS) == {name for name, *_ in loop}


def test_a_plan_without_tokens_has_no_forward_pass(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    trace.launched(plan(1, copies=[copy(Lane.OUT, 1, {1: 1})]))
    trace.launched(plan(2, generate={0: 1}))
    trace.work(Work(Lane.COMPUTE, 1.0, 2.0, 1))
    trace.close()
    assert [name for _, name, *_ in slices(tmp_path / "trace.json")] == ["step 2"]


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--trace"):
        TraceFile(tmp_path / "missing" / "trace.json")


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    trace = TraceFile(Path("/dev/full"))
    for step in range(1, 100):
        trace.launched(plan(step, generate={0: 1}))
    trace._thread.join(60)
    trace.launched(plan(100, generate={0: 1}))
    trace.close()
    trace.close()
    assert "the trace ends here" in caplog.text and "No space left" in caplog.text


def test_a_slow_disk_ends_the_trace_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe without a reader takes 64 KiB. Entries queued until then are written when it is
    read."""
    monkeypatch.setattr(trace_file, "MOST_QUEUED", 10)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    trace = TraceFile(tmp_path / "pipe")
    for step in range(1, 2000):
        trace.launched(plan(step, generate={0: 1}))
        time.sleep(0 if trace._ended else 1e-4)
    assert "too slowly" in caplog.text and trace._queue.qsize() <= 12
    os.set_blocking(reader, True)
    with ThreadPoolExecutor(1) as pool, open(reader) as pipe:
        text = pool.submit(pipe.read)
        trace.close()
        events = json.loads(text.result(60))
    assert events[-1]["ph"] == "C"


# -- the device's clock


def test_events_are_placed_on_the_clock_of_the_host_though_the_clocks_drift(
    host: Timepiece,
) -> None:
    """The device's clock is 100 ppm fast; the host sees each end 20 us late, or much later. After
    ten minutes an event's error is at most the drift of two windows."""
    first = FakeEvent(0.0)
    clock = DeviceClock(first)

    def at(seconds: float) -> FakeEvent:
        return FakeEvent(1e3 * seconds * (1 + 1e-4))

    for number in range(1, 60_000):
        since = number * 0.01
        host.now = 50.0 + since + (20e-6 if number % 7 else 5e-3)
        clock.seen(at(since))
    for since in (599.0, 599.9, 599.99):
        assert clock.read(at(since)) == pytest.approx(50.0 + since, abs=2 * WINDOW_S * 1e-4 + 20e-6)


def test_a_watched_device_reports_copies_and_every_step(host: Timepiece) -> None:
    events = Clock()
    work = []
    times = TransferTimes(
        events.event, {Lane.COMPUTE: "compute", Lane.IN: "in", Lane.OUT: "out"}, "idle"
    )
    times.loaded(4)
    times.watch(work.append, lambda event: setattr(event, "at", 0.0))
    times.copy(Lane.OUT, 640, lambda: None)
    times.step(8, lambda: None)
    times.read()
    assert not work, "nothing is complete"
    _, *ends = events.events
    for event, at in zip(ends, (0.0, 1.0, 3.0, 2.0, 7.0), strict=True):
        event.at = at
    times.read()
    assert work == [
        Work(Lane.OUT, pytest.approx(50.001), pytest.approx(50.003), 640),
        Work(Lane.COMPUTE, pytest.approx(50.002), pytest.approx(50.007), 8),
    ]
