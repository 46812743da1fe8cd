"""check.ranks: engines of several ranks give the results of one device with the same weights.

python -m benchmarks.check.ranks --device cuda --engine DIR [DIR ...]

Random prompts go to the ranks in their serving mode (over MPI, in CUDA graphs, rank 0 samples), and
to one device with all the weights in the engine's precision and in float32. The log probabilities
of each first token, of the further tokens while the replies are equal, and of the 20 likeliest, may
differ from float32's by twice the one device's difference, or by 1e-4 in a float32 engine. Rank 0's
device must hold the whole model in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pensieve.builder.manifest import Manifest
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    Group,
    register_group,
    release_group,
)
from pensieve.runtime.device.protocol import Device, ForwardPass
from pensieve.runtime.engine import open_engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.launch.assemble import make_device
from pensieve.runtime.launch.ranks import take_share
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import check_least, exit_status

from ..loop import LoopAnswer, random_ids
from ..ranks import run_as_ranks
from .reuse import FLOAT32_TOLERANCE, Exact, differences
from .reuse_ways import Asker

if TYPE_CHECKING:
    from pensieve.runtime.ranks.mpi import Ranks

REPLY = 16


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check.ranks", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option(
        "--engine", required=True, type=Path, nargs="+", metavar="DIR", help="of as many ranks each"
    )
    option(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where they run (default %(default)s)",
    )
    option("--prompts", type=int, default=24, metavar="N", help="(default %(default)s)")
    option(
        "--tokens",
        type=int,
        default=700,
        metavar="N",
        help="of the longest prompt (default %(default)s)",
    )
    option("--seed", type=int, default=0, metavar="N", help="of the prompts (default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)

    def run() -> int:
        counts = {Manifest.read(directory).tensor_parallel for directory in args.engine}
        if len(counts) > 1 or min(counts) < 2:
            raise SettingError(
                "--engine", f"all need as many ranks, and at least 2, not {sorted(counts)}"
            )
        check_least(args, prompts=1, tokens=1)
        return run_as_ranks("benchmarks.check.ranks", counts.pop(), words, partial(check, args))

    return exit_status("check.ranks", run)


def check(args: argparse.Namespace, ranks: Ranks) -> int:
    """Does one rank's part; rank 0 prints the result."""
    ranks.together(lambda: take_share(args.device, ranks))
    group: Group | None = None
    status = 0
    for directory in args.engine:
        manifest = Manifest.read(directory)
        config, prompts = ranks.together(partial(plan_prompts, args, manifest))
        dtype = getattr(torch, manifest.dtype)
        ask = partial(ask_whole, directory, manifest, config, prompts)
        whole = ranks.together(ask if ranks.rank == 0 else lambda: None)
        group = group or ranks.open_group(args.device, dtype)
        register_group(TENSOR_PARALLEL, group)
        answers = ask_ranks(args, ranks, directory, config, prompts)
        release_group(TENSOR_PARALLEL)
        if whole is not None:
            status |= judge(directory, manifest, answers, *whole)
    return status


