"""How OpenMP's threads, which compute a layer together on a CPU, wait for each other: they spin or
they sleep.

A spinning thread answers at once, but keeps a processor that others may need: on a busy machine
perhaps the thread that it waits for. libgomp, the library of torch's wheels, spins for some
milliseconds. This is as long as a busy process keeps a processor, and each token has hundreds of
waits. libgomp spins hardly at all while a process has more OpenMP threads than processors, also if
some of them have no work. So a team without work makes all threads sleep, and no other thread than
the one that computes passes may keep a team. The team that computes keeps its size, and with it the
order of its sums.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

LOOK_SECONDS = 1.0
MARGIN = 0.3
"""So many of the processors that our threads need may be used by others while our threads spin."""
CALM_LOOKS = 3
"""Threads spin again after so many looks in a row that found enough processors."""
SOFT_PAUSE = 1  # of OpenMP's omp_pause_resource_t: settings are kept
OF_THE_USER = (
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "GOMP_CPU_AFFINITY",
)
"""Variables that tell threads how to wait, or each where to run. If one is set, nothing is changed
at run time."""


class ProcessorUsage(NamedTuple):
    threads: int  # of this thread's team
    processors: int  # on which this process may run
    # used on them by all processes, or taken by a virtual machine's host; since any time
    total_seconds: float
    own_seconds: float  # used by this process, since any time


def read_usage() -> ProcessorUsage:
    """Called on the thread that computes. Linux."""
    numbers = os.sched_getaffinity(0)
    names = {f"cpu{number}" for number in numbers}
    ticks = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _idle, _io_wait, irq, soft_irq, stolen = map(int, fields[:8])
            ticks += user + nice + system + irq + soft_irq + stolen
    total = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessorUsage(torch.get_num_threads(), len(numbers), total, time.process_time())


@cache
def libgomp() -> ctypes.CDLL | None:
    """The library of torch's OpenMP threads. None if torch has another."""
    maps = Path("/proc/self/maps")
    loaded = [line.split()[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    paths = [word for word in loaded if Path(word).name.startswith("libgomp")]
    return ctypes.CDLL(paths[0]) if paths else None


def compute_alone() -> None:
    """The calling thread has no team from now on."""
    if (library := libgomp()) is not None:
        torch.get_num_threads()  # torch's first call on a thread sets the number of threads
        library.omp_set_num_threads(1)


def end_team() -> None:
    """Ends the calling thread's team until the thread computes again."""
    if (library := libgomp()) is not None:
        library.omp_pause_resource_all(SOFT_PAUSE)


StartTeam = Callable[[int], threading.Event]
"""Starts a team of so many threads, at least two, that have no work. Setting the event ends it."""


def idle_teams() -> StartTeam | None:
    """None if torch's OpenMP is not libgomp, or if the user has set how threads wait or where they
    run."""
    library = libgomp()
    if library is None or any(name in os.environ for name in OF_THE_USER):
        return None
    return partial(_start_idle_team, library)


def _start_idle_team(library: ctypes.CDLL, threads: int) -> threading.Event:
    started, ended = threading.Event(), threading.Event()

    def live() -> None:
        # Each thread calls a function that changes nothing. The team lives as long as the thread
        # that made it.
        library.GOMP_parallel(library.omp_get_level, None, threads, 0)
        started.set()
        ended.wait()

    threading.Thread(target=live, name="idle OpenMP team", daemon=True).start()
    started.wait()
    return ended


class SharedProcessors:
    """Makes the threads that compute sleep when they wait, as long as other processes need their
    processors."""

    def __init__(
        self, start_team: StartTeam | None, usage: Callable[[], ProcessorUsage] = read_usage
    ):
        """start_team: None: threads wait as OpenMP was set."""
        self._start_team = start_team
        self._usage = usage
        self._last: tuple[float, ProcessorUsage] | None = None
        self._end_team: threading.Event | None = None
        self._calm = 0

    def look(self, now: float) -> None:
        """Called often, on the thread that computes. now: seconds since any time."""
        if self._start_team is None or (self._last and now - self._last[0] < LOOK_SECONDS):
            return
        usage = self._usage()
        last = self._last
        self._last = (now, usage)
        if last is None:
            return
        then, before = last
        total = usage.total_seconds - before.total_seconds
        own = usage.own_seconds - before.own_seconds
        others = (total - own) / (now - then)
        needed = usage.threads > 1 and usage.threads + others > usage.processors + MARGIN
        self._calm = 0 if needed else self._calm + 1
        if needed and self._end_team is None:
            # One thread of each team is not counted, except for the first.
            self._end_team = self._start_team(max(2, usage.processors - usage.threads + 2))
        elif self._calm == CALM_LOOKS:
            self.close()

    def close(self) -> None:
        """Threads spin again."""
        if self._end_team is not None:
            self._end_team.set()
            self._end_team = None
