"""The disk tier by itself: plans made by hand, HOST slots as rows of an array, and a system that
fails on purpose."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading

import numpy as np
import pytest

from pensieve.runtime.disk import segments as disk_files
from pensieve.runtime.disk.record import PAGE, record_bytes
from pensieve.runtime.disk.segments import SystemCalls, aligned_buffer
from pensieve.runtime.disk.store import DiskSettings, DiskStore
from pensieve.scheduler.kv.piece_keys import StatePiece, piece_key
from pensieve.scheduler.plan import Promotion, Spill, TierReport, TierWork
from pensieve.scheduler.types import InvariantError, SettingError

SLOTS = 20
SEGMENT_SLOTS = 8
SIZES = [3000, PAGE]  # copied through a buffer, and perhaps in place


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def report(**slots):
    return TierReport(DiskStore.tier, **slots)


class Tier:
    """A store and the HOST slots it works on, a context manager."""

    def __init__(self, directory, payload=3000, system=SystemCalls(), engine="ab", slots=SLOTS):  # noqa: B008
        self.host = np.frombuffer(
            np.random.default_rng(0).bytes(SLOTS * payload), np.uint8
        ).reshape(SLOTS, payload)
        self.host = self.host.copy()
        self.content = self.host.copy()
        self.files = directory / "rank-0"
        settings = DiskSettings(
            directory,
            slots,
            engine,
            system=system,
            segment_bytes=SEGMENT_SLOTS * record_bytes(payload),
        )
        self.store = DiskStore(settings, 32, self.host.__getitem__)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    def begin(self, **work):
        return self.store.begin(
            TierWork(DiskStore.tier, **{name: tuple(value) for name, value in work.items()})
        )

    def erase(self, *slots):
        """Returns the slots that could not be erased."""
        return self.begin(erased=slots).result()

    def finished(self) -> TierReport:
        """All reports until nothing is under way, put together and sorted."""
        reports = []
        while self.store.busy:
            self.store.wait(1.0)
            reports.append(self.store.take())
        slots = (report[1:-1] for report in reports)  # without the tier and the seconds of a read
        fields = zip(*slots, strict=True)
        return TierReport(
            DiskStore.tier,
            *(tuple(sorted(slot for part in parts for slot in part)) for parts in fields),
        )

    def save(self, slots, **more) -> TierReport:
        """HOST slot n as the record of key n in DISK slot n."""
        self.begin(spills=[Spill(slot, slot, key(slot), 32 * slot) for slot in slots], **more)
        return self.finished()

    def load(self, slots, keys=None, into=None) -> TierReport:
        """Back into emptied HOST slots."""
        into = into or slots
        self.host[list(into)] = 0
        self.begin(
            promotions=[
                Promotion(n, at, k)
                for n, at, k in zip(slots, into, keys or map(key, slots), strict=True)
            ]
        )
        return self.finished()

    def flip(self, slot, offset, mask=1):
        """A bit of the slot's record on disk."""
        path = self.files / f"{slot // SEGMENT_SLOTS:06}.kv"
        with open(path, "r+b") as file:
            file.seek(slot % SEGMENT_SLOTS * record_bytes(self.host.shape[1]) + offset)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ mask]))


@pytest.fixture(params=SIZES)
def tier(request, tmp_path):
    with Tier(tmp_path, request.param) as opened:
        yield opened


def test_records_come_back_as_they_were(tier):
    everything = tuple(range(SLOTS))
    assert tier.save(everything) == report(spilled=everything)
    assert tier.load(everything) == report(promoted=everything)
    assert (tier.host == tier.content).all()
    assert tier.load([3, 11, 4], into=[7, 8, 9]) == report(promoted=(3, 4, 11))
    assert (tier.host[[7, 8, 9]] == tier.content[[3, 11, 4]]).all()
    counters = tier.store.counters
    assert (counters.spilled, counters.promoted, counters.spilling, counters.promoting) == (
        SLOTS,
        SLOTS + 3,
        0,
        0,
    )
    assert (
        counters.spilled_bytes == SLOTS * record_bytes(tier.host.shape[1])
        and counters.promoting_seconds > 0
    )
    assert 0 < counters.spilling_queued < counters.spilling_seconds
    assert 0 < counters.promoting_queued < counters.promoting_seconds


