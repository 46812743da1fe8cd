"""What became of work for the disk, and which records all ranks have: made of what the ranks say, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..scheduler.types import ChunkKey, DiskRecord


class DiskReport(NamedTuple):
    """DISK slots whose work has ended since the last report, as in `StepResult`."""

    spilled: tuple[int, ...] = ()
    promoted: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


class RankReports:
    """Of several ranks: a slot's work has ended when it has on every rank, and failed if it did on one.

    Ranks report the same work, each at its own time. One rank's failure alone ends nothing: the others may still be at
    work in the slot.
    """

    def __init__(self, ranks: int):
        self._ranks = ranks
        self._ended: dict[int, int] = {}  # by slot, on how many ranks
        self._failed: set[int] = set()

    def merge(self, reports: Sequence[DiskReport]) -> DiskReport:
        """One more report of each rank, in any order. What has ended with them, in the order in which it did."""
        spilled: list[int] = []
        promoted: list[int] = []
        failed: list[int] = []
        for report in reports:
            for slots, done in ((report.spilled, spilled), (report.promoted, promoted), (report.failed, failed)):
                for slot in slots:
                    if done is failed:
                        self._failed.add(slot)
                    self._ended[slot] = self._ended.get(slot, 0) + 1
                    if self._ended[slot] == self._ranks:
                        del self._ended[slot]
                        (failed if slot in self._failed else done).append(slot)
                        self._failed.discard(slot)
        return DiskReport(tuple(spilled), tuple(promoted), tuple(failed))


def common_records(ranks: Sequence[Sequence[DiskRecord]]) -> list[DiskRecord]:
    """The records that every rank has in the same slot, in order of slots; as old as the oldest part."""
    parts: dict[tuple[int, ChunkKey, int], list[float]] = {}
    for records in ranks:
        for record in records:
            parts.setdefault((record.slot, record.key, record.end), []).append(record.age_s)
    whole = [
        DiskRecord(slot, key, end, max(ages)) for (slot, key, end), ages in parts.items() if len(ages) == len(ranks)
    ]
    return sorted(whole)
