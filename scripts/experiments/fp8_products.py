"""Products in FP8, scaled by row inside of the product or behind it, beside bfloat16's: one run that decides.

    python scripts/experiments/fp8_products.py [--seconds 60] [--json FILE]

The four products of a layer of Llama-3-8B, 1 to 2,048 rows, each in a CUDA graph over different weights of 1 GiB:

    bfloat16   what torch calls
    rows       activations rounded row by row, `torch._scaled_mm` with scales by row (CUTLASS's kernel or cuBLAS's)
    behind     the same, but the product unscaled (cuBLAS's kernel), and both scales in a kernel of their own

**The rule**: whatever is quickest by whole layers at a count of rows serves it, if one boundary between counts says
which (`fp8_linear_kernel.MOST_SCALED_BEHIND`).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from graph_times import microseconds  # beside this file
from torch import Tensor

from pensieve.plugins.linear import fp8_kernel as fp8_linear_kernel
from pensieve.plugins.linear.fp8 import in_fp8, rounded, row_scales

PRODUCTS = {"qkv": (6144, 4096), "out": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 16, 64, 256, 1024, 2048, 32, 128, 512)
COLD_BYTES = 2**30
ROWS_ENOUGH = 2**20


def scaled(behind: int, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """behind: the most rows that are scaled behind their product."""
    fp8_linear_kernel.MOST_SCALED_BEHIND = behind
    return fp8_linear_kernel.linear(x, weight, scale, None)


WAYS = {"rows": functools.partial(scaled, 0), "behind": functools.partial(scaled, ROWS_ENOUGH)}


def every(way: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weights: Tensor, scale: Tensor) -> list[Tensor]:
    return [way(x, weight, scale) for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of it (default %(default)s)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    weights, scales = {}, {}
    for name, (outputs, inputs) in PRODUCTS.items():
        count = -(-COLD_BYTES // (outputs * inputs))
        plain = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)
        scales[name] = row_scales(plain)
        weights[name] = rounded(plain, scales[name]).expand(count, -1, -1).contiguous()
    found: dict[str, dict[str, float]] = {}
    print("| rows | a layer: bfloat16 | rows | behind | quantising alone | qkv, out, up, down: rows; behind |")
    for rows in ROWS:
        if time.monotonic() > deadline:
            print("no time left for the rest")
            break
        times: dict[str, list[float]] = {"bfloat16": [], "rows": [], "behind": [], "quantising": []}
        for name, (_, inputs) in PRODUCTS.items():
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            all_weights, scale = weights[name], scales[name]
            exact = in_fp8(x, all_weights[0], scale, None).float()
            wide = all_weights[: max(2, len(all_weights) // 2)].to(torch.bfloat16)
            times["bfloat16"].append(microseconds(lambda w=wide, x=x: [F.linear(x, part) for part in w], len(wide)))
            for kind, way in WAYS.items():
                error = float((way(x, all_weights[0], scale).float() - exact).norm() / exact.norm())
                if not error < 0.01:
                    print(f"{kind} is WRONG by {error:.1e}: {name}, {rows} rows")
                run = functools.partial(every, way, x, all_weights, scale)
                took = microseconds(run, len(all_weights))
                times[kind].append(took)
            times["quantising"].append(
                microseconds(lambda x=x: [fp8_linear_kernel.quantise_rows(x) for _ in range(20)], 20)
            )
        layer = {kind: sum(parts) for kind, parts in times.items()}
        found[str(rows)] = layer
        parts = "; ".join(", ".join(f"{time:.1f}" for time in times[kind]) for kind in ("rows", "behind"))
        print(f"| {rows} | " + " | ".join(f"{us:.1f}" for us in layer.values()) + f" | {parts} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
