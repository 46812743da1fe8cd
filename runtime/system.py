"""This process and others: stacks of a process that hangs, child processes. Linux."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

ASKED = signal.SIGUSR2
MEETING_SECONDS = 600.0  # for all ranks to meet at the start: some load, or capture graphs, longer than others
STDERR = 2  # the process's own, whatever Python's stands for


def tell_when_asked() -> None:
    """From now on ASKED writes every thread's stack to stderr; mpirun passes it on to all ranks."""
    faulthandler.register(ASKED, file=STDERR)


@contextlib.contextmanager
def give_up_after(seconds: float) -> Iterator[None]:
    """Ends this process, and mpirun all others, if the block takes longer; says where each thread is. One at a time."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def children(process: int) -> list[int]:
    """Those of threads that end meanwhile may be left out; those that nobody has waited for are there."""
    found = list[int]()
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(process: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = children(process)
    return [*found, *(one for child in found for one in descendants(child))]


def running(process: int) -> bool:
    """False too for one that has ended and that nobody has waited for."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False
