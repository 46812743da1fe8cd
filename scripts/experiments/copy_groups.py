"""Reads and copies at once: how fast attention reads a pool, and copies fill it, by layers a copy.

    python scripts/experiments/copy_groups.py [--seconds 60]

A 40 GB pool of 40 layers with 10 key heads; chunks arrive from pinned host memory in random order, in groups of 1, 4, 8
or all 40 layers, while attention (64 requests at 2,048 tokens) reads other chunks of it. Copies are handed to
`cudaMemcpyBatchAsync` as arrays of addresses, 1,024 a call, through ctypes, which releases the GIL meanwhile; with
--seconds, the calls are then repeated for so long while another thread counts how often it gets to run.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time

import numpy as np
import torch

from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention.work_list import Capacity

LAYERS, KV_HEADS, HEADS, CHUNK, HEAD_DIM = 40, 10, 40, 32, 128
LAYER_BYTES = 2 * KV_HEADS * CHUNK * HEAD_DIM * 2
REQUESTS, CONTEXT = 64, 2048
READ_SLOTS, SLOTS, HOST_SLOTS = REQUESTS * CONTEXT // CHUNK, 6144, 600  # 40 GB and 3.9 GB
ENTRIES = 1024


class Attributes(ctypes.Structure):
    """cudaMemcpyAttributes: source access order, location hints (type, id) of source and target, flags."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "source", "source_id", "target", "target_id", "flags")]


IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class BatchCopy:
    """`cudaMemcpyBatchAsync` of CUDA 13 on arrays of addresses."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
        self._call.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] + [ctypes.c_void_p] * 2
        self._call.argtypes += [ctypes.c_size_t, ctypes.c_void_p]
        self._attributes = Attributes(order=IN_STREAM_ORDER)
        self._first = np.zeros(1, np.uint64)

    def __call__(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """uint64 arrays of addresses and bytes; they may be changed once the call returns."""
        status = self._call(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(targets),
            ctypes.addressof(self._attributes), self._first.ctypes.data, 1, stream,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cudaMemcpyBatchAsync returned {status}")


class Copies:
    """Batches of copies host to GPU of whole records, `group` layers an entry, layer group by layer group."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor, group: int):
        dice = np.random.default_rng(0)
        record = LAYERS * LAYER_BYTES
        self.sources_slots = dice.permutation(HOST_SLOTS).astype(np.uint64)
        self.targets_slots = (READ_SLOTS + dice.permutation(SLOTS - READ_SLOTS)[:HOST_SLOTS]).astype(np.uint64)
        offsets = (np.arange(0, LAYERS, group, dtype=np.uint64) * np.uint64(LAYER_BYTES))[:, None]
        self._sources = (np.uint64(host.data_ptr()) + self.sources_slots * np.uint64(record) + offsets).ravel()
        self._targets = (np.uint64(pool.data_ptr()) + self.targets_slots * np.uint64(record) + offsets).ravel()
        self._sizes = np.full(len(self._sources), group * LAYER_BYTES, np.uint64)
        self.bytes = int(self._sizes.sum())
        self._copy = BatchCopy()

    def enqueue(self, stream: int) -> int:
        """All copies once; returns the number of calls."""
        starts = range(0, len(self._sizes), ENTRIES)
        for i in starts:
            part = slice(i, i + ENTRIES)
            self._copy(self._targets[part], self._sources[part], self._sizes[part], stream)
        return len(starts)


def attention_graph(pool: torch.Tensor) -> torch.cuda.CUDAGraph:
    """One decode step's attention: every layer once."""
    table = torch.randperm(READ_SLOTS, device="cuda").int().view(REQUESTS, -1)
    rows = [(i, 1, 0, CONTEXT, i) for i in range(REQUESTS)]
    q = torch.randn(REQUESTS, HEADS, HEAD_DIM, device="cuda").to(pool.dtype)
    capacity = Capacity(REQUESTS, REQUESTS, CONTEXT)
    work = attention_kernel.make_work_list(capacity, HEADS, KV_HEADS, HEAD_DIM, pool.dtype)
    work.build(torch.tensor(rows, dtype=torch.int32, device="cuda"), longest=1)

    def step() -> None:
        for layer in range(LAYERS):
            attention_kernel.multi_token_attention(q, table, pool, layer, HEAD_DIM**-0.5, work)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def timed(stream: torch.cuda.Stream, enqueue) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    enqueue()
    end.record(stream)
    return start, end


