"""bench_collectives: what a sum over all ranks takes, by tokens and way, and whether it is right.

python -m pensieve.scripts.bench_collectives --device cuda --ranks 4

On GPUs the sums are in a CUDA graph, one behind the other, as in an engine: NCCL, one shot, and `auto`, which is what
engines use; `--ways two_shot` is a candidate for sizes between. Every sum is compared with float32's, its bits with
rank 0's; one that is off makes the exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime.launch.ranks import run_as_ranks, take_share

if TYPE_CHECKING:
    from ..runtime.ranks.mpi import Ranks

SUMS = 40  # in a graph
REPLAYS = 20
LARGEST = {"one_shot": 2**22, "two_shot": 2**24}  # bytes, above which it is not tried
WAYS = ("nccl", "one_shot", "auto", "two_shot")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_collectives", description=__doc__.partition("\n")[0])
    option = made.add_argument
    option("--ranks", type=int, default=2, metavar="N", help="(default %(default)s)")
    option("--device", default="cuda", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--width", type=int, default=8192, metavar="N", help="numbers of a token (default %(default)s)")
    option("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096], metavar="N", help="(%(default)s)")
    option("--ways", nargs="+", default=WAYS[:3], choices=WAYS, help="of --device cuda (default: all but two_shot)")
    option("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="(default %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    for name in ("ranks", "width"):
        if getattr(args, name) < 1:
            print(f"bench_collectives: --{name}: must be at least 1", file=sys.stderr)
            return 2
    return run_as_ranks("bench_collectives", args.ranks, words, partial(bench, args))


def bench(args: argparse.Namespace, ranks: Ranks) -> int:
    ranks.together(lambda: take_share(args.device, ranks))
    dtype = getattr(torch, args.dtype)
    on_gpu = args.device == "cuda"
    ways = cuda_ways(ranks, dtype, args.ways) if on_gpu else {"mpi": ranks.open_group("cpu", dtype).all_reduce}
    wrong: list[str] = []
    for tokens in args.tokens:
        generator = torch.Generator().manual_seed(tokens)
        shares = [torch.randn(tokens, args.width, generator=generator).to(dtype) for _ in range(ranks.size)]
        x, exact = shares[ranks.rank].to(args.device), torch.stack(shares).float().sum(0)
        found = {}
        for name, add in ways.items():
            if x.nbytes > LARGEST.get(name, x.nbytes):
                continue
            wrong += problems(ranks, add(x).cpu(), exact, f"{name}, {tokens} tokens")
            found[name] = round(1e6 * (in_a_graph if on_gpu else one_by_one)(partial(add, x)), 2)
        if ranks.rank == 0:
            about = {"ranks": ranks.size, "dtype": args.dtype, "width": args.width, "tokens": tokens}
            print(json.dumps({"bench": "all_reduce", **about, "us": found}), flush=True)
    if wrong and ranks.rank == 0:
        print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def cuda_ways(ranks: Ranks, dtype: torch.dtype, names: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Those of the names that these ranks and this dtype have."""
    from ..plugins.collectives.cuda import ONE_SHOT_BYTES

    group = ranks.open_cuda_group(dtype, one_shot_bytes=max(LARGEST.values()))

    def add_up_to(most: int, x: Tensor) -> Tensor:
        group.one_shot_bytes = most
        return group.all_reduce(x)

    ways = {"nccl": partial(add_up_to, 0)}
    if group.shared is not None:
        ways["one_shot"], ways["auto"] = partial(add_up_to, LARGEST["one_shot"]), partial(add_up_to, ONE_SHOT_BYTES)
        ways["two_shot"] = partial(two_shot, group.shared, group.name)
    return {name: add for name, add in ways.items() if name in names}


def two_shot(shared: Tensor, group: str, x: Tensor) -> Tensor:
    """Each rank adds up a part of the numbers, then all read all parts; the kernels of all ranks end together."""
    place = shared[: x.numel()].view(x.shape)
    place.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(place, "sum", group, torch.empty_like(x))


def problems(ranks: Ranks, total: Tensor, exact: Tensor, what: str) -> list[str]:
    """The same on all ranks: whether one has other bits than rank 0, or is off by more than its roundings."""
    digest = hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest()
    error = float((total.float() - exact).norm() / exact.norm())
    # Each of ranks - 1 additions rounds once, by at most half a unit; norms average over all numbers.
    most = ranks.size * torch.finfo(total.dtype).eps
    found = []
    told = ranks.gather((digest, error))
    for rank, (bits, off) in enumerate(told):
        if bits != told[0][0]:
            found.append(f"{what}: rank {rank} has another sum than rank 0")
        if not off <= most:
            found.append(f"{what}: rank {rank}'s sum is off by {off:.1e}")
    return found


def in_a_graph(add: Callable[[], Tensor]) -> float:
    """Seconds of one, of many in a graph: the best of a few replays."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        add()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(SUMS):
            add()
    best = float("inf")
    with torch.cuda.stream(stream):
        for _ in range(REPLAYS):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            graph.replay()
            after.record(stream)
            after.synchronize()
            best = min(best, before.elapsed_time(after) / 1e3 / SUMS)
    return best


def one_by_one(add: Callable[[], Tensor]) -> float:
    best = float("inf")
    for _ in range(REPLAYS):
        started = time.perf_counter()
        add()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    sys.exit(main())
