"""benchmarks.ranks: times a sum over all ranks, and the sending of each step's plan to the other
ranks.

    python -m benchmarks.ranks sums --device cuda --ranks 4
    python -m benchmarks.ranks plans --ranks 4 --rows 256

sums: by tokens and method. On GPUs the sums are in a CUDA graph, one after the other, as in an
engine: NCCL, one shot, and `auto`, the choice of engines; `--ways two_shot` is a candidate for
sizes between. Every sum is compared with float32's, and its bits with rank 0's; a wrong one makes
the exit status 1.

plans: of a batch that generates, and of one with two new prompts and copies, at the pace of real
steps: packed and sent, received and unpacked, reported, and the reports merged. Each part is timed
on the clock that all processes of a host share, and by the thread's processor time, which other
programs on the machine affect less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pensieve.runtime.launch.ranks import run_rank, take_share
from pensieve.runtime.ranks.launch import run_ranks, under_mpi
from pensieve.scheduler.plan import (
    BlockUpdate,
    CopyBatch,
    Join,
    Lane,
    Span,
    StepPlan,
    StepResult,
    Tickets,
)
from pensieve.scheduler.types import GREEDY, RequestId, RowId
from pensieve.scripts.command import check_least, exit_status

if TYPE_CHECKING:
    from pensieve.runtime.ranks.executor import Reports
    from pensieve.runtime.ranks.mpi import Ranks

SUMS = 40  # in a graph
REPLAYS = 20
LARGEST = {"one_shot": 2**22, "two_shot": 2**24}  # bytes; larger sums are not tried
WAYS = ("nccl", "one_shot", "auto", "two_shot")
CHUNK, CONTEXT, PROMPT, COPIED = 32, 1000, 400, 64
DEADLINE_SECONDS = 60.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.ranks", description=__doc__.partition("\n")[0]
    )
    parts = parser.add_subparsers(dest="part", required=True)
    option = parts.add_parser("sums", help="over all ranks, by tokens and way").add_argument
    option("--ranks", type=int, default=2, metavar="N", help="(default %(default)s)")
    option("--device", default="cuda", choices=("cpu", "cuda"), help="(default %(default)s)")
    option(
        "--width",
        type=int,
        default=8192,
        metavar="N",
        help="numbers of a token (default %(default)s)",
    )
    option(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 16, 64, 256, 1024, 4096],
        metavar="N",
        help="(%(default)s)",
    )
    option(
        "--ways",
        nargs="+",
        default=WAYS[:3],
        choices=WAYS,
        help="of --device cuda (default: all but two_shot)",
    )
    option(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16", "float16"),
        help="(default %(default)s)",
    )
    option = parts.add_parser("plans", help="sent to the ranks, and their reports").add_argument
    option("--ranks", type=int, default=4, metavar="N", help="(default %(default)s)")
    option(
        "--rows", type=int, default=256, metavar="N", help="running requests (default %(default)s)"
    )
    option("--steps", type=int, default=1000, metavar="N", help="(default %(default)s)")
    option(
        "--step-ms",
        type=float,
        default=10.0,
        metavar="MS",
        help="from plan to plan (default %(default)s)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    work = bench_sums if args.part == "sums" else bench_plans

    def run() -> int:
        check_least(args, ranks=1, width=1)
        return run_as_ranks("benchmarks.ranks", args.ranks, words, partial(work, args))

    return exit_status("benchmarks.ranks", run)


def run_as_ranks(name: str, count: int, words: Sequence[str], work: Callable[[Ranks], int]) -> int:
    """Calls work(ranks) as one of `count` ranks, or starts all of them with `words` after the
    module's name. Returns the exit status. SettingError if there is no mpirun."""
    if under_mpi():
        return run_rank(name, count, work)
    return run_ranks(count, [sys.executable, "-m", name, *words])


# Sums.


