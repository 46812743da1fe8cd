"""benchmarks.tiers: a turn's first token by its history's tier, and the cost of loading and saving
KV.

    tiers    the history on the GPU, on HOST, on DISK, recomputed, and as the engine chooses; the
             disk speed at which reading and recomputing take equally long
    sweep    reading, recomputing and the engine's choice on disks around that speed, which are
             simulated in memory
    preload  the swap-in whole before the step, or layer group by layer group beside it, by the
             number of new tokens
    saving   turns under `--save off`, `async` and `sync`
    batch    `--rows` prompts at once, with more or fewer tokens known: recomputed, the known ones
             on HOST, on the GPU; and turns whose KV is copied to HOST beside other turns, or
             dropped

    build_engine --random-weights --config config.json --set max_position_embeddings=16384 --device
    cuda --output DIR python -m benchmarks.tiers --engine DIR --device cuda --disk-dir /a/local/disk

CachedAttention (Gao et al., USENIX ATC 2024) measures the last three in its sections 4.3.1 and
4.3.2. The engine is loaded and measured once. Prompts are random token ids, sampling is greedy,
prefetching is off. The results are explained in docs/measured/disk.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pensieve.runtime.disk.segments import SystemCalls
from pensieve.runtime.disk.speed import measure_disk
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.executor import GROUP_LAYERS, Executor
from pensieve.runtime.measure.profile import hardware
from pensieve.runtime.measure.step_bench import CopyTime
from pensieve.scheduler.config import SAVE_MODES, SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.cost_estimate import break_even_disk
from pensieve.scheduler.types import InvariantError, SettingError, Usage
from pensieve.scripts.command import check_least, exit_status

from .loop import (
    SPARE_CHUNKS,
    Loop,
    LoopAnswer,
    Pools,
    Timed,
    add_counts,
    check_context,
    intervals,
    loaded,
    parts_type,
    show,
)
from .steps import measure_costs

# of a history's tokens must have been where they were to be: a chunk or two may be shared with
# others
LEAST_SHARE = 0.9


class MemoryDisk:
    """Replaces the system calls: data stays in memory and is read at `bytes_per_s`, as by one
    device that serves one call after the other."""

    def __init__(self) -> None:
        self.bytes_per_s = inf
        self.calls = SystemCalls(self._read, self._write, self._allocate)
        self._files: dict[int, np.ndarray] = {}  # by the file's number
        self._lock = threading.Lock()
        self._free_at = 0.0

    def _allocate(self, descriptor: int, offset: int, size: int) -> None:
        os.ftruncate(descriptor, offset + size)  # takes no room on the file's disk
        self._files.setdefault(os.fstat(descriptor).st_ino, np.zeros(offset + size, np.uint8))

    def _write(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        return self._copy(descriptor, buffers, offset, lambda part, buffer: np.copyto(part, buffer))

    def _read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        began = time.perf_counter()
        done = self._copy(descriptor, buffers, offset, lambda part, buffer: np.copyto(buffer, part))
        with self._lock:
            self._free_at = free_at = max(self._free_at, began) + done / self.bytes_per_s
        time.sleep(max(0.0, free_at - time.perf_counter()))
        return done

    def _copy(
        self,
        descriptor: int,
        buffers: Sequence[Any],
        offset: int,
        copy: Callable[[np.ndarray, np.ndarray], None],
    ) -> int:
        content = self._files[os.fstat(descriptor).st_ino]
        end = offset
        for buffer in buffers:
            copy(content[end : end + len(buffer)], np.frombuffer(buffer, np.uint8))
            end += len(buffer)
        return end - offset


def always_load(cost: CostProfile) -> CostProfile:
    """Pretends that computing takes for ever."""
    return replace(cost, chunk_seconds=1e3)


def never_load(cost: CostProfile) -> CostProfile:
    """Pretends that computing takes no time."""
    return replace(cost, chunk_seconds=1e-9, attention=((1, 0.0),))


def as_measured(cost: CostProfile) -> CostProfile:
    return cost


BELIEFS: Mapping[str, Callable[[CostProfile], CostProfile]] = {
    "load": always_load,
    "recompute": never_load,
    "chosen": as_measured,
}
"""Settings that force the scheduler's choice."""


class Disk(NamedTuple):
    """The directory of KV files, and the system calls in use."""

    directory: Path
    calls: SystemCalls = SystemCalls()


