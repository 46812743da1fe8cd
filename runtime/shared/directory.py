"""The engine `directory`: a folder on a file system that all servers reach, one file a record.

    PATH/records/KEY        a record; its last use is the file's time of modification
    PATH/new/NAME.NUMBER    a record that is being written; NAME is the key with "+" for "/"

A record appears by a rename, so it is whole or missing. Removal is `unlink`, of the file that is
being written too: its writer then finds that it has nothing to rename.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...scheduler.types import SettingError
from .config import SETTING, DirectoryOptions
from .engine import Parts, StoreOutcome

log = logging.getLogger(__name__)

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE: on a network file system, of a file in use
USED_S = 60.0
"""Seconds until a further use of a record is noted: the order of use need not be exact."""
ABANDONED_S = 3600.0
"""Seconds after which a file that is being written is one that a killed server has left."""
SCAN_SHARE = 1 / 32
"""Share of `max_bytes` that one server writes between two scans. So all servers together exceed
`max_bytes` by that share for each, at most."""
KEPT_SHARE = 15 / 16
"""Share of `max_bytes` that eviction leaves."""
SORTED_AT_ONCE = 1024
"""Files of one sort, which keeps Python's lock: a sort of a million would stop the loop for
seconds."""
COMPLAINT_S = 60.0
CLOSE_S = 1.0  # seconds that the end waits for a scan


class _File(NamedTuple):
    used: float
    size: int
    path: str


class DirectoryEngine:
    """A `SharedEngine`. Several servers may use one directory, each with its own object."""

    def __init__(self, options: DirectoryOptions):
        """SettingError('kv_shared_config') if the directory cannot be used."""
        self._records = options.path / "records"
        self._new = options.path / "new"
        self._most = options.max_bytes
        self._host = os.uname().nodename.replace("/", "-")
        self._numbers = itertools.count()
        self._silent_until = 0.0
        # Used only while the lock is held.
        self._lock = threading.Condition()  # a re-entrant one
        self._used = 0  # bytes, as of the last scan and this server's own puts since
        self._since = 0  # bytes put since the last scan
        self._writing = 0  # bytes of records that are being written
        self._wanted = False
        self._closed = False
        try:
            for folder in (options.path, self._records, self._new):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._new / self._temporary("probe")
            probe.touch(0o600)
            probe.unlink()
        except OSError as error:
            message = f"cannot use the directory {options.path}: {error}"
            raise SettingError(SETTING, message) from error
        self._evictor = threading.Thread(target=self._evict, name="shared-evict", daemon=True)
        self._evictor.start()
        self._ask_for_scan()

    def register(self, buffer: np.ndarray) -> None:
        """Nothing: files are read into any memory."""

    def exists(self, keys: Sequence[str]) -> list[bool] | None:
        try:
            if not self._records.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such directory", str(self._records))
            return [_exists(self._path(key)) for key in keys]
        except OSError as error:
            self._complain(error)
            return None

    def put(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        return [self._put(key, parts) for key, parts in zip(keys, records, strict=True)]

    def get(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        return [self._get(key, parts) for key, parts in zip(keys, records, strict=True)]

    def remove(self, keys: Sequence[str]) -> list[StoreOutcome]:
        """Also flushes the folders, so that a removal survives a power failure."""
        names = {_flat(key) for key in keys}
        try:
            # before the records: a rename that comes first is then removed too
            for file in os.listdir(self._new):
                if file.split(".", 1)[0] in names:
                    (self._new / file).unlink(missing_ok=True)
        except OSError as error:
            self._complain(error)
            return [StoreOutcome.FAILED] * len(keys)
        outcomes = []
        folders = dict[Path, None]()
        for key in keys:
            path = Path(self._path(key))
            try:
                path.unlink(missing_ok=True)
                folders[path.parent] = None
                outcomes.append(StoreOutcome.DONE)
            except OSError as error:
                self._complain(error)
                outcomes.append(StoreOutcome.FAILED)
        for folder in folders:
            _flush(folder)
        return outcomes

    def drop_cached(self, keys: Sequence[str]) -> None:
        """The system drops only pages that it has written."""
        for key in keys:
            with suppress(OSError):
                descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        """A scan that hangs is left behind: it holds nothing that others need."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._evictor.join(CLOSE_S)

    # -- one record

    def _put(self, key: str, parts: Parts) -> StoreOutcome:
        path = Path(self._path(key))
        size = sum(part.nbytes for part in parts)
        if not self._takes_room(size):
            return StoreOutcome.FULL
        written = 0
        try:
            if path.exists():
                os.utime(path)
            else:
                self._write(path, self._new / self._temporary(_flat(key)), parts)
                written = size
            return StoreOutcome.DONE
        except OSError as error:
            if error.errno in NO_ROOM:
                self._ask_for_scan()
                return StoreOutcome.FULL
            self._complain(error)
            return StoreOutcome.FAILED
        finally:
            with self._lock:
                self._writing -= size
                self._used += written
                self._since += written
                if self._since > self._most * SCAN_SHARE:
                    self._ask_for_scan()

    def _takes_room(self, size: int) -> bool:
        """Returns whether a record has room, and counts it as being written."""
        with self._lock:
            fits = self._used + self._writing + size <= self._most
            if fits:
                self._writing += size
            else:
                self._ask_for_scan()
            return fits

    def _write(self, path: Path, new: Path, parts: Parts) -> None:
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write(descriptor, parts)
            finally:
                os.close(descriptor)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(new, path)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise

    def _get(self, key: str, parts: Parts) -> StoreOutcome:
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                right = status.st_size == sum(part.nbytes for part in parts)
                whole = right and _read(descriptor, parts)
            finally:
                os.close(descriptor)
            if not whole:
                Path(path).unlink(missing_ok=True)
                return StoreOutcome.MISSING
            if time.time() - status.st_mtime > USED_S:
                os.utime(path)
            return StoreOutcome.DONE
        except OSError as error:
            if error.errno in GONE:
                return StoreOutcome.MISSING
            self._complain(error)
            return StoreOutcome.FAILED

    def _path(self, key: str) -> str:
        """The last two letters before the name are a folder of their own: no folder then has very
        many files. A text, which takes a tenth of the time of a `Path`."""
        folders, _, name = key.rpartition("/")
        return f"{self._records}/{folders}/{name[:2]}/{name}"

    def _temporary(self, name: str) -> str:
        return f"{name}.{self._host}-{os.getpid()}-{id(self):x}-{next(self._numbers)}"

    # -- eviction

    def _ask_for_scan(self) -> None:
        with self._lock:
            self._wanted = True
            self._lock.notify_all()

    def _evict(self) -> None:
        """The evictor's thread."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
                self._wanted = False
                before = self._since
            try:
                used = self.scan()
            except OSError as error:
                self._complain(error)
                continue
            with self._lock:
                self._since -= before
                self._used = used + self._since

    def scan(self) -> int:
        """Counts the records, removes those used longest ago if they are too many, and removes what
        killed writers have left. Returns the bytes of the rest. OSError.

        Records may come and go meanwhile.
        """
        now = time.time()
        for file in _files(self._new):
            if now - file.used > ABANDONED_S:
                Path(file.path).unlink(missing_ok=True)
        files = list(_files(self._records))
        used = sum(file.size for file in files)
        if used <= self._most * (1 - SCAN_SHARE):
            return used
        for file in _in_order(files):
            if used <= self._most * KEPT_SHARE:
                break
            try:
                if os.stat(file.path).st_mtime <= file.used:
                    os.unlink(file.path)
                    used -= file.size
            except FileNotFoundError:  # another server was first
                used -= file.size
        return used

    def _complain(self, error: OSError) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + COMPLAINT_S
            log.error("the shared directory fails: %s", error)


def _exists(path: str) -> bool:
    """OSError if the file system does not tell."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _flat(key: str) -> str:
    """The key as the first part of a file's name."""
    return key.replace(".", "=").replace("/", "+")


def _files(folder: Path) -> Iterator[_File]:
    """All files below the folder. Those that disappear meanwhile are left out."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield _File(status.st_mtime, status.st_size, entry.path)


def _in_order(files: Sequence[_File]) -> Iterable[_File]:
    """The files, those used longest ago first."""
    runs = range(0, len(files), SORTED_AT_ONCE)
    return heapq.merge(*(sorted(files[first : first + SORTED_AT_ONCE]) for first in runs))


def _flush(folder: Path) -> None:
    """Some network file systems cannot flush a folder: their server has done it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    with suppress(OSError):
        os.fsync(descriptor)
    os.close(descriptor)


def _write(descriptor: int, parts: Parts) -> None:
    for part in parts:
        rest = part.data.cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]


MOST_BUFFERS = 1024  # of one call: Linux's IOV_MAX


def _read(descriptor: int, parts: Parts) -> bool:
    """Returns whether all parts were filled."""
    rest = [part.data.cast("B") for part in parts]
    while rest:
        count = os.readv(descriptor, rest[:MOST_BUFFERS])
        if not count:
            return False
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][count:]
    return True
