"""CUDA graphs of the forward pass, one for each size of batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..step.buffers import Shape


class StepGraphs:
    """Graphs that share their memory: they run one after the other, and no graph needs the previous
    one's contents."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shape: Shape, step: Callable[[Shape], None]) -> None:
        """Records `step(shape)`, which has just run once, on the stream; blocks.

        Other threads may meanwhile make calls that a capture forbids, such as NCCL's event queries
        and allocations.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            step(shape)
        self._graphs[shape] = graph

    def replay(self, shape: Shape) -> bool:
        """Launches the shape's graph on the current stream. Returns False if there is none."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        self._graphs.clear()
