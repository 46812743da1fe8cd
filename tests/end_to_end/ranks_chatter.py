"""One rank of random conversations over an engine of several ranks: run by mpirun, with a checkpoint, its engine and a
JSON list of the keyword arguments of one `Chatter` after the other. Rank 0 prints what has happened, as JSON.

`slow`: this rank's copies and steps are delayed at random, the others' are not.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from pensieve.plugins.collectives import TENSOR_PARALLEL, register_group
from pensieve.runtime.disk_store import DiskSettings
from pensieve.runtime.engine import open_engine
from pensieve.runtime.ranks import Ranks
from pensieve.runtime.ranks_executor import RankedExecutor, follow

from .chatter import Chatter


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
            turns = run.pop("turns")
            if (slow := run.pop("slow", None)) is not None:
                run["disturbed"] = ranks.rank == slow
            if slots := run.get("disk_kv_chunks"):
                folder = Path(directory).with_name(f"kv-{run['seed']}")
                run["disk"] = DiskSettings(folder, slots, "engine", ranks.size, ranks.rank)
            if ranks.rank == 0:
                chatter = Chatter(engine, reference, make_executor=partial(RankedExecutor, ranks), **run)
                happened.update(chatter.run(turns))
            else:
                follow(ranks, Chatter(engine, reference, **run).executor)
    except BaseException as error:
        ranks.fail(error)
    if ranks.rank == 0:
        print(json.dumps(happened))


if __name__ == "__main__":
    main(*sys.argv[1:])
