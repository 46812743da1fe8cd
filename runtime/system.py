"""This process and others: standard streams, stack traces of a process that hangs, child processes,
open files. Linux."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

DUMP_STACKS = signal.SIGUSR2
# for all ranks to meet at the start: loading and capturing graphs takes some longer than others
MEETING_SECONDS = 600.0
STDERR = 2  # the file descriptor, even if Python's sys.stderr is replaced


def hold_streams() -> None:
    """Called first by commands and `LLM`: /dev/null takes the place of standard streams and their
    descriptors that are missing or closed. A file that is opened next would get the descriptor, and
    with it what is meant for stderr."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115


def hold_stack_signal() -> None:
    """Called before a process starts threads: DUMP_STACKS, which would end it, waits until
    `print_stacks_on_signal`. Threads and child processes that start from here on hold it too. A
    thread that is already there does not."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [DUMP_STACKS])


def print_stacks_on_signal() -> None:
    """From now on the signal DUMP_STACKS writes every thread's stack to stderr. mpirun passes the
    signal on to all ranks. Called by the main thread.

    A thread waits for the signal and reads the stacks frame by frame. Other threads run in between,
    so a stack of theirs may mix two moments. faulthandler's handler would read frames that another
    thread frees, and could end the process.
    """
    hold_stack_signal()
    printer = threading.Thread(target=_print_stacks, name="stacks", daemon=True)
    printer.start()

    def pass_on(*_: object) -> None:
        """Runs if a thread that was there before `hold_stack_signal` got the signal: once the main
        thread returns from its call."""
        assert printer.ident is not None
        signal.pthread_kill(printer.ident, DUMP_STACKS)

    signal.signal(DUMP_STACKS, pass_on)


def _print_stacks() -> None:
    while True:
        signal.sigwait([DUMP_STACKS])
        text = stacks().encode(errors="replace")
        with contextlib.suppress(OSError):  # stderr has no reader, or its disk is full
            while text:
                text = text[os.write(STDERR, text) :]


def stacks() -> str:
    """What each thread of this process does, the innermost call last. Without lines of source: they
    would be read from files."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"Stacks of process {os.getpid()}"]
    for number, frame in sys._current_frames().items():
        lines.append(f"Thread {names.get(number, number)}:")
        for call, line in reversed(list(traceback.walk_stack(frame))):
            code = call.f_code
            lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Keeps the current directory off the import path of processes that start in the block.
    multiprocessing passes no -P to the processes that it spawns. A process that starts after the
    block, such as a pool's replacement, is not protected."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


@contextlib.contextmanager
def give_up_after(seconds: float) -> Iterator[None]:
    """Ends this process, and mpirun all others, if the block takes longer than `seconds`. Prints
    where each thread is. Only one such block at a time."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def allow_open_files(wanted: int) -> int:
    """Asks the system for so many open files. Returns how many this process may have, which may be
    fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


def usable_cores() -> int:
    """Cores that this process may use all the time, at least 1: also a container's quota (version
    2 of cgroups) limits them."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def children(process: int) -> list[int]:
    """Child processes, including ended ones that were not waited for. Children of threads that end
    during the call may be missing."""
    ids = list[int]()
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                ids += map(int, (thread / "children").read_text().split())
    return ids


def descendants(process: int) -> list[int]:
    """Children, their children, and so on."""
    direct = children(process)
    return [*direct, *(one for child in direct for one in descendants(child))]


def running(process: int) -> bool:
    """Returns whether the process runs; False also for one that has ended and was not waited
    for."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False
