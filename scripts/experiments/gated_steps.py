"""Gates inside a captured graph: three steps of one graph in flight, each layer's copy held up for 50 ms.

    python scripts/experiments/gated_steps.py

A step reads its slot of a pool layer by layer and waits before each for an external event, its gate; one event a layer
serves all steps. Copies, gates and launches are issued in the executor's order: a step's copies, its gates' records,
its launch, then the next step's. Prints one line a finding.
"""

from __future__ import annotations

import time

import torch

from pensieve.runtime.device.cuda_api import CudaRuntime

STEPS, LAYERS, WIDTH = 3, 4, 1 << 20
HELD_UP_S = 0.05


def cycles_a_second() -> float:
    """Of the kernel that spins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / begin.elapsed_time(end) * 1e3


class GatedSteps:
    """One graph: out[layer] = pool[slot, layer], each layer behind its gate."""

    def __init__(self) -> None:
        self.runtime = CudaRuntime()
        self.compute, self.lane = torch.cuda.Stream(), torch.cuda.Stream()
        self.pool = torch.zeros(STEPS, LAYERS, WIDTH, device="cuda")
        self.host = torch.randn(STEPS, LAYERS, WIDTH).pin_memory()
        self.slot = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.slots = torch.arange(STEPS).pin_memory()
        self.out = torch.zeros(LAYERS, WIDTH, device="cuda")
        self.results = torch.zeros(STEPS, LAYERS, WIDTH, device="cuda")
        self.gates = [torch.cuda.Event() for _ in range(LAYERS)]
        for gate in self.gates:
            gate.record(self.lane)  # only a recorded event can be waited for
        self.spin = int(HELD_UP_S * cycles_a_second())
        with torch.cuda.stream(self.compute):
            self._compute(gated=False)  # loads the kernels
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.compute):
            self._compute(gated=True)

    def _compute(self, gated: bool) -> None:
        for layer, gate in enumerate(self.gates):
            if gated:
                self.runtime.wait_external(self.compute.cuda_stream, gate.cuda_event)
            self.out[layer].copy_(self.pool[:, layer].index_select(0, self.slot)[0])

    def copy(self, step: int) -> None:
        with torch.cuda.stream(self.lane):
            for layer, gate in enumerate(self.gates):
                torch.cuda._sleep(self.spin)
                self.pool[step, layer].copy_(self.host[step, layer], non_blocking=True)
                gate.record(self.lane)

    def launch(self, step: int) -> torch.cuda.Event:
        with torch.cuda.stream(self.compute):
            self.slot.copy_(self.slots[step : step + 1], non_blocking=True)
            self.graph.replay()
            self.results[step].copy_(self.out)
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
        return ended

    def run(self, copies_first: bool) -> tuple[float, list[float], list[bool]]:
        """Milliseconds until all was issued, those at which each step ended, and whether it read what it should."""
        self.pool.zero_()
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        start.record(self.compute)
        began, ended = time.perf_counter(), []
        for step in range(STEPS):
            if copies_first:
                self.copy(step)
            ended.append(self.launch(step))
            if not copies_first:
                self.copy(step)
        issued = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        right = [torch.equal(self.results[step].cpu(), self.host[step]) for step in range(STEPS)]
        return issued, [start.elapsed_time(event) for event in ended], right


def main() -> None:
    steps = GatedSteps()
    for copies_first in (True, False):
        issued, ended, right = steps.run(copies_first)
        order = "gates recorded before" if copies_first else "gates recorded after"
        times = ", ".join(f"{end:.0f}" for end in ended)
        verdicts = ", ".join("right" if one else "wrong" for one in right)
        print(
            f"{order} each launch: {STEPS} steps of {LAYERS} gates issued in {issued:.1f} ms, "
            f"ended after {times} ms, results {verdicts}"
        )
    apart = HELD_UP_S * LAYERS * 1e3
    print(f"expected: ends {apart:.0f} ms apart, all right; else each step waits for the copies before its own: wrong")


if __name__ == "__main__":
    main()