def test_adjacent_records_go_in_one_call_and_none_across_segments(tmp_path):
    calls = []

    def write(file, buffers, offset):
        calls.append(sum(map(len, buffers)))
        return os.pwritev(file, buffers, offset)

    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        assert tier.save([9, 0, 1, 3, 2, 7, 8]).spilled == (0, 1, 2, 3, 7, 8, 9)
        assert sorted(calls) == [record_bytes(3000) * n for n in (1, 2, 4)]
        assert tier.load([9, 0, 1, 3, 2, 7, 8]).promoted == (0, 1, 2, 3, 7, 8, 9)
        assert (tier.host == tier.content).all()


def test_a_restart_finds_intact_records_with_their_keys_and_ages(tier, tmp_path):
    tier.save([0, 5, 19])
    tier.flip(5, 20)  # in the header
    tier.store.close()
    with Tier(tmp_path, tier.host.shape[1]) as again:
        records = again.store.records()
        assert [(record.slot, record.key, record.end) for record in records] == [
            (0, key(0), 0),
            (19, key(19), 608),
        ]
        assert all(0 <= record.age_s < 60 for record in records)
        assert again.load([0, 19]).promoted == (0, 19)
        assert (again.host[[0, 19]] == tier.content[[0, 19]]).all()


@pytest.mark.parametrize("change", [dict(engine="cd"), dict(payload=3001)])
def test_records_of_another_engine_are_dropped_with_a_word(tmp_path, change, caplog):
    with Tier(tmp_path) as tier:
        tier.save([1, 2])
    with Tier(tmp_path, **change) as tier:
        assert tier.store.records() == [] and "another engine" in caplog.text
        assert not list(tier.files.glob("*.kv"))


def test_a_planted_file_of_another_engine_is_not_read(tmp_path):
    """Even if the directory's own word about its origin were wrong."""
    (tmp_path / "one").mkdir()
    with Tier(tmp_path / "one", engine="cd") as tier:
        tier.save([1])
        files = tier.files
    with Tier(tmp_path / "two") as tier:
        (files / "000000.kv").rename(tier.files / "000000.kv")
        assert tier.store.records() == []
        assert tier.load([1]).failed == (1,)


def test_no_more_bytes_than_the_slots_take(tmp_path):
    with Tier(tmp_path) as tier:
        tier.save(range(SLOTS))
        assert sum(path.stat().st_size for path in tier.files.glob("*.kv")) == SLOTS * record_bytes(
            3000
        )
    with Tier(tmp_path, slots=10) as tier:
        assert sum(path.stat().st_size for path in tier.files.glob("*.kv")) == 10 * record_bytes(
            3000
        )
        assert [record.slot for record in tier.store.records()] == list(range(10))
    with Tier(tmp_path) as tier:
        assert tier.save(range(10, 20)).spilled == tuple(range(10, 20))
        assert len(tier.store.records()) == SLOTS


# -- damage


@pytest.mark.parametrize("offset", [0, 9, 13, 50, 90, 100, PAGE, PAGE + 1500, PAGE + 2999])
def test_a_flipped_bit_anywhere_fails_the_record_alone(tier, offset, caplog):
    tier.save([3, 4, 5])
    tier.flip(4, offset)
    assert tier.load([3, 4, 5]) == report(promoted=(3, 5), failed=(4,))
    assert (tier.host[[3, 5]] == tier.content[[3, 5]]).all()
    assert tier.store.counters.rejected == 1 and "not intact" in caplog.text


@pytest.mark.parametrize("whole", [0, PAGE, 2 * PAGE])
def test_a_torn_write_is_found(tmp_path, whole):
    """The process was killed after this many bytes of the second record in the slot were
    written."""
    payload = 3 * PAGE

    def write(file, buffers, offset):
        if torn.is_set():
            cut = aligned_buffer(whole or PAGE)
            cut[:] = b"".join(buffers)[: len(cut)]
            return os.pwrite(file, cut, offset) if whole else sum(map(len, buffers))
        return os.pwritev(file, buffers, offset)

    torn = threading.Event()
    with Tier(tmp_path, payload, SystemCalls(write=write)) as tier:
        tier.save([6])
        torn.set()
        tier.begin(spills=[Spill(7, 6, key(7), 96)])
        tier.finished()
    with Tier(tmp_path, payload) as tier:
        (record,) = tier.store.records()
        if whole:  # the new header precedes the old payload
            assert record.key == key(7) and tier.load([6], [key(7)]).failed == (6,)
        else:
            assert record.key == key(6) and tier.load([6]).promoted == (6,)