class FirstToken(NamedTuple):
    """Seconds to a turn's first token, and where its prompt came from."""

    seconds: float
    usage: Usage


def quickest(turns: Sequence[FirstToken]) -> float:
    """Seconds of the fastest turn without the first: other users of the machine only add time."""
    return min(turn.seconds for turn in turns[1:])


def ask(loop: Loop, prompts: Sequence[array[int]], tier: str | None, tokens: int) -> FirstToken:
    """All at once: until the last first token, with that prompt's usage. InvariantError if not
    almost `tokens` of each prompt's tokens came from there (a name in `Usage`)."""
    loop.drain()
    started = time.perf_counter()
    answers = [loop.add(prompt, 1) for prompt in prompts]
    loop.run_until(lambda: all(answer.usage is not None for answer in answers))
    for answer in answers:
        usage = answer.usage or Usage()
        if tier is not None and getattr(usage, tier) < LEAST_SHARE * tokens:
            raise InvariantError(
                f"{tokens} tokens were to be found as {tier!r}, but the prompt had {usage}"
            )
    last = max(answers, key=lambda answer: answer.began)
    return FirstToken(last.began - started, last.usage or Usage())


class TurnLoad(NamedTuple):
    """`turns` first turns of conversations, `rows` at a time: tokens of a prompt, and of a
    reply."""

    turns: int
    rows: int
    prompt: int
    reply: int


