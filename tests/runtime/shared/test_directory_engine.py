"""The engine on a directory: files, eviction, and what killed writers leave."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pensieve.runtime.shared import directory
from pensieve.runtime.shared.config import DirectoryOptions
from pensieve.runtime.shared.directory import DirectoryEngine
from pensieve.runtime.shared.engine import Parts, StoreOutcome
from pensieve.runtime.shared.trial import READERS, ROUNDS, try_store
from pensieve.scheduler.types import SettingError

from .engine_tests import PAGE, PAYLOAD, EngineTests, key, record

SIZE = PAGE + PAYLOAD
ROOM = 4096 * SIZE
"""Of a test that is not about room. It is more than all that a test puts, removed or not: a scan
counts the records put meanwhile twice, and does not know of a removal that comes after it."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DirectoryEngine]:
    engine = DirectoryEngine(DirectoryOptions(tmp_path / "kv", ROOM))
    yield engine
    engine.close()


class TestDirectoryEngine(EngineTests):
    """As every engine."""


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_a_removal_leaves_no_file(engine: DirectoryEngine, tmp_path: Path) -> None:
    engine.put([key(1)], [record(engine, 1)])
    assert [file.stat().st_mode & 0o777 for file in files(tmp_path)] == [0o600]
    engine.remove([key(1)])
    assert files(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_with_its_key(
    engine: DirectoryEngine, tmp_path: Path
) -> None:
    left = tmp_path / "kv" / "new" / f"{key(1).replace('/', '+')}.host-1-2-3"
    left.write_bytes(b"part")
    engine.remove([key(2)])
    assert files(tmp_path) == [left]
    engine.remove([key(1)])
    assert files(tmp_path) == []


def test_a_record_that_is_removed_while_it_is_written_does_not_appear(
    engine: DirectoryEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def removed_before(source: Path, target: Path) -> None:
        engine.remove([key(1)])
        rename(source, target)

    monkeypatch.setattr(directory.os, "rename", removed_before)
    assert engine.put([key(1)], [record(engine, 1)]) == [StoreOutcome.FAILED]
    assert files(tmp_path) == []


def test_abandoned_files_go_after_a_while(engine: DirectoryEngine, tmp_path: Path) -> None:
    new = tmp_path / "kv" / "new"
    for name, age in (("old.a", directory.ABANDONED_S + 60), ("young.a", 0.0)):
        (new / name).write_bytes(b"part")
        os.utime(new / name, (time.time() - age,) * 2)
    engine.scan()
    assert [file.name for file in files(tmp_path)] == ["young.a"]


@pytest.mark.parametrize("most", [1, 3, 1024])
def test_the_records_used_longest_ago_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """However many are sorted at once."""
    monkeypatch.setattr(directory, "SORTED_AT_ONCE", most)
    first = DirectoryEngine(DirectoryOptions(tmp_path, ROOM))
    second = DirectoryEngine(DirectoryOptions(tmp_path, 8 * SIZE))  # of another server
    second.close()  # its thread scans no more
    try:
        for number in range(16):
            first.put([key(number)], [record(first, 1)])
            age = 1000 - number
            (file,) = (file for file in files(tmp_path) if file.name == key(number)[-64:])
            os.utime(file, (time.time() - age,) * 2)
        assert first.get([key(0)], [record(first, 0)]) == [
            StoreOutcome.DONE
        ]  # its latest use is now
        assert second.scan() == 7 * SIZE
        there = first.exists([key(number) for number in range(16)])
        assert there == [True] + [False] * 9 + [True] * 6
    finally:
        first.close()


def test_one_call_flushes_each_folder_once(
    engine: DirectoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = list[Path]()
    monkeypatch.setattr(directory, "_flush", flushed.append)
    keys = [f"a/0/{name:064x}" for name in (1, 2, 1 << 248, 2 + (1 << 248))]
    engine.put(keys, [record(engine, number) for number in range(4)])
    assert engine.remove(keys) == [StoreOutcome.DONE] * 4
    assert [folder.name for folder in flushed] == ["00", "01"]


def test_a_trial_reads_from_the_file_system_and_not_from_memory(
    engine: DirectoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = list[int]()
    advise = os.posix_fadvise

    def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append(os.fstat(descriptor).st_size)
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(directory.os, "posix_fadvise", noted)
    assert not try_store(engine, SIZE).failed
    assert dropped == [SIZE] * (READERS * 4 * ROUNDS)


def test_a_trial_reads_with_as_many_threads_as_the_server(
    engine: DirectoryEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(READERS, timeout=60)
    get = engine.get

    def met(keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        together.wait()
        return get(keys, records)

    monkeypatch.setattr(engine, "get", met)
    assert not try_store(engine, SIZE).failed


def test_a_full_directory_refuses_until_eviction_has_made_room(tmp_path: Path) -> None:
    engine = DirectoryEngine(DirectoryOptions(tmp_path, 4 * SIZE))
    try:
        put = []
        for number in range(40):
            outcome = engine.put([key(number)], [record(engine, 1)])
            while outcome == [StoreOutcome.FULL]:
                outcome = engine.put([key(number)], [record(engine, 1)])
            put += outcome
            assert len(files(tmp_path)) <= 4
        assert put == [StoreOutcome.DONE] * 40
    finally:
        engine.close()


def test_a_scan_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanning = threading.Event()
    gate = threading.Event()

    def hang(folder: Path) -> list[os.DirEntry[str]]:
        scanning.set()
        assert gate.wait(60)
        return []

    monkeypatch.setattr(directory, "CLOSE_S", 0.01)
    monkeypatch.setattr(directory.os, "scandir", hang)
    engine = DirectoryEngine(DirectoryOptions(tmp_path, ROOM))
    assert scanning.wait(60)
    ending = threading.Thread(target=engine.close, daemon=True)
    ending.start()
    ending.join(10)
    hung = ending.is_alive()
    gate.set()
    ending.join(60)
    assert not hung


def test_a_full_file_system_is_not_an_error(
    engine: DirectoryEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(directory.os, "write", full)
    assert engine.put([key(1)], [record(engine, 1)]) == [StoreOutcome.FULL]
    assert files(tmp_path) == []


def test_a_directory_that_is_gone_does_not_answer(tmp_path: Path) -> None:
    engine = DirectoryEngine(DirectoryOptions(tmp_path / "kv", ROOM))
    (tmp_path / "kv").rename(tmp_path / "elsewhere")
    try:
        assert engine.exists([key(1)]) is None
        assert engine.put([key(1)], [record(engine, 1)]) == [StoreOutcome.FAILED]
        assert engine.remove([key(1)]) == [StoreOutcome.FAILED]
    finally:
        engine.close()


def test_a_directory_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SettingError, match="kv_shared_config: cannot use the directory"):
        DirectoryEngine(DirectoryOptions(tmp_path / "file", ROOM))