def test_pieces_of_one_state_and_its_chunk_are_not_taken_for_each_other(tier, tmp_path):
    first = bytes(range(8))
    pieces = [StatePiece(0, first), StatePiece(1, first), StatePiece(1, first[::-1])]
    keys = [key(3), *(piece_key(key(3), piece) for piece in pieces)]
    tier.begin(spills=[Spill(slot, slot, one, 64) for slot, one in enumerate(keys)])
    assert tier.finished() == report(spilled=(0, 1, 2, 3))
    for first in range(1, 4):
        others = keys[first:] + keys[:first]
        assert tier.load(range(4), keys=others) == report(failed=(0, 1, 2, 3))
    assert tier.load(range(4), keys=keys) == report(promoted=(0, 1, 2, 3))
    assert (tier.host[:4] == tier.content[:4]).all()
    tier.store.close()
    with Tier(tmp_path, tier.host.shape[1]) as again:
        records = again.store.records()
        assert [(one.slot, one.key, one.end) for one in records] == [
            (slot, one, 64) for slot, one in enumerate(keys)
        ]


def test_a_record_planted_under_another_key_is_not_returned(tier):
    tier.save([1, 2])
    assert tier.load([2], [key(1)]) == report(failed=(2,))
    assert not (tier.host[2] == tier.content[1]).all()


def test_a_slot_that_was_never_written_fails(tier):
    assert tier.load([3]).failed == (3,)
    tier.save([4])
    assert tier.load([3]).failed == (3,)


# -- a system that fails


def failing(number, when=lambda offset: True):
    """Calls that raise this error number if `when` returns True."""

    def refuse(call):
        def wrapped(file, buffers, offset):
            if when(offset):
                raise OSError(number, os.strerror(number))
            return call(file, buffers, offset)

        return wrapped

    return refuse


def test_an_input_output_error_fails_the_record_at_fault_only(tmp_path, caplog):
    record = record_bytes(3000)
    read = failing(errno.EIO, lambda offset: offset == 2 * record)(os.preadv)

    def merged(file, buffers, offset):
        if offset <= 2 * record < offset + sum(map(len, buffers)) and len(buffers) > 1:
            raise OSError(errno.EIO, "a bad sector")
        return read(file, buffers, offset)

    with Tier(tmp_path, system=SystemCalls(read=merged)) as tier:
        tier.save(range(6))
        assert tier.load(range(6)) == report(promoted=(0, 1, 3, 4, 5), failed=(2,))
        assert "the disk fails" in caplog.text and tier.store.counters.errors == 1


def test_writes_that_fail_are_reported_and_the_slots_serve_again(tmp_path):
    broken = threading.Event()
    broken.set()
    write = failing(errno.EIO, lambda offset: broken.is_set())(os.pwritev)
    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        assert tier.save([0, 1, 9]).failed == (0, 1, 9)
        broken.clear()
        assert tier.save([0, 1, 9]).spilled == (0, 1, 9)


def test_a_short_transfer_is_a_failure(tmp_path):
    with Tier(tmp_path, system=SystemCalls(write=lambda file, buffers, offset: PAGE)) as tier:
        assert tier.save([0]).failed == (0,)


