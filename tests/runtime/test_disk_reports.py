"""Reports of several ranks become one, each slot once; records of several ranks are those that all have."""

from __future__ import annotations

import random

import pytest

from pensieve.runtime.disk_reports import DiskReport, RankReports, common_records
from pensieve.scheduler.types import ChunkKey, DiskRecord


def test_a_slot_is_done_when_the_last_rank_says_so() -> None:
    reports = RankReports(2)
    assert reports.merge([DiskReport(spilled=(3, 4)), DiskReport(spilled=(4,))]) == DiskReport(spilled=(4,))
    assert reports.merge([DiskReport(promoted=(7,)), DiskReport()]) == DiskReport()
    assert reports.merge([DiskReport(), DiskReport(spilled=(3,), promoted=(7,))]) == DiskReport((3,), (7,))
    assert reports.merge([DiskReport(spilled=(3,)), DiskReport(spilled=(3,))]) == DiskReport((3,)), "used again"


def test_one_rank_s_failure_fails_the_slot_but_only_when_all_have_ended() -> None:
    reports = RankReports(3)
    assert reports.merge([DiskReport(failed=(5,)), DiskReport(promoted=(5,)), DiskReport()]) == DiskReport()
    assert reports.merge([DiskReport(), DiskReport(), DiskReport(promoted=(5,))]) == DiskReport(failed=(5,))
    assert reports.merge([DiskReport(promoted=(5,))] * 3) == DiskReport(promoted=(5,)), "and is forgotten"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_reports_give_each_slot_once(ranks: int) -> None:
    rng = random.Random(ranks)
    reports, slots = RankReports(ranks), list(range(100))
    fails = {slot: [rng.random() < 0.1 for _ in range(ranks)] for slot in slots}
    queues = [rng.sample(slots, len(slots)) for _ in range(ranks)]
    merged: list[DiskReport] = []
    while any(queues):
        said = []
        for rank, queue in enumerate(queues):
            taken = [queue.pop() for _ in range(min(len(queue), rng.randrange(6)))]
            failed = tuple(slot for slot in taken if fails[slot][rank])
            said.append(DiskReport(spilled=tuple(slot for slot in taken if not fails[slot][rank]), failed=failed))
        merged.append(reports.merge(said))
    failed = [slot for report in merged for slot in report.failed]
    assert sorted([*failed, *(slot for report in merged for slot in report.spilled)]) == slots
    assert sorted(failed) == [slot for slot in slots if any(fails[slot])]


def record(slot: int, key: int, age: float = 1.0) -> DiskRecord:
    return DiskRecord(slot, ChunkKey(bytes([key]) * 32), 32 * key, age)


def test_common_records_are_in_the_same_slot_on_every_rank() -> None:
    first = [record(0, 1), record(1, 2), record(2, 3), record(3, 4, age=5.0)]
    second = [record(3, 4, age=9.0), record(1, 7), record(2, 3), record(4, 1)]
    assert common_records([first, second]) == [record(2, 3), record(3, 4, age=9.0)]
    assert common_records([first]) == first
    assert common_records([first, []]) == []
