"""Shared by commands that run as several ranks: they start themselves under mpirun, and each rank
takes its share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...plugins.collectives.protocol import TENSOR_PARALLEL, register_group
from ...scheduler.types import SettingError
from ..device.protocol import Device
from ..engine import Engine, open_engine
from ..ranks.launch import die_with_mpirun, open_ranks
from ..system import MEETING_SECONDS, give_up_after, print_stacks_on_signal
from .settings import in_flags

if TYPE_CHECKING:
    from ..ranks.mpi import Ranks

log = logging.getLogger(__name__)


def take_share(device: str, ranks: Ranks) -> None:
    """Takes this rank's share of the host's cores, or its own GPU, by its number. SettingError for
    too few GPUs."""
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.local_size))
    elif torch.cuda.device_count() < ranks.local_size:
        raise SettingError(
            "--device",
            f"{ranks.local_size} ranks here need a GPU each, not {torch.cuda.device_count()}",
        )
    else:
        torch.cuda.set_device(ranks.local_rank)


def open_rank(
    directory: Path,
    device: str,
    make_device: Callable[[], Device],
    ranks: Ranks,
    kv_cache_dtype: str,
) -> tuple[Device, Engine]:
    """Returns this rank's device and its part of the engine, with the group in which it computes.
    All ranks call it at the same time. A fault of one rank is raised on it and on rank 0."""
    ranks.together(lambda: take_share(device, ranks))
    own_device = ranks.together(make_device)
    engine = ranks.together(lambda: open_engine(directory, device, ranks.rank, kv_cache_dtype))
    ranks.check_equal("engine", "engine", engine.manifest.fingerprint)
    register_group(TENSOR_PARALLEL, ranks.open_group(device, engine.dtype))
    return own_device, engine


def run_rank(name: str, count: int, work: Callable[[Ranks], int]) -> int:
    """Calls work(ranks) as one of the `count` processes that mpirun started. An exception ends them
    all."""
    print_stacks_on_signal()
    die_with_mpirun()
    try:
        with give_up_after(MEETING_SECONDS):
            ranks = open_ranks()
    except SettingError as error:
        print(f"{name}: {in_flags(error)}", file=sys.stderr)
        return 2
    try:
        if ranks.size != count and ranks.rank == 0:
            raise SettingError(
                "mpirun",
                f"{count} ranks are needed and {ranks.size} were started: mpirun -n {count}",
            )
        status = work(ranks)
        ranks.close()
    except SettingError as error:
        where = f" (rank {ranks.rank})" if ranks.rank else ""
        ranks.fail(error, status=2, message=f"{name}: {in_flags(error)}{where}\n")
    except BaseException as error:
        log.exception("rank %d failed", ranks.rank)
        ranks.fail(error)
    return status