@pytest.mark.parametrize("where", ["allocate", "write"])
def test_a_full_disk_stops_spilling_says_so_once_and_goes_on_when_there_is_room(
    tmp_path, where, caplog
):
    full = threading.Event()

    def refused(call):
        def wrapped(*arguments):
            if full.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*arguments)

        return wrapped

    real = dict(allocate=os.posix_fallocate, write=os.pwritev)[where]
    with Tier(tmp_path, system=SystemCalls(**{where: refused(real)})) as tier:
        tier.save([0])
        full.set()
        assert tier.save([8]).failed == (8,)
        for _ in range(5):
            assert tier.save([8, 9]).failed == (8, 9)
        assert caplog.text.count("the disk is full") == 1 and tier.store.counters.full == 1
        assert tier.load([0]).promoted == (0,), "a full disk still serves its records"
        full.clear()
        assert tier.save([8]).spilled == (8,)
        assert tier.store.counters.full == 0 and "room again" in caplog.text
        if where == "allocate":
            assert (tier.files / "000001.kv").stat().st_size == SEGMENT_SLOTS * record_bytes(3000)


def test_room_that_two_writers_find_at_once_is_said_once(tmp_path, monkeypatch, caplog):
    full = threading.Event()
    both = threading.Barrier(2)
    write = failing(errno.ENOSPC, lambda offset: full.is_set())(os.pwritev)
    not_full = DiskStore._not_full

    def not_full_for_both(store):
        both.wait(60)
        not_full(store)

    monkeypatch.setattr(DiskStore, "_not_full", not_full_for_both)
    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        full.set()
        tier.save([0])
        full.clear()
        assert tier.save([0, 8]).spilled == (0, 8)
        assert tier.store.counters.full == 0 and caplog.text.count("room again") == 1


def test_slow_reads_hold_up_neither_the_caller_nor_writes(tmp_path):
    gate = threading.Event()

    def read(file, buffers, offset):
        gate.wait(60)
        return os.preadv(file, buffers, offset)

    with Tier(tmp_path, system=SystemCalls(read=read)) as tier:
        tier.save(range(4))
        tier.begin(promotions=[Promotion(n, n, key(n)) for n in range(4)])
        assert tier.store.take() == report() and tier.store.counters.promoting == 4
        tier.store.wait(0.002)
        assert tier.store.take() == report() and tier.store.counters.promoting == 4
        tier.begin(spills=[Spill(9, 9, key(9), 0)])
        tier.store.wait(60.0)
        assert tier.store.take().spilled == (9,)
        gate.set()
        assert tier.finished().promoted == (0, 1, 2, 3)


def test_room_that_is_slow_to_be_made_holds_up_nothing_that_has_its_own(tmp_path):
    gate = threading.Event()
    gate.set()

    def allocate(file, offset, size):
        gate.wait(60)
        os.posix_fallocate(file, offset, size)

    with Tier(tmp_path, system=SystemCalls(allocate=allocate)) as tier:
        tier.save([0, 1])
        gate.clear()
        tier.begin(spills=[Spill(9, 9, key(9), 0)])  # in the next segment
        tier.begin(promotions=[Promotion(0, 0, key(0))])
        tier.store.wait(60.0)
        assert tier.store.take().promoted == (0,)
        tier.begin(spills=[Spill(2, 2, key(2), 0)])
        tier.store.wait(60.0)
        assert tier.store.take().spilled == (2,)
        gate.set()
        assert tier.finished().spilled == (9,)


def test_what_breaks_a_thread_breaks_the_loop(tmp_path):
    def read(file, buffers, offset):
        raise ZeroDivisionError

    with Tier(tmp_path, system=SystemCalls(read=read)) as tier:
        tier.save([0])
        with pytest.raises(ZeroDivisionError):
            tier.load([0])
        with pytest.raises(ZeroDivisionError):
            tier.begin()


def test_a_file_system_without_direct_transfers(tmp_path, monkeypatch, caplog):
    def refuse(file, command, *flags):
        if flags and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return fcntl(file, command, *flags)

    fcntl = disk_files.fcntl.fcntl
    monkeypatch.setattr(disk_files.fcntl, "fcntl", refuse)
    caplog.set_level("INFO")
    with Tier(tmp_path) as tier:
        assert tier.save([1, 12]).spilled == (1, 12) and tier.load([1, 12]).promoted == (1, 12)
        assert caplog.text.count("page cache") == 1


