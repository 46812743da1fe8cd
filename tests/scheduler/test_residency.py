"""The tiers of conversations' chunks, reported in ranges."""

from __future__ import annotations

from .harness import Harness


def told(harness, most=1000):
    """All ranges, one after the other."""
    stretches = []
    start = 0
    while True:
        chunk_tokens, entries, following, begun = harness.scheduler.conversations.residency(
            start, most
        )
        assert (chunk_tokens, begun) == (harness.config.chunk_tokens, start)
        start = following
        stretches.append(entries)
        if not start:
            return stretches


def where(**chunks):
    return {"gpu": 0, "host": 0, "disk": 0, "shared": 0, "dropped": 0} | chunks


def test_chunks_are_counted_where_they_are():
    harness = Harness()
    assert told(harness) == [[]]
    harness.turn(range(18), 2, "a")  # four full chunks and a tail
    harness.turn(range(100, 108), 1, "b")
    assert told(harness) == [[("a", where(gpu=5)), ("b", where(gpu=2))]]
    harness.fork("a", "c")
    assert told(harness)[0][2] == ("c", where(gpu=4))
    harness.drain()


def test_what_was_swapped_out_or_dropped_is_told():
    harness = Harness()
    for number in range(12):
        harness.turn(range(100 * number, 100 * number + 18), 2, f"c{number}")
    (entries,) = told(harness)
    slots = harness.scheduler.stats().slots
    assert [sum(entry.chunks.values()) for entry in entries] == [5] * 12
    assert sum(entry.chunks["gpu"] for entry in entries) <= 24 - slots["gpu"]["free"]
    assert sum(entry.chunks["host"] for entry in entries) == slots["host"]["idle"] > 0
    assert (
        sum(entry.chunks["dropped"] for entry in entries) == harness.scheduler.stats().dropped > 0
    )
    harness.drain()


def test_a_stretch_ends_when_enough_has_been_looked_at():
    harness = Harness()
    for number in range(5):
        harness.turn(range(100 * number, 100 * number + 9), 1, f"c{number}")
    (whole,) = told(harness)
    stretches = told(harness, most=4)
    assert [len(entries) for entries in stretches] == [2, 2, 1]
    assert [entry for entries in stretches for entry in entries] == whole
    assert harness.scheduler.conversations.residency(5, 4).conversations == []
    harness.drain()
