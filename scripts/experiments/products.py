"""What multiplies a step's few rows with its weights fastest: one run that decides if anything but cuBLAS is worth it.

    python scripts/experiments/products.py [--seconds 200] [--json FILE]

The four products of a layer of Llama-3-8B and of Llama-2-13B with 10 KV heads, bf16, 1 to 256 rows, each in a CUDA
graph over different weights of 1 GiB, so that the L2 holds none of them:

    cuBLAS    what torch calls
    padded    the same, with more rows: up to a multiple of 16, 32 or 64
    cuBLASLt  each of the 16 algorithms that its heuristic proposes, with a workspace of 64 MiB (cublaslt.py)
    split     Triton, inputs split among programs, copied by cp.async (few_rows_kernel.py), up to 64 rows
    even      Triton, steps divided evenly, copied by TMA (product_kernels.py)

Then layers in their order (qkv, out, up, down): cuBLAS, the best of each product, and the best of those in Triton with
each kernel launched before the one ahead of it has ended. Results that are off by more than 1% are named and left out.
One table line a product and row count, the most interesting counts first, until the time is over; last the verdict.
The numbers go to FILE, or without one are printed as JSON.

**The rule**: a table of the best way by product and token bucket, behind one operation, enters the engines only if
whole layers of a shape gain more than 4% at each of 32, 48 and 64 rows, to which steps of 17 to 64 tokens are padded;
otherwise all stays with cuBLAS. If other sizes (17 or 24 rows as they are, or more padding) or an algorithm of cuBLASLt
gain as much, that alone enters: sizes are a line of runtime/step/buffers.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import few_rows_kernel  # these four are beside this file
import product_kernels
import torch
import torch.nn.functional as F
from cublaslt import Algorithms
from few_rows_kernel import Tile
from graph_times import microseconds
from product_kernels import Cut, cuts
from torch import Tensor
from triton.errors import TritonError

MODELS = {  # outputs and inputs of each product, in a layer's order
    "8B": {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)},
    "13B": {"qkv": (7680, 5120), "out": (5120, 5120), "up": (27648, 5120), "down": (5120, 13824)},
}
ROWS = (32, 64, 48, 1, 128, 16, 24, 96, 17, 8, 256)  # the most interesting first
DECISIVE = (32, 48, 64)  # what steps of 17 to 64 tokens are padded to (runtime/step/buffers.py)
WORTH = 0.04
TILES = (Tile(64, 128, 4, 4), Tile(128, 64, 4, 5))
COLD_BYTES = 2**30
LAYERS = 4  # of a chain; more than the L2 holds
WORKSPACE_BYTES = 64 * 2**20
TB_S = 4.25  # the floor's
COMPILERS = 12

Way = Callable[[Tensor, Tensor], Tensor]
REFUSALS = (TritonError, RuntimeError)
"""What a way may end with that does not run here: too large, not compiled, or refused by cuBLASLt."""


class Found(NamedTuple):
    """The quickest of its kind: a name, microseconds and how it multiplies."""

    name: str
    microseconds: float
    way: Way


class Model:
    """Weights of each product: as many as make 1 GiB, and at least a chain's."""

    def __init__(self, name: str):
        self.name = name
        self.weights = {}
        for product, (outputs, inputs) in MODELS[name].items():
            count = max(LAYERS, -(-COLD_BYTES // (2 * outputs * inputs)))
            weights = torch.empty(count, outputs, inputs, dtype=torch.bfloat16, device="cuda")
            self.weights[product] = weights.normal_(std=inputs**-0.5)

    def inputs(self, rows: int) -> dict[str, Tensor]:
        return {
            product: torch.randn(rows, weights.shape[2], device="cuda").bfloat16()
            for product, weights in self.weights.items()
        }

    @property
    def layer_bytes(self) -> int:
        return sum(weights[0].nbytes for weights in self.weights.values())


def padded_linear(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """The rows beyond x are what is behind it in memory (see `wide`): those of a captured step cost no copy either."""
    return F.linear(torch.as_strided(x, (rows, x.shape[1]), x.stride()), weight)[: len(x)]


def ways(rows: int, outputs: int, inputs: int, workspace: Tensor, processors: int) -> dict[str, dict[str, Way]]:
    """By kind and name."""
    more = sorted({-(-rows // step) * step for step in (16, 32, 64)} - {rows})
    algorithms = Algorithms(rows, outputs, inputs, workspace)

    def algorithm(x: Tensor, weight: Tensor, index: int) -> Tensor:
        out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        algorithms.run(index, x, weight, out)
        return out

    tiles = [tile for tile in TILES if rows <= few_rows_kernel.MOST_ROWS and tile.fits(outputs, inputs)]
    evenly = [cut for cut in cuts(rows) if cut.fits(outputs, inputs)]
    return {
        "cuBLAS": {"cuBLAS": F.linear},
        "padded": {f"to {count}": partial(padded_linear, rows=count) for count in more},
        "cuBLASLt": {
            f"#{index} ({proposal.waves:.1f} waves)": partial(algorithm, index=index)
            for index, proposal in enumerate(algorithms.proposals)
        },
        "split": {str(tuple(tile)): partial(few_rows_kernel.product, tile=tile) for tile in tiles},
        "even": {str(tuple(cut)): partial(product_kernels.product, cut=cut, processors=processors) for cut in evenly},
    }


def fastest(kind: dict[str, Way], x: Tensor, weights: Tensor, exact: Tensor) -> Found | None:
    """None if none runs."""
    best = None
    for name, way in kind.items():
        try:
            error = float((way(x, weights[0]).float() - exact).norm() / exact.norm())
            if not error < 0.01:
                print(f"{name} is WRONG by {error:.1e}: {len(x)} rows, weight {list(weights.shape[1:])}")
                continue
            took = microseconds(lambda way=way: [way(x, weight) for weight in weights], len(weights))
        except REFUSALS as problem:
            print(f"{name} does not run: {len(x)} rows, weight {list(weights.shape[1:])}: {str(problem)[:120]}")
            continue
        if best is None or took < best.microseconds:
            best = Found(name, took, way)
    return best


def measure(model: Model, rows: int, workspace: Tensor, processors: int) -> dict[str, Any]:
    """All of one model and row count; prints it."""
    found: dict[str, dict[str, Found]] = {}
    inputs = model.inputs(rows)
    for product, weights in model.weights.items():
        x = wide(inputs[product])
        exact = x.float() @ weights[0].float().t()
        kinds = ways(rows, *weights.shape[1:], workspace, processors)
        found[product] = {
            kind: best for kind, named in kinds.items() if (best := fastest(named, x, weights, exact)) is not None
        }
        show(model.name, product, rows, weights[0].nbytes, found[product])
    chains = measure_chains(model, {name: wide(x) for name, x in inputs.items()}, found)
    base = chains["cuBLAS"]
    floor = model.layer_bytes / TB_S / 1e6
    texts = [f"{name} {took:.1f} us ({1 - took / base:+.1%})" for name, took in chains.items()]
    print(f"| {model.name} | layer | {rows} | floor {floor:.1f} us | {' | '.join(texts)} |", flush=True)
    products = {
        product: {kind: {"way": best.name, "us": round(best.microseconds, 2)} for kind, best in kinds.items()}
        for product, kinds in found.items()
    }
    return {"model": model.name, "rows": rows, "products": products, "layer_us": chains, "floor_us": floor}


def wide(x: Tensor) -> Tensor:
    """x at the beginning of memory for 64 rows more, of zeros."""
    room = torch.zeros(len(x) + 64, x.shape[1], dtype=x.dtype, device=x.device)
    room[: len(x)] = x
    return room[: len(x)]


def show(model: str, product: str, rows: int, size: int, found: dict[str, Found]) -> None:
    quickest = min(found, key=lambda kind: found[kind].microseconds)
    texts = []
    for kind, best in found.items():
        text = f"{kind} {best.microseconds:.1f} ({size / best.microseconds / 1e6:.2f}) {best.name}"
        texts.append(f"**{text}**" if kind == quickest else text)
    print(f"| {model} | {product} | {rows} | {' | '.join(texts)} |", flush=True)


def measure_chains(model: Model, inputs: dict[str, Tensor], found: dict[str, dict[str, Found]]) -> dict[str, float]:
    """Microseconds a layer of each way of choosing."""

    def layers(choice: dict[str, Way]) -> float:
        def run() -> None:
            for layer in range(LAYERS):
                for product, weights in model.weights.items():
                    choice[product](inputs[product], weights[layer])

        return microseconds(run, LAYERS, repeats=20)

    def best_of(kinds: Sequence[str]) -> dict[str, Way]:
        best = {}
        for product, bests in found.items():
            own = [bests[kind] for kind in kinds if kind in bests]
            if not own:
                return {}
            best[product] = min(own, key=lambda each: each.microseconds).way
        return best

    choices = {
        "cuBLAS": best_of(["cuBLAS"]),
        "padded": best_of(["cuBLAS", "padded"]),
        "cuBLASLt": best_of(["cuBLAS", "padded", "cuBLASLt"]),
        "best": best_of(["cuBLAS", "padded", "cuBLASLt", "split", "even"]),
        "Triton": (ours := best_of(["split", "even"])),
        "Triton, early": {product: partial(way, early=True) for product, way in ours.items()},
    }
    return {name: layers(choice) for name, choice in choices.items() if choice}


def compiled(job: tuple[Cut | Tile, int, bool]) -> str:
    """In a process of its own: fills Triton's cache; what went wrong, or nothing."""
    how, rows, early = job
    splits = how.splits if isinstance(how, Tile) else 1
    x = torch.zeros(rows, 4 * how.inputs * splits, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(how.outputs * 16, x.shape[1], dtype=torch.bfloat16, device="cuda")
    try:
        if isinstance(how, Tile):
            few_rows_kernel.product(x, weight, how, early)
        else:
            product_kernels.product(x, weight, how, 1, early)
        torch.cuda.synchronize()
    except REFUSALS as problem:
        return f"{how} with {rows} rows, {early=}: {str(problem)[:200]}"
    return ""


def compile_all() -> None:
    rows = sorted({product_kernels.padded(count) for count in ROWS})
    jobs: list[tuple[Cut | Tile, int, bool]] = [
        (how, count, early)
        for count in rows
        for how in (*cuts(count), *(TILES if count <= few_rows_kernel.MOST_ROWS else ()))
        for early in (False, True)
    ]
    start = time.monotonic()
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        for problem in pool.map(compiled, jobs):
            if problem:
                print(problem, flush=True)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)


def verdict(results: Sequence[dict[str, Any]]) -> str:
    """What the rule says of each way of choosing."""
    lines = []
    for model, choice in itertools.product(MODELS, ("padded", "cuBLASLt", "best", "Triton, early")):
        layers = {result["rows"]: result["layer_us"] for result in results if result["model"] == model}
        gains = {
            rows: 1 - layers[rows][choice] / layers[rows]["cuBLAS"]
            for rows in DECISIVE
            if rows in layers and choice in layers[rows]
        }
        if len(gains) < len(DECISIVE):
            lines.append(f"{model}, {choice}: not measured at all of {DECISIVE} rows")
            continue
        shown = ", ".join(f"{rows} rows {gain:+.1%}" for rows, gain in gains.items())
        lines.append(f"{model}, {choice}: {shown}: {'worth it' if min(gains.values()) > WORTH else 'not worth it'}")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="for all of it (default %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    compile_all()
    torch.manual_seed(0)
    models = [Model(name) for name in MODELS]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    print("microseconds (TB/s) of the quickest of each kind, and which it is")
    results, longest = [], 0.0
    for rows, model in itertools.product(ROWS, models):
        start = time.monotonic()
        if start + longest > deadline:
            print(f"no time left for {rows} rows of {model.name}")
            continue
        results.append(measure(model, rows, workspace, processors))
        longest = max(longest, time.monotonic() - start)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    if options.json is None:
        print(json.dumps(report))
    else:
        options.json.write_text(json.dumps(report, indent=1))
    print(verdict(results))


if __name__ == "__main__":
    main()
