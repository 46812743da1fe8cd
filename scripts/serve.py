"""Serves an engine over HTTP (OpenAI API), with a KV cache that survives between turns."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..builder.manifest import Manifest
from ..runtime.launch.assemble import locked_directories
from ..runtime.launch.options import ServeSettings, early_options, parse_options
from ..runtime.launch.ranks import run_rank
from ..runtime.launch.serving import follow_rank, serve, serve_attached, telling_model
from ..runtime.observe.logs import configure_logging
from ..runtime.ranks.launch import run_ranks, under_mpi
from ..runtime.system import tell_when_asked
from ..scheduler.types import SettingError

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with telling_model(early_options(words).attach):
            settings = parse_options(words)
            configure_logging(settings.log_format, settings.log_level)
            if under_mpi():
                return run_rank("pensieve serve", engine_ranks(settings), partial(serve_rank, settings))
            if (ranks := engine_ranks(settings)) > 1:
                flags = ["-P", "-E"] if sys.flags.ignore_environment else ["-P"]
                return run_ranks(ranks, [sys.executable, *flags, "-m", f"{__package__}.pensieve", "serve", *words])
            tell_when_asked()
            return serve_clients(settings)
    except SettingError as error:
        print(f"pensieve serve: {error}", file=sys.stderr)
        return 2


def engine_ranks(settings: ServeSettings) -> int:
    return 1 if settings.engine == "demo" else Manifest.read(Path(settings.engine)).tensor_parallel


def serve_rank(settings: ServeSettings, ranks: Ranks) -> int:
    """As one of the processes that mpirun started: rank 0 serves, the others follow it."""
    if ranks.rank == 0:
        with telling_model(settings.attach):
            return serve_clients(settings, ranks if ranks.size > 1 else None)
    logging.getLogger().setLevel(logging.ERROR)  # rank 0 logs the rest
    follow_rank(settings, ranks)
    return 0


def serve_clients(settings: ServeSettings, ranks: Ranks | None = None) -> int:
    """HTTP's, or with `--attach` Triton's; the exit status."""
    with locked_directories(settings):
        if settings.attach is None:
            return serve(settings, ranks)
        serve_attached(settings, settings.attach, ranks)
        return 0
