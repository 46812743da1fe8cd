"""Does a compiled decoder leave a KV pool alone that its operations take by handle?

    python scripts/experiments/pool_handle.py [--device cpu --pool-gib 0.05]

A decoder of a few layers with random weights is exported, compiled by AOTInductor, packaged, loaded and run. Printed
are the peak memory during its run beyond what was there before (a clone of the pool would show), the pool's address
before and after, and whether the pool and the logits hold what the eager decoder writes: the same in the slots of
this batch, nothing anywhere else.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch._inductor
from torch import Tensor

from pensieve.builder.checkpoints.config import DecoderConfig, Rotary
from pensieve.builder.model import Decoder
from pensieve.builder.random_weights import random_weights
from pensieve.plugins.torch_ops import register_pool, release_pool

CHUNK = 32
LENGTHS = (1000, 300, 77, 1)  # contexts; of each the last tokens are computed in a second run, over the first
NEW = (40, 8, 1, 1)
UNTOUCHED = 3.0  # what all other slots hold; a run must not change it
SHAPE = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=1024, hidden_size=1024, layers=4, heads=8, kv_heads=2, head_dim=128,
    mlp_size=2816, max_positions=4096, embedding_size=1024, rotary=Rotary(128, 10000.0), position_offset=0,
    norm="rms", norm_eps=1e-5, norm_affine=True, norm_first=True, final_norm=True, qk_norm=False, activation="silu",
    gated=True, qkv_bias=False, attention_out_bias=False, mlp_bias=False, tied_embeddings=True,
)  # fmt: skip


class Inputs(NamedTuple):
    """Arguments of `Decoder.forward` but the pool."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    segments: Tensor
    block_table: Tensor
    sample_rows: Tensor


