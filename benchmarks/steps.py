"""benchmarks.steps: scheduler, executor and device on one engine, with the service's loop and
without HTTP.

    copies     the link: swap-ins in pieces of 1, 2, 4, 8 and all layers, swap-outs, alone and both
               ways at once
    returning  a turn whose history is on HOST only, alone and beside rows that generate; with its
               swap-in pipelined layer group by layer group, and with all of it first
    gaps       how long the GPU idles between steps, and the host's time for each step

    build_engine --random-weights --config config.json --set max_position_embeddings=16384 --device
    cuda --output DIR python -m benchmarks.steps --engine DIR --device cuda

The engine is loaded once, and its graphs are captured once: the parts run one after the other on
one device, each with its own scheduler, whose GPU cache is small enough for the measured case.
Prompts are random token ids, sampling is greedy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.executor import GROUP_LAYERS, MAX_IN_FLIGHT, Executor
from pensieve.runtime.loop import STEPS_IN_FLIGHT
from pensieve.runtime.measure.profile import PIECES, Measured, cost_profile, hardware
from pensieve.runtime.measure.step_bench import CopyTime, StepBench
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.types import InvariantError, Tier
from pensieve.scripts.command import check_least, exit_status

from .loop import (
    SPARE_CHUNKS,
    Loop,
    Pools,
    Timed,
    add_counts,
    check_context,
    intervals,
    loaded,
    parts_type,
    show,
)

PARTS = ("copies", "returning", "gaps")
PHASES = ("plan", "launch", "wait", "apply")
WHEN = ("before", "during")
COUNTS = {
    "history": (8192, "tokens of KV that a returning turn has on HOST"),
    "new_tokens": (32, "of a returning turn's prompt"),
    "rows": (32, "that generate beside it"),
    "row_context": (1024, "tokens of each of them"),
    "repeats": (5, "turns of each kind"),
    "gap_rows": (256, "that generate while gaps are measured"),
    "gap_context": (1024, "tokens of each of them"),
    "steps": (200, "in which gaps are measured"),
    "chunk_tokens": (32, "tokens of a chunk"),
    "max_num_batched_tokens": (1024, "a full batch"),
}
"""Options: default, and in words."""

QUIET_STEPS = 20  # before each turn, to compare the steps during the turn with
TURN_STEPS = 20  # the most expected steps of a turn
# of rows while gaps are measured: before all have begun, and in flight at the end
UNMEASURED_STEPS = 8
POINT_SECONDS = 0.05  # to measure each cost of a step, each copy


# Pools.


class StepPools(Pools):
    """SettingError if they, or the model's contexts, are too small."""

    def __init__(self, args: argparse.Namespace, engine: Engine):
        self.batch = args.max_num_batched_tokens
        self.size = size = args.chunk_tokens
        self.record = engine.chunk_bytes(size)
        self.seats = max(
            args.gap_rows if "gaps" in args.parts else 1, args.rows + 1, self.batch // size
        )
        steps = 2 * (args.repeats + 1) * (QUIET_STEPS + TURN_STEPS)
        # until the last row has joined
        steps += 2 * args.rows * args.row_context // args.max_num_batched_tokens
        self.row_tokens = steps
        row_end = args.row_context + size + steps
        self.gap_start = max(1, args.gap_context - args.steps // 2 - size // 2)
        self.gap_tokens = args.steps + UNMEASURED_STEPS
        gap_end = self.gap_start + size + self.gap_tokens + MAX_IN_FLIGHT
        self.longest = max(args.history + args.new_tokens + 1, row_end, gap_end)
        check_context(self.longest, engine)
        self.history = args.history // size

        def chunks(tokens: int) -> int:
            return -(-tokens // size)

        alone = max(chunks(args.history + args.new_tokens) + SPARE_CHUNKS, chunks(self.longest))
        self.returning = {0: alone, args.rows: alone + args.rows * chunks(row_end)}
        # While one history returns, the others leave none of its chunks on the GPU.
        idle = {
            rows: pool - rows * chunks(args.row_context) for rows, pool in self.returning.items()
        }
        self.histories = {rows: 2 + pool // self.history for rows, pool in idle.items()}
        self.gaps = max(args.gap_rows * chunks(gap_end), chunks(self.longest))
        self.measuring = max(self.seats + chunks(self.longest), 2 * self.history)
        wanted = {
            "copies": self.measuring,
            "returning": max(self.returning.values()),
            "gaps": self.gaps,
        }
        self.gpu = max(self.measuring, *(wanted[part] for part in args.parts))
        # A turn adds a chunk or two. A quarter of HOST is for copies made ahead of time.
        turns = (
            max(self.histories.values()) * self.history
            + 4 * chunks(args.new_tokens) * (args.repeats + 1)
            + SPARE_CHUNKS
        )
        self.host = max(4 * (alone + SPARE_CHUNKS), turns)


# The parts.


def measure_costs(
    device: Timed,
    engine: Engine,
    config: SchedulerConfig,
    history: int,
    rows: int,
    pieces: Iterable[int],
) -> tuple[CostProfile, tuple[CopyTime, ...]]:
    """The scheduler's costs, measured at few points: contexts of one and of `history` chunks,
    `rows` rows that generate; and copies of a history, by layers in a piece, whole records last."""
    size = config.chunk_tokens
    batch = config.max_num_batched_tokens
    layers = engine.manifest.kv_layers
    with StepBench(device, engine, config, POINT_SECONDS) as bench:
        copies = tuple(bench.copies(piece, history) for piece in sorted({*pieces, layers}))
        contexts = (size, history * size)
        measured = Measured(
            steps=tuple((tokens, bench.fresh(tokens)) for tokens in (1, batch)),
            full_batches=tuple((at, bench.chunks_at(at, batch // size)) for at in contexts),
            generation=tuple((rows, at, bench.generation(at, rows)) for at in contexts),
            copies=copies,
        )
    return cost_profile(measured, config, engine.chunk_bytes(size)), copies


def link_speeds(copies: Sequence[CopyTime], record: int) -> list[dict[str, float]]:
    """GB/s by layers a piece: each way alone, and each while both run."""
    return [
        {"layers": copy.layers}
        | {
            way: copy.chunks * record / 1e9 / getattr(copy, way)
            for way in ("swap_in", "swap_out", "both")
        }
        for copy in copies
    ]


class MeasuredTurn(NamedTuple):
    """first_token   seconds from its arrival between two steps, as in the loop
    step          seconds of the step that computed it, on the device
    swap_in       seconds from the start of its first copy to the end of its last one
    others        inter-token latencies of the other rows meanwhile, seconds
    """

    first_token: float
    step: float
    swap_in: float
    others: list[float]


class Returning:
    """Turns with a history of KV on HOST, and again with it on the GPU, beside `rows` rows that
    generate."""

    def __init__(
        self, device: Timed, loop: Loop, sizes: StepPools, args: argparse.Namespace, rows: int
    ):
        self.device = device
        self.loop = loop
        self.rows = rows
        self.new_tokens = args.new_tokens
        self.cached = sizes.history * args.chunk_tokens
        self.cached_bytes = sizes.history * sizes.record
        self.histories = []
        for _ in range(sizes.histories[rows]):
            self.histories.append(loop.random_ids(args.history))
            loop.add(self.histories[-1], 1)
            loop.drain()
        size = args.chunk_tokens  # rows cross the borders of chunks one after the other
        added = [
            loop.add(loop.random_ids(args.row_context + row % size), sizes.row_tokens)
            for row in range(rows)
        ]
        loop.run_until(lambda: all(row.usage for row in added))
        self.before: list[float] = []

    def measure(self, repeats: int) -> dict[str, float]:
        from_host, from_gpu = [], []
        for number in range(repeats + 1):
            history = self.histories[number % len(self.histories)]
            turns = self._turn(history, Tier.HOST), self._turn(history, Tier.GPU)
            if number:  # the first one warms up
                from_host.append(turns[0])
                from_gpu.append(turns[1])
        self.loop.abort_all()
        self.during = [seconds for turn in from_host for seconds in turn.others]
        median = statistics.median
        return {
            "ttft_s": median(turn.first_token for turn in from_host),
            "ttft_max_s": max(turn.first_token for turn in from_host),
            "gpu_hit_ttft_s": median(turn.first_token for turn in from_gpu),
            "compute_s": median(turn.step for turn in from_gpu),
            "swap_in_gb_per_s": median(
                self.cached_bytes / 1e9 / turn.swap_in for turn in from_host
            ),
        } | self._latencies()

    def _turn(self, history: array[int], tier: Tier) -> MeasuredTurn:
        """InvariantError if less than nine tenths of the history were where they were to be."""
        loop, device = self.loop, self.device
        if self.rows:
            self.before += intervals(loop.steady(self.rows, QUIET_STEPS))
        else:
            loop.drain()
        device.start_recording()
        seen = len(loop.steps)
        in_flight = loop.scheduler.in_flight
        prompt = history + loop.random_ids(self.new_tokens)
        started = time.perf_counter()
        answer = loop.add(prompt, 1)
        loop.run_until(lambda: answer.usage is not None)
        device.recording = False
        if getattr(answer.usage, tier.name.lower()) < 0.9 * self.cached:
            raise InvariantError(
                f"{self.cached} tokens of KV were to be on {tier.name}, but the prompt had "
                f"{answer.usage}"
            )
        # Steps that were in flight before are applied, but not recorded.
        computed = device.steps[len(loop.steps) - seen - 1 - in_flight]
        copied = device.copies_in
        return MeasuredTurn(
            first_token=answer.began - started,
            step=device.seconds(*computed),
            swap_in=device.seconds(copied[0][0], copied[-1][1]) if copied else 0.0,
            others=intervals(loop.checked(seen - 1, self.rows)) if self.rows else [],
        )

    def _latencies(self) -> dict[str, float]:
        if not self.rows:
            return {}
        times = zip(WHEN, (self.before, self.during), strict=True)
        latencies = {
            f"itl_{when}_p{p}_s": float(np.percentile(each, p))
            for when, each in times
            for p in (50, 99)
        }
        return latencies | {
            "itl_p99_rise": latencies["itl_during_p99_s"] / latencies["itl_before_p99_s"]
        }


def measure_returning(
    device: Timed,
    make_loop: Callable[..., Loop],
    layers: int,
    sizes: StepPools,
    args: argparse.Namespace,
    link: CopyTime,
) -> dict[str, Any]:
    """Results by kind of swap-in and by other rows; `ratio` is the time to first token over the
    copy's or the compute's."""
    copy = link.swap_in * sizes.history / link.chunks
    results: dict[str, Any] = {
        "copy_s": copy,
        "link_gb_per_s": link.chunks * sizes.record / 1e9 / link.swap_in,
    }
    for way, group_layers in (("pipelined", GROUP_LAYERS), ("first", layers)):
        for name, rows in (("alone", 0), ("beside_rows", args.rows)):
            if name == "alone" or rows:
                loop = make_loop(group_layers=group_layers, gpu_kv_chunks=sizes.returning[rows])
                turns = Returning(device, loop, sizes, args, rows).measure(args.repeats)
                turns["ratio"] = turns["ttft_s"] / max(copy, turns["compute_s"])
                results[f"{way}_{name}"] = turns
    return results


def measure_gaps(
    device: Timed, loop: Loop, sizes: StepPools, args: argparse.Namespace
) -> dict[str, float]:
    """Measures rows whose contexts are `gap_context` tokens long in the middle of the measured
    steps."""
    for row in range(args.gap_rows):
        loop.add(loop.random_ids(sizes.gap_start + row % args.chunk_tokens), sizes.gap_tokens)
    loop.run_until(lambda: all(row.usage for row in loop.answers.values()))
    loop.run_until(lambda: loop.steps[-1].rows == args.gap_rows)
    device.start_recording()
    steps = loop.steady(args.gap_rows, args.steps)
    device.recording = False
    late = device.late
    loop.drain()
    spans = device.steps[STEPS_IN_FLIGHT : args.steps]
    gaps = [device.seconds(before[1], after[0]) for before, after in pairwise(spans)]
    step = statistics.median(intervals(steps))
    columns = {
        "rows": args.gap_rows,
        "steps": args.steps,
        "step_s": step,
        "tokens_per_s": args.gap_rows * (args.steps - 1) / (steps[-1].at - steps[0].at),
        "device_step_s": statistics.median(device.seconds(*span) for span in spans),
        "gap_s": statistics.median(gaps),
        "gap_max_s": max(gaps),
        "idle_share": sum(gaps) / device.seconds(spans[0][1], spans[-1][1]),
        "late_launches": late,
    }
    return columns | {
        f"host_{phase}_s": statistics.median(getattr(step, phase) for step in steps)
        for phase in PHASES
    }


# The command.


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.steps", description=__doc__.partition("\n")[0]
    )
    add_counts(parser, COUNTS)
    option = parser.add_argument
    option(
        "--parts",
        type=parts_type(PARTS),
        default=PARTS,
        metavar="LIST",
        help=f"of {','.join(PARTS)} (default: all)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("benchmarks.steps", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Raises SettingError."""
    least = {
        "rows": 0,
        "history": args.chunk_tokens,
        "steps": 10,
        "max_num_batched_tokens": args.chunk_tokens,
    }
    check_least(args, **dict.fromkeys(COUNTS, 1) | least)
    engine = open_engine(args.engine, args.device, kv_cache_dtype=args.kv_cache_dtype)
    sizes = StepPools(args, engine)
    with loaded(args.device, engine, sizes.config()) as device:
        measure(device, engine, sizes, args)


def measure(device: Timed, engine: Engine, sizes: StepPools, args: argparse.Namespace) -> None:
    """Runs the parts, each of which prints a table and a line of JSON."""
    config = sizes.config()
    layers = engine.manifest.kv_layers
    pieces = (
        {piece for piece in PIECES if piece < layers}
        if "copies" in args.parts
        else {min(GROUP_LAYERS, layers)}
    )
    measuring = replace(config, gpu_kv_chunks=sizes.measuring)
    cost, copies = measure_costs(
        device, engine, measuring, sizes.history, max(args.rows, 1), pieces
    )

    def make_loop(group_layers: int = GROUP_LAYERS, **changes: Any) -> Loop:
        make = partial(Executor, group_layers=group_layers)
        return Loop(device, engine, replace(config, **changes), cost, make_executor=make)

    print(
        f"{hardware(engine)}; {layers} layers, {engine.manifest.dtype}, chunks of {sizes.record} "
        "bytes"
    )
    if "copies" in args.parts:
        speeds = link_speeds(copies, sizes.record)
        result = {"chunks": copies[-1].chunks, "gb_per_s": speeds}
        show(
            "steps_copies",
            "copies, GB/s by layers a piece: in alone, out alone, each while both run",
            result,
            speeds,
        )
    if "returning" in args.parts:
        turns = measure_returning(device, make_loop, layers, sizes, args, copies[-1])
        title = (
            f"a turn of {args.new_tokens} tokens, {args.history} tokens of history on HOST: its "
            "copy takes "
        )
        title += (
            f"{1e3 * turns['copy_s']:.2f} ms at the link's {turns['link_gb_per_s']:.1f} GB/s; "
            "seconds"
        )
        rows = [{"way": name} | turn for name, turn in turns.items() if isinstance(turn, dict)]
        show("steps_returning", title, {"history": args.history, "rows": args.rows, **turns}, rows)
    if "gaps" in args.parts:
        # Prompts first, then all rows together, so that they stay as long as they are meant to be.
        gaps = measure_gaps(
            device, make_loop(gpu_kv_chunks=sizes.gaps, batching="separate"), sizes, args
        )
        title = (
            "rows that generate: a step, the device's part, its idle time, and the host's part by "
            "phase; seconds"
        )
        show(
            "steps_gaps",
            title,
            gaps,
            [{"what": name, "found": value} for name, value in gaps.items()],
        )


if __name__ == "__main__":
    sys.exit(main())
