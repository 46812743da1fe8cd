"""What launching a decode step's small kernels early brings, and that it changes no bit: one run that decides.

    python scripts/experiments/early_launch.py [--rows 32 80 1] [--json FILE]

Llama-2-13B with 10 KV heads, bf16, random weights, 1,100 tokens of context, on a GPU of compute capability 9.0. A
layer runs nine kernels, five of them ours: add_norm, *qkv*, write_kv, attention, *out*, add_norm, *up*, silu_gate,
*down*. The decoder and its host code are the product's; the ways differ in what stands where these find their kernels:

    as it is            the product's kernels
    in order            their twins below: each asks the L2 for what it will read and nobody writes, then does the same
    early               the same, by programmatic dependent launch: a kernel may begin once every program of the one in
                        front of it has said so, or has ended
    ..., N MB ahead     norms and gates also ask for the first N MB of the weight that the next product reads: while
                        small kernels run, the memory has nothing to do

Each way is measured as a whole step, and without its products (whose results are drawn once): there every kernel has
one of ours in front of it.

**Which edges are programmatic.** The attribute is the successor's, so those into our kernels: four a layer from cuBLAS,
whose programs are not known to say anything before they end, and write_kv -> attention. Those from ours into cuBLAS
stay ordinary. Attention runs one class of tiles here, as in every step that only generates; with more, the classes on
other streams are behind an event. The edges that a graph was captured with are counted, also behind an external event,
as the engine's gates are. (torch captures and instantiates graphs with CUDA's own calls and touches no edge; Triton
sets the attribute when it launches.)

**Why no bit changes.** In a twin all threads of all programs wait (griddepcontrol.wait); only then do they say that the
successor may begin, and run the product's kernel. Let K1, K2, K3 be launched one behind the other.

1. The wait ends when the kernel in front has completed and its stores can be seen. So K2 stores nothing before K1 is
   complete, and reads nothing of K1's too early.
2. K3's wait is for K2 only. But K2 is complete only when its programs are, and they have waited for K1: so all before
   K2 is complete too. That is why programs without work wait as well, and why an ordinary successor, cuBLAS, may rely
   on its one edge.
3. So nobody overwrites too early what others still read: the graph's memory, the work list's counters.
4. What comes before the wait decides no value, only what the L2 is asked for; there a store is seen whenever it comes.
   The addresses come from arguments, and in attention from the work list and the block table. Those are complete: when
   attention begins, write_kv's programs are behind their wait, so all before write_kv is complete.
5. Programs that wait take no room that the kernel in front needs: all programs of that one had begun.

The check: the written KV is poisoned before each replay, and two batches take turns, so that whatever is read too early
is another batch's or NaN. Logits, written KV and sums must be those of the kernels as they are.

**The rule**: a way enters the engines if a whole step gains 2% at 32 and at 80 rows and all bits are equal; of several
the one of least code, unless another gains 1% more. Prints a table, then the verdict, then JSON. About 45 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from cuda.bindings import runtime as cuda
from torch import Tensor

from pensieve.builder.architectures import decoder_config
from pensieve.builder.model import Batch, Decoder, Projection
from pensieve.builder.random_weights import random_weights
from pensieve.plugins import attention_kernel, kv_write_kernel, norm_kernel
from pensieve.plugins.attention_kernel import _attend, make_work_list
from pensieve.plugins.kv_write_kernel import _write_kv
from pensieve.plugins.norm_kernel import _norm, _silu_gate
from pensieve.plugins.torch_ops import register_pool
from pensieve.plugins.work_list import Capacity
from pensieve.runtime.cuda_runtime import CudaRuntime

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "intermediate_size": 13824,
    "max_position_embeddings": 4096,
}
DEVICE = "cuda"
CHUNK, CONTEXT = 32, 1100
BLOCKS = -(-CONTEXT // CHUNK)
ROUNDS = 40
CHECKS = 6  # replays of each of the two batches
WORTH = 0.02
DECISIVE = (32, 80)
LINE = tl.constexpr(128)  # bytes of the L2's
LANES = tl.constexpr(256)


class Way(NamedTuple):
    """early: programmatic edges; ahead: megabytes of the next product's weight that a kernel asks for."""

    early: bool
    ahead: int = 0


WAYS = {
    "as it is": None,
    "in order": Way(False),
    "early": Way(True),
    "in order, 8 MB ahead": Way(False, 8),
    "early, 4 MB ahead": Way(True, 4),
    "early, 8 MB ahead": Way(True, 8),
    "early, 16 MB ahead": Way(True, 16),
}
BASE = "as it is"


