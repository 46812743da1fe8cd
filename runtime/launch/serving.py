"""Serves with the parts from `assemble`: runs the loop in this process, and the clients' side in
another."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ...scheduler.step_timing import StepTiming
from ...scheduler.types import SettingError
from ..conversations.store import HistoryStore
from ..http.listener import listen
from ..http.process import serve_http
from ..http.settings import HTTPSettings
from ..messages import TritonSettings
from ..ranks.launch import DRAIN, tell_serving
from ..service import Service
from ..system import safe_path
from .assemble import Assembled, assemble, make_executor, prepare_rank
from .attached import connect
from .http_options import http_settings
from .settings import ServeSettings

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks

log = logging.getLogger("pensieve")

ENDS = (signal.SIGTERM, signal.SIGINT, DRAIN)
HTTP_EXIT_SECONDS = 15  # for clients to read the end of their replies
END_SECONDS = 10.0  # for the last step, and to free memory


def serve(settings: ServeSettings, ranks: Ranks | None = None) -> int:
    """Starts the HTTP process, then runs the loop. Returns the exit status. SettingError before
    anything is served."""
    http_process = http_settings(settings)
    check_histories(settings, http_process)  # before anything else starts
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    http = spawn.Process(target=serve_http, args=(theirs, listener, http_process), name="http")
    # From here on the loop alone handles these signals. mpirun and a terminal send them to the HTTP
    # process too, which inherits this mask. Started later, the process that multiprocessing starts
    # would remove the mask.
    with safe_path():
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        http.start()  # its imports run while the weights load
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    listener.close()
    theirs.close()
    try:
        assembled = assemble(settings, ranks)
        service = make_service(assembled, ours)
        drain_on_signals(service, settings.shutdown_timeout)
        log.info("serving %s on http://%s:%d", assembled.ready.model, host, port)
        service.run(assembled.ready)
    finally:
        ours.close()
        http.join(HTTP_EXIT_SECONDS)
        status = http.exitcode
        http.kill()  # it ignores other signals; after a clean end it is gone already
    # it ended unexpectedly: a supervisor that restarts failed servers must see a failure
    if status:
        log.error("the HTTP process has ended with status %d, and the server with it", status)
        return 1
    return 0


def serve_attached(settings: ServeSettings, socket_path: Path, ranks: Ranks | None = None) -> None:
    """Runs the loop of Triton's model, which listens at `socket_path`. SettingError before anything
    is served."""
    history = http_settings(settings)
    check_histories(settings, history)  # before weights are loaded
    assembled = assemble(settings, ranks)
    with connect(socket_path) as connection:
        service = make_service(assembled, connection)
        connection.send(
            TritonSettings(
                histories=history.histories,
                server=history.server,
                history_ttl=history.history_ttl,
                max_conversations_per_owner=history.max_conversations_per_owner,
                log_format=history.log_format,
                log_level=history.log_level,
                end_seconds=settings.shutdown_timeout + END_SECONDS,
            )
        )
        drain_on_signals(service, settings.shutdown_timeout)
        service.run(assembled.ready)


def check_histories(settings: ServeSettings, http: HTTPSettings) -> None:
    """SettingError if they cannot be used. KV on disk goes if this server does not know what others
    have deleted since it was written."""
    store = HistoryStore(http.histories, server=http.server)
    if store.shared:
        if not store.is_registered():
            _drop_kv(settings.disk_directory, store.where)
        store.register()  # last: if this process ends before, the next one drops the rest
    store.close()


def _drop_kv(directory: Path, histories: str) -> None:
    records = list(directory.glob("rank-*/*.kv"))
    try:
        for file in records:
            file.unlink()
    except OSError as error:
        raise SettingError("--disk-dir", f"cannot use {directory}: {error}") from error
    if records:
        log.warning("%s: dropped KV that was written apart from %s", directory, histories)


def make_service(assembled: Assembled, connection: Connection) -> Service:
    scheduler, executor, cost, trace, _, kv_events = assembled
    return Service(scheduler, executor, connection, StepTiming(cost), trace, kv_events)


def follow_rank(settings: ServeSettings, ranks: Ranks) -> None:
    """Runs a rank other than 0 until rank 0 ends it. Signals are for rank 0: before it serves they
    end it, and mpirun ends the others."""
    from ..ranks.executor import follow  # imported here because it imports MPI

    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    prepared = prepare_rank(settings, ranks)
    follow(ranks, make_executor(settings, prepared, ranks))


def drain_on_signals(service: Service, seconds: float) -> None:
    """The first SIGTERM, SIGINT or (passed on by mpirun) SIGUSR1 lets requests finish within
    `seconds`, the second ends them, the third kills the process."""
    patience = [0.0, seconds]

    def drain(*_: object) -> None:
        service.drain(patience.pop())
        if not patience:
            for number in ENDS:
                signal.signal(number, signal.SIG_DFL)

    for number in ENDS:
        signal.signal(number, drain)
    tell_serving()