@dataclass(frozen=True)
class Tiers:
    """One device and engine, and the caches for turns: the GPU's holds one history and the new
    tokens, HOST all histories.

    copy          times of copies over the link
    histories     token ids, in whole chunks, one history for each turn: the first one warms up
    rows          turns at once, in `from_memory` and `recomputed`; as many histories for each time
    """

    device: Timed
    engine: Engine
    config: SchedulerConfig
    cost: CostProfile
    copy: CopyTime
    histories: Sequence[array[int]]
    rows: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a history: whole chunks."""
        return len(self.histories[0])

    @contextmanager
    def loop(
        self,
        cost: CostProfile,
        disk: Disk | None = None,
        group_layers: int = GROUP_LAYERS,
        **how: Any,
    ) -> Iterator[Loop]:
        """disk: used with the files that earlier loops left there; how: fields of
        `SchedulerConfig`."""
        settings = None
        slots = self.config.disk_kv_chunks if disk else 0
        if disk is not None:
            settings = DiskSettings(
                disk.directory, slots, self.engine.manifest.fingerprint, system=disk.calls
            )
        config = replace(self.config, disk_kv_chunks=slots, **how)
        make = partial(Executor, group_layers=group_layers, disk=settings)
        loop = Loop(self.device, self.engine, config, cost, make_executor=make)
        try:
            yield loop
        finally:
            loop.close()

    def fill(self, loop: Loop) -> None:
        """Computes all histories, one after the other."""
        for history in self.histories:
            loop.add(history, 1)
            loop.drain()

    def recomputed(self, new: int) -> float:
        """Seconds to the first token without reuse."""
        with self.loop(self.cost, reuse=False) as loop:
            return quickest([self._ask(loop, batch, new, "new") for batch in self._batches()])

    def from_memory(
        self, news: Sequence[int], group_layers: int = GROUP_LAYERS
    ) -> list[dict[str, float]]:
        """Seconds to the first token by how many tokens are new, with the history on HOST alone and
        on the GPU."""
        rows = []
        with self.loop(always_load(self.cost), group_layers=group_layers) as loop:
            self.fill(loop)
            for new in news:
                turns = [
                    [self._ask(loop, batch, new, tier) for tier in ("host", "gpu")]
                    for batch in self._batches()
                ]
                host, gpu = (quickest(tier) for tier in zip(*turns, strict=True))
                rows.append({"new_tokens": new, "host_s": host, "gpu_s": gpu})
        return rows

    def _batches(self) -> Iterator[Sequence[array[int]]]:
        for first in range(0, len(self.histories), self.rows):
            yield self.histories[first : first + self.rows]

    def _ask(
        self, loop: Loop, histories: Sequence[array[int]], new: int, tier: str | None
    ) -> FirstToken:
        return ask(
            loop, [history + loop.random_ids(new) for history in histories], tier, self.tokens
        )

    def write(self, disk: Disk) -> None:
        """Writes all histories to files of that disk; afterwards they are in no other tier."""
        with self.loop(self.cost, disk, save="async") as loop:
            self.fill(loop)

    def from_disk(
        self, disk: Disk, cost: CostProfile, belief: str, new: int
    ) -> tuple[float, float]:
        """Seconds to the first token, and the share of the history that was read. Before, the
        history is on DISK only.

        `cost` contains the disk's speed.
        """
        tier = {"load": "disk", "recompute": "recomputed", "chosen": None}[belief]
        with self.loop(BELIEFS[belief](cost), disk, save="off", prefetch=False) as loop:
            turns = [self._ask(loop, [history], new, tier) for history in self.histories]
        read = statistics.mean(turn.usage.disk for turn in turns[1:]) / self.tokens
        return quickest(turns), read

    def saving(self, load: TurnLoad, disk: Disk | None = None, **how: Any) -> dict[str, float]:
        """Measures turns with these fields of `SchedulerConfig`:

        seconds            until the last turn's end was sent
        tokens_per_s       of prompts and replies
        first_token_s, turn_s
                           medians, from a turn's beginning
        between_tokens_p99_s
                           of rows that generate
        until_saved_s      from the last turn's end until all its KV is on DISK
        copied_out         chunks copied to HOST until the last turn's end
        saved              chunks
        """
        with self.loop(self.cost, disk, **how) as loop:
            turns: list[tuple[float, LoopAnswer]] = []
            while (ended := sum(answer.done for _, answer in turns)) < load.turns:
                while len(turns) < min(load.turns, ended + load.rows):
                    at = time.perf_counter()
                    turns.append((at, loop.add(loop.random_ids(load.prompt), load.reply)))
                loop.step()
            start = turns[0][0]
            last = max(answer.ended for _, answer in turns)
            between = intervals(loop.steps)
            copied = loop.executor.copied_bytes.swap_out // self.cost.chunk_bytes
            loop.drain()
            return {
                "seconds": last - start,
                "tokens_per_s": load.turns * (load.prompt + load.reply) / (last - start),
                "first_token_s": statistics.median(answer.began - at for at, answer in turns),
                "turn_s": statistics.median(answer.ended - at for at, answer in turns),
                "between_tokens_p99_s": float(np.percentile(between, 99)),
                "until_saved_s": time.perf_counter() - last,
                "copied_out": copied,
                "saved": loop.scheduler.stats().spilled,
            }


PARTS = ("tiers", "sweep", "preload", "saving", "batch")
SPEEDS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)  # of the break-even
NEW_TOKENS = (1, 4, 16)  # multiples of --new-tokens, for turns whose swap-in is timed
# known and new tokens of `batch`, in tenths of --prompt
SPLITS = ((5, 5), (6, 4), (7, 3), (8, 2), (9, 1), (10, 1))
SAVED = (10, 16)  # tokens of a turn of `batch` that is saved, in tenths of --prompt
TARGET = 1.1  # the choice's time over the better way's
COUNTS = {
    "history": (8192, "tokens of KV that a turn finds"),
    "new_tokens": (32, "of the turn's prompt"),
    "repeats": (5, "turns of each kind, of which the quickest counts"),
    "turns": (32, "whose saving is measured"),
    "rows": (16, "of them at a time"),
    "prompt": (1024, "tokens of each"),
    "reply": (32, "tokens of each"),
    "chunk_tokens": (32, "tokens of a chunk"),
    "max_num_batched_tokens": (1024, "a full batch"),
}
"""Options: default, and in words."""


class Split:
    """A prompt of `batch`: known tokens in whole chunks, the other ones new. Caches in chunks: the
    GPU's for a batch, HOST's for all of them with what two turns add."""

    def __init__(self, args: argparse.Namespace, stored: int, new: int):
        size = args.chunk_tokens
        self.name = f"{stored * args.prompt // 10}/{new * args.prompt // 10}"
        self.stored = max(1, round(stored * args.prompt / 10 / size))
        self.new = max(1, (stored + new) * args.prompt // 10 - self.stored * size)
        fresh = -(-self.new // size) + 1
        self.gpu = args.rows * (self.stored + fresh) + SPARE_CHUNKS
        self.histories = (
            max(args.repeats + 1, 2 + self.gpu // (args.rows * self.stored)) * args.rows
        )
        self.host = self.histories * (self.stored + 2 * fresh)


def saved_batch(args: argparse.Namespace, prompt: int) -> int:
    """Chunks of a GPU cache for `--rows` turns, and half as many whose KV is being copied."""
    return args.rows * 3 // 2 * (-(-(prompt + args.reply) // args.chunk_tokens) + 1)


class TierPools(Pools):
    """With a disk a sixteenth of HOST is kept free. SettingError if the model's contexts are too
    short."""

    def __init__(self, args: argparse.Namespace, engine: Engine):
        self.batch = args.max_num_batched_tokens
        self.size = size = args.chunk_tokens
        self.history = args.history // size
        self.new_tokens = [times * args.new_tokens for times in NEW_TOKENS]
        most = (max(SAVED) if "batch" in args.parts else 10) * args.prompt // 10
        self.longest = max(args.history + self.new_tokens[-1], most + args.reply) + 1
        check_context(self.longest, engine)
        self.turn = -(-self.longest // size) + SPARE_CHUNKS
        self.seats = max(args.rows, self.batch // size)
        saved = -(-(args.prompt + args.reply) // size)
        self.saving = max(self.turn, (args.rows + 1) * saved)
        self.gpu = max(self.saving, self.seats + self.turn, 2 * self.history)
        self.histories = max(
            args.repeats + 1, 2 + self.turn // self.history
        )  # after the rest none of one is on the GPU
        self.kept = (self.histories + 1) * self.turn
        self.disk = max(self.kept, (args.turns + 1) * saved)
        self.host = max(2 * self.history, self.kept * 9 // 8)
        if "batch" in args.parts:
            splits = [Split(args, *tenths) for tenths in SPLITS]
            self.gpu = max(self.gpu, saved_batch(args, most), *(split.gpu for split in splits))
            # copies ahead need room
            self.host = max(self.host, 2 * self.gpu, *(split.host for split in splits))


# The parts.


def measure_tiers(tiers: Tiers, disk: Disk, new: int) -> dict[str, Any]:
    """Seconds to the first token by tier, the share of the history that the engine chose to read,
    and the measured and the predicted break-even."""
    cost = tiers.cost
    chunks = tiers.tokens // tiers.config.chunk_tokens
    (memory,) = tiers.from_memory([new])
    tiers.write(disk)
    times = {
        "gpu_s": memory["gpu_s"],
        "host_s": memory["host_s"],
        "recomputed_s": tiers.recomputed(new),
    }
    times["disk_s"], _ = tiers.from_disk(disk, cost, "load", new)
    times["chosen_s"], read = tiers.from_disk(disk, cost, "chosen", new)
    spared = times["recomputed_s"] - times["host_s"]
    if spared <= 0:
        raise SettingError(
            "--history",
            "is computed as quickly as it is copied from HOST: no disk is worth reading",
        )
    size = chunks * cost.chunk_bytes
    recompute = sum(
        cost.recompute((chunk + 1) * tiers.config.chunk_tokens) for chunk in range(chunks)
    )
    return times | {
        "chosen_read": read,
        "disk_read_gb_per_s": cost.disk_read_bytes_per_s / 1e9,
        "kv_bytes_per_token": size / tiers.tokens,
        "predicted_recompute_s_per_token": recompute / tiers.tokens,
        "predicted_break_even_gb_per_s": break_even_disk(cost, tiers.tokens) / 1e9,
        "break_even_gb_per_s": size / 1e9 / spared,
    }


def measure_sweep(tiers: Tiers, directory: Path, new: int, even: float) -> list[dict[str, float]]:
    """Each way on disks of speeds around `even` (GB/s)."""
    memory = MemoryDisk()
    disk = Disk(directory, memory.calls)
    tiers.write(disk)
    rows = []
    for times in SPEEDS:
        memory.bytes_per_s = speed = times * even * 1e9
        cost = replace(tiers.cost, disk_read_bytes_per_s=speed)
        ways = {belief: tiers.from_disk(disk, cost, belief, new) for belief in BELIEFS}
        better = min(ways["load"][0], ways["recompute"][0])
        rows.append(
            {"gb_per_s": speed / 1e9, "of_break_even": times}
            | {f"{belief}_s": seconds for belief, (seconds, _) in ways.items()}
            | {"read": ways["chosen"][1], "ratio": ways["chosen"][0] / better}
        )
    return rows


def measure_preload(tiers: Tiers, new_tokens: Sequence[int]) -> dict[str, list[dict[str, float]]]:
    """By the layers of a group that share a gate, all of them first; as `Tiers.from_memory`."""
    layers = tiers.engine.manifest.kv_layers
    groups = {min(group, layers) for group in (GROUP_LAYERS, 2 * GROUP_LAYERS, layers)}
    return {
        str(group): tiers.from_memory(new_tokens, group) for group in sorted(groups, reverse=True)
    }


def measure_batch(tiers: Tiers, args: argparse.Namespace) -> list[dict[str, Any]]:
    """By split: seconds to the last first token of `--rows` prompts at once, and of copying their
    known tokens in."""
    rows = []
    for split in (Split(args, *tenths) for tenths in SPLITS):
        histories = random_histories(
            tiers.engine, split.histories, split.stored * args.chunk_tokens
        )
        longest = split.stored * args.chunk_tokens + split.new + 1
        config = replace(tiers.config, gpu_kv_chunks=split.gpu, max_model_len=longest)
        batch = replace(tiers, config=config, histories=histories, rows=args.rows)
        (memory,) = batch.from_memory([split.new])
        copied = args.rows * split.stored * tiers.copy.swap_in / tiers.copy.chunks
        rows.append(
            {
                "split": split.name,
                "recomputed_s": batch.recomputed(split.new),
                **memory,
                "copy_in_s": copied,
            }
        )
    return rows


def measure_saved_batch(tiers: Tiers, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds for a turn, by its prompt: if its KV is dropped, if it is copied to HOST beside other
    turns, and of the copy alone. What the copies beside cost is shared among the turns that were
    copied before the run's end."""
    rows = []
    for tenths in SAVED:
        load = TurnLoad(args.turns, args.rows, tenths * args.prompt // 10, args.reply)
        gpu = saved_batch(args, load.prompt)
        longest = load.prompt + load.reply
        runs = [
            [
                tiers.saving(load, reuse=reuse, gpu_kv_chunks=gpu, max_model_len=longest)
                for reuse in (False, True)
            ]
            for _ in range(args.repeats)
        ]
        dropped, kept = (min(ways, key=itemgetter("seconds")) for ways in zip(*runs, strict=True))
        chunks = longest // args.chunk_tokens
        alone = dropped["seconds"] / load.turns
        copied = max(1, kept["copied_out"] / chunks)
        rows.append(
            {
                "prompt": load.prompt,
                "dropped_s": alone,
                "copied_beside_s": alone + (kept["seconds"] - dropped["seconds"]) / copied,
                "copy_out_s": chunks * tiers.copy.swap_out / tiers.copy.chunks,
                "copied_turns": copied,
            }
        )
    return rows


# The command.


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tiers", description=__doc__.partition("\n")[0]
    )
    add_counts(parser, COUNTS)
    option = parser.add_argument
    option(
        "--disk-dir",
        type=Path,
        metavar="DIR",
        help="on the disk to be measured (default: the system's own)",
    )
    words = f"of {','.join(PARTS)} (default: all); with sweep come the tiers"
    option(
        "--parts",
        type=parts_type(PARTS, {"sweep": "tiers"}),
        default=PARTS,
        metavar="LIST",
        help=words,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("benchmarks.tiers", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Raises SettingError."""
    least = {
        "history": args.chunk_tokens,
        "turns": args.rows + 1,
        "max_num_batched_tokens": max(args.rows, args.chunk_tokens),
    }
    check_least(args, **dict.fromkeys(COUNTS, 1) | least)
    if args.disk_dir is not None and not args.disk_dir.is_dir():
        raise SettingError("--disk-dir", f"{args.disk_dir} is no directory")
    engine = open_engine(args.engine, args.device, kv_cache_dtype=args.kv_cache_dtype)
    sizes = TierPools(args, engine)
    with (
        loaded(args.device, engine, sizes.config()) as device,
        tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=args.disk_dir) as directory,
    ):
        measure(prepare(device, engine, sizes, args, Path(directory)), sizes, args, Path(directory))


def prepare(
    device: Timed, engine: Engine, sizes: TierPools, args: argparse.Namespace, directory: Path
) -> Tiers:
    """Measures the scheduler's costs and makes the histories."""
    config = sizes.config()
    pieces = [min(GROUP_LAYERS, engine.manifest.kv_layers)]
    cost, copies = measure_costs(device, engine, config, sizes.history, args.rows, pieces)
    speed = measure_disk(directory, cost.chunk_bytes)  # as a server at its start
    if speed is None:
        raise SettingError("--disk-dir", f"{directory} takes no records")
    cost = replace(cost, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)
    histories = random_histories(engine, sizes.histories, sizes.history * args.chunk_tokens)
    return Tiers(
        device, engine, replace(config, gpu_kv_chunks=sizes.turn), cost, copies[-1], histories
    )


def random_histories(engine: Engine, count: int, tokens: int) -> list[array[int]]:
    ids = np.random.default_rng(1).integers(0, engine.vocab_size, (count, tokens), np.int32)
    return [array("i", row.tobytes()) for row in ids]


def measure(tiers: Tiers, sizes: TierPools, args: argparse.Namespace, directory: Path) -> None:
    """Runs the parts, each of which prints a table and a line of JSON."""
    manifest = tiers.engine.manifest
    cost = tiers.cost
    speeds = [
        f"{speed / 1e9:.3f}" for speed in (cost.disk_read_bytes_per_s, cost.disk_write_bytes_per_s)
    ]
    about = {"hardware": hardware(tiers.engine)}
    print(
        f"{about['hardware']}; {manifest.layers} layers, {manifest.dtype}, chunks of "
        f"{cost.chunk_bytes} bytes"
    )
    print(f"the disk of {directory.parent} reads {speeds[0]} GB/s, writes {speeds[1]} GB/s")
    if "tiers" in args.parts:
        results = measure_tiers(tiers, Disk(_own(directory, "tiers")), args.new_tokens)
        title = (
            f"a turn of {args.new_tokens} tokens, {args.history} tokens of history: first token by "
            "tier, break-even"
        )
        rows = [{"what": name, "found": value} for name, value in results.items()]
        show("tiers_tiers", title, {"history": tiers.tokens, **results, **about}, rows)
    if "sweep" in args.parts:
        swept = measure_sweep(
            tiers, _own(directory, "sweep"), args.new_tokens, results["break_even_gb_per_s"]
        )
        worst = max(speed["ratio"] for speed in swept)
        title = (
            f"first token by the disk's speed; ratio: chosen over the better, worst {worst:.2f}, "
            f"target {TARGET}"
        )
        show("tiers_sweep", title, {"speeds": swept, "worst": worst, "target": TARGET}, swept)
    if "preload" in args.parts:
        preloads = measure_preload(tiers, sizes.new_tokens)
        title = (
            "first token with the history on HOST and on the GPU; a group of all layers: swap-in "
            "first"
        )
        rows = [
            {"layers a group": group} | turn for group, turns in preloads.items() for turn in turns
        ]
        show("tiers_preload", title, {"history": tiers.tokens, "by_group_layers": preloads}, rows)
    if "saving" in args.parts:
        load = TurnLoad(args.turns, args.rows, args.prompt, args.reply)
        modes = {
            mode: tiers.saving(
                load, Disk(_own(directory, mode)), save=mode, gpu_kv_chunks=sizes.saving
            )
            for mode in reversed(SAVE_MODES)
        }
        title = (
            f"{load.turns} turns, {load.rows} at a time, {load.prompt} tokens in and {load.reply} "
            "out, by --save"
        )
        rows = [{"save": mode} | results for mode, results in modes.items()]
        show("tiers_saving", title, {**load._asdict(), "modes": modes}, rows)
    if "batch" in args.parts:
        splits = measure_batch(tiers, args)
        show(
            "tiers_batch",
            f"{args.rows} prompts at once, known/new tokens",
            {"rows": args.rows, "splits": splits, **about},
            splits,
        )
        saved = measure_saved_batch(tiers, args)
        title = (
            f"a turn of {args.reply} steps, {args.rows} at a time: its KV dropped or copied to "
            "HOST beside other turns"
        )
        show("tiers_saved_batch", title, {"reply": args.reply, "turns": saved, **about}, saved)


def _own(directory: Path, name: str) -> Path:
    """A new folder on the measured disk."""
    (directory / name).mkdir()
    return directory / name


if __name__ == "__main__":
    sys.exit(main())
