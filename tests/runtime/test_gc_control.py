"""Cyclic garbage is looked for between steps, when there is time, and never by Python itself
meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pensieve.runtime import gc_control as garbage
from pensieve.runtime.gc_control import DUE, SPARE_SECONDS, TOO_MANY, GarbageCollector

# lists from Python's free list are not counted
DUE_OBJECTS = 2 * DUE
TOO_MANY_OBJECTS = TOO_MANY + DUE


class Ring:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[GarbageCollector]:
    with GarbageCollector() as opened:
        yield opened


def ring() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


def objects(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def test_pythons_own_collector_is_off_inside_only() -> None:
    with pytest.raises(KeyError), GarbageCollector():
        assert not gc.isenabled() and gc.get_freeze_count()
        raise KeyError
    assert gc.isenabled() and not gc.get_freeze_count()


def test_a_collector_that_was_off_before_stays_off() -> None:
    gc.disable()
    try:
        with GarbageCollector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_looked_for_once_there_may_be_some_and_there_is_time(
    collector: GarbageCollector,
) -> None:
    lost = ring()
    assert not collector.due(spare=1.0), "there is next to nothing"
    kept = objects(DUE_OBJECTS)
    assert not collector.due(spare=DUE * SPARE_SECONDS / 2), "the device would have to wait"
    assert collector.due(spare=1.0) and lost()
    collector.collect_new()
    assert not lost() and not collector.due(spare=1.0)
    kept += objects(TOO_MANY_OBJECTS)
    assert collector.due(spare=0.0), "there is never time"


def grown_old(collector: GarbageCollector) -> weakref.ref[Ring]:
    """An object that has survived a collection and is now garbage."""
    old = Ring()
    collector.collect_new()
    return weakref.ref(old)


def test_old_objects_are_examined_without_waiting_requests_if_many_are_new(
    collector: GarbageCollector,
) -> None:
    lost = grown_old(collector)
    kept = objects(DUE_OBJECTS)
    collector.collect_new()
    assert lost() and kept, "it has been there for long"
    collector.collect_idle()
    assert not lost()
    lost = grown_old(collector)
    collector.collect_idle()
    assert not lost(), "there was a look at new objects"
    lost = ring()
    collector.collect_idle()
    assert lost(), "next to nothing has been made"


def test_old_objects_are_examined_in_the_end_though_requests_always_wait(
    collector: GarbageCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = grown_old(collector)
    monkeypatch.setattr(garbage, "ALL_SECONDS", -1.0)
    collector.collect_new()
    assert not lost()
