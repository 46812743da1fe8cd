"""bench_engine_gpu: engines of large models on a GPU: building, loading, memory, and generation beside its floor.

    python -m pensieve.scripts.bench_engine_gpu [--shapes llama-3-8b llama-2-13b] [--weights same fp8]

For each shape, with random bf16 weights, an eager and a compiled engine are built, opened one after the other and run:
a prompt that fills the largest step, then captured generation. Printed for each:

    build, load        seconds; of a compiled engine also its compiler's
    loading            peak GPU memory while it was opened beyond the weights' own bytes (random weights are made one
                       tensor at a time, so a tensor or two)
    running            peak GPU memory while steps ran beyond weights and KV pool: activations, a step's logits, graphs
    generation         ms a step, and the share of the floor: weights and KV bytes at 4.25 TB/s

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..builder.build import WEIGHTS, build_random_engine
from ..builder.checkpoints.config import Shard
from ..plugins.torch_ops import register_pool, release_pool
from ..runtime.engine import Engine, open_engine
from ..scheduler.types import SettingError
from .bench_engine import CHUNK, arguments

LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 16384}
SHAPES = {
    "llama-3-8b": LLAMA
    | dict(vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    | dict(intermediate_size=14336, rope_theta=500000.0),
    "llama-2-13b": LLAMA
    | dict(vocab_size=32000, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, num_key_value_heads=10)
    | dict(intermediate_size=13824),
}
FLOOR_BYTES_S = 4.25e12
POOL_BYTES = 20 * 2**30
PROMPT = 2048
GENERATION = ((1, 32), (64, 32), (64, 1024))  # rows, context
REPEATS = 30


class Row(NamedTuple):
    """Seconds, bytes, and milliseconds a step of GENERATION in its order."""

    shape: str
    backend: str
    weights: str
    build_seconds: float
    compile_seconds: float
    load_seconds: float
    weight_bytes: int
    loading_beyond: int
    pool_bytes: int
    running_beyond: int
    step_ms: tuple[float, ...]
    floor_ms: tuple[float, ...]


def bench(shape: str, backend: str, weights: str, directory: Path) -> Row:
    """Raises SettingError as building does."""
    config = directory / "config.json"
    config.write_text(json.dumps(SHAPES[shape]))
    start = time.perf_counter()
    path = directory / f"{shape}-{backend}-{weights}"
    built = build_random_engine(config, path, backend=backend, dtype="bfloat16", device="cuda", weights=weights)
    build_seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    engine = open_engine(path, "cuda")
    torch.cuda.synchronize()
    load_seconds = time.perf_counter() - start
    loading = torch.cuda.max_memory_allocated() - before
    compiled = built.manifest.compiled
    pool, running, steps = run(engine, before)
    return Row(
        shape=shape,
        backend=backend,
        weights=weights,
        build_seconds=round(build_seconds, 1),
        compile_seconds=compiled.compile_seconds if compiled else 0.0,
        load_seconds=round(load_seconds, 2),
        weight_bytes=engine.weight_bytes,
        loading_beyond=loading - engine.weight_bytes,
        pool_bytes=pool,
        running_beyond=running - engine.weight_bytes - pool,
        step_ms=tuple(steps),
        floor_ms=tuple(floor_ms(engine, *batch) for batch in GENERATION),
    )


def floor_ms(engine: Engine, rows: int, context: int) -> float:
    kv = rows * context * engine.chunk_bytes(CHUNK) // CHUNK
    return 1e3 * (engine.weight_bytes + kv) / FLOOR_BYTES_S


@torch.inference_mode()
def run(engine: Engine, before: int) -> tuple[int, int, list[float]]:
    """(Bytes of the pool, peak bytes beyond those allocated before the engine was, milliseconds of each generation)."""
    slots = POOL_BYTES // engine.chunk_bytes(CHUNK)
    pool = torch.zeros(engine.kv_shape(slots, CHUNK), dtype=engine.dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    step_of(engine, pool, 1, PROMPT)(lambda step: step())
    times = [step_of(engine, pool, rows, 1, context)(captured_ms) for rows, context in GENERATION]
    torch.cuda.synchronize()
    return pool.nbytes, torch.cuda.max_memory_allocated() - before, times


def step_of(engine: Engine, pool: Tensor, requests: int, new: int, context: int = 0) -> Callable[..., Any]:
    """how -> how(step), while the pool is registered."""
    from ..plugins.attention.kernel import make_work_list  # Triton comes with CUDA only
    from ..plugins.attention.work_list import Capacity

    batch = [part.cuda() for part in arguments(requests, new, engine.vocab_size, context)]
    shard = Shard(engine.manifest.decoder, engine.manifest.tensor_parallel)
    capacity = Capacity(requests * new, requests, batch[4].shape[1] * CHUNK)
    work = make_work_list(capacity, shard.heads, shard.kv_heads, shard.config.head_dim, engine.dtype)

    def do(how: Callable[[Callable[[], Tensor]], Any]) -> Any:
        handle = register_pool(pool, work=work)
        inputs: list[Any] = [*batch, handle]

        def step() -> Tensor:
            work.build(batch[3], longest=new)  # as the device tells it
            return engine.forward(*inputs)

        try:
            return how(step)
        finally:
            torch.cuda.synchronize()
            release_pool(handle)

    return do


def captured_ms(step: Callable[[], Tensor]) -> float:
    """Median time of one captured step, one behind the other."""
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[3:]))


def line(row: Row) -> str:
    mib, gib = 2**20, 2**30
    steps = " | ".join(f"{ms:.2f} ({floor / ms:.0%})" for ms, floor in zip(row.step_ms, row.floor_ms, strict=True))
    return (
        f"| {row.shape} | {row.backend}, {row.weights} | {row.build_seconds:.0f} ({row.compile_seconds:.0f}), "
        f"{row.load_seconds:.2f} s | {row.weight_bytes / gib:.2f} | {row.loading_beyond / mib:.0f} MiB | "
        f"{row.pool_bytes / gib:.2f} | {row.running_beyond / mib:.0f} MiB | {steps} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engine_gpu", description="engines of large models on a GPU")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--backends", nargs="+", default=["reference", "inductor"], metavar="NAME")
    parser.add_argument("--weights", nargs="+", default=["same"], choices=WEIGHTS)
    args = parser.parse_args(argv)
    generation = " | ".join(f"{rows} at {context}" for rows, context in GENERATION)
    print(f"| shape | engine | build (compiler), load | weights, GiB | loading | pool, GiB | running | {generation} |")
    print("|---|---|---|---|---|---|---|" + "---|" * len(GENERATION))
    rows = []
    for shape, weights, backend in itertools.product(args.shapes, args.weights, args.backends):
        with tempfile.TemporaryDirectory() as directory:
            try:
                rows.append(bench(shape, backend, weights, Path(directory)))
            except SettingError as error:
                print(f"bench_engine_gpu: {error}", file=sys.stderr)
                return 2
        torch.cuda.empty_cache()
        print(line(rows[-1]), flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "rows": [row._asdict() for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
