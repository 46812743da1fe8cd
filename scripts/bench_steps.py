"""bench_steps: scheduler, executor and device on one engine, with the service's loop and without HTTP.

    copies     the link: swap-ins in pieces of 1, 2, 4, 8 and all layers, swap-outs, alone and both ways at once
    returning  a turn whose history is on HOST only, alone and beside rows that generate; with its swap-in pipelined
               layer group by layer group, and with all of it first
    gaps       how long the GPU idles between steps, and what each step costs the host

    build_engine --random-weights --config config.json --set max_position_embeddings=16384 --device cuda --output DIR
    python -m pensieve.scripts.bench_steps --engine DIR --device cuda

The engine is loaded once, and its graphs captured once: the parts run one after the other on one device, each with a
scheduler of its own whose GPU cache is as small as makes it happen. Prompts are random token ids, sampling is greedy.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..runtime.engine import Engine, open_engine
from ..runtime.executor import GROUP_LAYERS, Executor
from ..runtime.loop import STEPS_IN_FLIGHT
from ..runtime.measure.profile import PIECES, Measured, cost_profile, hardware
from ..runtime.measure.step_bench import CopyTime, StepBench
from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import CostProfile
from ..scheduler.types import InvariantError, SettingError, Tier
from .bench_loop import QUIET_STEPS, Loop, Sizes, Timed, intervals, make_device

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

POINT_SECONDS = 0.05  # to measure each cost of a step, each copy


# The parts.


def measure_costs(
    device: Timed, engine: Engine, config: SchedulerConfig, history: int, rows: int, pieces: Iterable[int]
) -> tuple[CostProfile, tuple[CopyTime, ...]]:
    """What the scheduler goes by, measured at few points: contexts of one and of `history` chunks, `rows` rows that
    generate; and copies of a history, by layers a piece, of whole records in the last place."""
    size, batch, layers = config.chunk_tokens, config.max_num_batched_tokens, engine.manifest.layers
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
        | {way: copy.chunks * record / 1e9 / getattr(copy, way) for way in ("swap_in", "swap_out", "both")}
        for copy in copies
    ]


class MeasuredTurn(NamedTuple):
    """first_token   seconds from its arrival between two steps, as the loop takes requests in
    step          seconds of the step that computed it, on the device
    swap_in       seconds from the beginning of its first copy to the end of its last one
    others        inter-token latencies of the other rows meanwhile, seconds
    """

    first_token: float
    step: float
    swap_in: float
    others: list[float]


class Returning:
    """Turns with a history of KV on HOST, and again with it on the GPU, beside `rows` rows that generate."""

    def __init__(self, loop: Loop, sizes: Sizes, args: argparse.Namespace, rows: int):
        self.loop, self.rows = loop, rows
        self.new_tokens = args.new_tokens
        self.cached = sizes.history * args.chunk_tokens
        self.cached_bytes = sizes.history * sizes.record
        self.histories = []
        for _ in range(sizes.histories[rows]):
            self.histories.append(loop.random_ids(args.history))
            loop.add(self.histories[-1], 1)
            loop.drain()
        size = args.chunk_tokens  # rows cross the borders of chunks one after the other
        added = [loop.add(loop.random_ids(args.row_context + row % size), sizes.row_tokens) for row in range(rows)]
        loop.run_until(lambda: all(request in loop.begun for request in added))
        self.added = added
        self.before: list[float] = []

    def measure(self, repeats: int) -> dict[str, float]:
        from_host, from_gpu = [], []
        for number in range(repeats + 1):
            history = self.histories[number % len(self.histories)]
            turns = self._turn(history, Tier.HOST), self._turn(history, Tier.GPU)
            if number:  # the first one warms up
                from_host.append(turns[0])
                from_gpu.append(turns[1])
        for request in self.added:
            self.loop.scheduler.abort(request, time.monotonic())
        self.loop.drain()
        self.during = [seconds for turn in from_host for seconds in turn.others]
        median = statistics.median
        return {
            "ttft_s": median(turn.first_token for turn in from_host),
            "ttft_max_s": max(turn.first_token for turn in from_host),
            "gpu_hit_ttft_s": median(turn.first_token for turn in from_gpu),
            "compute_s": median(turn.step for turn in from_gpu),
            "swap_in_gb_per_s": median(self.cached_bytes / 1e9 / turn.swap_in for turn in from_host),
        } | self._latencies()

    def _turn(self, history: array[int], tier: Tier) -> MeasuredTurn:
        """InvariantError if less than nine tenths of the history were where they were to be."""
        loop, device = self.loop, self.loop.device
        if self.rows:
            self.before += intervals(loop.steady(self.rows, QUIET_STEPS))
        else:
            loop.drain()
        device.start_recording()
        seen, in_flight = len(loop.steps), loop.scheduler.in_flight
        prompt = history + loop.random_ids(self.new_tokens)
        started = time.perf_counter()
        request = loop.add(prompt, 1)
        loop.run_until(lambda: request in loop.begun)
        at, usage = loop.begun[request]
        device.recording = False
        if (usage.host if tier is Tier.HOST else usage.gpu) < 0.9 * self.cached:
            raise InvariantError(f"{self.cached} tokens of KV were to be on {tier.name}, but the prompt had {usage}")
        # Steps that were in flight before are applied, but not recorded.
        computed = device.steps[len(loop.steps) - seen - 1 - in_flight]
        copied = device.copies_in
        return MeasuredTurn(
            first_token=at - started,
            step=device.seconds(*computed),
            swap_in=device.seconds(copied[0][0], copied[-1][1]) if copied else 0.0,
            others=intervals(loop.checked(seen - 1, self.rows)) if self.rows else [],
        )

    def _latencies(self) -> dict[str, float]:
        if not self.rows:
            return {}
        times = zip(WHEN, (self.before, self.during), strict=True)
        found = {f"itl_{when}_p{p}_s": float(np.percentile(each, p)) for when, each in times for p in (50, 99)}
        return found | {"itl_p99_rise": found["itl_during_p99_s"] / found["itl_before_p99_s"]}


def measure_returning(
    make_loop: Callable[..., Loop], layers: int, sizes: Sizes, args: argparse.Namespace, link: CopyTime
) -> dict[str, Any]:
    """By way of swapping in and by rows beside; `ratio` is the time to first token over the copy's or the compute's."""
    copy = link.swap_in * sizes.history / link.chunks
    found: dict[str, Any] = {"copy_s": copy, "link_gb_per_s": link.chunks * sizes.record / 1e9 / link.swap_in}
    for way, group_layers in (("pipelined", GROUP_LAYERS), ("first", layers)):
        for name, rows in (("alone", 0), ("beside_rows", args.rows)):
            if name == "alone" or rows:
                loop = make_loop(group_layers=group_layers, gpu_kv_chunks=sizes.returning[rows])
                turns = Returning(loop, sizes, args, rows).measure(args.repeats)
                turns["ratio"] = turns["ttft_s"] / max(copy, turns["compute_s"])
                found[f"{way}_{name}"] = turns
    return found


def measure_gaps(loop: Loop, sizes: Sizes, args: argparse.Namespace) -> dict[str, float]:
    """Rows whose contexts are `gap_context` long in the middle of the steps that are measured."""
    device = loop.device
    for row in range(args.gap_rows):
        loop.add(loop.random_ids(sizes.gap_start + row % args.chunk_tokens), sizes.gap_tokens)
    loop.run_until(lambda: len(loop.begun) == args.gap_rows)
    loop.run_until(lambda: loop.steps[-1].rows == args.gap_rows)
    device.start_recording()
    steps = loop.steady(args.gap_rows, args.steps)
    device.recording, late = False, device.late
    loop.drain()
    spans = device.steps[STEPS_IN_FLIGHT : args.steps]
    gaps = [device.seconds(before[1], after[0]) for before, after in pairwise(spans)]
    step = statistics.median(intervals(steps))
    found = {
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
    return found | {f"host_{phase}_s": statistics.median(getattr(step, phase) for step in steps) for phase in PHASES}


# The command.


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_steps", description=__doc__.partition("\n")[0])
    option = made.add_argument
    option("--engine", required=True, type=Path, metavar="DIR", help="an engine directory")
    option("--device", default="cpu", choices=("cpu", "cuda"), help="where the engine runs (default %(default)s)")
    option("--parts", type=_parts, default=PARTS, metavar="LIST", help="of copies,returning,gaps (default: all)")
    for name, (default, words) in COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        option(flag, type=int, default=default, metavar="N", help=f"{words} (default %(default)s)")
    for tier in ("gpu", "host"):
        option(f"--{tier}-kv-bytes", metavar="SIZE", help=f"{tier.upper()} cache (default: what the parts need)")
    return made


def _parts(text: str) -> tuple[str, ...]:
    parts = text.split(",")
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check(args)
        engine = open_engine(args.engine, args.device)
        sizes = Sizes(args, engine)
        device = make_device(args.device)
        try:
            measure(device, engine, sizes, args)
        finally:
            gc.unfreeze()
            device.end()
    except SettingError as error:
        print(f"bench_steps: {error}", file=sys.stderr)
        return 2
    return 0


def check(args: argparse.Namespace) -> None:
    """SettingError names what is too small."""
    least = {"rows": 0, "history": args.chunk_tokens, "steps": 10, "max_num_batched_tokens": args.chunk_tokens}
    for name in COUNTS:
        if (value := getattr(args, name)) < least.get(name, 1):
            raise SettingError(f"--{name.replace('_', '-')}", f"must be at least {least.get(name, 1)}, not {value}")


def measure(device: Timed, engine: Engine, sizes: Sizes, args: argparse.Namespace) -> None:
    """The parts, each of which prints its lines and one of JSON."""
    config, layers = sizes.config(args), engine.manifest.layers
    Executor(device, engine, config)  # makes the pools and loads the engine, once for all that follow
    gc.collect()
    gc.freeze()  # collections do not look at the engine again, nor do they in `pensieve serve`
    pieces = {piece for piece in PIECES if piece < layers} if "copies" in args.parts else {min(GROUP_LAYERS, layers)}
    measuring = replace(config, gpu_kv_chunks=sizes.measuring)
    cost, copies = measure_costs(device, engine, measuring, sizes.history, max(args.rows, 1), pieces)

    def make_loop(group_layers: int = GROUP_LAYERS, **changes: Any) -> Loop:
        return Loop(device, engine, replace(config, **changes), cost, group_layers)

    print(f"{hardware(engine)}; {layers} layers, {engine.manifest.dtype}, chunks of {sizes.record} bytes")
    if "copies" in args.parts:
        speeds = link_speeds(copies, sizes.record)
        show("copies", copies_lines(speeds), {"chunks": copies[-1].chunks, "gb_per_s": speeds})
    if "returning" in args.parts:
        turns = measure_returning(make_loop, layers, sizes, args, copies[-1])
        show("returning", returning_lines(turns, args), {"history": args.history, "rows": args.rows, **turns})
    if "gaps" in args.parts:
        # Prompts first, then all rows together, so that they stay as long as they are meant to be.
        gaps = measure_gaps(make_loop(gpu_kv_chunks=sizes.gaps, batching="separate"), sizes, args)
        show("gaps", gaps_lines(gaps), gaps)


def show(part: str, lines: Iterator[str], found: dict[str, Any]) -> None:
    print("\n".join(lines))
    print(json.dumps({"bench": f"steps_{part}", **found}), flush=True)


def copies_lines(speeds: Sequence[dict[str, float]]) -> Iterator[str]:
    yield "copies, GB/s by layers a piece: in alone, out alone, each while both run"
    for speed in speeds:
        yield f"  {speed['layers']:7}" + "".join(f"{speed[way]:9.2f}" for way in ("swap_in", "swap_out", "both"))


def returning_lines(found: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    yield (
        f"a turn of {args.new_tokens} tokens, {args.history} tokens of history on HOST: its copy takes "
        f"{1e3 * found['copy_s']:.2f} ms at the link's {found['link_gb_per_s']:.1f} GB/s"
    )
    for name, turns in found.items():
        if isinstance(turns, dict):
            yield (
                f"  {name:22} first token {1e3 * turns['ttft_s']:8.2f} ms (most {1e3 * turns['ttft_max_s']:.2f}), "
                f"history on the GPU {1e3 * turns['gpu_hit_ttft_s']:.2f} (compute {1e3 * turns['compute_s']:.2f}), "
                f"ratio {turns['ratio']:.2f}, swap-in {turns['swap_in_gb_per_s']:.1f} GB/s"
            )
            if "itl_p99_rise" in turns:
                before, during = (_milliseconds(turns, f"itl_{when}_p50_s", f"itl_{when}_p99_s") for when in WHEN)
                rise = turns["itl_p99_rise"]
                yield f"  {'':22} other rows' p50, p99 ms: {before} before, {during} during, rise {rise:.2f}"


def _milliseconds(found: dict[str, float], *names: str) -> str:
    return ", ".join(f"{1e3 * found[name]:.3f}" for name in names)


def gaps_lines(found: dict[str, float]) -> Iterator[str]:
    yield (
        f"{found['rows']} rows generating, {found['steps']} steps: {1e3 * found['step_s']:.3f} ms a step, "
        f"{found['tokens_per_s']:.0f} tokens/s"
    )
    yield (
        f"  the device idles {100 * found['idle_share']:.2f}% between steps (ms, median and most: "
        f"{_milliseconds(found, 'gap_s', 'gap_max_s')}); {found['late_launches']} steps issued late"
    )
    phases = ", ".join(f"{phase} {_milliseconds(found, f'host_{phase}_s')}" for phase in PHASES)
    yield f"  the host, ms a step: {phases}"


if __name__ == "__main__":
    sys.exit(main())
