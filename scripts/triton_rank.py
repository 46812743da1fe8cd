"""One of several ranks behind Triton's model: `python -m pensieve.scripts.triton_rank OPTIONS DOOR`, started by mpirun.

DOOR is the path of the socket at which `triton_engine` hands rank 0 the pipe to Triton's model.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ..runtime.launch.options import ServeSettings, parse_options
from ..runtime.launch.ranks import run_rank
from ..runtime.launch.serving import follow_rank
from ..runtime.observe.logs import configure_logging
from ..scheduler.types import SettingError
from .serve import engine_ranks
from .triton_engine import serve_model

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks


def main(argv: Sequence[str]) -> int:
    *options, door = argv
    args = parse_options(options)
    configure_logging(args.log_format, args.log_level)
    return run_rank("pensieve's engine", engine_ranks(args), partial(serve_rank, args, door))


def serve_rank(args: ServeSettings, door: str, ranks: Ranks) -> int:
    """Rank 0 serves Triton's model, and tells it of a wrong setting; the others follow it."""
    if ranks.rank:
        logging.getLogger().setLevel(logging.ERROR)  # what else it would say rank 0 says
        follow_rank(args, ranks)
        return 0
    with take_over(door) as connection:
        try:
            serve_model(args, connection, ranks)
        except SettingError as error:
            connection.send(str(error))
            raise
    return 0


def take_over(door: str) -> Connection:
    """The pipe to Triton's model."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(door)
        _, (descriptor,), _, _ = socket.recv_fds(visitor, len(b"pipe"), 1)
    return Connection(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
