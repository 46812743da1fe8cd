"""How long a captured run of equal parts takes, for the experiments beside this file."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch


def microseconds(run: Callable[[], Any], count: int, repeats: int = 10) -> float:
    """Median time of one of the `count` parts of a run, captured."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / count
