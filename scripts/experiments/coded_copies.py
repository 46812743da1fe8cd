"""Copies in eight bits, and packed, beside steps: how fast the kernels are, and what copying with them costs a step.

    python scripts/experiments/coded_copies.py

Pools of Llama-2-13B with 10 key heads, bf16. First the kernels alone, by the number of their programs. Then steps (a
graph of 40 layers' matrix products for 64 tokens) beside swap-ins in groups of 4 layers and swap-outs of whole records,
copied as they are, in eight bits and packed; bytes are those on the link. The last line is JSON.
"""

from __future__ import annotations

import json
import statistics

import numpy as np
import torch

from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel
from pensieve.plugins.kv_forms import packed_kernel as kv_packed_kernel
from pensieve.plugins.kv_forms.forms import FP8, PACKED, Form, record_bytes
from pensieve.runtime.device.cuda import CudaDevice
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import Tier

SHAPE = (1200, 40, 2, 10, 32, 128)
HOST_SLOTS, CHUNKS, GROUP = 1200, 600, 4
PROGRAMS = (8, 16, 32, 64, 132)
HIDDEN, MLP, TOKENS = 5120, 13824, 64
STEPS = 8  # 22 ms, while copies in eight bits take 40


def milliseconds(stream: torch.cuda.Stream, enqueue) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record(stream)
    enqueue()
    end.record(stream)
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def set_programs(count: int) -> None:
    kv_fp8_kernel.PROGRAMS = kv_packed_kernel.PROGRAMS = count


def kernel_speeds(pool: torch.Tensor, form: Form) -> dict[str, dict[int, float]]:
    """GB/s of records by programs, each kernel alone."""
    slots = torch.randperm(len(pool), device="cuda")[:20].int()
    layers, kernels = range(pool.shape[1]), form.kernels()
    records = torch.zeros(len(slots), len(layers), form.layer_bytes(pool.shape), dtype=torch.uint8, device="cuda")
    works = {
        "encode": lambda: kernels.encode(pool, slots, layers, records),
        "decode": lambda: kernels.decode(records, slots, layers, pool),
    }
    speeds = {}
    for name, work in works.items():
        speeds[name] = {}
        for programs in PROGRAMS:
            set_programs(programs)
            work()
            times = [milliseconds(torch.cuda.current_stream(), work) for _ in range(7)]
            speeds[name][programs] = records.nbytes / statistics.median(times) / 1e6
    return speeds


def step_graph() -> torch.cuda.CUDAGraph:
    weights = [
        tuple(torch.randn(*size, device="cuda").bfloat16() for size in ((HIDDEN, MLP), (MLP, HIDDEN)))
        for _ in range(SHAPE[1])
    ]
    x = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()

    def step() -> None:
        y = x
        for up, down in weights:
            y = (y @ up) @ down * 1e-4

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def beside(device: CudaDevice, graph: torch.cuda.CUDAGraph, lanes: tuple[Lane, ...]) -> tuple[float, float]:
    """Milliseconds of a step beside copies on the lanes, and GB/s of each lane; copies outlast the steps."""
    dice = np.random.default_rng(0)
    slots = {tier: dice.permutation(HOST_SLOTS)[: 2 * CHUNKS].astype(np.int32) for tier in (Tier.GPU, Tier.HOST)}

    def copies() -> None:
        for first in range(0, SHAPE[1], GROUP):
            for lane in lanes:
                part = slice(0, CHUNKS) if lane is Lane.IN else slice(CHUNKS, None)
                gpu, host = slots[Tier.GPU][part], slots[Tier.HOST][part]
                if lane is Lane.IN:
                    device.copy(lane, host, gpu, range(first, first + GROUP))
                elif not first:
                    device.copy(lane, gpu, host, range(SHAPE[1]))

    copies()
    torch.cuda.synchronize()
    before = device.transfer_seconds()
    copies()
    compute = device._streams[Lane.COMPUTE]
    with torch.cuda.stream(compute):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    after = device.transfer_seconds()
    busy = max(after.swap_in - before.swap_in, after.swap_out - before.swap_out)
    moved = CHUNKS * device._host.records.record
    return start.elapsed_time(end) / STEPS, moved / busy / 1e9 if lanes else 0.0


def main() -> None:
    report: dict[str, object] = {"gpu": torch.cuda.get_device_name()}
    graph = step_graph()
    both = (Lane.IN, Lane.OUT)
    settings = [("as it is", None, kv_fp8_kernel.PROGRAMS)]
    settings += [(f"coded, {programs} programs", FP8, programs) for programs in PROGRAMS]
    settings += [(f"packed, {programs} programs", PACKED, programs) for programs in PROGRAMS]
    for name, form, programs in settings:
        device = CudaDevice()
        device.allocate_pool(Tier.GPU, SHAPE, torch.bfloat16)
        device.allocate_pool(Tier.HOST, (HOST_SLOTS, *SHAPE[1:]), torch.bfloat16, form)
        device._pool.normal_()
        torch.cuda.synchronize()
        if form is not None and programs == PROGRAMS[0]:
            report[f"{name}: kernels"] = alone = kernel_speeds(device._pool, form)
            for kernel, speeds in alone.items():
                print(f"{name}: {kernel}, GB/s by programs:", {n: round(speed, 1) for n, speed in speeds.items()})
        set_programs(programs)
        for lanes in ((), (Lane.IN,), (Lane.OUT,), both):
            step, speed = beside(device, graph, lanes)
            way = " and ".join(lane.name for lane in lanes) or "no copies"
            print(f"{name:20} {way:12} a step {step:7.3f} ms, each lane {speed:5.1f} GB/s", flush=True)
            report[f"{name}, {way}"] = {"step_ms": step, "gb_s": speed}
        device.close()
    forms = {"as it is": None, "coded": FP8, "packed": PACKED}
    report["record"] = {name: record_bytes(SHAPE, torch.bfloat16, form) for name, form in forms.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
