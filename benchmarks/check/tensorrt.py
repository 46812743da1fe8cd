"""check.tensorrt: TensorRT engines of two ranks give the reference's replies, served in every way.

python -m benchmarks.check.tensorrt [--directory DIR]

Needs two GPUs, TensorRT and a checkout. Small Llama and OPT engines in float32, and eight layers of
Llama-2-13B's in float16, are built, then checked by `check.ranks` (replies and log probabilities,
in the serving mode) and `check.reuse` (with KV from every tier). Tests serve small engines with
`pensieve serve`, and behind Triton Inference Server: replies, streams, cancelling, statistics and
metrics. Without the server of `make triton-server` that part is skipped. At the end steps of
Llama-2-13B's shape are timed for each backend: to build it takes a GPU with 100 GB. What a part
says is printed. The last lines say which parts failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "benchmarks" / "shapes"
LARGE = "llama-2-13b-gqa"
SERVED = "tests/end_to_end/test_tensorrt_ranks.py"
TESTS = ("tests/builder/test_tensorrt_gpu.py", SERVED)
TRITON = Path(sys.prefix) / "triton-server"
"""The folder that `make triton-server` fills."""
SMALL = {  # of the shapes: two layers, a head of 64 for each rank's KV
    "opt-13b": ("hidden_size=256", "word_embed_proj_dim=256", "ffn_dim=1024"),
    LARGE: ("hidden_size=256", "intermediate_size=704", "num_key_value_heads=2"),
}
BOTH = ("num_hidden_layers=2", "num_attention_heads=4", "vocab_size=2000")


class CheckPart(NamedTuple):
    """`missing`: what is not here, and so the part is skipped."""

    name: str
    command: tuple[str, ...]
    missing: str = ""


def parts(directory: Path) -> Iterator[CheckPart]:
    """The commands, in order; engines go into the directory."""
    module = (sys.executable, "-m")
    engines = []
    for shape, dtype, settings in (
        *((shape, "float32", (*own, *BOTH)) for shape, own in SMALL.items()),
        (LARGE, "float16", ("num_hidden_layers=8",)),
    ):
        engines.append(str(directory / f"{shape}-{dtype}"))
        how = ("--backend", "tensorrt", "--device", "cuda", "--tensor-parallel", "2")
        config = ("--random-weights", "--config", str(SHAPES / f"{shape}.json"))
        changed = [word for one in settings for word in ("--set", one)]
        words = (*config, *changed, "--dtype", dtype, *how, "--output", engines[-1])
        command = (*module, "pensieve.scripts.build_engine", *words)
        yield CheckPart(f"build {shape} {dtype}", command)
    on_gpu = ("--device", "cuda", "--engine")
    yield CheckPart("check.ranks", (*module, "benchmarks.check.ranks", *on_gpu, *engines))
    for engine in engines:
        name = f"check.reuse {Path(engine).name}"
        command = (*module, "benchmarks.check.reuse", "--tokens", "1000", *on_gpu, engine)
        yield CheckPart(name, command)
    test = (*module, "pytest", "-q", "-rs", "-m", "gpu", "-k")
    yield CheckPart("tests", (*test, "not BehindTriton", *TESTS))
    missing = "" if TRITON.exists() else f"no tritonserver in {TRITON}: run `make triton-server`"
    yield CheckPart("triton", (*test, "BehindTriton", SERVED), missing)
    how = ("--backends", "reference", "inductor", "tensorrt", "--dtype", "float16")
    rows = ("--generation", "1x64", "64x64", "256x64", "--tensor-parallel", "2")
    yield CheckPart("times", (*module, "benchmarks.engine", "gpu", "--shapes", LARGE, *how, *rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check.tensorrt", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="of the engines, which stay (default: none)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        return run_all(parts((args.directory or Path(temporary)).resolve()))


def run_all(commands: Iterator[CheckPart]) -> int:
    """Runs all checks, also behind one that fails, and prints the result of each. Returns 1 if a
    check failed."""
    told = []
    failed = False
    for part in commands:
        if part.missing:
            told.append(f"SKIP {part.name}: {part.missing}")
            continue
        print(f"== {part.name}: {shlex.join(part.command)}", flush=True)
        began = time.perf_counter()
        status = subprocess.run(part.command, cwd=ROOT).returncode
        failed |= status != 0
        word = "FAIL" if status else "PASS"
        told.append(f"{word} {part.name} ({time.perf_counter() - began:.0f} s)")
    print("\n".join(told), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
