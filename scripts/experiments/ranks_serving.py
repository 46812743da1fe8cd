"""Serving with several ranks, by rate: with reuse, with the GPU's cache only, and with every history computed anew.

    python scripts/experiments/ranks_serving.py --shape scripts/shapes/llama-2-70b.json --output DIR \\
        --rates reuse=3,6 none=0.5,1 gpu=2,3

One server after the other, random weights, ShareGPT's lengths; ends in one table. A server that does not start, and
what `--seconds` leaves no time for, is said and left out. KV sizes are a rank's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

<<<<<<< HEAD
import numpy as np

from pensieve.runtime.device.memory import GIB, host_memory
from pensieve.scripts.serving_runs import run, serving, tell_end
=======
from pensieve.scripts.serving_runs import PIECE, SERVE, run, serving, tell_end, use_memory
>>>>>>> versus
from pensieve.scripts.sizes import parse_bytes
from pensieve.scripts.traces import TURN_COUNTS

NO_HOST = ["--host-kv-chunks", "0", "--swap-out-below", "0"]
MODES = {"reuse": [], "gpu": NO_HOST, "none": [*NO_HOST, "--no-reuse"]}
START_SECONDS = 240.0  # longest start of a server


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="ranks_serving", description=__doc__.partition("\n")[0])
    option = made.add_argument
    option("--shape", type=Path, required=True, metavar="FILE", help="a config.json")
    option("--output", type=Path, required=True, metavar="DIR", help="engine, logs and a JSON line a rate")
    option("--rates", nargs="+", required=True, metavar="MODE=RATES", help=f"of {', '.join(MODES)}; conversations/s")
    option("--ranks", type=int, default=4, metavar="N", help="(default %(default)s)")
    option("--device", default="cuda", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--dtype", default="bfloat16", help="(default %(default)s)")
    option("--gpu-kv-bytes", default="20GiB", metavar="SIZE", help="(default %(default)s)")
    option("--host-kv-bytes", default="48GiB", metavar="SIZE", help="(default %(default)s)")
    option("--max-num-seqs", type=int, default=256, metavar="N", help="(default %(default)s)")
    option("--ramp-s", type=float, default=45.0, metavar="S", help="see bench_serving (default %(default)s)")
    option("--warm-up-s", type=float, default=60.0, metavar="S", help="not measured (default %(default)s)")
    option("--measure-s", type=float, default=30.0, metavar="S", help="of each rate (default %(default)s)")
    option("--think-s", type=float, default=15.0, metavar="S", help="(default %(default)s)")
    option("--turn-counts", default=TURN_COUNTS[0], choices=TURN_COUNTS, help="(default %(default)s)")
    option("serve_options", nargs="*", metavar="OPTION", help="behind --: more of `pensieve serve`")
    option("--seconds", type=float, default=570.0, metavar="S", help="for all of it (default %(default)s)")
    return made


def main() -> int:
    args = parser().parse_args()
    deadline = time.monotonic() + args.seconds
    args.output.mkdir(parents=True, exist_ok=True)
    run("build_engine", "--random-weights", "--config", args.shape, "--output", args.output / "engine",
        "--backend", "reference", "--dtype", args.dtype, "--device", args.device,
        "--tensor-parallel", args.ranks)  # fmt: skip
    if args.device == "cuda":
        use_memory(args.ranks * (parse_bytes(args.host_kv_bytes, "--host-kv-bytes") + PIECE))
    told = []
    for mode, _, rates in (word.partition("=") for word in args.rates):
        left = deadline - time.monotonic()
        file = args.output / f"{mode}.json"
        try:
            with server(args, mode, min(left, START_SECONDS)) as url:
                measure(args, url, rates, file, deadline - time.monotonic())
        except (subprocess.SubprocessError, TimeoutError) as error:
            tell_end(args.output / f"{mode}.log", error)
        if file.exists() and file.read_text():
            told.append(file)
    run("bench_serving", "--compare", *told)
    return 0


def measure(args: argparse.Namespace, url: str, rates: str, file: Path, seconds: float) -> None:
    vocabulary = json.loads(args.shape.read_text())["vocab_size"]
    run("bench_serving", "--url", url, "--conversations", "--vocabulary", vocabulary, "--processes", 8,
        "--rate", rates, "--ramp-s", args.ramp_s, "--warm-up-s", args.warm_up_s, "--measure-s", args.measure_s,
        "--think-s", args.think_s, "--turn-counts", args.turn_counts, "--json", file, seconds=seconds)  # fmt: skip


def server(args: argparse.Namespace, mode: str, seconds: float) -> AbstractContextManager[str]:
    """As `serving`."""
    words = ["--engine", args.output / "engine", "--device", args.device, "--gpu-kv-bytes", args.gpu_kv_bytes]
    words += ["--state-dir", args.output / f"state-{mode}", "--max-num-seqs", args.max_num_seqs]
    words += ["--max-num-batched-tokens", 1024, "--shutdown-timeout", 1, *args.serve_options]
<<<<<<< HEAD
    words += MODES[mode] or ["--host-kv-bytes", args.host_kv_bytes]  # last: swaps are off where HOST is
    return serving(words, args.output / f"{mode}.log", seconds)


def use_memory(size: int) -> None:
    """Touches memory until so many bytes are free: some virtual machines are given it as they use it."""
    held: list[np.ndarray] = []
    patience = 10
    while (free := host_memory().free) + len(held) * PIECE < size and patience:
        if free > 2 * PIECE:
            held.append(np.ones(PIECE, np.uint8))
        else:
            patience -= 1
            time.sleep(1.0)
    print(f"{(free + len(held) * PIECE) / GIB:.0f} GiB of host memory for {size / GIB:.0f}", flush=True)
=======
    return serving([*SERVE, *words], args.output / f"{mode}.log", seconds)
>>>>>>> versus


if __name__ == "__main__":
    sys.exit(main())
