"""simulate: replays conversations against the scheduler on a virtual clock, for each eviction
policy and tier size.

    pensieve simulate --trace FILE --host-kv-bytes 16GiB,64GiB --eviction retention,lru
    pensieve simulate --preset load --rate 4,5 --start middle

Nothing is computed: the model's shape and the GPU's speeds say how long steps and copies take. See
`scheduler/sim/simulator.py` for what is simulated, `scripts/simulation/traces.py` for the form of a
trace. The preset `load` has options of its own: `scripts/simulation/load.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ..runtime.launch.command_line import CommandParser
from ..runtime.launch.options import parse_bytes
from ..runtime.system import safe_path
from ..scheduler.config import EVICTION_POLICIES, QUEUE_ORDERS, SAVE_MODES, SchedulerConfig
from ..scheduler.cost import CostProfile
from ..scheduler.sim.simulator import Report, Session, longest_context, simulate
from ..scheduler.types import SettingError
from .command import check_above_0, check_least, exit_status, result_line, title_line
from .simulation.load import COLUMNS as LOAD_COLUMNS
from .simulation.load import (
    add_load_options,
    add_workload,
    config_of,
    host_size,
    plan_load,
    simulate_load,
)
from .simulation.models import MODELS
from .simulation.traces import CHATS, read_trace, synthetic

PRESETS = ("trace", "load")
LOAD_SETTINGS = (
    "eviction",
    "queue_order",
    "max_num_batched_tokens",
    "swap_out_below",
    "generation_reserve",
)
POSITIVE = (
    "sessions_per_s",
    "think_s",
    "flops_per_s",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "chunk_tokens",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "seconds",
    "measure_s",
)


class Run(NamedTuple):
    """One line of the table."""

    host_kv_bytes: int
    disk_kv_bytes: int
    config: SchedulerConfig
    cost: CostProfile
    sessions: Sequence[Session]
    warm_up: int


def parser(preset: str = "trace") -> CommandParser:
    command = CommandParser(prog="pensieve simulate", description=__doc__.partition("\n")[0])
    command.add_argument(
        "--preset", choices=PRESETS, default="trace", help="each has its own options (trace)"
    )
    add_common_options(command)
    add_disk_options(command)
    {"load": add_load_options, "trace": add_trace_options}[preset](command)
    return command


def add_common_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option(
        "--think-s",
        type=float,
        default=15.0,
        metavar="S",
        help="mean, synthetic only (default %(default)s)",
    )
    option("--gpu-kv-bytes", default="40GiB", metavar="SIZE", help="(default %(default)s)")
    option("--host-kv-bytes", default="16GiB,32GiB,64GiB", metavar="SIZES",
           help="comma between, of load only one; auto: what `pensieve serve` takes on this "
                "machine (default %(default)s)")  # fmt: skip
    option(
        "--queue-order", choices=QUEUE_ORDERS, default=QUEUE_ORDERS[0], help="(default %(default)s)"
    )
    option(
        "--chunk-tokens",
        type=int,
        default=64,
        metavar="N",
        help="(default %(default)s: hit rates within a point of those with 32, in less time)",
    )
    option(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="running requests (default %(default)s)",
    )
    option(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="a step (default %(default)s)",
    )
    option(
        "--target-ms-per-token",
        type=float,
        metavar="MS",
        help="of a step with generation (default: none)",
    )
    option(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="runs at a time (default %(default)s)",
    )
    option("--json", action="store_true", help="one JSON line a run instead of the table")


def add_trace_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    add_workload(command)
    option(
        "--sessions",
        type=int,
        metavar="N",
        help="so many conversations (default: all of a trace, 1000 synthetic)",
    )
    option(
        "--sessions-per-s",
        type=float,
        default=0.1,
        metavar="RATE",
        help="starts a second (default %(default)s)",
    )
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of starts and synthetic lengths (default %(default)s)",
    )
    option("--model", choices=MODELS, default="llama-2-13b-gqa", help="(default %(default)s)")
    option(
        "--save",
        choices=SAVE_MODES,
        default="async",
        help="when chunks go to disk (default %(default)s)",
    )
    option(
        "--prefetch",
        choices=("on", "off"),
        default="on",
        help="read ahead of a request's turn (default on)",
    )
    option(
        "--conversation-ttl",
        type=float,
        default=math.inf,
        metavar="S",
        help="of idle conversations' KV",
    )
    option(
        "--warm-up", type=int, default=0, metavar="N", help="the first N requests are not reported"
    )
    option(
        "--eviction",
        default="all",
        metavar="NAMES",
        help=f"all, or of {','.join(EVICTION_POLICIES)}",
    )
    add_hardware_options(command)


def add_disk_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option("--disk-kv-bytes", default="0", metavar="SIZES",
           help="comma between, of load only one (default %(default)s: no disk)")  # fmt: skip
    option("--disk-read-bytes-per-s", type=float, default=6e9, metavar="B",
           help="`pensieve doctor` measures a disk (default %(default)g)")  # fmt: skip
    option("--disk-write-bytes-per-s", type=float, default=4e9, metavar="B",
           help="(default %(default)g)")  # fmt: skip


def add_hardware_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option(
        "--flops-per-s",
        type=float,
        default=500e12,
        metavar="F",
        help="of large steps (default %(default)g)",
    )
    option(
        "--memory-bytes-per-s",
        type=float,
        default=4.25e12,
        metavar="B",
        help="GPU memory (default %(default)g)",
    )
    option(
        "--link-bytes-per-s",
        type=float,
        default=50e9,
        metavar="B",
        help="host to GPU (default %(default)g)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = CommandParser(prog="pensieve simulate", add_help=False)
    chosen.add_argument("--preset", choices=PRESETS, default="trace")
    preset = chosen.parse_known_args(words)[0].preset
    args = parser(preset).parse_args(words)
    lines = {"load": load_lines, "trace": trace_lines}[preset]
    return exit_status("pensieve simulate", lambda: print_lines(args, lines))


def print_lines(
    args: argparse.Namespace, lines: Callable[[argparse.Namespace], Iterator[str]]
) -> None:
    check_above_0(args, POSITIVE)
    for line in lines(args):
        print(line, flush=True)


def trace_lines(args: argparse.Namespace) -> Iterator[str]:
    runs = plan_runs(args)
    if not args.json:
        yield (
            f"{args.model}, {args.gpu_kv_bytes} of KV on the GPU, {len(runs[0].sessions)} "
            "conversations"
        )
        yield title_line(COLUMNS)
    for run, report in in_processes(_simulate, runs, args.jobs):
        yield json_line(run, report) if args.json else report_line(run, report)


def load_lines(args: argparse.Namespace) -> Iterator[str]:
    runs = plan_load(args)
    if not args.json:
        yield title_line(LOAD_COLUMNS)
    for run, line in in_processes(simulate_load, runs, args.jobs):
        if line is None:
            raise SettingError(
                "--measure-s", f"at {run.rate:g} conversations/s no reply ended meanwhile"
            )
        setting = {name: getattr(run.config, name) for name in LOAD_SETTINGS}
        yield (
            json.dumps({"bench": "simulate_load", **setting, **line})
            if args.json
            else result_line(LOAD_COLUMNS, line)
        )


def in_processes(
    work: Callable[[Any], Any], runs: Sequence[Any], jobs: int
) -> Iterator[tuple[Any, Any]]:
    """Each run and its result, in their order."""
    spawn = multiprocessing.get_context("spawn")
    with safe_path(), spawn.Pool(max(1, min(jobs, len(runs)))) as pool:
        yield from zip(runs, pool.imap(work, runs), strict=True)


def _simulate(run: Run) -> Report:
    return simulate(run.config, run.cost, run.sessions, run.warm_up)


def plan_runs(args: argparse.Namespace) -> list[Run]:
    """Every policy with every HOST and DISK size. Raises SettingError."""
    sessions = load_sessions(args)
    speeds = {
        name: getattr(args, name)
        for name in ("flops_per_s", "memory_bytes_per_s", "link_bytes_per_s")
    }
    cost = replace(
        MODELS[args.model].cost(args.chunk_tokens, longest_context(sessions), **speeds),
        disk_read_bytes_per_s=args.disk_read_bytes_per_s,
        disk_write_bytes_per_s=args.disk_write_bytes_per_s,
    )
    policies = EVICTION_POLICIES if args.eviction == "all" else args.eviction.split(",")
    gpu_bytes = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes")
    host_sizes = [host_size(size, gpu_bytes) for size in args.host_kv_bytes.split(",")]
    disk_sizes = [parse_bytes(size, "--disk-kv-bytes") for size in args.disk_kv_bytes.split(",")]
    for name, default in (("save", "async"), ("prefetch", "on")):
        if getattr(args, name) != default and not any(disk_sizes):
            raise SettingError(f"--{name}", "needs --disk-kv-bytes above 0: no KV goes to disk")
    requests = sum(len(session.turns) for session in sessions)
    if not 0 <= args.warm_up < requests:
        raise SettingError(
            "--warm-up", f"must leave some of {requests} requests, not {args.warm_up}"
        )
    return [
        Run(
            host_bytes,
            disk_bytes,
            config_of(
                args,
                sessions,
                cost,
                host_kv_chunks=host_bytes // cost.chunk_bytes,
                eviction=policy,
                disk_kv_chunks=disk_bytes // cost.chunk_bytes,
                save=args.save,
                prefetch=args.prefetch == "on",
                conversation_ttl=args.conversation_ttl,
            ),
            cost,
            sessions,
            args.warm_up,
        )
        for host_bytes in host_sizes
        for disk_bytes in disk_sizes
        for policy in policies
    ]


def load_sessions(args: argparse.Namespace) -> list[Session]:
    """Load is scaled by dropping whole conversations, never by stretching time. Raises
    SettingError."""
    check_least(args, sessions=1)
    if args.trace is None:
        return synthetic(
            CHATS[args.synthetic],
            conversations=args.sessions or 1000,
            sessions_per_s=args.sessions_per_s,
            think_s=args.think_s,
            seed=args.seed,
        )
    return read_trace(args.trace, sessions_per_s=args.sessions_per_s, seed=args.seed)[
        : args.sessions
    ]


COLUMNS = {
    "policy": ("policy", "<18"),
    "host_gib": ("host GiB", "8.4g"),
    "disk_gib": ("disk GiB", "8.4g"),
    "gpu": ("gpu", "11,"),
    "host": ("host", "11,"),
    "disk": ("disk", "11,"),
    "recomputed": ("recomputed", "11,"),
    "new": ("new", "10,"),
    "hit_percent": ("hit %", "6.1f"),
    "ttft_p50": ("TTFT p50 s", "10.3f"),
    "ttft_p99": ("p99 s", "8.3f"),
    "ms_per_token": ("ms/token", "8.2f"),
    "per_busy_s": ("req/busy s", "10.2f"),
    "suspensions": ("suspended", "9"),
}
"""gpu, host, disk, recomputed, new: prompt tokens; hit %: found of those computed before."""


def report_line(run: Run, report: Report) -> str:
    rates = {"hit_percent": 100 * report.hit_rate, "per_busy_s": report.requests / report.busy_s}
    sizes = {"host_gib": run.host_kv_bytes / 2**30, "disk_gib": run.disk_kv_bytes / 2**30}
    values = {
        "policy": run.config.eviction,
        "ms_per_token": 1e3 * report.seconds_per_token,
        **rates,
        **sizes,
    }
    return result_line(COLUMNS, values | asdict(report) | asdict(report.usage))


def json_line(run: Run, report: Report) -> str:
    sizes = {"host_kv_bytes": run.host_kv_bytes, "disk_kv_bytes": run.disk_kv_bytes}
    setting = {
        "eviction": run.config.eviction,
        **sizes,
        "save": run.config.save,
        "prefetch": run.config.prefetch,
    }
    return json.dumps(
        {"bench": "simulate", **setting, **asdict(report), "hit_rate": report.hit_rate}
    )


if __name__ == "__main__":
    sys.exit(main())