def plan_prompts(
    args: argparse.Namespace, manifest: Manifest
) -> tuple[SchedulerConfig, list[array[int]]]:
    """Prompts of all lengths up to the requested one."""
    longest = args.tokens + REPLY
    if longest > manifest.max_model_len:
        raise SettingError(
            "--tokens",
            f"needs contexts of {longest} tokens, the model's are {manifest.max_model_len}",
        )
    dice = np.random.default_rng(args.seed)
    lengths = np.linspace(1, args.tokens, args.prompts).astype(int)
    prompts = [random_ids(dice, manifest.vocab_size, length) for length in lengths]
    chunks = sum(-(-(length + REPLY) // 32) + 1 for length in lengths.tolist())
    return SchedulerConfig(
        gpu_kv_chunks=2 * chunks, host_kv_chunks=1, max_model_len=longest
    ), prompts


def ask_all(
    device: Device,
    engine: ForwardPass,
    config: SchedulerConfig,
    prompts: Sequence[array[int]],
    make_executor: Callable[[Device, ForwardPass, SchedulerConfig], Executor] = Executor,
) -> list[LoopAnswer]:
    asker = Asker(device, engine, config, 1, 0, make_executor)
    answers = [asker.begin(prompt, REPLY) for prompt in prompts]
    asker.run_until(lambda: all(answer.done for answer in answers))
    asker.executor.close()
    return answers


def ask_whole(
    directory: Path, manifest: Manifest, config: SchedulerConfig, prompts: Sequence[array[int]]
) -> tuple[list[LoopAnswer], list[LoopAnswer]]:
    """One device's answers, in the engine's precision and in float32; frees its memory
    afterwards."""
    told = []
    for dtype in (getattr(torch, manifest.dtype), torch.float32):
        told.append(
            ask_all(
                make_device(manifest.device, enforce_eager=True),
                Exact(directory, manifest, dtype),
                config,
                prompts,
            )
        )
        if manifest.device == "cuda":
            torch.cuda.empty_cache()
    one, exact = told
    return one, exact


def ask_ranks(
    args: argparse.Namespace,
    ranks: Ranks,
    directory: Path,
    config: SchedulerConfig,
    prompts: Sequence[array[int]],
) -> list[LoopAnswer]:
    """The ranks' answers, on rank 0; an empty list on others."""
    # imported here because it imports MPI
    from pensieve.runtime.ranks.executor import RankedExecutor, follow

    engine = ranks.together(lambda: open_engine(directory, args.device, ranks.rank))
    device = make_device(args.device)
    if ranks.rank == 0:
        return ask_all(device, engine, config, prompts, partial(RankedExecutor, ranks))
    follow(ranks, Executor(device, engine, config))
    return []


def judge(
    directory: Path,
    manifest: Manifest,
    answers: list[LoopAnswer],
    one: list[LoopAnswer],
    exact: list[LoopAnswer],
) -> int:
    """Prints a line of text and one of JSON; returns 1 if the ranks differ too much."""
    ours, theirs = off(answers, exact), off(one, exact)
    tolerance = FLOAT32_TOLERANCE if manifest.dtype == "float32" else 2 * float(np.max(theirs))
    worst = float(np.max(ours))  # NaN counts as the largest
    passed = worst <= tolerance
    equal = sum(answer.tokens == right.tokens for answer, right in zip(answers, exact, strict=True))
    print(
        f"{'PASS' if passed else 'FAIL'} {directory}: {manifest.tensor_parallel} ranks, "
        f"{len(ours)} log probabilities "
        f"off by at most {worst:.2e} (mean {np.mean(ours):.1e}), one device by {max(theirs):.2e} "
        f"(mean {np.mean(theirs):.1e}); {tolerance:.2e} is allowed; "
        f"{equal} of {len(exact)} replies are float32's"
    )
    distances = {"ranks_max": worst, "ranks_mean": float(np.mean(ours))}
    distances |= {
        "one_max": max(theirs),
        "one_mean": float(np.mean(theirs)),
        "tolerance": tolerance,
        "equal_replies": equal,
    }
    about = {"engine": directory.name, "ranks": manifest.tensor_parallel, "dtype": manifest.dtype}
    print(
        json.dumps({"bench": "ranks_logits", **about, "passed": bool(passed), **distances}),
        flush=True,
    )
    return int(not passed)


def off(answers: list[LoopAnswer], exact: list[LoopAnswer]) -> list[float]:
    """Differences of log probabilities, up to the first token at which a reply differs from the
    exact one."""
    gaps = []
    for answer, right in zip(answers, exact, strict=True):
        steps = zip(answer.tokens, answer.logprobs, right.tokens, right.logprobs, strict=True)
        for token, told, right_token, right_told in steps:
            gaps += differences(told, token, right_told, right_token)
            if token != right_token:
                break
    return gaps


if __name__ == "__main__":
    sys.exit(main())
