"""The work of `pensieve serve` after its options are read: in this process, or as the ranks of a
divided engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...builder.manifest import Manifest
from ..ranks.launch import run_ranks, under_mpi
from ..system import print_stacks_on_signal
from .assemble import locked_directories
from .attached import telling_model
from .command_line import interrupts_raise
from .ranks import run_rank
from .resolve import resolved
from .serving import follow_rank, serve, serve_attached
from .settings import ServeSettings

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks


def run(settings: ServeSettings, words: Sequence[str]) -> int:
    """Serves with `settings`, parsed from `words` and checked. Returns the exit status. Raises
    SettingError."""
    with interrupts_raise():  # a build removes its files
        settings = resolved(settings)
    ranks = Manifest.read(settings.engine_directory).tensor_parallel
    if under_mpi():
        return run_rank("pensieve serve", ranks, partial(serve_rank, settings))
    if ranks > 1:
        flags = ["-P", "-E"] if sys.flags.ignore_environment else ["-P"]
        command = [sys.executable, *flags, "-m", "pensieve.scripts.pensieve", "serve"]
        return run_ranks(ranks, [*command, *words, *settled_words(settings)])
    print_stacks_on_signal()
    return serve_clients(settings)


def settled_words(settings: ServeSettings) -> list[str]:
    """Options with the resolved values, the same for all ranks. They are appended, because the last
    ones count."""
    names = settings.served_model_name
    return [
        f"--engine={settings.engine}",
        f"--state-dir={settings.state_dir}",
        *(["--served-model-name", *names] if names else []),
    ]


def serve_rank(settings: ServeSettings, ranks: Ranks) -> int:
    """Runs as one of the processes that mpirun started: rank 0 serves, the others follow it."""
    if ranks.rank == 0:
        with telling_model(settings.attach):
            return serve_clients(settings, ranks if ranks.size > 1 else None)
    logging.getLogger().setLevel(logging.ERROR)  # rank 0 logs the rest
    follow_rank(settings, ranks)
    return 0


def serve_clients(settings: ServeSettings, ranks: Ranks | None = None) -> int:
    """Serves HTTP, or with `--attach` Triton's model. Returns the exit status."""
    with locked_directories(settings):
        if settings.attach is None:
            return serve(settings, ranks)
        serve_attached(settings, settings.attach, ranks)
        return 0