def test_no_read_runs_while_direct_transfers_are_tried(tmp_path, monkeypatch):
    """Where they are refused only when used. A read that failed at the start would lose the
    record."""

    def refuse(file, *_):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            trying.set()
            both.wait(1)  # as long as that takes
            raise OSError(errno.EINVAL, "no")

    def read(file, buffers, offset):
        refuse(file)
        return preadv(file, buffers, offset)

    trying = threading.Event()
    both = threading.Event()
    preadv = os.preadv
    with Tier(tmp_path) as tier:
        tier.save([0, 1])
    monkeypatch.setattr(os, "preadv", read)
    with Tier(tmp_path, system=SystemCalls(read=read)) as tier:
        tier.begin(promotions=[Promotion(0, 0, key(0))])
        assert trying.wait(60)
        tier.begin(promotions=[Promotion(1, 1, key(1))])
        assert tier.finished().promoted == (0, 1)


# -- erasing


def test_what_is_erased_cannot_be_read(tier):
    tier.save([3, 4])
    tier.erase(3)
    (left,) = tier.store.records()
    assert left.slot == 4
    assert tier.load([3, 4]) == report(promoted=(4,), failed=(3,))
    assert tier.save([3]).spilled == (3,), "the slot serves again"
    assert tier.load([3]).promoted == (3,)


def test_the_last_record_of_a_file_is_erased_too(tier):
    last = SEGMENT_SLOTS - 1
    tier.save([last])
    tier.erase(last)
    assert tier.store.records() == [] and tier.load([last]).failed == (last,)


def test_an_erasure_does_not_wait_behind_slow_reads_and_writes(tmp_path):
    gate = threading.Event()

    def slow(call):
        def wrapped(file, buffers, offset):
            if sum(map(len, buffers)) > PAGE:  # not an erasure
                gate.wait(60)
            return call(file, buffers, offset)

        return wrapped

    gate.set()
    with Tier(tmp_path, system=SystemCalls(read=slow(os.preadv), write=slow(os.pwritev))) as tier:
        tier.save([0, 1, 2])
        gate.clear()
        tier.begin(
            spills=[Spill(n, n, key(n), 0) for n in range(8, 16)],
            promotions=[Promotion(1, 1, key(1))],
        )
        tier.erase(2)
        assert tier.store.take() == report() and not gate.is_set()
        gate.set()
        assert tier.finished().promoted == (1,)
        assert 2 not in [record.slot for record in tier.store.records()]


def test_a_slot_in_use_by_work_is_refused(tmp_path):
    gate = threading.Event()

    def write(file, buffers, offset):
        gate.wait(60)
        return os.pwritev(file, buffers, offset)

    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        tier.begin(spills=[Spill(3, 3, key(3), 96)])
        for work in (
            dict(erased=[3]),
            dict(promotions=[Promotion(3, 4, key(3))]),
            dict(spills=[Spill(1, 3, key(1), 0)]),
        ):
            with pytest.raises(InvariantError, match="in use"):
                tier.begin(**work)
        gate.set()
        assert tier.finished().spilled == (3,)


def test_a_record_in_a_file_that_was_moved_is_erased(tmp_path):
    with Tier(tmp_path) as tier:
        tier.save([3])
        moved = (tier.files / "000000.kv").rename(tmp_path / "moved")
        before = moved.read_bytes()
        start = 3 * record_bytes(3000)
        assert any(before[start : start + PAGE])
        assert tier.erase(3) == ()
        assert not any(moved.read_bytes()[start : start + PAGE])


def test_an_erasure_that_fails_is_said(tmp_path, caplog):
    broken = threading.Event()
    write = failing(errno.EIO, lambda offset: broken.is_set())(os.pwritev)
    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        tier.save([0])
        broken.set()
        assert tier.erase(0, 1, 9) == (0, 1), (
            "nothing was ever written to the file of slot 9, there is none"
        )
        assert "may still be on disk" in caplog.text
        broken.clear()
        assert tier.erase(0, 1) == ()


def test_an_erasure_takes_no_room(tmp_path):
    """The file is of a smaller tier and the disk is full: existing records can still be
    overwritten."""

    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Tier(tmp_path, slots=3) as tier:
        tier.save([0])
    with Tier(tmp_path, system=SystemCalls(allocate=full)) as tier:
        assert tier.erase(0) == () and tier.store.records() == []


