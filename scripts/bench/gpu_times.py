"""Times of work on a GPU, measured by its own events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

UNCOUNTED = 3


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a CUDA graph, which each call of the result launches."""
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def median_seconds(work: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Of one call of `work`. The time of `before`, called before each one, is not counted."""
    times = []
    for _ in range(UNCOUNTED + repeats):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in times[UNCOUNTED:])
