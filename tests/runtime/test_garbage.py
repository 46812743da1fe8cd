"""Cyclic garbage is looked for between steps, when there is time, and never by Python itself meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from pensieve.runtime import garbage
from pensieve.runtime.garbage import NEW, SECONDS, TOO_MANY, GarbageCollector


class Ring:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[GarbageCollector]:
    with GarbageCollector() as made:
        yield made


def ring() -> weakref.ref[Ring]:
    return weakref.ref(Ring())


def test_pythons_own_collector_is_off_inside_only() -> None:
    with pytest.raises(KeyError), GarbageCollector():
        assert not gc.isenabled() and gc.get_freeze_count()
        raise KeyError
    assert gc.isenabled() and not gc.get_freeze_count()


def test_it_is_looked_for_once_there_may_be_some_and_there_is_time(collector: GarbageCollector) -> None:
    lost, kept = ring(), []
    assert not collector.collect_new(spare=1.0), "there is next to nothing"
    kept += [[] for _ in range(NEW)]
    assert not collector.collect_new(spare=SECONDS / 2) and lost(), "the device would have to wait"
    assert collector.collect_new(spare=SECONDS) and not lost()
    assert not collector.collect_new(spare=1.0)
    kept += [[] for _ in range(TOO_MANY)]
    assert collector.collect_new(spare=0.0), "there is never time"


def test_what_is_old_is_looked_at_when_nobody_waits(collector: GarbageCollector) -> None:
    old, kept = Ring(), [[] for _ in range(NEW)]
    lost = weakref.ref(old)
    assert collector.collect_new(spare=1.0) and kept
    del old
    kept += [[] for _ in range(NEW)]
    assert collector.collect_new(spare=1.0) and lost(), "it has been there for long"
    collector.collect_all()
    assert not lost()


def test_what_is_old_is_looked_at_in_the_end_though_somebody_always_waits(
    collector: GarbageCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, kept = Ring(), [[] for _ in range(NEW)]
    lost = weakref.ref(old)
    assert collector.collect_new(spare=1.0)
    del old
    kept += [[] for _ in range(NEW)]
    monkeypatch.setattr(garbage, "FULL_SECONDS", -1.0)
    assert collector.collect_new(spare=1.0) and not lost() and kept
