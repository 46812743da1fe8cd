"""One process a directory; records of another origin are dropped, with a word."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.runtime.disk.directory import RecordOrigin, locked, open_directory
from pensieve.scheduler.types import SettingError

ORIGIN = RecordOrigin("ab", 32, 4096, ranks=2, rank=1)
HOLD = """
import sys
from pathlib import Path
from pensieve.runtime.disk.directory import locked
with locked(Path(sys.argv[1]), "--state-dir"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_which_process_has_the_directory(tmp_path: Path) -> None:
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "state")], **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with (
            pytest.raises(SettingError, match=rf"--state-dir: .*process {other.pid};"),
            locked(tmp_path / "state", "--state-dir"),
        ):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait()
        with locked(tmp_path / "state", "--state-dir"):
            assert (tmp_path / "state" / "lock").read_text() == f"{os.getpid()}\n"
    with locked(tmp_path / "state", "--state-dir"):
        pass


def test_a_place_where_no_directory_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--state-dir"), locked(tmp_path / "file", "--state-dir"):
        pass


def test_a_place_that_knows_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(SettingError, match=r"--state-dir: .*No locks"),
        locked(tmp_path, "--state-dir"),
    ):
        pass


def test_records_of_the_same_origin_stay(tmp_path: Path) -> None:
    own = open_directory(tmp_path / "kv", ORIGIN)
    (own / "000000.kv").write_text("records")
    assert open_directory(tmp_path / "kv", ORIGIN) == own == tmp_path / "kv" / "rank-1"
    assert (own / "000000.kv").exists()


CHANGES = [
    dict(engine="cd"),
    dict(chunk_tokens=16),
    dict(chunk_bytes=1),
    dict(ranks=4),
    dict(version=1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_records_of_another_origin_go(tmp_path: Path, change: dict[str, object], caplog) -> None:
    own = open_directory(tmp_path, ORIGIN)
    (own / "000000.kv").write_text("records")
    (own / "notes").write_text("not ours")
    changed = replace(ORIGIN, **change)
    open_directory(tmp_path, changed)
    assert "another engine, setting or version" in caplog.text
    assert sorted(path.name for path in own.iterdir()) == ["about.json", "notes"]
    assert changed.digest != ORIGIN.digest


def test_folders_of_ranks_that_are_no_more_go_too(tmp_path: Path) -> None:
    for rank in range(3):
        open_directory(tmp_path, replace(ORIGIN, ranks=3, rank=rank))
    (tmp_path / "rank-old").mkdir()
    open_directory(tmp_path, replace(ORIGIN, ranks=1, rank=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-old"]


def test_a_directory_can_be_locked_on_a_full_disk(tmp_path: Path) -> None:
    """The lock's owner cannot be written down. Other users of the disk report the full disk
    themselves."""
    (tmp_path / "lock").symlink_to("/dev/full")
    with locked(tmp_path, "--state-dir"):
        pass


def test_what_was_cleared_halfway_is_cleared_when_the_directory_is_used_next(
    tmp_path: Path, monkeypatch
) -> None:
    """The process ended between the records that it dropped: the others must not pass for records
    of this origin."""
    own = open_directory(tmp_path, ORIGIN)
    (own / "000000.kv").write_text("records")
    changed = replace(ORIGIN, engine="cd")

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch, pytest.raises(SettingError, match="--disk-dir"):
        patch.setattr(Path, "unlink", refuse)
        open_directory(tmp_path, changed)
    open_directory(tmp_path, changed)
    assert not list(own.glob("*.kv"))


def test_each_rank_s_records_are_its_own() -> None:
    """A file that is moved into another rank's folder holds other heads of the same chunks."""
    assert len({replace(ORIGIN, rank=rank).digest for rank in range(4)}) == 4