def test_a_file_system_that_has_given_up_refuses_an_erasure_and_breaks_nothing(
    tmp_path, monkeypatch
):
    """XFS then answers every call with EIO."""

    def refused(path, **_):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with Tier(tmp_path) as tier:
        tier.save([0])
        with monkeypatch.context() as patch:
            patch.setattr(disk_files.os, "stat", refused)
            assert tier.erase(0) == (0,)
        assert tier.erase(0) == ()


def test_a_record_that_cannot_be_read_at_the_start_is_erased(tmp_path):
    """Its slot is free: a later deletion would miss the record, and the next start might find
    it."""
    record = record_bytes(3000)
    read = failing(errno.EIO, lambda offset: offset == record)(os.preadv)
    with Tier(tmp_path) as tier:
        tier.save([0, 1, 2])
    with Tier(tmp_path, system=SystemCalls(read=read)) as tier:
        assert [stored_record.slot for stored_record in tier.store.records()] == [0, 2]
    with Tier(tmp_path) as tier:
        assert [stored_record.slot for stored_record in tier.store.records()] == [0, 2]


def test_a_directory_that_cannot_be_used_is_a_wrong_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--disk-dir"):
        Tier(tmp_path / "file")
    with Tier(tmp_path):
        pass
    (tmp_path / "rank-0" / "000099.kv").mkdir()
    with pytest.raises(SettingError, match=r"--disk-dir: cannot use .*000099\.kv"):
        Tier(tmp_path)


def test_a_tier_of_more_files_than_a_process_may_usually_open(tmp_path, monkeypatch):
    """With 1 GiB in a file, a tier of 1 TiB has as many files as most shells allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    slots = 400
    held = []
    host = np.zeros((1, PAGE), np.uint8)
    settings = DiskSettings(tmp_path, slots, "ab", segment_bytes=record_bytes(PAGE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        store = DiskStore(settings, 32, lambda _: host[0])
        store.begin(
            TierWork(DiskStore.tier, tuple(Spill(0, slot, key(slot), 32) for slot in range(slots)))
        )
        while store.busy:
            store.wait(1.0)
            held += store.take().spilled
        store.close()
        assert len(held) == slots
        monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 300))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        with pytest.raises(SettingError, match=r"400 files .* may open 300: raise the limit"):
            DiskStore(settings, 32, lambda _: host[0])
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_erasure_is_done_when_every_file_is_flushed_behind_its_writes(tmp_path, monkeypatch):
    """A power failure would restore records of any file that is not flushed."""
    calls = []
    flush = os.fdatasync

    def write(file, buffers, offset):
        calls.append(("written", file))
        return os.pwritev(file, buffers, offset)

    monkeypatch.setattr(
        disk_files.os, "fdatasync", lambda file: (calls.append(("flushed", file)), flush(file))
    )
    with Tier(tmp_path, system=SystemCalls(write=write)) as tier:
        tier.save([0, 1, SEGMENT_SLOTS])
        calls.clear()
        assert tier.erase(0, 1, SEGMENT_SLOTS) == ()
    files = {file for _, file in calls}
    assert (
        len(files) == 2
        and calls.count(("written", min(files))) + calls.count(("written", max(files))) == 3
    )
    for file in files:
        own = [what for what, where in calls if where == file]
        assert own[-1] == "flushed" and "written" in own


def test_an_erasure_makes_no_file_longer(tmp_path):
    """The file of a smaller tier ends where the slot would begin: it was never written."""
    with Tier(tmp_path, slots=3) as tier:
        tier.save(range(3))
    with Tier(tmp_path) as tier:
        assert tier.erase(3) == ()
        assert (tier.files / "000000.kv").stat().st_size == 3 * record_bytes(3000)


def test_a_file_that_could_not_be_made_whole_gives_back_what_it_got(tmp_path):
    """Else it would take the last room on the disk from others, and hold no record."""

    def allocate(file, offset, size):
        os.posix_fallocate(file, offset, size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Tier(tmp_path, system=SystemCalls(allocate=allocate)) as tier:
        assert tier.save([0]).failed == (0,)
        assert (tier.files / "000000.kv").stat().st_size == 0
