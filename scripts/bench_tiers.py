"""bench_tiers: a turn's first token by where its history is, and what loading and saving KV cost.

    tiers    the history on the GPU, on HOST, on DISK, recomputed, and as the engine chooses; the disk speed at which
             reading and recomputing take equally long
    sweep    reading, recomputing and the engine's choice on disks around that speed, which are made of memory
    preload  the swap-in whole before the step, or layer group by layer group beside it, by how many tokens are new
    saving   turns under `--save off`, `async` and `sync`

    build_engine --random-weights --config config.json --set max_position_embeddings=16384 --device cuda --output DIR
    python -m pensieve.scripts.bench_tiers --engine DIR --device cuda --disk-dir /a/local/disk

The last two are what CachedAttention (Gao et al., USENIX ATC 2024) measures in its section on overlapped access to KV.
The engine is loaded and measured once. Prompts are random token ids, sampling is greedy, nothing is prefetched.
How to read it: docs/measured/disk.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.disk.speed import measure_disk
from ..runtime.engine import Engine, open_engine
from ..runtime.executor import GROUP_LAYERS, Executor
from ..runtime.measure.profile import hardware
from ..scheduler.config import SAVE_MODES, SchedulerConfig
from ..scheduler.types import SettingError
from .bench_loop import SPARE_CHUNKS, Timed, make_device
from .bench_steps import measure_costs
from .tier_turns import BELIEFS, Disk, Load, MemoryDisk, Tiers

PARTS = ("tiers", "sweep", "preload", "saving")
SPEEDS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)  # of the break-even
NEW_TOKENS = (1, 4, 16)  # times --new-tokens, of turns whose swap-in is timed
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


class Sizes:
    """Caches that are just large enough, in chunks. SettingError if the model's contexts are too short."""

    def __init__(self, args: argparse.Namespace, engine: Engine):
        size = args.chunk_tokens
        self.history = args.history // size
        self.new_tokens = [times * args.new_tokens for times in NEW_TOKENS]
        self.longest = max(args.history + self.new_tokens[-1], args.prompt + args.reply) + 1
        if self.longest > engine.manifest.max_model_len:
            raise SettingError(
                "--history",
                f"contexts come to {self.longest} tokens, the model's to {engine.manifest.max_model_len}; take shorter "
                "ones, or build it with --set max_position_embeddings",
            )
        self.turn = -(-self.longest // size) + SPARE_CHUNKS
        self.seats = max(args.rows, args.max_num_batched_tokens // size)
        saved = -(-(args.prompt + args.reply) // size)
        self.saving = max(self.turn, (args.rows + 1) * saved)
        self.gpu = max(self.saving, self.seats + self.turn, 2 * self.history)
        self.histories = max(
            args.repeats + 1, 2 + self.turn // self.history
        )  # after the rest none of one is on the GPU
        self.kept = (self.histories + 1) * self.turn
        self.disk = max(self.kept, (args.turns + 1) * saved)

    def config(self, args: argparse.Namespace) -> SchedulerConfig:
        """Least recently used goes first: of a history that another one has displaced nothing is left on the GPU. A
        sixteenth of HOST is kept free when there is a disk."""
        return SchedulerConfig(
            gpu_kv_chunks=self.gpu,
            host_kv_chunks=max(2 * self.history, self.kept * 9 // 8),
            disk_kv_chunks=self.disk,
            max_model_len=self.longest,
            max_num_seqs=self.seats,
            max_num_batched_tokens=args.max_num_batched_tokens,
            chunk_tokens=args.chunk_tokens,
            eviction="lru",
            swap_out_below=1.0,
            generation_reserve=0.0,
        )


# The parts.


def measure_tiers(tiers: Tiers, disk: Disk, new: int) -> dict[str, Any]:
    """Seconds to the first token by tier, and which share of the history the engine chose to read; the break-even from
    them, and as predicted."""
    cost, chunks = tiers.cost, tiers.tokens // tiers.config.chunk_tokens
    (memory,) = tiers.from_memory([new])
    tiers.write(disk)
    found = {"gpu_s": memory["gpu_s"], "host_s": memory["host_s"], "recomputed_s": tiers.recomputed(new)}
    found["disk_s"], _ = tiers.from_disk(disk, cost, "load", new)
    found["chosen_s"], read = tiers.from_disk(disk, cost, "chosen", new)
    spared = found["recomputed_s"] - found["host_s"]
    if spared <= 0:
        raise SettingError("--history", "is computed as quickly as it is copied from HOST: no disk is worth reading")
    size = chunks * cost.chunk_bytes
    recompute = sum(cost.recompute((chunk + 1) * tiers.config.chunk_tokens) for chunk in range(chunks))
    return found | {
        "chosen_read": read,
        "disk_read_gb_per_s": cost.disk_read_bytes_per_s / 1e9,
        "kv_bytes_per_token": size / tiers.tokens,
        "predicted_recompute_s_per_token": recompute / tiers.tokens,
        "predicted_break_even_gb_per_s": cost.break_even_disk(tiers.tokens) / 1e9,
        "break_even_gb_per_s": size / 1e9 / spared,
    }


def measure_sweep(tiers: Tiers, directory: Path, new: int, even: float) -> list[dict[str, float]]:
    """Each way on disks of speeds around `even` (GB/s)."""
    memory = MemoryDisk()
    disk = Disk(directory, memory.calls)
    tiers.write(disk)
    found = []
    for times in SPEEDS:
        memory.bytes_per_s = speed = times * even * 1e9
        cost = replace(tiers.cost, disk_read_bytes_per_s=speed)
        ways = {belief: tiers.from_disk(disk, cost, belief, new) for belief in BELIEFS}
        better = min(ways["load"][0], ways["recompute"][0])
        found.append(
            {"gb_per_s": speed / 1e9, "of_break_even": times}
            | {f"{belief}_s": seconds for belief, (seconds, _) in ways.items()}
            | {"read": ways["chosen"][1], "ratio": ways["chosen"][0] / better}
        )
    return found


def measure_preload(tiers: Tiers, new_tokens: Sequence[int]) -> dict[str, list[dict[str, float]]]:
    """By the layers of a group that share a gate, all of them first; as `Tiers.from_memory`."""
    layers = tiers.engine.manifest.layers
    groups = {min(group, layers) for group in (GROUP_LAYERS, 2 * GROUP_LAYERS, layers)}
    return {str(group): tiers.from_memory(new_tokens, group) for group in sorted(groups, reverse=True)}


# The command.


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_tiers", description=__doc__.partition("\n")[0])
    option = made.add_argument
    option("--engine", required=True, type=Path, metavar="DIR", help="an engine directory")
    option("--device", default="cpu", choices=("cpu", "cuda"), help="where the engine runs (default %(default)s)")
    option("--disk-dir", type=Path, metavar="DIR", help="on the disk to be measured (default: the system's own)")
    option(
        "--parts",
        type=_parts,
        default=PARTS,
        metavar="LIST",
        help=f"of {','.join(PARTS)} (default: all); with sweep come the tiers",
    )
    for name, (default, words) in COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        option(flag, type=int, default=default, metavar="N", help=f"{words} (default %(default)s)")
    return made


def _parts(text: str) -> tuple[str, ...]:
    parts = text.split(",")
    if not set(parts) <= set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in parts or (part == "tiers" and "sweep" in parts))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check(args)
        engine = open_engine(args.engine, args.device)
        sizes = Sizes(args, engine)
        device = make_device(args.device)
        try:
            with tempfile.TemporaryDirectory(prefix="bench-tiers-", dir=args.disk_dir) as directory:
                tiers = prepare(device, engine, sizes, args, Path(directory))
                measure(tiers, sizes, args, Path(directory))
        finally:
            gc.unfreeze()
            device.end()
    except SettingError as error:
        print(f"bench_tiers: {error}", file=sys.stderr)
        return 2
    return 0


def check(args: argparse.Namespace) -> None:
    """SettingError names what is too small."""
    least = {"history": args.chunk_tokens, "max_num_batched_tokens": max(args.rows, args.chunk_tokens)}
    for name in COUNTS:
        if (value := getattr(args, name)) < least.get(name, 1):
            raise SettingError(f"--{name.replace('_', '-')}", f"must be at least {least.get(name, 1)}, not {value}")
    if args.disk_dir is not None and not args.disk_dir.is_dir():
        raise SettingError("--disk-dir", f"{args.disk_dir} is no directory")


def prepare(device: Timed, engine: Engine, sizes: Sizes, args: argparse.Namespace, directory: Path) -> Tiers:
    """Pools and the engine, once for all that follow; what the scheduler goes by, measured; the histories."""
    config = sizes.config(args)
    Executor(device, engine, config)
    gc.collect()
    gc.freeze()  # collections do not look at the engine again, nor do they in `pensieve serve`
    pieces = [min(GROUP_LAYERS, engine.manifest.layers)]
    cost, _ = measure_costs(device, engine, config, sizes.history, args.rows, pieces)
    speed = measure_disk(directory, cost.chunk_bytes)  # as a server at its start
    if speed is None:
        raise SettingError("--disk-dir", f"{directory} takes no records")
    cost = replace(cost, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)
    dice = np.random.default_rng(1)
    shape = (sizes.histories, sizes.history * args.chunk_tokens)
    histories = [array("i", ids.tobytes()) for ids in dice.integers(0, engine.vocab_size, shape, np.int32)]
    return Tiers(device, engine, replace(config, gpu_kv_chunks=sizes.turn), cost, histories)


def measure(tiers: Tiers, sizes: Sizes, args: argparse.Namespace, directory: Path) -> None:
    """The parts, each of which prints its lines and one of JSON."""
    manifest, cost = tiers.engine.manifest, tiers.cost
    speeds = [f"{speed / 1e9:.3f}" for speed in (cost.disk_read_bytes_per_s, cost.disk_write_bytes_per_s)]
    print(f"{hardware(tiers.engine)}; {manifest.layers} layers, {manifest.dtype}, chunks of {cost.chunk_bytes} bytes")
    print(f"the disk of {directory.parent} reads {speeds[0]} GB/s, writes {speeds[1]} GB/s")
    if "tiers" in args.parts:
        found = measure_tiers(tiers, Disk(_own(directory, "tiers")), args.new_tokens)
        show("tiers", tiers_lines(found, args), {"history": tiers.tokens, **found})
    if "sweep" in args.parts:
        swept = measure_sweep(tiers, _own(directory, "sweep"), args.new_tokens, found["break_even_gb_per_s"])
        worst = max(speed["ratio"] for speed in swept)
        show("sweep", sweep_lines(swept, worst), {"speeds": swept, "worst": worst, "target": TARGET})
    if "preload" in args.parts:
        preloads = measure_preload(tiers, sizes.new_tokens)
        show("preload", preload_lines(preloads), {"history": tiers.tokens, "by_group_layers": preloads})
    if "saving" in args.parts:
        load = Load(args.turns, args.rows, args.prompt, args.reply)
        modes = {
            mode: tiers.saving(Disk(_own(directory, mode)), sizes.saving, mode, load) for mode in reversed(SAVE_MODES)
        }
        show("saving", saving_lines(modes, load), {**load._asdict(), "modes": modes})


def _own(directory: Path, name: str) -> Path:
    """A folder of its own on the disk that is measured."""
    (directory / name).mkdir()
    return directory / name


def show(part: str, lines: Iterator[str], found: dict[str, Any]) -> None:
    print("\n".join(lines))
    print(json.dumps({"bench": f"tiers_{part}", **found}), flush=True)


def tiers_lines(found: dict[str, Any], args: argparse.Namespace) -> Iterator[str]:
    yield f"a turn of {args.new_tokens} tokens, {args.history} tokens of history; ms to its first token"
    for name in ("gpu", "host", "disk", "recomputed", "chosen"):
        yield f"  {name:12}{1e3 * found[f'{name}_s']:10.2f}"
    yield (
        f"  when the engine chose, {100 * found['chosen_read']:.0f}% of the history was read, at the disk's "
        f"{found['disk_read_gb_per_s']:.3f} GB/s"
    )
    yield (
        f"  break-even disk speed {found['break_even_gb_per_s']:.4g} GB/s; predicted "
        f"{found['predicted_break_even_gb_per_s']:.4g}: {found['kv_bytes_per_token']:.0f} bytes of KV a token, "
        f"{1e6 * found['predicted_recompute_s_per_token']:.2f} us to recompute it, less its copy from HOST"
    )


def sweep_lines(speeds: Sequence[dict[str, float]], worst: float) -> Iterator[str]:
    yield "disks by GB/s, of the break-even; ms to the first token: load, recompute, chosen (read), over the better"
    for speed in speeds:
        times = "".join(f"{1e3 * speed[f'{belief}_s']:10.2f}" for belief in BELIEFS)
        yield (
            f"  {speed['gb_per_s']:10.4g}{speed['of_break_even']:6.2f}{times} ({100 * speed['read']:3.0f}%)"
            f"{speed['ratio']:7.2f}"
        )
    yield f"  worst {worst:.2f}, target {TARGET}"


def preload_lines(found: dict[str, list[dict[str, float]]]) -> Iterator[str]:
    yield "history on HOST, ms to the first token by new tokens (history on the GPU, as if all were loaded before)"
    for place, (group, turns) in enumerate(found.items()):
        name = f"{group} layers a group" if place else "swap-in first"
        times = (f"{turn['new_tokens']:6}: {1e3 * turn['host_s']:8.2f} ({1e3 * turn['gpu_s']:.2f})" for turn in turns)
        yield f"  {name:18}" + "".join(times)


def saving_lines(modes: dict[str, dict[str, float]], load: Load) -> Iterator[str]:
    yield f"{load.turns} turns, {load.rows} at a time, {load.prompt} tokens in and {load.reply} out, by --save"
    for mode, found in modes.items():
        yield (
            f"  {mode:6}{found['seconds']:8.3f} s, {found['tokens_per_s']:8.0f} tokens/s; ms: first token "
            f"{1e3 * found['first_token_s']:.1f}, turn {1e3 * found['turn_s']:.1f}, between tokens p99 "
            f"{1e3 * found['between_tokens_p99_s']:.2f}; {found['saved']} chunks saved, the last "
            f"{1e3 * found['until_saved_s']:.0f} ms after the end"
        )


if __name__ == "__main__":
    sys.exit(main())
