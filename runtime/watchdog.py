"""Where a process that hangs is: told when asked, or before it is given up. Also while a library runs no Python."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ASKED = signal.SIGUSR2
MEETING_SECONDS = 600.0  # for all ranks to meet at the start: some load, or capture graphs, longer than others
STDERR = 2  # the process's own, whatever Python's stands for


def tell_when_asked() -> None:
    """From now on ASKED writes every thread's stack to stderr; mpirun passes it on to all ranks."""
    faulthandler.register(ASKED, file=STDERR)


@contextmanager
def give_up_after(seconds: float) -> Iterator[None]:
    """Ends this process, and mpirun all others, if the block takes longer; says where each thread is. One at a time."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