@triton.jit
def _fetch(places):
    """Asks the L2 for the lines that these pointers are in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64, bitcast=True)], tl.int32, False, 1
    )


@triton.jit
def _fetch_weight(weight, outputs, stride, size):
    """Asks for the first `size` bytes, a multiple of 16, of each row; the last programs, of no other work, first."""
    programs = tl.num_programs(0) * tl.num_programs(1)
    me = programs - 1 - tl.program_id(1) * tl.num_programs(0) - tl.program_id(0)
    for first in range(me * LANES, outputs, programs * LANES):
        row = tl.minimum(first + tl.arange(0, LANES), outputs - 1).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r", [(weight + row * stride).to(tl.int64, bitcast=True), size], tl.int32, False, 1,
        )  # fmt: skip


@triton.jit
def _begin():
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["count"])
def _norm_twin(x, y, weight, bias, normed, total, count, heads, row_stride, head_stride, eps,
               ahead, ahead_rows, ahead_stride, ahead_size,
               SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, RMS: tl.constexpr):  # fmt: skip
    if weight is not None:
        step: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        column = tl.arange(0, WIDTH // step) * step
        _fetch(weight + tl.minimum(column, SIZE - 1))
    if ahead is not None:
        _fetch_weight(ahead, ahead_rows, ahead_stride, ahead_size)
    _begin()
    _norm(x, y, weight, bias, normed, total, count, heads, row_stride, head_stride, eps, SIZE, WIDTH, ROWS, RMS)


@triton.jit(do_not_specialize=["tokens"])
def _silu_gate_twin(x, out, tokens, width, ahead, ahead_rows, ahead_stride, ahead_size, BLOCK: tl.constexpr):
    if ahead is not None:
        _fetch_weight(ahead, ahead_rows, ahead_stride, ahead_size)
    _begin()
    _silu_gate(x, out, tokens, width, BLOCK)


@triton.jit
def _write_kv_twin(q, k, v, rotary, slots, pool, rotated, q_stride, q_head, k_stride, k_head, v_stride, v_head,
                   rotary_stride, slot_stride, layer_offset, heads, kv_heads, q_blocks,
                   HEAD_DIM: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_DIM: tl.constexpr,
                   CHUNK: tl.constexpr, HEADS: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    _fetch(slots + token + tl.arange(0, 1))
    _fetch(rotary + token * rotary_stride + tl.arange(0, 2 * HALF_DIM * 4 // LINE) * (LINE // 4))
    _begin()
    _write_kv(q, k, v, rotary, slots, pool, rotated, q_stride, q_head, k_stride, k_head, v_stride, v_head,
              rotary_stride, slot_stride, layer_offset, heads, kv_heads, q_blocks, HEAD_DIM, DIM, HALF, HALF_DIM,
              CHUNK, HEADS)  # fmt: skip


@triton.jit
def _attend_twin(q, o, partial, lse, pool, block_table, items, arrivals, counters, covered, kind, classes, tokens,
                 q_stride, q_head_stride, blocks, slot_stride, layer_offset, scale,
                 KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
                 DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, UNMASKED: tl.constexpr,
                 LARGEST: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Asks for the first keys and values of a program's first item; they may be those being written."""
    taken = tl.program_id(0)
    if taken < tl.load(counters + kind) * KV_HEADS:
        item = items + taken // KV_HEADS * WORDS
        n = tl.load(item + 3) // KEYS * KEYS + tl.arange(0, KEYS)
        table = block_table + tl.load(item + 5).to(tl.int64) * blocks
        slot = tl.load(table + n // CHUNK, mask=n < tl.load(item + 4), other=0)
        keys = pool + layer_offset + taken % KV_HEADS * (CHUNK * HEAD_DIM)
        key = keys + slot.to(tl.int64) * slot_stride + n % CHUNK * HEAD_DIM
        step: tl.constexpr = LINE * 8 // pool.dtype.element_ty.primitive_bitwidth
        lines = key[:, None] + (tl.arange(0, DIM // step) * step)[None, :]
        _fetch(lines)
        _fetch(lines + KV_HEADS * CHUNK * HEAD_DIM)
    _begin()
    _attend(q, o, partial, lse, pool, block_table, items, arrivals, counters, covered, kind, classes, tokens,
            q_stride, q_head_stride, blocks, slot_stride, layer_offset, scale, KV_HEADS, GROUP, HEAD_DIM, CHUNK, DIM,
            ROWS, KEYS, UNMASKED, LARGEST, WORDS)  # fmt: skip


class Twin:
    """Stands in for a kernel of the product: launches its twin."""

    def __init__(self, kernel: Any, way: Way):
        self.kernel, self.way = kernel, way

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.kernel[grid], launch_pdl=self.way.early)


class TwinAhead(Twin):
    """One that is followed by a product: `weights` are those that a run's launches are followed by, in their order."""

    def __init__(self, kernel: Any, way: Way, weights: Sequence[Tensor], processors: int):
        super().__init__(kernel, way)
        self.weights, self.processors = itertools.cycle(weights), processors

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        weight = next(self.weights)
        if not self.way.ahead:
            return partial(super().__getitem__(grid), ahead=None, ahead_rows=0, ahead_stride=0, ahead_size=0)
        outputs, inputs = weight.shape
        size = min(self.way.ahead * 2**20 // outputs, 2 * inputs) // 128 * 128
        # Programs beyond the kernel's own work have nothing else to do.
        launch = super().__getitem__((max(grid[0], self.processors), *grid[1:]))
        return partial(launch, ahead=weight, ahead_rows=outputs, ahead_stride=inputs, ahead_size=size)


@contextlib.contextmanager
def kernels_of(way: Way | None, decoder: Decoder) -> Iterator[None]:
    """The product launches its kernels this way."""
    if way is None:
        yield
        return
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    layers, head = decoder.layers, decoder.head.weight
    after_norms = [weight for layer in layers for weight in (layer.attention.qkv.weight, layer.mlp.up.weight)]
    after_gates = [layer.mlp.down.weight for layer in layers]
    twins = (
        (norm_kernel, "_norm", TwinAhead(_norm_twin, way, [*after_norms, head], processors)),
        (norm_kernel, "_silu_gate", TwinAhead(_silu_gate_twin, way, after_gates, processors)),
        (kv_write_kernel, "_write_kv", Twin(_write_kv_twin, way)),
        (attention_kernel, "_attend", Twin(_attend_twin, way)),
    )
    with contextlib.ExitStack() as stack:
        for module, name, twin in twins:
            stack.enter_context(mock.patch.object(module, name, twin))
        yield


class Step:
    """A decode step of some rows over chunks in random slots of a pool, of either of two batches."""

    def __init__(self, decoder: Decoder, pool: Tensor, rows: int):
        config = decoder.config
        self.decoder, self.pool, self.rows = decoder, pool, rows
        seats, last = torch.arange(rows), CONTEXT - 1
        table = torch.randperm(len(pool))[: rows * BLOCKS].view(rows, BLOCKS)
        segments = torch.stack([seats, torch.ones(rows), torch.zeros(rows), torch.full((rows,), CONTEXT), seats], dim=1)
        self.chunks, self.place = table[:, last // CHUNK].to(DEVICE), last % CHUNK
        parts = (torch.zeros(rows), torch.full((rows,), last), self.chunks * CHUNK + self.place, segments, table, seats)
        self.inputs = [part.to(DEVICE, torch.int32) for part in parts]
        self.token_ids = torch.randint(config.vocab_size, (2, rows), dtype=torch.int32, device=DEVICE)
        widths = {projection.out_features for projection in decoder.modules() if isinstance(projection, Projection)}
        self.results = {width: self.draw(2, rows, width) for width in sorted(widths)}  # of products, by batch
        self.result = {width: drawn[0].clone() for width, drawn in self.results.items()}
        self.x = self.draw(rows, config.hidden_size)
        shape = (config.heads, config.kv_heads, config.head_dim)
        self.work = make_work_list(Capacity(rows, rows, BLOCKS * CHUNK), *shape, torch.bfloat16, DEVICE)
        self.handle = register_pool(pool, work=self.work)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    def choose(self, batch: int) -> None:
        """What the next replay computes with; the KV that it writes is NaN until then."""
        self.inputs[0].copy_(self.token_ids[batch])
        for width, result in self.result.items():
            result.copy_(self.results[width][batch])
        self.pool[self.chunks, :, :, :, self.place] = torch.nan

    def written(self) -> Tensor:
        return self.pool[self.chunks, :, :, :, self.place]

    def whole(self) -> Tensor:
        self.work.build(self.inputs[3], longest=1)
        return self.decoder(*self.inputs, self.handle)

    def small(self, handle: int | None = None) -> Tensor:
        """The layers without their products; the sum of the residuals."""
        _, positions, slots, segments, table, _ = self.inputs
        self.work.build(segments, longest=1)
        batch = Batch(self.decoder.rotary(positions), slots, segments, table, handle or self.handle)
        x, change = self.x, self.result[self.x.shape[1]]
        with mock.patch.object(Projection, "forward", lambda projection, _: self.result[projection.out_features]):
            for layer in self.decoder.layers:
                x, change = layer(x, change, batch)
        return x


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Tensor
    programmatic: int
    edges: int


def captured(run: Callable[[], Tensor]) -> Captured:
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        result = run()
    graph.instantiate()
    return Captured(graph, result, *edges_of(graph.raw_cuda_graph()))


def edges_of(graph: int) -> tuple[int, int]:
    """(Programmatic edges, all edges)."""
    status, *_, count = cuda.cudaGraphGetEdges(graph)
    if status == cuda.cudaError_t.cudaSuccess:
        status, _, _, data, _ = cuda.cudaGraphGetEdges(graph, count)
    if status != cuda.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaGraphGetEdges: {status.name}")
    programmatic = cuda.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
    return sum(int(edge.type) == programmatic for edge in data), count


def differences(step: Step, graphs: dict[str, Captured]) -> dict[str, int]:
    """Of each way, the replays whose results or KV differ in a bit from the kernels' as they are."""

    def replayed(graph: Captured, batch: int) -> tuple[Tensor, Tensor]:
        step.choose(batch)
        graph.graph.replay()
        return graph.result.clone(), step.written()

    expected = [replayed(graphs[BASE], batch) for batch in range(2)]
    if torch.equal(expected[0][0], expected[1][0]) or not all(x.isfinite().all() for each in expected for x in each):
        raise RuntimeError("the two batches must give different, finite results")
    return {
        name: sum(
            not all(torch.equal(*pair) for pair in zip(replayed(graph, batch), expected[batch], strict=True))
            for _ in range(CHECKS)
            for batch in range(2)
        )
        for name, graph in graphs.items()
    }


def microseconds(graphs: dict[str, Captured]) -> dict[str, float]:
    """Median of each way; the ways take turns."""
    for graph in graphs.values():
        graph.graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS * len(graphs) + 1)]
    marks[0].record()
    for graph, mark in zip(itertools.cycle(graphs.values()), marks[1:], strict=False):
        graph.graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return {name: statistics.median(times[i :: len(graphs)]) for i, name in enumerate(graphs)}


def measure(step: Step, kind: str, run: Callable[[], Tensor], ways: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each way: microseconds, edges, and how many replays differed; prints them."""
    graphs = {}
    for name in ways:
        with kernels_of(WAYS[name], step.decoder):
            graphs[name] = captured(run)
    wrong, times = differences(step, graphs), microseconds(graphs)
    found = {}
    for name, graph in graphs.items():
        gain = 1 - times[name] / times[BASE]
        edges = f"{graph.programmatic} of {graph.edges}"
        bits = f"{wrong[name]} of {2 * CHECKS} DIFFER" if wrong[name] else "equal"
        print(f"| {step.rows} | {kind} | {name} | {times[name]:.1f} | {gain:+.2%} | {edges} | {bits} |", flush=True)
        found[name] = {
            "us": round(times[name], 1),
            "gain": round(gain, 4),
            "programmatic": graph.programmatic,
            "differ": wrong[name],
        }
    return found


def behind_gates(step: Step) -> str:
    """What becomes of the edges where an external event is waited for in front of each layer's write_kv."""
    event = torch.cuda.Event()
    event.record()
    runtime = CudaRuntime()

    def gate(_: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            runtime.wait_external(torch.cuda.current_stream().cuda_stream, event.cuda_event)

    handle = register_pool(step.pool, gate, step.work)
    try:
        with kernels_of(WAYS["early"], step.decoder):
            graph = captured(lambda: step.small(handle))
    except RuntimeError as problem:
        return f"not captured: {str(problem)[:160]}"
    return f"{graph.programmatic} of {graph.edges} edges programmatic"


def verdict(results: dict[int, dict[str, Any]]) -> str:
    lines = []
    for name in WAYS:
        gains = {rows: results[rows]["step"][name]["gain"] for rows in DECISIVE if rows in results}
        differ = sum(kind.get(name, {"differ": 0})["differ"] for result in results.values() for kind in result.values())
        if name == BASE or len(gains) < len(DECISIVE):
            continue  # nothing is decided by other rows
        good = not differ and min(gains.values()) > WORTH
        shown = ", ".join(f"{rows} rows {gain:+.2%}" for rows, gain in gains.items())
        lines.append(f"{name}: {shown}, {differ} replays differ: {'worth it' if good else 'not worth it'}")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=(32, 80, 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = decoder_config(CONFIG)
    decoder = Decoder.from_weights(config, random_weights(config, torch.bfloat16, DEVICE, 0))
    shape = (max(options.rows) * BLOCKS, config.layers, 2, config.kv_heads, CHUNK, config.head_dim)
    pool = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_()
    print("| rows | what | way | us | gain | programmatic edges | bits |")
    results: dict[int, dict[str, Any]] = {}
    for rows in options.rows:
        step = Step(decoder, pool, rows)
        near = [name for name, way in WAYS.items() if way is None or not way.ahead]
        results[rows] = {
            "step": measure(step, "step", step.whole, list(WAYS)),
            "small": measure(step, "small kernels", step.small, near),
        }
    gates = behind_gates(step)
    print(f"behind gates: {gates}")
    print(verdict(results))
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    report |= {"results": results, "behind_gates": gates}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
