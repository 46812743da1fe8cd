"""benchmarks.engine: times a compiled forward pass against the reference's, and engines of large
models on a GPU.

    python -m benchmarks.engine compare [--checkpoint DIR] [--dtype float32] [--threads 1]
    python -m benchmarks.engine gpu [--shapes opt-13b ...] [--backends reference inductor tensorrt]
        [--dtype float16] [--generation 1x256 64x256 ...] [--weights same fp8 int4]
        [--tensor-parallel 2]

compare: the time outside attention, which both engines share. Prints medians of batches with one
new token for each request, or with one prompt; then runs all steps of a chat load, each once.

gpu: for each shape, with random weights, an engine of each backend is built, opened and run: a
prompt, then generation, both captured. With several ranks each runs its share on a GPU of its own,
and what is printed is rank 0's. Printed for each:

    build, load        seconds; of a compiled engine also its compiler's
    loading            peak GPU memory while it was opened, besides the weights' own bytes (random
                       weights are made one tensor at a time, so a tensor or two)
    pool               KV, and the states of a model with linear attention
    running            peak GPU memory while steps ran, besides weights and pool: activations, a
                       step's logits, graphs
    generation         ms for a step, and the least: weights and KV read, states read and written,
                       at this run's copy rate; and the share of the least in the measured
    prompt             the same for a step of one prompt; the least is the larger of that for its
                       bytes and that for its products at this run's rate of them

The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pensieve.builder.build import build_engine, build_random_engine
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT, parameter_shapes
from pensieve.builder.choices import WEIGHTS
from pensieve.builder.forward_batch import ForwardBatch
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.plugins.attention import cpu as cpu_attention
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    register_group,
    release_group,
)
from pensieve.plugins.state.pool import StatePool
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.launch.ranks import take_share
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.plan import StepPlan
from pensieve.scheduler.sim.simulator import Simulator, VirtualDevice, longest_context
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import add_kv_cache_dtype, check_least, exit_status
from pensieve.scripts.simulation.traces import CHATS, synthetic

from .ranks import run_as_ranks

if TYPE_CHECKING:
    from pensieve.runtime.ranks.mpi import Ranks

CHUNK = 32


class RequestPart(NamedTuple):
    """One request's share of a step: its `new` last tokens of `context`, and whether the last of
    them is sampled."""

    new: int
    context: int
    samples: bool = True


# tokens of a row that generates: short, because attention's time is subtracted but its noise is not
CONTEXT = 128
BATCHES = {
    "1 row generates": [RequestPart(1, CONTEXT)],
    "4 rows generate": [RequestPart(1, CONTEXT)] * 4,
    "16 rows generate": [RequestPart(1, CONTEXT)] * 16,
    "64 rows generate": [RequestPart(1, CONTEXT)] * 64,
    "a prompt of 64": [RequestPart(64, 64)],
    "a prompt of 512": [RequestPart(512, 512)],
}
UNCOUNTED = 3


Clock = Callable[[], float]


class AttentionTime:
    """Seconds of a clock inside the operations that every backend calls."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = 0.0
        self.clock = clock
        for name in ("write_kv", "multi_token_attention"):
            setattr(cpu_attention, name, self._timed(getattr(cpu_attention, name)))

    def _timed(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self.clock()
            result = operation(*arguments)
            self.seconds += self.clock() - start
            return result

        return timed


class Row(NamedTuple):
    """Milliseconds of a step: outside attention, and in all."""

    batch: str
    reference: float
    inductor: float
    reference_total: float
    inductor_total: float

    @property
    def ratio(self) -> float:
        return self.reference / self.inductor


def batch_for(requests: int, new: int, vocab: int, context: int = CONTEXT) -> ForwardBatch:
    """Each request computes the end of its context, and samples its last token."""
    return batch_of_parts([RequestPart(new, max(context, new))] * requests, vocab)


def batch_of_parts(parts: Sequence[RequestPart], vocab: int) -> ForwardBatch:
    """Makes a batch like `batch_for`, with its own part for each request; chunks are those of the
    pool's first slots, in order."""
    blocks = [-(-part.context // CHUNK) for part in parts]
    table = torch.zeros(len(parts), max(blocks), dtype=torch.int64)
    pieces = []
    rows = []
    tokens = taken = 0
    for seat, part in enumerate(parts):
        table[seat, : blocks[seat]] = torch.arange(taken, taken + blocks[seat])
        pieces.append(SeatSpan(seat, part.context - part.new, part.context))
        taken += blocks[seat]
        tokens += part.new
        if part.samples:
            rows.append(tokens - 1)
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    return batch_of(pieces, ids, table, torch.tensor(rows), CHUNK)


class Comparison:
    """Both engines, over one pool of `slots` chunks; `step` runs one batch on each."""

    def __init__(self, engines: Sequence[Engine], slots: int, spent: AttentionTime):
        self.engines = engines
        self.spent = spent
        self.vocab = engines[0].manifest.vocab_size
        self.handle = register_pool(
            torch.zeros(engines[0].kv_shape(slots, CHUNK), dtype=engines[0].kv_dtype)
        )

    def step(self, batch: ForwardBatch) -> list[float]:
        """Milliseconds outside attention of each engine, then all of them."""
        outside, total = [], []
        for engine in self.engines:
            self.spent.seconds = 0.0
            start = self.spent.clock()
            engine.forward(batch, self.handle)
            took = self.spent.clock() - start
            outside.append(1e3 * (took - self.spent.seconds))
            total.append(1e3 * took)
        return outside + total

    def batch(self, name: str, seconds: float) -> Row:
        """Medians of one of the BATCHES."""
        batch = batch_of_parts(BATCHES[name], self.vocab)
        times: list[list[float]] = []
        deadline = time.perf_counter() + seconds
        while len(times) < UNCOUNTED + 5 or time.perf_counter() < deadline:
            times.append(self.step(batch))
        return Row(name, *map(statistics.median, zip(*times[UNCOUNTED:], strict=True)))

    def chats(self, steps: Sequence[Sequence[RequestPart]]) -> Row:
        """Means over the steps, each run once, so the first-run cost of each shape is included."""
        times = [self.step(batch_of_parts(step, self.vocab)) for step in steps]
        return Row(f"{len(steps)} steps of chats", *map(statistics.fmean, zip(*times, strict=True)))


class Recorder(VirtualDevice):
    """Keeps the parts of each step: generated tokens and then spans, as the batch has them."""

    def __init__(self, cost: CostProfile):
        super().__init__(cost)
        self.steps: list[tuple[RequestPart, ...]] = []

    def launch(self, plan: StepPlan, now: float) -> float:
        if plan.tokens:
            generated = [RequestPart(1, position + 1) for position in plan.positions]
            spans = [
                RequestPart(span.end - span.start, span.end, bool(span.samples))
                for span in plan.spans
            ]
            self.steps.append((*generated, *spans))
        return super().launch(plan, now)


def chat_steps(users: int = 8, turns: int = 2, seed: int = 0) -> list[tuple[RequestPart, ...]]:
    """The steps of `users` conversations like ShareGPT's, of `turns` turns at most; nothing is
    evicted."""
    drawn = synthetic(
        CHATS["sharegpt"], conversations=users, sessions_per_s=1.0, think_s=2.0, seed=seed
    )
    sessions = [session._replace(turns=session.turns[:turns]) for session in drawn]
    longest = longest_context(sessions)
    config = SchedulerConfig(
        gpu_kv_chunks=users * (longest // CHUNK + 2),
        host_kv_chunks=0,
        max_model_len=longest,
        max_num_seqs=users,
        chunk_tokens=CHUNK,
        generation_reserve=0.0,
    )
    cost = analytic_profile(  # only a step's 5 ms matter: no chunk is evicted, loaded or recomputed
        chunk_tokens=CHUNK,
        parameters=5_000_000,
        layers=6,
        attention_width=512,
        chunk_bytes=2**19,
        max_context=longest,
        flops_per_s=50e9,
        link_bytes_per_s=5e9,
        step_base_seconds=5e-3,
    )
    device = Recorder(cost)
    Simulator(config, cost, sessions, watch=lambda *_: None, device=device).run()
    return device.steps


def slots_of(parts: Sequence[RequestPart]) -> int:
    return sum(-(-part.context // CHUNK) for part in parts)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a table; returns the line of JSON. Raises SettingError as building does."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        engines = []
        for backend in ("reference", "inductor"):
            build_engine(args.checkpoint, Path(directory) / backend, backend, args.dtype)
            engines.append(open_engine(Path(directory) / backend))
        steps = chat_steps()
        slots = max(slots_of(parts) for parts in (*BATCHES.values(), *steps))
        bench = Comparison(
            engines,
            slots,
            AttentionTime(time.thread_time if args.threads == 1 else time.perf_counter),
        )
        rows = [bench.batch(name, args.seconds) for name in BATCHES]
        rows.append(bench.chats(steps))
    print("| batch | reference, ms | inductor, ms | ratio | with attention: reference | inductor |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        numbers = (row.reference, row.inductor, row.ratio, row.reference_total, row.inductor_total)
        print(f"| {row.batch} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    return {"dtype": args.dtype, "threads": args.threads, "rows": [row._asdict() for row in rows]}


# On a GPU.


SHAPES = Path(__file__).parent / "shapes"
POOL_BYTES = 20 * 2**30
PROMPT = 2048
GENERATION = ("1x32", "64x32", "64x1024")  # rows x context
REPEATS = 30


class GpuRates(NamedTuple):
    """Of this machine, in this run: bytes copied, read and written both counted, and operations of
    products in bfloat16, a second."""

    bytes_s: float
    flop_s: float


class GpuRow(NamedTuple):
    """Seconds, bytes, and milliseconds: of each generation of the options, in their order, and of a
    prompt."""

    shape: str
    backend: str
    dtype: str
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
    prompt_ms: float
    prompt_floor_ms: float


def bench_on_gpu(
    config: Path,
    backend: str,
    dtype: str,
    weights: str,
    batches: Sequence[tuple[int, int]],
    directory: Path,
    rates: GpuRates,
    kv_cache_dtype: str = "auto",
    ranks: Ranks | None = None,
) -> GpuRow:
    """batches: (rows, context) of each generation. ranks: all of them call it, with one directory;
    None: there is one. Raises SettingError as building does."""
    start = time.perf_counter()
    path = directory / f"{backend}-{weights}"
    build = partial(
        build_random_engine,
        config,
        path,
        backend=backend,
        dtype=dtype,
        device="cuda",
        weights=weights,
        tensor_parallel=1 if ranks is None else ranks.size,
    )
    if ranks is None:
        build()
    else:
        ranks.together(build if ranks.rank == 0 else lambda: None)
    build_seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    rank = 0 if ranks is None else ranks.rank
    engine = open_engine(path, "cuda", rank, kv_cache_dtype)
    torch.cuda.synchronize()
    load_seconds = time.perf_counter() - start
    loading = torch.cuda.max_memory_allocated() - before
    compiled = engine.manifest.compiled
    floors = [floor_ms(engine, *batch, rates) for batch in batches]
    prompt_floor = prompt_floor_ms(engine, rates)
    pool, running, steps, prompt = run(engine, batches, before, [prompt_floor, *floors])
    return GpuRow(
        shape=config.stem,
        backend=backend,
        dtype=dtype,
        weights=weights,
        build_seconds=round(build_seconds, 1),
        compile_seconds=compiled.compile_seconds if compiled else 0.0,
        load_seconds=round(load_seconds, 2),
        weight_bytes=engine.weight_bytes,
        loading_beyond=loading - engine.weight_bytes,
        pool_bytes=pool,
        running_beyond=running - engine.weight_bytes - pool,
        step_ms=tuple(steps),
        floor_ms=tuple(floors),
        prompt_ms=prompt,
        prompt_floor_ms=prompt_floor,
    )


def floor_ms(engine: Engine, rows: int, context: int, rates: GpuRates) -> float:
    """The time to read the KV that a layer's window reaches, to read and write states, and to read
    the weights, without those of experts that no row chooses, if all are equally likely."""
    decoder = engine.manifest.decoder
    keys = sum(
        min(context, decoder.window(layer) or context)
        for layer in range(decoder.layers)
        if not decoder.is_linear(layer)
    )
    kv = rows * keys * engine.chunk_bytes(CHUNK) // CHUNK // decoder.kv_layers
    states = 0 if engine.state_shape is None else 2 * rows * engine.state_shape.nbytes
    # the share that a row does not choose
    others = 1 - decoder.experts_per_token / max(decoder.experts, 1)
    unread = (
        (engine.parameters - engine.active_parameters)
        * others ** (rows - 1)
        * engine.dtype.itemsize
    )
    return 1e3 * (read_bytes(engine) - unread + kv + states) / rates.bytes_s


def prompt_floor_ms(engine: Engine, rates: GpuRates) -> float:
    """The larger of two times: to read all weights and write the state behind the prompt; and to
    compute the products of its tokens with the weights of layers."""
    shapes = ends(engine)
    outside = sum(math.prod(shape) for shape in shapes.values())
    flop = 2 * PROMPT * (engine.active_parameters - outside)
    state = 0 if engine.state_shape is None else engine.state_shape.nbytes
    return 1e3 * max(flop / rates.flop_s, (read_bytes(engine) + state) / rates.bytes_s)


def ends(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The shapes of this rank's embedding and, if it is another one, its head."""
    manifest = engine.manifest
    shapes = parameter_shapes(manifest.decoder, manifest.tensor_parallel)
    return {name: shapes[name] for name in ("embed.weight", "head.weight") if name in shapes}


def read_bytes(engine: Engine) -> int:
    """Of weights, in a step of all experts: a few rows of an embedding that is not the head."""
    shapes = ends(engine)
    embedding = math.prod(shapes["embed.weight"]) if "head.weight" in shapes else 0
    return engine.weight_bytes - embedding * engine.dtype.itemsize


@torch.inference_mode()
def run(
    engine: Engine, batches: Sequence[tuple[int, int]], before: int, floors: Sequence[float]
) -> tuple[int, int, list[float], float]:
    """Returns (bytes of the pool, peak bytes besides those allocated before the engine,
    milliseconds of each generation, of a prompt). floors: of the prompt and of each generation."""
    slots = POOL_BYTES // engine.chunk_bytes(CHUNK)
    needed = [PROMPT // CHUNK, *(rows * -(-context // CHUNK) for rows, context in batches)]
    for (rows, context), chunks in zip(batches, needed[1:], strict=True):
        if chunks > slots:
            held = f"the pool of {POOL_BYTES >> 30} GiB"
            raise SettingError("--generation", f"{rows}x{context} has more KV than {held} holds")
    states = None
    if engine.state_shape is not None:
        slots = max(needed)  # states take much of the room
        states = state_records(engine, max(rows for rows, _ in batches), "cuda")
    pool = torch.zeros(engine.kv_shape(slots, CHUNK), dtype=engine.kv_dtype, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for (rows, new, context), floor in zip(
        [(1, PROMPT, 0), *((rows, 1, context) for rows, context in batches)], floors, strict=True
    ):
        times.append(step_of(engine, pool, rows, new, context, states)(captured_ms))
        name = f"prompt of {new}" if context == 0 else f"{rows} rows at {context}"
        print(f"{name}: {shown(times[-1], floor)}", flush=True)
    torch.cuda.synchronize()
    pool_bytes = pool.nbytes + (0 if states is None else states.nbytes)
    peak = torch.cuda.max_memory_allocated() - before
    return pool_bytes, peak, times[1:], times[0]


def state_records(engine: Engine, rows: int, device: str) -> Tensor:
    """Zeros for a state of each row, [rows, bytes]."""
    assert engine.state_shape is not None
    return torch.zeros(rows, engine.state_shape.nbytes, dtype=torch.uint8, device=device)


def step_of(
    engine: Engine,
    pool: Tensor,
    requests: int,
    new: int,
    context: int = 0,
    records: Tensor | None = None,
) -> Callable[..., Any]:
    """Returns a function that calls how(step) while the pool is registered. records: of states, at
    least one for each request. A request without context begins at the zero state; all others
    change their own states."""
    batch = batch_for(requests, new, engine.vocab_size, context).map(
        lambda part: part.to(pool.device)
    )
    states = None
    if records is not None:
        assert engine.state_shape is not None
        states = StatePool(records, engine.state_shape)
        own = torch.arange(requests, dtype=torch.int32, device=pool.device)
        batch = replace(batch, state_in=own if context else batch.state_in, state_out=own)
    work = None
    if pool.is_cuda:
        from pensieve.plugins.attention.kernel import (
            make_work_list,  # imported here because only CUDA installations have Triton
        )
        from pensieve.plugins.attention.work_list import Capacity

        shard = Shard(engine.manifest.decoder, engine.manifest.tensor_parallel)
        capacity = Capacity(requests * new, requests, batch.block_table.shape[1] * CHUNK)
        work = make_work_list(
            capacity, shard.heads, shard.kv_heads, shard.config.head_dim, engine.dtype
        )
        if states is not None:
            states.make_work(requests * new, requests)

    def do(how: Callable[[Callable[[], Tensor]], Any]) -> Any:
        handle = register_pool(pool, work=work, states=states)

        def step() -> Tensor:
            if work is not None:  # like a device
                work.build(batch.segments, longest=new)
                if states is not None:
                    states.list_work(batch.segments, batch.state_out, longest=new)
            return engine.forward(batch, handle)

        try:
            return how(step)
        finally:
            if pool.is_cuda:
                torch.cuda.synchronize()
            release_pool(handle)

    return do


def captured_ms(step: Callable[[], Tensor]) -> float:
    """Median time of captured steps that run one after the other."""
    from .kernels import captured  # and Triton, which comes with CUDA only

    replay = captured(step)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)]
    for event in events:
        replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events[3:]))


def shown(ms: float, floor: float) -> str:
    return f"{ms:.2f} ms, floor {floor:.2f} ({floor / ms:.0%})"


def line(row: GpuRow) -> str:
    mib, gib = 2**20, 2**30
    steps = map(shown, row.step_ms, row.floor_ms)
    cells = (
        row.shape,
        f"{row.backend}, {row.dtype}, {row.weights}",
        f"{row.build_seconds:.0f} ({row.compile_seconds:.0f}), {row.load_seconds:.2f} s",
        f"{row.weight_bytes / gib:.2f}",
        f"{row.loading_beyond / mib:.0f} MiB",
        f"{row.pool_bytes / gib:.2f}",
        f"{row.running_beyond / mib:.0f} MiB",
        *steps,
        shown(row.prompt_ms, row.prompt_floor_ms),
    )
    return f"| {' | '.join(cells)} |"


def bench_on_ranks(args: argparse.Namespace, ranks: Ranks) -> int:
    """One rank's part of `bench_gpu`; rank 0 prints."""
    ranks.together(lambda: take_share("cuda", ranks))
    group = ranks.open_group("cuda", getattr(torch, args.dtype))
    register_group(TENSOR_PARALLEL, group)
    out = sys.stdout if ranks.rank == 0 else io.StringIO()
    with contextlib.redirect_stdout(out):
        print(json.dumps(bench_gpu(args, ranks)), flush=True)
    release_group(TENSOR_PARALLEL)
    return 0


def bench_gpu(args: argparse.Namespace, ranks: Ranks | None = None) -> dict[str, Any]:
    """See `compare`. ranks: as of `bench_on_gpu`."""
    from .kernels import ceilings  # and Triton, which comes with CUDA only

    batches = [batch(text) for text in args.generation]
    limits = ceilings(torch.empty(2**28, dtype=torch.int8, device="cuda"))
    rates = GpuRates(1e12 * limits["copy_tb_s"], 1e12 * limits["matrix_tflop_s"])
    torch.cuda.empty_cache()
    print(
        f"{torch.cuda.get_device_name()}: copies {limits['copy_tb_s']:.2f} TB/s, "
        f"products {limits['matrix_tflop_s']:.0f} TFLOP/s",
        flush=True,
    )
    generation = " | ".join(f"{rows} at {context}" for rows, context in batches)
    rows = []
    for shape, weights, backend in itertools.product(args.shapes, args.weights, args.backends):
        with tempfile.TemporaryDirectory() as directory:
            config = SHAPES / f"{shape}.json"
            # rank 0's, if there are several
            place = Path(directory if ranks is None else ranks.gather(directory)[0])
            how = (args.dtype, weights, batches, place, rates, args.kv_cache_dtype)
            print(f"{shape}, {backend}, {weights}", flush=True)
            rows.append(bench_on_gpu(config, backend, *how, ranks))
            if ranks is not None:
                ranks.gather(None)
        torch.cuda.empty_cache()
    print(
        "| shape | engine | build (compiler), load | weights, GiB | loading | pool, GiB | running "
        f"| {generation} | "
        f"prompt of {PROMPT} |"
    )
    print("|---|---|---|---|---|---|---|" + "---|" * len(batches) + "---|")
    print("\n".join(map(line, rows)))
    about = {
        "gpu": torch.cuda.get_device_name(),
        "ranks": args.tensor_parallel,
        "kv_cache_dtype": args.kv_cache_dtype,
        **limits,
    }
    return {**about, "rows": [row._asdict() for row in rows]}


def batch(text: str) -> tuple[int, int]:
    """Of ROWSxCONTEXT; SettingError."""
    rows, _, context = text.partition("x")
    if not (rows.isdigit() and context.isdigit() and int(rows) and int(context)):
        raise SettingError("--generation", f"{text!r} is not ROWSxCONTEXT, such as 64x1024")
    return int(rows), int(context)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine", description=__doc__.partition("\n")[0]
    )
    ways = parser.add_subparsers(dest="way", required=True)
    option = ways.add_parser("compare", help="beside the reference, on the CPU").add_argument
    option("--checkpoint", type=Path, default=DEMO_CHECKPOINT, metavar="DIR")
    option("--dtype", default="float32")
    option("--threads", type=int, default=1)
    option("--seconds", type=float, default=3.0, help="a batch (default %(default)s)")
    gpu = ways.add_parser("gpu", help="engines of large models")
    add_kv_cache_dtype(gpu)
    option = gpu.add_argument
    option(
        "--shapes",
        nargs="+",
        default=["llama-3-8b", "llama-2-13b-gqa"],
        metavar="NAME",
        help="of benchmarks/shapes/",
    )
    option("--backends", nargs="+", default=["reference", "inductor"], metavar="NAME")
    option("--dtype", default="bfloat16", help="(default %(default)s)")
    option(
        "--generation",
        nargs="+",
        default=GENERATION,
        metavar="ROWSxCONTEXT",
        help="(default %(default)s)",
    )
    option("--weights", nargs="+", default=["same"], choices=WEIGHTS)
    option("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs (default 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)

    def run_way() -> int | None:
        if args.way == "gpu" and args.tensor_parallel != 1:
            check_least(args, tensor_parallel=1)
            work = partial(bench_on_ranks, args)
            return run_as_ranks("benchmarks.engine", args.tensor_parallel, words, work)
        print(json.dumps(bench_gpu(args) if args.way == "gpu" else compare(args)))
        return None

    return exit_status("benchmarks.engine", run_way)


if __name__ == "__main__":
    sys.exit(main())