def side_by_side(pool: torch.Tensor, host: torch.Tensor) -> None:
    main, lane = torch.cuda.Stream(), torch.cuda.Stream()
    graph = attention_graph(pool)
    read = LAYERS * REQUESTS * CONTEXT * KV_HEADS * HEAD_DIM * 4

    def steps(count: int) -> None:
        with torch.cuda.stream(main):
            for _ in range(count):
                graph.replay()

    def rate(events: tuple[torch.cuda.Event, torch.cuda.Event], size: float) -> float:
        torch.cuda.synchronize()
        return size / events[0].elapsed_time(events[1]) / 1e6  # GB/s

    steps(2)
    alone = rate(timed(main, lambda: steps(10)), 10 * read)
    print(f"attention alone reads {alone:.0f} GB/s")
    for group in (1, 4, 8, LAYERS):
        copies = Copies(pool, host, group)
        copies.enqueue(lane.cuda_stream)
        copying = rate(timed(lane, lambda copies=copies: copies.enqueue(lane.cuda_stream)), copies.bytes)
        torch.cuda.synchronize()
        # Attention runs as long as the copies do: the copies are timed inside it, and it inside the copies.
        thread = threading.Thread(target=lambda copies=copies: [copies.enqueue(lane.cuda_stream) for _ in range(4)])
        thread.start()
        time.sleep(0.02)
        reading = timed(main, lambda: steps(20))
        read_rate = rate(reading, 20 * read)
        thread.join()
        torch.cuda.synchronize()
        steps(40)
        copied = timed(lane, lambda copies=copies: copies.enqueue(lane.cuda_stream))
        copy_rate = rate(copied, copies.bytes)
        for target, source in zip(copies.targets_slots[:8], copies.sources_slots[:8], strict=True):
            assert torch.equal(pool[int(target)].cpu(), host[int(source)])
        print(
            f"{group:2} layers a copy ({group * LAYER_BYTES >> 10} KiB): copies {copying:.1f} GB/s alone, "
            f"{copy_rate:.1f} beside attention; attention reads {read_rate:.0f} GB/s beside copies "
            f"({read_rate / alone:.0%})",
            flush=True,
        )


def endurance(pool: torch.Tensor, host: torch.Tensor, seconds: float) -> None:
    """Calls back to back; a second thread shows how long it was kept from running."""
    stream = torch.cuda.Stream()
    copies = Copies(pool, host, 4)
    turns, longest, over = 0, 0.0, threading.Event()

    def count() -> None:
        nonlocal turns, longest
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0)
            now = time.perf_counter()
            turns, longest, last = turns + 1, max(longest, now - last), now

    thread = threading.Thread(target=count)
    thread.start()
    end, calls, inside, rounds = time.perf_counter() + seconds, 0, 0.0, 0
    began = time.perf_counter()
    while time.perf_counter() < end:
        before = time.perf_counter()
        calls += copies.enqueue(stream.cuda_stream)
        inside += time.perf_counter() - before
        rounds += 1
        stream.synchronize()
    spent = time.perf_counter() - began
    over.set()
    thread.join()
    print(
        f"{calls} calls of up to {ENTRIES} entries in {spent:.1f} s: {rounds * copies.bytes / spent / 1e9:.1f} GB/s, "
        f"{inside / calls * 1e6:.0f} us a call; the other thread ran {turns / spent:.0f} times a second, "
        f"kept waiting {longest * 1e3:.1f} ms at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="attention and copies at once")
    parser.add_argument("--seconds", type=float, default=0, help="repeat the calls for so long")
    options = parser.parse_args()
    shape = (LAYERS, 2, KV_HEADS, CHUNK, HEAD_DIM)
    pool = torch.empty(SLOTS, *shape, dtype=torch.bfloat16, device="cuda").normal_()
    host = torch.empty(HOST_SLOTS, *shape, dtype=torch.bfloat16, pin_memory=True)
    for slot in host:
        slot.copy_(torch.randn(shape, device="cuda"))
    side_by_side(pool, host)
    if options.seconds:
        endurance(pool, host, options.seconds)


if __name__ == "__main__":
    main()