def bench_sums(args: argparse.Namespace, ranks: Ranks) -> int:
    ranks.together(lambda: take_share(args.device, ranks))
    dtype = getattr(torch, args.dtype)
    on_gpu = args.device == "cuda"
    ways = (
        cuda_ways(ranks, dtype, args.ways)
        if on_gpu
        else {"mpi": ranks.open_group("cpu", dtype).all_reduce}
    )
    wrong: list[str] = []
    for tokens in args.tokens:
        generator = torch.Generator().manual_seed(tokens)
        shares = [
            torch.randn(tokens, args.width, generator=generator).to(dtype)
            for _ in range(ranks.size)
        ]
        x = shares[ranks.rank].to(args.device)
        exact = torch.stack(shares).float().sum(0)
        times_us = {}
        for name, add in ways.items():
            if x.nbytes > LARGEST.get(name, x.nbytes):
                continue
            wrong += problems(ranks, add(x).cpu(), exact, f"{name}, {tokens} tokens")
            times_us[name] = round(1e6 * (in_a_graph if on_gpu else one_by_one)(partial(add, x)), 2)
        if ranks.rank == 0:
            about = {
                "ranks": ranks.size,
                "dtype": args.dtype,
                "width": args.width,
                "tokens": tokens,
            }
            print(json.dumps({"bench": "all_reduce", **about, "us": times_us}), flush=True)
    if wrong and ranks.rank == 0:
        print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def cuda_ways(
    ranks: Ranks, dtype: torch.dtype, names: Sequence[str]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """The methods among the names that these ranks and this dtype support."""
    from pensieve.plugins.collectives.cuda import ONE_SHOT_BYTES

    group = ranks.open_cuda_group(dtype, one_shot_bytes=max(LARGEST.values()))

    def add_up_to(most: int, x: Tensor) -> Tensor:
        group.one_shot_bytes = most
        return group.all_reduce(x)

    ways = {"nccl": partial(add_up_to, 0)}
    if group.shared is not None:
        ways["one_shot"], ways["auto"] = (
            partial(add_up_to, LARGEST["one_shot"]),
            partial(add_up_to, ONE_SHOT_BYTES),
        )
        ways["two_shot"] = partial(two_shot, group.shared, group.name)
    return {name: add for name, add in ways.items() if name in names}


def two_shot(shared: Tensor, group: str, x: Tensor) -> Tensor:
    """Each rank adds a part of the numbers, then all read all parts; the kernels of all ranks end
    together."""
    place = shared[: x.numel()].view(x.shape)
    place.copy_(x)
    return torch.ops.symm_mem.two_shot_all_reduce_out(place, "sum", group, torch.empty_like(x))


def problems(ranks: Ranks, total: Tensor, exact: Tensor, what: str) -> list[str]:
    """Returns, equal on all ranks, the ranks whose bits differ from rank 0's or whose error exceeds
    that of roundings."""
    digest = hashlib.sha256(total.view(torch.uint8).numpy().tobytes()).hexdigest()
    error = float((total.float() - exact).norm() / exact.norm())
    # Each of ranks - 1 additions rounds once, by at most half a unit; norms average over all
    # numbers.
    most = ranks.size * torch.finfo(total.dtype).eps
    faults = []
    told = ranks.gather((digest, error))
    for rank, (bits, off) in enumerate(told):
        if bits != told[0][0]:
            faults.append(f"{what}: rank {rank} has another sum than rank 0")
        if not off <= most:
            faults.append(f"{what}: rank {rank}'s sum is off by {off:.1e}")
    return faults


def in_a_graph(add: Callable[[], Tensor]) -> float:
    """Seconds of one of many in a graph: the best of a few replays."""
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


# Plans.


def generating(step: int, rows: int, spans: int = 0) -> StepPlan:
    """All rows but the last `spans` generate; every 32nd of them begins a chunk."""
    fed = rows - spans
    return StepPlan(
        step=step,
        copies=(),
        after=Tickets(),
        joins=(),
        blocks=tuple(
            BlockUpdate(seat, CONTEXT // CHUNK, (seat,)) for seat in range(step % CHUNK, fed, CHUNK)
        ),
        generate=array("i", range(fed)),
        positions=array("i", [CONTEXT + seat for seat in range(fed)]),
        spans=(),
        token_ids=array("i"),
        samples=tuple(RowId(RequestId(seat), seat) for seat in range(rows)),
    )


def mixed(step: int, rows: int) -> StepPlan:
    """Two rows begin, with a prompt each, while chunks are copied both ways."""
    plan = generating(step, rows, 2)
    joined = range(rows - 2, rows)
    slots = tuple(range(-(-PROMPT // CHUNK)))
    copies = tuple(
        CopyBatch(
            lane,
            2 * step,
            array("i", range(COPIED)),
            array("i", range(COPIED)),
            Tickets(step - 1),
            gated,
        )
        for lane, gated in ((Lane.IN, True), (Lane.OUT, False))
    )
    return StepPlan(
        step=step,
        copies=copies,
        after=Tickets(swap_out=2 * step - 2),
        joins=tuple(Join(seat, RowId(RequestId(seat), step), GREEDY) for seat in joined),
        blocks=(*plan.blocks, *(BlockUpdate(seat, 0, slots) for seat in joined)),
        generate=plan.generate,
        positions=plan.positions,
        spans=tuple(Span(seat, 0, PROMPT, 0, True) for seat in joined),
        token_ids=array("i", range(2 * PROMPT)),
        samples=plan.samples,
    )


def bench_plans(args: argparse.Namespace, ranks: Ranks) -> int:
    if ranks.rank:
        follow(ranks)
        return 0
    for name, make in (("generating", generating), ("mixed", mixed)):
        plans = [make(step, args.rows) for step in range(1, args.steps + 1)]
        print(measure(args, ranks, name, plans), flush=True)
    ranks.stop()
    return 0


def follow(ranks: Ranks) -> None:
    """Reports each step, with the time at which its plan was unpacked, and the seconds of that and
    of the previous report."""
    from pensieve.runtime.ranks.executor import report_of, unpack
    from pensieve.runtime.ranks.mpi import pause

    reporting = NOTHING
    while True:
        clock = Clock()
        if (packed := ranks.receive()) is None:
            pause(busy=True)
            continue
        if not packed:
            break
        step = unpack(packed).step
        unpacking = clock.spent()
        when = time.monotonic_ns()
        clock = Clock()
        ranks.report(
            (
                report_of(StepResult(step, (), (), Tickets(step, 2 * step, 2 * step)), 0),
                when,
                unpacking,
                reporting,
            )
        )
        reporting = clock.spent()


class Elapsed(NamedTuple):
    """Nanoseconds: on the wall's clock, and of this thread on a processor."""

    wall: int
    cpu: int


NOTHING = Elapsed(0, 0)


class Clock:
    """Reads both clocks when made."""

    def __init__(self) -> None:
        self._wall = time.monotonic_ns()
        self._cpu = time.thread_time_ns()

    def spent(self) -> Elapsed:
        return Elapsed(time.monotonic_ns() - self._wall, time.thread_time_ns() - self._cpu)


class Times(NamedTuple):
    """Times of one step; the largest of several ranks' times."""

    sending: Elapsed
    unpacking: Elapsed
    reporting: Elapsed
    merging: Elapsed
    until_all_have_it: int  # nanoseconds from before packing


def measure(args: argparse.Namespace, ranks: Ranks, name: str, plans: Sequence[StepPlan]) -> str:
    """A JSON line, in microseconds."""
    from pensieve.runtime.ranks.executor import Reports

    reports = Reports(ranks.size - 1)
    taken = []
    size = 0
    for plan in plans:
        began = time.monotonic()
        times, packed_bytes = one_step(ranks, reports, plan)
        taken.append(times)
        size = max(size, packed_bytes)
        time.sleep(max(0.0, began + args.step_ms / 1e3 - time.monotonic()))
    about = {
        "bench": "ranks_plans",
        "plans": name,
        "ranks": ranks.size,
        "rows": args.rows,
        "steps": len(plans),
    }
    times_us = {
        f"{part}_{clock}_us": percentiles([getattr(getattr(times, part), clock) for times in taken])
        for part in ("sending", "unpacking", "reporting", "merging")
        for clock in Elapsed._fields
    }
    arrived = percentiles([times.until_all_have_it for times in taken])
    return json.dumps({**about, "bytes": size, "until_all_have_it_us": arrived, **times_us})


def one_step(ranks: Ranks, reports: Reports, plan: StepPlan) -> tuple[Times, int]:
    """Runs one step; returns its times, and the bytes of the packed plan."""
    from pensieve.runtime.ranks.executor import pack
    from pensieve.runtime.ranks.mpi import RankFailed

    began = time.monotonic_ns()
    clock = Clock()
    packed = pack(plan)
    ranks.send(packed)
    sending = clock.spent()
    heard: list[Any] = []
    merging = NOTHING
    while len(heard) < ranks.size - 1:
        clock = Clock()
        news = list(ranks.reports())
        for rank, (report, *told) in news:
            reports.take(rank, report)
            heard.append(told)
        if news:
            merging = plus(merging, clock.spent())
        if time.monotonic_ns() - began > DEADLINE_SECONDS * 1e9:
            raise RankFailed("a rank does not report")
        time.sleep(1e-4)
    clock = Clock()
    reports.merged(StepResult(plan.step, plan.samples, tuple(range(len(plan.samples)))))
    merging = plus(merging, clock.spent())
    when, unpacking, reporting = zip(*heard, strict=True)
    return Times(sending, most(unpacking), most(reporting), merging, max(when) - began), len(packed)


def plus(one: Elapsed, other: Elapsed) -> Elapsed:
    return Elapsed(one.wall + other.wall, one.cpu + other.cpu)


def most(spent: Sequence[Elapsed]) -> Elapsed:
    return Elapsed(*map(max, zip(*spent, strict=True)))


def percentiles(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles of a list of at least two, in microseconds."""
    cuts = statistics.quantiles(nanoseconds, n=100, method="inclusive")
    return {"p50": round(cuts[49] / 1e3, 1), "p99": round(cuts[98] / 1e3, 1)}


if __name__ == "__main__":
    sys.exit(main())