def batch(spans: list[tuple[int, int]], table: Tensor, device: str) -> Inputs:
    """Positions [start, end) of each request; requests without any have no segment."""
    positions, slots, segments, row = [], [], [], 0
    for seat, (start, end) in enumerate(spans):
        own = torch.arange(start, end)
        positions.append(own)
        slots.append(table[seat, own // CHUNK] * CHUNK + own % CHUNK)
        if end > start:
            segments.append((row, end - start, 0, end, seat))
        row += end - start
    at = torch.cat(positions)
    parts = (at * 7919 % SHAPE.vocab_size, at, torch.cat(slots), torch.tensor(segments), table, torch.arange(row))
    return Inputs(*(part.int().to(device) for part in parts))


class Experiment:
    """A pool with its handle, and the batches of two steps over random slots of it."""

    def __init__(self, device: str, pool_gib: float, dtype: torch.dtype):
        self.device = device
        record = (SHAPE.layers, 2, SHAPE.kv_heads, CHUNK, SHAPE.head_dim)
        record_bytes = torch.Size(record).numel() * dtype.itemsize
        blocks = -(-max(LENGTHS) // CHUNK)
        self.slot_count = max(int(pool_gib * 2**30) // record_bytes, len(LENGTHS) * blocks)
        self.pool = torch.full((self.slot_count, *record), UNTOUCHED, dtype=dtype, device=device)
        self.table = torch.randperm(self.slot_count)[: len(LENGTHS) * blocks].view(len(LENGTHS), blocks).int()
        cached = [length - new for length, new in zip(LENGTHS, NEW, strict=True)]
        self.steps = [
            batch([(0, end) for end in cached], self.table, device),
            batch(list(zip(cached, LENGTHS, strict=True)), self.table, device),
        ]
        self.work = self._work_list(dtype) if device == "cuda" else None
        self.handle = register_pool(self.pool, work=self.work)

    def _work_list(self, dtype: torch.dtype):
        from pensieve.plugins.attention import kernel as attention_kernel  # Triton comes with CUDA only
        from pensieve.plugins.attention.work_list import Capacity

        capacity = Capacity(sum(LENGTHS), len(LENGTHS), SHAPE.max_positions)
        return attention_kernel.make_work_list(capacity, SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim, dtype)

    def run(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        """The logits of both steps; the second reads what the first has written."""
        logits = []
        for inputs in self.steps:
            if self.work is not None:
                self.work.build(inputs.segments)
            logits.append(forward(*inputs, self.handle))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return logits

    def written(self) -> Tensor:
        """A copy of the slots that the requests use."""
        return self.pool[self.table.flatten().long().to(self.device)].clone()

    def reset(self) -> None:
        self.pool.fill_(UNTOUCHED)

    def changed_elsewhere(self) -> int:
        """How many slots that no request uses hold something else; looked at a few at a time."""
        used = set(self.table.flatten().tolist())
        others = [slot for slot in range(self.slot_count) if slot not in used]
        parts = (others[i : i + 256] for i in range(0, len(others), 256))
        return sum(int((self.pool[part] != UNTOUCHED).flatten(1).any(1).sum()) for part in parts)


def compiled(decoder: Decoder, example: Inputs, handle: int, directory: str) -> Callable[..., Tensor]:
    """The decoder as a loaded package, for any token count from 2 on, any segments, seats and rows."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic},) * 4 + ({0: dynamic, 1: dynamic}, {0: dynamic}, None)
    start = time.perf_counter()
    program = torch.export.export(decoder, (*example, handle), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(directory) / "decoder.pt2"))
    calls = sum(str(node.target).startswith("pensieve.") for node in program.graph.nodes)
    print(
        f"exported, compiled and packaged in {time.perf_counter() - start:.1f} s: {calls} calls of our operations, "
        f"{Path(path).stat().st_size / 2**20:.1f} MiB"
    )
    return torch._inductor.aoti_load_package(path, run_single_threaded=True)


class Memory:
    """Peak memory of what runs inside, in bytes beyond what was in use at its beginning.

    peak        on a GPU of PyTorch's allocator, on the CPU of the process (0: no more than ever before)
    grown       of the whole GPU, allocations of others included; 0 on the CPU
    """

    def __init__(self, device: str):
        self._gpu = device == "cuda"
        self.peak = self.grown = 0

    def __enter__(self) -> Memory:
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
        self._used, self._free = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        used, free = self._now()
        self.peak = (torch.cuda.max_memory_allocated() if self._gpu else used) - self._used
        self.grown = self._free - free

    def _now(self) -> tuple[int, int]:
        if self._gpu:
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0


@torch.no_grad()
def experiment(device: str, pool_gib: float, dtype: torch.dtype) -> bool:
    decoder = Decoder.from_weights(SHAPE, random_weights(SHAPE, dtype, device, 0))
    trial = Experiment(device, pool_gib, dtype)
    print(f"pool: {trial.pool.nbytes / 2**30:.2f} GiB, {trial.slot_count} slots, at {trial.pool.data_ptr():#x}")
    eager = trial.run(decoder)
    expected = trial.written()
    with tempfile.TemporaryDirectory() as directory:
        package = compiled(decoder, trial.steps[1], trial.handle, directory)
        trial.run(package)  # whatever is loaded or tuned at the first run is there afterwards
        trial.reset()
        address = trial.pool.data_ptr()
        with Memory(device) as memory:
            logits = trial.run(package)
    written = trial.written()
    print(f"peak during a run beyond what was there: {memory.peak / 2**20:.1f} MiB", end="")
    print(f" (the device: {memory.grown / 2**20:.1f} MiB more after it)" if device == "cuda" else " (of the process)")
    same_place = trial.pool.data_ptr() == address
    print(f"address of the pool: {trial.pool.data_ptr():#x}, {'unchanged' if same_place else 'MOVED'}")
    errors = [_error(written, expected), *(_error(*pair) for pair in zip(logits, eager, strict=True))]
    changed = trial.changed_elsewhere()
    print(f"KV written, difference from the eager decoder: {errors[0]:.1e}; logits: {max(errors[1:]):.1e} (relative)")
    print(f"slots of no request that have changed: {changed}")
    release_pool(trial.handle)
    small = memory.peak < trial.pool.nbytes / 2 if device == "cuda" else True
    right = same_place and small and not changed and max(errors) < (1e-5 if dtype == torch.float32 else 0.03)
    print("PASS" if right else "FAIL")
    return right


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def main() -> int:
    parser = argparse.ArgumentParser(description="a compiled decoder and a KV pool by handle")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--pool-gib", type=float, default=10.0, metavar="GIB")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    options = parser.parse_args()
    torch.manual_seed(0)
    return 0 if experiment(options.device, options.pool_gib, getattr(torch, options.dtype)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
