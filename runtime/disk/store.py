"""One rank's disk tier: does the spills, promotions and erasures of plans in threads, so that the
loop never waits.

    begin(work)     hands a plan's work to the threads and returns
    take()          returns the work that has ended since, each slot once

Separate threads read and write, so no turn waits behind records that are being spilled.
Neighbouring records are read and written with one call.

A failure of the disk is not an error: a record that cannot be written, read or verified is reported
as failed, and its chunk is recomputed.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...scheduler.plan import Promotion, Spill, TierReport, TierWork
from ...scheduler.types import InvariantError, SettingError, StoredRecord, Tier
from ..counters import DiskCounters
from .directory import RecordOrigin, open_directory
from .record import PAGE, pack_header, payload_intact, read_header, record_bytes
from .segments import SEGMENT_BYTES, Segments, SystemCalls, aligned_buffer

log = logging.getLogger(__name__)

READERS, WRITERS = 8, 4  # threads; a solid-state disk is fastest with several requests at once
MERGED_BYTES = 4 * 2**20  # bytes of one call; larger calls are not faster
COMPLAINT_SECONDS = 60.0  # least time between two log messages about failures
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a user's quota, a file's limit

Work = TypeVar("Work", Spill, Promotion)


class DiskSettings(NamedTuple):
    """The directory of the records, their number, and the parts of their `RecordOrigin`
    (`chunk_bytes` is the device's)."""

    directory: Path
    slots: int
    engine: str
    ranks: int = 1
    rank: int = 0
    system: SystemCalls = SystemCalls()
    segment_bytes: int = SEGMENT_BYTES


class DiskStore:
    """Reads and writes records in its own threads. One thread calls its methods."""

    tier = Tier.DISK

    def __init__(
        self, settings: DiskSettings, chunk_tokens: int, host_record: Callable[[int], np.ndarray]
    ):
        """host_record: returns the bytes of a HOST slot, [bytes] uint8, as `Device.record`; the
        threads call it too.

        SettingError('--disk-dir') if the directory cannot be used.
        """
        payload = len(host_record(0))
        origin = RecordOrigin(settings.engine, chunk_tokens, payload, settings.ranks, settings.rank)
        self._directory = open_directory(settings.directory, origin)
        self._origin = origin.digest
        self._payload = payload
        self._record = record_bytes(payload)
        self._host_record = host_record
        try:
            self._segments = Segments(
                self._directory,
                settings.slots,
                self._record,
                settings.system,
                settings.segment_bytes,
            )
        except OSError as error:
            raise SettingError("--disk-dir", f"cannot use {self._directory}: {error}") from error
        self._most_merged = max(1, MERGED_BYTES // self._record)
        self._readers = ThreadPoolExecutor(READERS, "disk-read")
        self._writers = ThreadPoolExecutor(WRITERS, "disk-write")
        # a thread of its own, because a plan waits for it
        self._eraser = ThreadPoolExecutor(1, "disk-erase")
        self._own = threading.local()  # each thread's buffer

        # Used only while the condition is held.
        self._changed = threading.Condition()
        self._under_way: set[int] = set()  # DISK slots
        self._report: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._counters = DiskCounters()
        self._silent_until = 0.0
        self._error: BaseException | None = None

    # -- called by the loop

    def records(self) -> list[StoredRecord]:
        """Returns the records of an earlier process. Reads headers only; payloads are checked when
        they are read. Blocks.

        Records that cannot be read now are erased: otherwise a later deletion would miss them, and
        the next start might find them.
        """
        now = time.time()
        unreadable = list[int]()
        read = self._readers.map(
            lambda slot: self._look(slot, now, unreadable), self._segments.present()
        )
        records = [record for record in read if record is not None]
        self.erase(unreadable)
        return records

    def erase(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Erases the slots' records; on return they cannot be read again, even after a power
        failure. Returns the slots that the disk refused to erase. The slots must not be in use by
        any work."""
        page = aligned_buffer(PAGE)  # zeros
        written: list[int] = []
        refused: list[int] = []
        errors: list[OSError] = []
        for slot in slots:
            try:
                if self._segments.holds(slot):
                    self._segments.write(slot, [page], make=False)
                    written.append(slot)
            except OSError as error:
                refused.append(slot)
                errors.append(error)
        try:
            self._segments.flush(written)
        except OSError as error:
            refused += written
            errors.append(error)
        if errors:
            self._count(errors=len(errors))
            log.error(
                "%s: %d records, perhaps of deleted conversations, may still be on disk: %s",
                self._directory,
                len(refused),
                errors[0],
            )
        return tuple(refused)

    def begin(self, work: TierWork) -> Future[tuple[int, ...]] | None:
        """Begins a plan's work. The future's result is that of `erase` for the `erased` slots; None
        if there are none.

        Raises the error that ended a thread, if there is one, and InvariantError if a slot is
        already in use by other work.
        """
        self._raise_error()
        began = time.perf_counter()
        slots = [
            *(spill.slot for spill in work.spills),
            *(promotion.slot for promotion in work.promotions),
            *work.erased,
        ]
        with self._changed:
            if len(set(slots)) < len(slots) or not self._under_way.isdisjoint(slots):
                raise InvariantError(f"a plan uses a DISK slot that is in use: {slots}")
            self._under_way.update(slots[: len(slots) - len(work.erased)])
            self._count(spilling=len(work.spills), promoting=len(work.promotions))
        for spills in self._runs(work.spills):
            self._writers.submit(self._guarded, self._spill, spills, began)
        for promotions in self._runs(work.promotions):
            self._readers.submit(self._guarded, self._promote, promotions, began)
        return self._eraser.submit(self.erase, work.erased) if work.erased else None

    @property
    def busy(self) -> bool:
        """True if any work has begun whose end has not been taken."""
        return bool(self._under_way or any(self._report))

    def wait(self, seconds: float) -> None:
        """Returns when a report can be taken, or after `seconds` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._report) or self._error is not None, seconds)

    def take(self) -> TierReport:
        """Returns the work that has ended since the last call. Raises the error that ended a
        thread, if there is one."""
        self._raise_error()
        with self._changed:
            spilled, promoted, failed = map(tuple, self._report)
            for slots in self._report:
                slots.clear()
        return TierReport(self.tier, spilled, promoted, failed)

    @property
    def counters(self) -> DiskCounters:
        return self._counters

    def close(self) -> bool:
        """Finishes work that has begun and drops the rest. Returns True: no thread uses HOST slots.
        Idempotent."""
        for threads in (self._readers, self._writers, self._eraser):
            threads.shutdown(cancel_futures=True)
        self._segments.close()
        return True

    # -- run by the threads

    def _guarded(
        self, work: Callable[[list[Work], float], None], run: list[Work], began: float
    ) -> None:
        try:
            work(run, began)
        except BaseException as error:  # carried to the loop's thread, which raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _spill(self, run: list[Spill], began: float) -> None:
        queued = (time.perf_counter() - began) * len(run)
        done = self._one_or_all([run], self._write)
        took = (time.perf_counter() - began) * len(run)
        size = len(done) * self._record
        with self._changed:
            self._end(run, done, 0)
            self._count(
                spilling=-len(run),
                spilled=len(done),
                spilled_bytes=size,
                spilling_seconds=took,
                spilling_queued=queued,
            )

    def _promote(self, run: list[Promotion], began: float) -> None:
        queued = (time.perf_counter() - began) * len(run)
        done = self._one_or_all([run], self._read)
        took = (time.perf_counter() - began) * len(run)
        size = len(done) * self._record
        with self._changed:
            self._end(run, done, 1)
            self._count(
                promoting=-len(run),
                promoted=len(done),
                promoted_bytes=size,
                promoting_seconds=took,
                promoting_queued=queued,
            )

    def _end(self, run: Sequence[Work], done: set[int], kind: int) -> None:
        """Called while the condition is held. `kind`: index in the report for the slots that
        succeeded."""
        for work in run:
            self._under_way.discard(work.slot)
            self._report[kind if work.slot in done else 2].append(work.slot)
        self._changed.notify_all()

    def _one_or_all(
        self, runs: Iterable[list[Work]], transfer: Callable[[list[Work]], set[int]]
    ) -> set[int]:
        """Returns the DISK slots that succeeded. If a run fails as a whole, its records are tried
        one by one."""
        done: set[int] = set()
        for run in runs:
            try:
                done |= transfer(run)
            except OSError as error:
                if len(run) > 1 and error.errno not in NO_ROOM:
                    done |= self._one_or_all(([work] for work in run), transfer)
                else:
                    self._trouble(error)
        return done

    def _write(self, run: list[Spill]) -> set[int]:
        buffers: list[Any] = []
        for spill, buffer in zip(run, self._buffers(), strict=False):
            payload = self._host_record(spill.host)
            buffer[:PAGE] = np.frombuffer(
                pack_header(spill.key, spill.end, self._origin, time.time(), payload), np.uint8
            )
            if self._in_place(payload):
                buffers += [buffer[:PAGE], payload]
            else:
                buffer[PAGE : PAGE + len(payload)] = payload
                buffers.append(buffer)
        self._segments.write(run[0].slot, buffers)
        if self._counters.full:
            self._not_full()
        return {spill.slot for spill in run}

    def _read(self, run: list[Promotion]) -> set[int]:
        """Reads records. Returns the DISK slots whose record is the expected one."""
        buffers: list[Any] = []
        read = []
        for promotion, buffer in zip(run, self._buffers(), strict=False):
            payload = self._host_record(promotion.host)
            in_place = self._in_place(payload)
            buffers += [buffer[:PAGE], payload] if in_place else [buffer]
            read.append((promotion, buffer, payload, in_place))
        self._segments.read(run[0].slot, buffers)
        intact = set()
        for promotion, buffer, payload, in_place in read:
            page = buffer[:PAGE].data
            content = payload if in_place else buffer[PAGE : PAGE + len(payload)]
            header = read_header(page, self._origin, len(payload))
            if header is None or header.key != promotion.key or not payload_intact(page, content):
                self._reject(promotion)
                continue
            if not in_place:
                payload[:] = content
            intact.add(promotion.slot)
        return intact

    def _look(self, slot: int, now: float, unreadable: list[int]) -> StoredRecord | None:
        page = self._buffers()[0][:PAGE].data
        try:
            self._segments.read(slot, [page])
        except OSError as error:
            self._trouble(error)
            unreadable.append(slot)
            return None
        header = read_header(page, self._origin, self._payload)
        return (
            None
            if header is None
            else StoredRecord(slot, header.key, header.end, max(0.0, now - header.written))
        )

    # -- internal

    def _runs(self, work: Sequence[Work]) -> list[list[Work]]:
        """Sorts the work by slot and groups records that one call can move."""
        runs: list[list[Work]] = []
        for one in sorted(work, key=lambda one: one.slot):
            if (
                runs
                and len(runs[-1]) < self._most_merged
                and self._segments.neighbours(runs[-1][-1].slot, one.slot)
            ):
                runs[-1].append(one)
            else:
                runs.append([one])
        return runs

    def _buffers(self) -> list[np.ndarray]:
        """Buffers of this thread for the records of a run, [bytes] uint8 each. If payloads are
        transferred in place, only the header pages are used."""
        if not hasattr(self._own, "buffers"):
            buffer = np.frombuffer(aligned_buffer(self._most_merged * self._record), np.uint8)
            self._own.buffers = list(buffer.reshape(self._most_merged, self._record))
        buffers: list[np.ndarray] = self._own.buffers
        return buffers

    @staticmethod
    def _in_place(payload: np.ndarray) -> bool:
        """Returns whether O_DIRECT can transfer these bytes in place."""
        return payload.ctypes.data % PAGE == 0 and len(payload) % PAGE == 0

    def _count(self, **changes: float) -> None:
        with self._changed:
            values = {
                name: getattr(self._counters, name) + change for name, change in changes.items()
            }
            self._counters = self._counters._replace(**values)

    def _trouble(self, error: OSError) -> None:
        """Handles a refusal of the system. A full disk is logged once, until it accepts a record
        again."""
        self._count(errors=1)
        if error.errno not in NO_ROOM:
            self._complain(f"the disk fails: {error}")
            return
        with self._changed:
            if self._counters.full:
                return
            self._count(full=1)
        log.error("%s: the disk is full; no KV is spilled until there is room", self._directory)

    def _not_full(self) -> None:
        with self._changed:
            if not self._counters.full:
                return  # another writer was first
            self._count(full=-1)
        log.warning("%s: there is room again", self._directory)

    def _reject(self, promotion: Promotion) -> None:
        self._count(rejected=1)
        self._complain(
            f"the record in slot {promotion.slot} is not intact, or another's; its chunk is "
            "computed again"
        )

    def _complain(self, message: str) -> None:
        with self._changed:
            now = time.monotonic()
            if now < self._silent_until:
                return
            self._silent_until = now + COMPLAINT_SECONDS
        log.error("%s: %s", self._directory, message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
