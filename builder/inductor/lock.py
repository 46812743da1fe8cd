"""One build of a directory at a time, on one machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of the file at `path`, which is created here and removed at the end. Calls
    `waiting` if it is taken.

    The system releases the lock if the process dies; the remaining file blocks no other build.
    """
    descriptor = _acquire(path, waiting)
    try:
        yield
    finally:
        # while it is locked: a waiting build checks that it still exists
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, waiting: Callable[[], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
