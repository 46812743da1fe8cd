"""Where the time of a decode step goes, and what quicker products of few rows would bring.

    python scripts/experiments/decode_floor.py [--rows 1 64] [--context 32] [--no-trace] [--compile]

Llama-3-8B's shape with random weights, in CUDA graphs, in one run:

1. the whole step, and each kind of its kernels alone, over all layers' own weights (so the L2 holds none of them);
   what is left is between the kernels. Then the same step by a trace, kernel by kernel.
2. each product through cuBLAS beside `few_rows_kernel` with several tiles, and in FP8 with the rounding of activations
   (with --compile also what inductor's max-autotune finds, which takes a minute a shape).
3. a chain of norms, products and gates of all layers, data depending on data: cuBLAS, ours, ours with early fetching;
   and what an empty kernel in a graph costs.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import few_rows_kernel  # beside this file
import torch
import torch.nn.functional as F
from few_rows_kernel import Tile
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.model import Batch, Decoder
from pensieve.builder.random_weights import random_weights
from pensieve.plugins.attention.kernel import make_work_list
from pensieve.plugins.attention.work_list import Capacity
from pensieve.plugins.linear import fp8 as fp8_linear
from pensieve.plugins.torch_ops import register_pool
from pensieve.runtime.step.sampler import sample

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
CHUNK = 32
TB_S = 4.25  # the floor's
TILES = (
    Tile(32, 128, 1, 5),
    Tile(32, 256, 1, 4),
    Tile(64, 128, 1, 4),
    Tile(64, 128, 2, 4),
    Tile(64, 128, 4, 4),
    Tile(64, 256, 2, 3),
    Tile(128, 64, 4, 5),
    Tile(128, 128, 2, 4),
    Tile(128, 128, 4, 4),
    Tile(128, 128, 7, 4),
    Tile(128, 128, 8, 4),
)
PRODUCTS = ("qkv", "out", "up", "down")


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of one captured run, one behind the other, so that launches are hidden."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


class Step:
    """A decode step of so many rows at a context, and inputs for its parts."""

    def __init__(self, decoder: Decoder, rows: int, context: int):
        config = decoder.config
        self.decoder, self.config, self.rows, self.context = decoder, config, rows, context
        blocks = -(-context // CHUNK)
        shape = (rows * blocks, config.layers, 2, config.kv_heads, CHUNK, config.head_dim)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16, device="cuda").normal_()
        seats = torch.arange(rows)
        table = torch.randperm(rows * blocks).view(rows, blocks)
        last = context - 1
        segments = torch.stack([seats, torch.ones(rows), torch.zeros(rows), torch.full((rows,), context), seats], 1)
        slots = table[:, last // CHUNK] * CHUNK + last % CHUNK
        positions = torch.full((rows,), last)
        parts = (seats, positions, slots, segments, table, seats)
        self.inputs = [part.int().cuda() for part in parts]
        work = make_work_list(
            Capacity(rows, rows, blocks * CHUNK), config.heads, config.kv_heads, config.head_dim, torch.bfloat16
        )
        self.work, self.handle = work, register_pool(self.pool, work=work)
        self.work.build(self.inputs[3], longest=1)
        self.x, self.y = self.draw(config.hidden_size), self.draw(config.hidden_size)
        self.wide, self.gated = self.draw(2 * config.mlp_size), self.draw(config.mlp_size)
        self.heads = self.draw(config.heads * config.head_dim)

    def draw(self, width: int) -> Tensor:
        return torch.randn(self.rows, width, device="cuda").bfloat16()

    def whole(self) -> Tensor:
        self.work.build(self.inputs[3], longest=1)
        return self.decoder(*self.inputs, self.handle)

    def kinds(self) -> dict[str, tuple[Callable[[], Any], int]]:
        """(all layers' kernels of a kind, bytes that they read of weights and KV)."""
        decoder, config, layers = self.decoder, self.config, self.decoder.layers
        ids, positions, slots, segments, table, _ = self.inputs
        rotary = decoder.rotary(positions)
        q, k, v = torch.randn(
            self.rows, config.heads + 2 * config.kv_heads, config.head_dim, device="cuda"
        ).bfloat16().split((config.heads, config.kv_heads, config.kv_heads), dim=1)  # fmt: skip
        batch = Batch(rotary, slots, segments, table, self.handle)
        ops, scale, numbers = torch.ops.pensieve, config.head_dim**-0.5, range(config.layers)
        logits = torch.randn(self.rows, config.vocab_size, device="cuda")
        none = torch.empty(0, dtype=torch.int64, device="cuda")
        weights = {name: sum(projection(layer, name).weight.nbytes for layer in layers) for name in PRODUCTS}
        kv = self.rows * self.context * 2 * config.kv_heads * config.head_dim * 2 * config.layers

        def norms() -> None:
            for layer in layers:
                layer.attention_norm.of_sum(self.x, self.y)
                layer.mlp_norm.of_sum(self.x, self.y)

        def attention() -> None:
            for i in numbers:
                ops.multi_token_attention(q, batch.segments, batch.block_table, batch.pool, i, scale)

        return {
            **{name: (lambda name=name: self.products(name), weights[name]) for name in PRODUCTS},
            "attention": (attention, kv),
            "write_kv": (lambda: [ops.write_kv(q, k, v, rotary, slots, self.handle, i) for i in numbers], 0),
            "norms": (norms, 0),
            "silu_gate": (lambda: [ops.silu_gate(self.wide) for _ in numbers], 0),
            "head": (lambda: F.linear(self.x, decoder.head.weight).float(), decoder.head.weight.nbytes),
            "embedding, rotary": (lambda: (decoder.embed(ids), decoder.rotary(positions)), 0),
            "work list": (lambda: self.work.build(segments, longest=1), 0),
            "greedy sampling (outside the step)": (lambda: sample(logits, none, *[none] * 6), logits.nbytes),
        }

    def input_of(self, name: str) -> Tensor:
        return {"qkv": self.x, "out": self.heads, "up": self.x, "down": self.gated}[name]

    def products(self, name: str, how: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        for layer in self.decoder.layers:
            how(self.input_of(name), projection(layer, name).weight)

    def chain(self, how: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> Tensor:
        """Everything of the layers but the attention, which gets a slice of the projection instead."""
        x, change = self.x, self.y
        for layer in self.decoder.layers:
            normed, x = layer.attention_norm.of_sum(x, change)
            qkv = how["qkv"](normed, layer.attention.qkv.weight)
            change = how["out"](qkv[:, : self.heads.shape[1]].contiguous(), layer.attention.out.weight)
            normed, x = layer.mlp_norm.of_sum(x, change)
            gated = torch.ops.pensieve.silu_gate(how["up"](normed, layer.mlp.up.weight))
            change = how["down"](gated, layer.mlp.down.weight)
        return change


def projection(layer: Any, name: str) -> Any:
    return getattr(layer.attention if name in ("qkv", "out") else layer.mlp, name)


def parts(step: Step) -> dict[str, float]:
    """Prints 1."""
    weights = sum(x.nbytes for x in step.decoder.parameters())
    kv = step.kinds()["attention"][1]
    floor = (weights + kv) / TB_S / 1e9
    whole = milliseconds(step.whole)
    read = floor - step.decoder.embed.weight.nbytes / TB_S / 1e9
    print(f"\n{step.rows} rows at {step.context}: {whole:.3f} ms, floor {floor:.3f} ({floor / whole:.0%}), ", end="")
    print(f"without the embeddings, which are not read, {read:.3f} ({read / whole:.0%})")
    print(f"{'kind':36} ms     share  TB/s")
    times = {}
    for name, (run, size) in step.kinds().items():
        times[name] = milliseconds(run)
        speed = f"{size / times[name] / 1e9:5.2f}" if size else ""
        print(f"{name:36} {times[name]:6.3f} {times[name] / whole:5.0%}  {speed}", flush=True)
    inside = sum(time for name, time in times.items() if "outside" not in name)
    print(f"{'sum (without sampling)':36} {inside:6.3f} {inside / whole:5.0%}")
    return {"whole": whole, "floor": floor, **times}


def traced(step: Step) -> None:
    """Prints the kernels of one captured step as the GPU saw them, and the time between them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.whole()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    spans: dict[str, list[float]] = defaultdict(list)
    kernels = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for event in kernels:
        spans[event.name].append(event.time_range.elapsed_us())
    busy = sum(map(sum, spans.values())) / 3
    print(f"\ntrace of {step.rows} rows: {len(kernels) // 3} kernels a step, {busy / 1000:.3f} ms in them")
    for name, found in sorted(spans.items(), key=lambda item: -sum(item[1]))[:14]:
        print(f"{sum(found) / 3000:7.3f} ms {len(found) // 3:4} x {statistics.median(found):7.2f} us  {name[:90]}")


def candidates(step: Step, compiled: bool) -> tuple[dict[str, Any], dict[str, Tile]]:
    """Prints 2; (times, the best tile of each product)."""
    found: dict[str, Any] = {}
    best: dict[str, Tile] = {}
    print(f"\nproducts of {step.rows} rows, all layers, ms (TB/s)")
    for name in PRODUCTS:
        weights = [projection(layer, name).weight for layer in step.decoder.layers]
        outputs, inputs = weights[0].shape
        size = sum(weight.nbytes for weight in weights)
        x = step.input_of(name)
        exact = x.float() @ weights[0].float().t()
        times = {"cuBLAS": milliseconds(lambda name=name: step.products(name))}
        if compiled:
            quick = torch.compile(F.linear, mode="max-autotune-no-cudagraphs")
            times["max-autotune"] = milliseconds(lambda name=name, quick=quick: step.products(name, quick))
        rounded = [(fp8_linear.rounded(weight, scale := fp8_linear.row_scales(weight)), scale) for weight in weights]
        times["FP8"] = milliseconds(
            lambda x=x, rounded=rounded: [torch.ops.pensieve.fp8_linear(x, *both, None) for both in rounded]
        )
        del rounded
        for tile in TILES:
            if not tile.fits(outputs, inputs):
                continue
            ours = ways([tile])[0]
            try:
                error = float((ours(x, weights[0]).float() - exact).norm() / exact.norm())
                times[str(tuple(tile))] = milliseconds(lambda name=name, ours=ours: step.products(name, ours))
            except (OutOfResources, CompilationError) as problem:
                print(f"{name}: {tile} does not run: {str(problem)[:100]}")
                continue
            if not error < 0.01:
                print(f"{name}: {tile} is WRONG by {error:.1e}")
        ordered = sorted(times.items(), key=lambda item: item[1])
        texts = [f"{way} {time:.3f} ({size / time / 1e9:.2f})" for way, time in ordered[:6]]
        print(
            f"{name:5} cuBLAS {times['cuBLAS']:.3f} ({size / times['cuBLAS'] / 1e9:.2f}); " + ", ".join(texts),
            flush=True,
        )
        best[name] = min(
            (tile for tile in TILES if str(tuple(tile)) in times), key=lambda tile: times[str(tuple(tile))]
        )
        found[name] = times
    return found, best


def ways(tiles: Sequence[Tile], early: bool = False) -> list[Callable[[Tensor, Tensor], Tensor]]:
    return [lambda x, weight, tile=tile: few_rows_kernel.product(x, weight, tile, early) for tile in tiles]


def chains(step: Step, best: dict[str, Tile]) -> dict[str, float]:
    """Prints 3."""
    layers = [weight for layer in step.decoder.layers for weight in layer.parameters()]
    size = sum(weight.nbytes for weight in layers)
    some = torch.zeros(1, device="cuda")
    empty = milliseconds(lambda: [some.add_(1) for _ in range(200)]) / 200
    times = {
        "cuBLAS": milliseconds(lambda: step.chain(dict.fromkeys(PRODUCTS, F.linear))),
        "ours": milliseconds(lambda: step.chain(dict(zip(best, ways(list(best.values())), strict=True)))),
        "ours, early": milliseconds(lambda: step.chain(dict(zip(best, ways(list(best.values()), True), strict=True)))),
    }
    plain, early = (step.chain(dict(zip(best, ways(list(best.values()), e), strict=True))) for e in (False, True))
    same = torch.equal(plain, early)
    print(f"\nchain of {step.rows} rows without attention, of {size / TB_S / 1e9:.3f} ms: ", end="")
    print(", ".join(f"{way} {time:.3f}" for way, time in times.items()), f"(equal bits: {same})")
    print(f"an empty kernel in a graph: {1000 * empty:.2f} us")
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 64))
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    config = decoder_config(CONFIG)
    decoder = Decoder.from_weights(config, random_weights(config, torch.bfloat16, "cuda", 0))
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for rows in options.rows:
        step = Step(decoder, rows, options.context)
        result: dict[str, Any] = {"parts": parts(step)}
        if not options.no_trace:
            traced(step)
        result["products"], best = candidates(step, options.compile)
        result["chain"] = chains(step, best)
        result["best"] = {name: tuple(tile) for name, tile in best.items()}
        report[f"{rows} rows"] = result
    print(json.dumps(report))


if __name__ == "__main__":
    main()
