"""The disk is measured with the code that uses it, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pensieve.runtime.disk import segments as disk_files
from pensieve.runtime.disk import speed as disk_speed
from pensieve.runtime.disk.speed import measure_disk
from pensieve.scheduler.types import SettingError


@pytest.mark.parametrize("chunk_bytes", [3000, 2**20])
def test_a_disk_has_speeds_and_is_left_as_it_was(tmp_path: Path, chunk_bytes: int) -> None:
    (tmp_path / "rank-0").mkdir()
    speed = measure_disk(tmp_path, chunk_bytes)
    assert speed is not None and 1e5 < speed.read < 1e12 and 1e5 < speed.write < 1e12
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0"]


def test_a_full_disk_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = disk_speed.DiskSettings
    calls = disk_files.SystemCalls(allocate=full)
    monkeypatch.setattr(
        disk_speed, "DiskSettings", lambda *args, **named: settings(*args, **named, system=calls)
    )
    assert measure_disk(tmp_path, 4096) is None
    assert not list(tmp_path.iterdir())


def test_a_directory_that_keeps_what_was_written_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "speed").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match=f"--disk-dir: cannot use {tmp_path / 'speed'}: "):
        measure_disk(tmp_path, 4096)
