"""The engine's process behind Triton's model: `python -m pensieve.scripts.triton_engine OPTIONS DESCRIPTOR`.

Started by `runtime.triton_model`, with the options of `pensieve serve` and the number of an open pipe.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

from ..runtime.history_store import HistoryStore
from ..runtime.logs import configure_logging
from ..runtime.triton_settings import TritonSettings
from ..scheduler.types import SettingError
from .serve import drain_on_signals, locked_directories, make_service
from .serve_http import http_settings
from .serve_options import parse_options

END_SECONDS = 10.0  # for the last step, and for memory to be given back


def main(argv: Sequence[str]) -> int:
    """Serves until told to end or until Triton's model is gone. A wrong setting is told to the model."""
    *options, descriptor = argv
    with Connection(int(descriptor)) as connection, ExitStack() as locks:
        try:
            args = parse_options(options)
            configure_logging(args.log_format, args.log_level)
            locks.enter_context(locked_directories(args))
            settings = http_settings(args)
            HistoryStore(settings.history_file).close()  # whether it can be used is known before weights are loaded
            service, ready = make_service(args, connection)
        except SettingError as error:
            connection.send(str(error))
            return 2
        connection.send(
            TritonSettings(
                history_file=settings.history_file,
                history_ttl=settings.history_ttl,
                log_format=settings.log_format,
                log_level=settings.log_level,
                chunk_tokens=args.chunk_tokens,
                end_seconds=args.shutdown_timeout + END_SECONDS,
            )
        )
        drain_on_signals(service, args.shutdown_timeout)
        gc.collect()
        gc.freeze()  # as in `serve`
        try:
            service.run(ready)
        finally:
            gc.unfreeze()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
