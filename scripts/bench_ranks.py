"""bench_ranks: what sending each step's plan to the other ranks costs, and until when all have it.

python -m pensieve.scripts.bench_ranks --ranks 4 --rows 256

Plans of a batch that generates, and of one with two new prompts and copies beside it, at the pace of real steps: packed
and sent, received and unpacked, reported, and the reports merged. Each part's time is told on the clock that all
processes of a host share, and as the thread's own on a processor, which other programs there change less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runtime.launch.ranks import run_as_ranks
from ..scheduler.plan import BlockUpdate, CopyBatch, Join, Lane, Span, StepPlan, StepResult, Tickets
from ..scheduler.types import GREEDY, RequestId, RowId

if TYPE_CHECKING:
    from ..runtime.ranks.executor import Reports
    from ..runtime.ranks.mpi import Ranks

CHUNK, CONTEXT, PROMPT, COPIED = 32, 1000, 400, 64
DEADLINE_SECONDS = 60.0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_ranks", description=__doc__.partition("\n")[0])
    option = made.add_argument
    option("--ranks", type=int, default=4, metavar="N", help="(default %(default)s)")
    option("--rows", type=int, default=256, metavar="N", help="running requests (default %(default)s)")
    option("--steps", type=int, default=1000, metavar="N", help="(default %(default)s)")
    option("--step-ms", type=float, default=10.0, metavar="MS", help="from plan to plan (default %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    return run_as_ranks("bench_ranks", args.ranks, words, partial(bench, args))


def generating(step: int, rows: int, spans: int = 0) -> StepPlan:
    """All rows but the last `spans` generate; every 32nd of them begins a chunk."""
    fed = rows - spans
    return StepPlan(
        step=step,
        copies=(),
        after=Tickets(),
        joins=(),
        blocks=tuple(BlockUpdate(seat, CONTEXT // CHUNK, (seat,)) for seat in range(step % CHUNK, fed, CHUNK)),
        generate=array("i", range(fed)),
        positions=array("i", [CONTEXT + seat for seat in range(fed)]),
        spans=(),
        token_ids=array("i"),
        samples=tuple(RowId(RequestId(seat), seat) for seat in range(rows)),
    )


def mixed(step: int, rows: int) -> StepPlan:
    """Two rows begin, with a prompt each, while chunks are copied both ways."""
    plan, joined = generating(step, rows, 2), range(rows - 2, rows)
    slots = tuple(range(-(-PROMPT // CHUNK)))
    copies = tuple(
        CopyBatch(lane, 2 * step, array("i", range(COPIED)), array("i", range(COPIED)), Tickets(step - 1), gated)
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


def bench(args: argparse.Namespace, ranks: Ranks) -> int:
    if ranks.rank:
        follow(ranks)
        return 0
    for name, make in (("generating", generating), ("mixed", mixed)):
        plans = [make(step, args.rows) for step in range(1, args.steps + 1)]
        print(measure(args, ranks, name, plans), flush=True)
    ranks.stop()
    return 0


def follow(ranks: Ranks) -> None:
    """Reports each step, with when its plan was unpacked and what that, and the report before, took."""
    from ..runtime.ranks.executor import report_of, unpack
    from ..runtime.ranks.mpi import pause

    reporting = NOTHING
    while True:
        clock = Clock()
        if (packed := ranks.receive()) is None:
            pause(busy=True)
            continue
        if not packed:
            break
        step = unpack(packed).step
        unpacking, when = clock.spent(), time.monotonic_ns()
        clock = Clock()
        ranks.report(
            (report_of(StepResult(step, (), (), Tickets(step, 2 * step, 2 * step))), when, unpacking, reporting)
        )
        reporting = clock.spent()


class Spent(NamedTuple):
    """Nanoseconds: on the wall's clock, and of this thread on a processor."""

    wall: int
    cpu: int


NOTHING = Spent(0, 0)


class Clock:
    """Reads both clocks when made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic_ns(), time.thread_time_ns()

    def spent(self) -> Spent:
        return Spent(time.monotonic_ns() - self._wall, time.thread_time_ns() - self._cpu)


class Times(NamedTuple):
    """Of one step; of several ranks' times the most."""

    sending: Spent
    unpacking: Spent
    reporting: Spent
    merging: Spent
    until_all_have_it: int  # nanoseconds from before packing


def measure(args: argparse.Namespace, ranks: Ranks, name: str, plans: Sequence[StepPlan]) -> str:
    """A JSON line, in microseconds."""
    from ..runtime.ranks.executor import Reports

    reports, taken, size = Reports(ranks.size - 1), [], 0
    for plan in plans:
        began = time.monotonic()
        times, packed_bytes = one_step(ranks, reports, plan)
        taken.append(times)
        size = max(size, packed_bytes)
        time.sleep(max(0.0, began + args.step_ms / 1e3 - time.monotonic()))
    about = {"bench": "ranks_plans", "plans": name, "ranks": ranks.size, "rows": args.rows, "steps": len(plans)}
    found = {
        f"{part}_{clock}_us": percentiles([getattr(getattr(times, part), clock) for times in taken])
        for part in ("sending", "unpacking", "reporting", "merging")
        for clock in Spent._fields
    }
    arrived = percentiles([times.until_all_have_it for times in taken])
    return json.dumps({**about, "bytes": size, "until_all_have_it_us": arrived, **found})


def one_step(ranks: Ranks, reports: Reports, plan: StepPlan) -> tuple[Times, int]:
    """What it took, and the bytes of the packed plan."""
    from ..runtime.ranks.executor import pack
    from ..runtime.ranks.mpi import RankFailed

    began, clock = time.monotonic_ns(), Clock()
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


def plus(one: Spent, other: Spent) -> Spent:
    return Spent(one.wall + other.wall, one.cpu + other.cpu)


def most(spent: Sequence[Spent]) -> Spent:
    return Spent(*map(max, zip(*spent, strict=True)))


def percentiles(nanoseconds: Sequence[int]) -> dict[str, float]:
    """Of a list of at least two, in microseconds."""
    cuts = statistics.quantiles(nanoseconds, n=100, method="inclusive")
    return {"p50": round(cuts[49] / 1e3, 1), "p99": round(cuts[98] / 1e3, 1)}


if __name__ == "__main__":
    sys.exit(main())
