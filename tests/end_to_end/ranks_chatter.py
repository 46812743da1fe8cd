"""One rank of random conversations over an engine of several ranks: run by mpirun, with a
checkpoint, its engine and a JSON list of the keyword arguments of successive `Chatter` objects.
Rank 0 prints the counts of events as JSON.

`slow`: only this rank's copies and steps are delayed at random. `bad_disk`: only this rank's disk
returns wrong data. `failing_copies`: some copies to HOST fail on this rank only. `restarts`: number
of restarts of all ranks at random times. `events`: as of `Chatter.run`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from functools import partial
from pathlib import Path

import torch

from pensieve.plugins.collectives.protocol import TENSOR_PARALLEL, register_group
from pensieve.runtime.disk.record import record_bytes
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from pensieve.runtime.ranks.executor import RankedExecutor, follow
from pensieve.runtime.ranks.mpi import Ranks

from .bad_disk import BadDisk
from .chatter import Chatter
from .failing_form import FAILING_FORM


def main(checkpoint, directory, runs):
    torch.set_num_threads(1)
    ranks = Ranks()
    engine = open_engine(directory, rank=ranks.rank)
    register_group(TENSOR_PARALLEL, ranks.open_group("cpu", engine.dtype))
    reference = None
    if ranks.rank == 0:
        from transformers import AutoModelForCausalLM  # seconds that the others are spared

        reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    happened = Counter()
    try:
        for run in json.loads(runs):
            happened.update(chat(ranks, engine, reference, Path(directory), **run))
    except BaseException as error:
        ranks.fail(error)
    if ranks.rank == 0:
        print(json.dumps(happened))


def chat(
    ranks,
    engine,
    reference,
    directory,
    *,
    turns,
    restarts=0,
    events=(),
    slow=None,
    bad_disk=None,
    failing_copies=None,
    **settings,
):
    """Runs one `Chatter`; returns the counts of events on rank 0."""
    if slow is not None:
        settings["disturbed"] = ranks.rank == slow
    if failing_copies is not None:
        settings |= dict(
            copies_may_fail=True, host_form=FAILING_FORM if ranks.rank == failing_copies else None
        )
    disk = None
    if slots := settings.get("disk_kv_chunks"):
        folder = directory.with_name(f"kv-{settings['seed']}")
        settings["disk"] = DiskSettings(folder, slots, "engine", ranks.size, ranks.rank)
        if bad_disk == ranks.rank:
            disk = BadDisk(settings["seed"], slots, record_bytes(engine.chunk_bytes(8)))
            settings["disk"] = settings["disk"]._replace(system=disk.calls)
    if ranks.rank == 0:
        chatter = Chatter(engine, reference, make_executor=partial(lead, ranks), **settings)
        happened = chatter.run(turns, restarts, events)
        happened["failed_copies"] = chatter.scheduler.stats().bad_copies
    else:
        chatter = Chatter(engine, reference, **settings)
        obey(ranks, chatter)
        for _ in range(restarts):
            chatter.restart()
            obey(ranks, chatter)
        happened = Counter()
    for lies in ranks.gather(disk.happened if disk is not None else {}):
        happened.update(lies)
    return happened


def lead(ranks, *arguments, **settings):
    """Rank 0's executor, made after all reports to the previous one have arrived."""
    ranks.gather(None)
    deque(ranks.reports(), maxlen=0)
    return RankedExecutor(ranks, *arguments, **settings)


def obey(ranks, chatter):
    ranks.gather(None)
    follow(ranks, chatter.executor)


if __name__ == "__main__":
    main(*sys.argv[1:])
