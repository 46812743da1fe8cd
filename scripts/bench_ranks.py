"""bench_ranks: what sending each step's plan to the other ranks costs, and until when all have it.

python -m pensieve.scripts.bench_ranks --ranks 4 --rows 256

Plans of a batch that generates, and of one with two new prompts and copies beside it, at the pace of real steps. Times
are read from the one clock that all processes of a host share.
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
from typing import TYPE_CHECKING

from ..scheduler.plan import BlockUpdate, CopyBatch, Join, Lane, Span, StepPlan, Tickets
from ..scheduler.types import GREEDY, RequestId, RowId
from .ranks_command import run_as_ranks

if TYPE_CHECKING:
    from ..runtime.ranks import Ranks

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
    """Reports when each plan was unpacked, in nanoseconds, and how long that took."""
    from ..runtime.ranks import pause
    from ..runtime.ranks_executor import unpack

    while (packed := ranks.receive()) != b"":
        if packed is None:
            pause(busy=True)
            continue
        received = time.monotonic_ns()
        step = unpack(packed).step
        now = time.monotonic_ns()
        ranks.report((step, now, now - received))


def measure(args: argparse.Namespace, ranks: Ranks, name: str, plans: Sequence[StepPlan]) -> str:
    """A JSON line; times in microseconds, of the slowest rank where there are several."""
    from ..runtime.ranks import RankFailed
    from ..runtime.ranks_executor import pack

    sending, arriving, unpacking, size = [], [], [], 0
    for plan in plans:
        began = time.monotonic_ns()
        packed = pack(plan)
        ranks.send(packed)
        sent = time.monotonic_ns()
        size = max(size, len(packed))
        heard: dict[int, tuple[int, int]] = {}
        while len(heard) < ranks.size - 1:
            for rank, (step, when, took) in ranks.reports():
                assert step == plan.step
                heard[rank] = when, took
            if time.monotonic_ns() - began > DEADLINE_SECONDS * 1e9:
                raise RankFailed("a rank does not report")
            time.sleep(1e-4)
        sending.append((sent - began) / 1e3)
        arriving.append((max(when for when, _ in heard.values()) - began) / 1e3)
        unpacking.append(max(took for _, took in heard.values()) / 1e3)
        time.sleep(max(0.0, args.step_ms / 1e3 - (time.monotonic_ns() - began) / 1e9))
    about = {"bench": "ranks_plans", "plans": name, "ranks": ranks.size, "rows": args.rows, "steps": len(plans)}
    times = {"rank_0": sending, "until_unpacked_by_all": arriving, "unpacking": unpacking}
    found = {f"{what}_us": {"p50": percentile(each, 50), "p99": percentile(each, 99)} for what, each in times.items()}
    return json.dumps({**about, "bytes": size, **found})


def percentile(values: Sequence[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 1)


if __name__ == "__main__":
    sys.exit(main())
