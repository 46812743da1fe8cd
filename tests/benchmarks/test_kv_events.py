"""The cost of KV events, measured on a small scheduler."""

from __future__ import annotations

from benchmarks.kv_events import periods, thread_times
from benchmarks.scheduler import SchedulerLoad


def test_a_loop_is_measured_with_and_without_events():
    line = periods(SchedulerLoad(600, 1_200, 8), step_s=0.0, rounds=2, steps=3)
    assert (line["rows"], line["device_ms"]) == (8, 0.0)
    assert line["off_ms"] > 0 and line["on_ms"] > 0 and line["ratio"] > 0


def test_a_change_of_the_first_chunk_is_the_whole_conversation():
    sizes = {line["change"]: line["bytes"] for line in thread_times()}
    assert sizes["the next one goes to HOST"] < 100 < sizes["the first one is dropped"]
    assert sizes["the first one goes to HOST"] > 90_000
