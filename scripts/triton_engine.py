"""The engine's process behind Triton's model: `python -m pensieve.scripts.triton_engine OPTIONS DESCRIPTOR`.

Started by `runtime.triton_model`, with the options of `pensieve serve` and the number of an open pipe. Of an engine of
several ranks it is mpirun's parent, and rank 0 gets the pipe (`triton_rank`).
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.conversations.store import HistoryStore
from ..runtime.messages import TritonSettings
from ..runtime.observe.logs import configure_logging
from ..runtime.ranks.launch import find_mpirun, run_ranks
from ..scheduler.types import SettingError
from .serve import drain_on_signals, engine_ranks, locked_directories, make_service
from .serve_http import http_settings
from .serve_options import parse_options
from .triton_repository import refuse_tritons

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks

END_SECONDS = 10.0  # for the last step, and for memory to be given back


def main(argv: Sequence[str]) -> int:
    """Serves until told to end or until Triton's model is gone. A wrong setting is told to the model."""
    *options, descriptor = argv
    with Connection(int(descriptor)) as connection:
        try:
            args = parse_options(options)
            refuse_tritons(args)
            configure_logging(args.log_format, args.log_level)
            if (ranks := engine_ranks(args)) > 1:
                return start_ranks(ranks, options, connection)
            serve_model(args, connection)
        except SettingError as error:
            connection.send(str(error))
            return 2
    return 0


def serve_model(args: argparse.Namespace, connection: Connection, ranks: Ranks | None = None) -> None:
    """Becomes the loop behind `connection`; with `ranks`, as rank 0. SettingError before anything is served."""
    with locked_directories(args):
        settings = http_settings(args)
        HistoryStore(settings.history_file).close()  # whether it can be used is known before weights are loaded
        service, ready = make_service(args, connection, ranks)
        connection.send(
            TritonSettings(
                history_file=settings.history_file,
                history_ttl=settings.history_ttl,
                max_conversations_per_owner=settings.max_conversations_per_owner,
                log_format=settings.log_format,
                log_level=settings.log_level,
                chunk_tokens=args.chunk_tokens,
                end_seconds=args.shutdown_timeout + END_SECONDS,
            )
        )
        drain_on_signals(service, args.shutdown_timeout)
        service.run(ready)


def start_ranks(count: int, options: Sequence[str], connection: Connection) -> int:
    """Runs the ranks, of which rank 0 takes the pipe over, and returns mpirun's exit status. SettingError.

    mpirun closes what its ranks would inherit, so the pipe is handed over a socket in a directory of this user's own.
    """
    find_mpirun()  # before anybody waits for a rank
    with tempfile.TemporaryDirectory(prefix="pensieve-") as directory, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(directory, "door"))
        door.bind(path)
        door.listen()
        threading.Thread(target=hand_over, args=(connection, door), name="hand-over", daemon=True).start()
        # -E: as for this process, what Triton's environment says to Python is not for the ranks.
        return run_ranks(count, [sys.executable, "-E", "-m", f"{__package__}.triton_rank", *options, path])


def hand_over(connection: Connection, door: socket.socket) -> None:
    """Thread: gives the pipe to rank 0 when it comes. From then on the pipe ends where rank 0 does."""
    visitor, _ = door.accept()
    with visitor, connection:
        socket.send_fds(visitor, [b"pipe"], [connection.fileno()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
