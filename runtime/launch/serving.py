"""Serves what `assemble` made: the loop of this process, and the process of the clients beside it."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...scheduler.step_timing import StepTiming
from ..conversations.store import HistoryStore
from ..disk.directory import locked
from ..http.process import listen, serve_http
from ..messages import Ready
from ..ranks.launch import DRAIN
from ..service import Service
from ..watchdog import ASKED
from .assemble import assemble, make_executor, prepare_rank
from .options import ServeSettings, http_settings
from .sizing import disk_settings

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks

log = logging.getLogger("pensieve")

ENDS = (signal.SIGTERM, signal.SIGINT, DRAIN)
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies


def serve(settings: ServeSettings, ranks: Ranks | None = None) -> int:
    """Starts the HTTP process, then becomes the loop; the exit status. SettingError before anything is served."""
    http_process = http_settings(settings)
    HistoryStore(http_process.history_file).close()  # it must be usable before anything else starts
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    http = spawn.Process(target=serve_http, args=(theirs, listener, http_process), name="http")
    ours_alone = [DRAIN, ASKED]
    signal.pthread_sigmask(signal.SIG_BLOCK, ours_alone)  # mpirun tells the HTTP process too, which inherits this
    http.start()  # it imports while the weights load
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ours_alone)
    listener.close()
    theirs.close()
    try:
        service, ready = make_service(settings, ours, ranks)
        drain_on_signals(service, settings.shutdown_timeout)
        log.info("serving %s on http://%s:%d", ready.model, host, port)
        service.run(ready)
    finally:
        ours.close()
        http.join(HTTP_EXIT_SECONDS)
        status = http.exitcode
        http.kill()  # it ignores other signals; after a clean end it is gone already
    if status:  # it ended without being asked: a supervisor that restarts failed servers must see a failure
        log.error("the HTTP process has ended with status %d, and the server with it", status)
        return 1
    return 0


def make_service(settings: ServeSettings, connection: Connection, ranks: Ranks | None = None) -> tuple[Service, Ready]:
    """With `ranks`, rank 0's."""
    scheduler, executor, cost, trace, ready = assemble(settings, ranks)
    return Service(scheduler, executor, connection, StepTiming(cost), trace), ready


def follow_rank(settings: ServeSettings, ranks: Ranks) -> None:
    """Another rank than 0, until rank 0 ends it. Signals are for rank 0: before it serves it dies of them, and mpirun
    ends all."""
    from ..ranks.executor import follow  # and MPI

    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    prepared = prepare_rank(settings, ranks)
    follow(ranks, make_executor(settings, prepared, disk_settings(settings, prepared.config, ranks), ranks))


@contextmanager
def locked_directories(settings: ServeSettings) -> Iterator[None]:
    """While this is open no other server has them. SettingError."""
    with ExitStack() as locks:
        locks.enter_context(locked(settings.state_dir, "--state-dir"))
        disk = settings.disk_directory
        if disk.resolve() != settings.state_dir.resolve():
            locks.enter_context(locked(disk, "--disk-dir"))
        yield


def drain_on_signals(service: Service, seconds: float) -> None:
    """The first SIGTERM, SIGINT or (passed on by mpirun) SIGUSR1 lets requests finish within `seconds`, the second ends
    them, the third kills."""
    patience = [0.0, seconds]

    def drain(*_: object) -> None:
        service.drain(patience.pop())
        if not patience:
            for number in ENDS:
                signal.signal(number, signal.SIG_DFL)

    for number in ENDS:
        signal.signal(number, drain)
