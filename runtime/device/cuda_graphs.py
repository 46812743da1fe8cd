"""CUDA graphs of the forward pass, one for each size of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...builder.progress import show_progress
from ..step.buffers import Shape


class StepGraphs:
    """Graphs that share their memory: they run one after the other, and no graph needs the previous one's contents."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}

    def capture(self, shapes: Sequence[Shape], step: Callable[[Shape], None]) -> None:
        """Records `step(shape)`, which has run once for each shape, on the stream; blocks.

        The largest comes first, so the others fit in its memory. Other threads may meanwhile make calls that a capture
        forbids, such as NCCL's event queries and allocations.
        """
        ordered = sorted(shapes, reverse=True)
        for done, shape in enumerate(ordered, start=1):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                step(shape)
            self._graphs[shape] = graph
            show_progress("capturing graphs", done, len(ordered))

    def replay(self, shape: Shape) -> bool:
        """Launches the shape's graph on the current stream. Returns False if there is none."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def clear(self) -> None:
        self._graphs.clear()
