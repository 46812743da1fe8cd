"""Directories for the use of one process at a time, and the disk tier's own, which records the
origin of its records."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ...scheduler.types import SettingError
from .record import VERSION

log = logging.getLogger(__name__)

ABOUT = "about.json"


@dataclass(frozen=True)
class RecordOrigin:
    """Everything that must be equal for KV on disk to be read again: all that changes KV, and its
    division among ranks.

    engine          digest of all that changes KV, as `SchedulerConfig.seed`, hexadecimal
    chunk_tokens    tokens of a chunk
    chunk_bytes     bytes of a chunk's KV in HOST memory on one rank
    ranks, rank     number of ranks that share a chunk, and the number of this one
    version         of the record format
    """

    engine: str
    chunk_tokens: int
    chunk_bytes: int
    ranks: int = 1
    rank: int = 0
    version: int = VERSION

    @property
    def digest(self) -> bytes:
        """In the header of each record, in case the directory's description is wrong."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()


def open_directory(path: Path, origin: RecordOrigin) -> Path:
    """Returns the rank's own folder under `path`, and creates it if it is missing. Records of any
    other origin are deleted.

    SettingError('--disk-dir') if it cannot be used.
    """
    own = path / f"rank-{origin.rank}"
    about = own / ABOUT
    words = json.dumps(asdict(origin), sort_keys=True, indent=1) + "\n"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if origin.rank == 0:
            _remove_ranks(path, origin.ranks)
        previous = about.read_text("utf-8") if about.exists() else None
        if previous != words:
            records = sorted(own.glob("*.kv"))
            for file in records:
                file.unlink()
            if records:
                log.warning(
                    "%s: dropped %d files of KV, which another engine, setting or version wrote",
                    own,
                    len(records),
                )
            _replace(about, words)  # last, so all records found next to it are of this origin
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--disk-dir", f"cannot use {own}: {error}") from error
    return own


def _remove_ranks(path: Path, ranks: int) -> None:
    """Removes the folders of an earlier start with more ranks."""
    for folder in path.glob("rank-*"):
        number = folder.name.removeprefix("rank-")
        if number.isdecimal() and int(number) >= ranks and (folder / ABOUT).exists():
            log.warning("%s: dropped, there are %d ranks now", folder, ranks)
            shutil.rmtree(folder)


def _replace(path: Path, words: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(words, "utf-8")
    os.replace(new, path)


@contextmanager
def locked(directory: Path, setting: str) -> Iterator[None]:
    """While this is open no other process can use the directory, which is created if it is missing.

    The system releases the lock when the process ends in any way. SettingError names `setting` and
    the other process.
    """
    path = directory / "lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+", buffering=0)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise SettingError(setting, f"cannot use {directory}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace").strip() or "?"
            raise SettingError(
                setting,
                f"{directory} is in use by process {owner}; give this server a directory of its "
                "own",
            ) from None
        except OSError as error:
            raise SettingError(setting, f"cannot lock {path}: {error.strerror}") from error
        # a full disk: the lock holds all the same, but does not name its process
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
