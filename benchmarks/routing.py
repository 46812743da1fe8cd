"""benchmarks.routing: what routing is worth when several replicas serve the same conversations,
simulated.

    python -m benchmarks.routing --replicas 1,8,64 --routing session,random --trace FILE
    --sessions-per-s 0.3

Every replica gets the load of `--sessions-per-s`, so that more replicas have more conversations.
Replicas may fail, drain and come back (`--event`). Large clusters are simulated by some of their
replicas (`--simulated`). See `benchmarks/cluster_model.py` for what is simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import NamedTuple

from pensieve.runtime.launch.command_line import CommandParser
from pensieve.runtime.launch.options import parse_bytes
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.sim.simulator import Session, longest_context
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status, numbers, result_line, title_line
from pensieve.scripts.simulate import (
    add_common_options,
    add_hardware_options,
    in_processes,
    print_lines,
)
from pensieve.scripts.simulation.load import add_workload, config_of, conversations, host_size
from pensieve.scripts.simulation.models import MODELS
from pensieve.scripts.simulation.traces import TURN_COUNTS

from .cluster_model import DETECTION_S, ROUTINGS, Cluster, ClusterReport, ReplicaEvent

KINDS = ("fail", "drain", "back")
SETTING = ("replicas", "routing", "seed")


class ClusterRun(NamedTuple):
    """One line of the table."""

    replicas: int
    routing: str
    simulated: int | None
    seed: int
    config: SchedulerConfig
    cost: CostProfile
    sessions: list[Session]
    events: tuple[ReplicaEvent, ...]
    seconds: float
    warm_up_s: float


def parser() -> CommandParser:
    parser = CommandParser(prog="benchmarks.routing", description=__doc__.partition("\n")[0])
    add_common_options(parser)
    option = parser.add_argument
    option("--replicas", required=True, metavar="NUMBERS", help="of servers, comma between")
    option(
        "--routing",
        default="all",
        metavar="NAMES",
        help=f"all, or of {','.join(ROUTINGS)} (default all)",
    )
    option(
        "--simulated",
        type=int,
        metavar="N",
        help="replicas that stand for all (default: all are simulated)",
    )
    option(
        "--event",
        action="append",
        default=[],
        metavar="S:REPLICA:KIND",
        help=f"after S seconds one of {', '.join(KINDS)}; replicas count from 0; may be repeated",
    )
    add_workload(parser)
    option("--turn-counts", choices=TURN_COUNTS, default="geometric",
           help="of synthetic conversations (default %(default)s)")  # fmt: skip
    option(
        "--sessions-per-s",
        type=float,
        default=0.1,
        metavar="RATE",
        help="a replica (default %(default)s)",
    )
    option(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="of arrivals (default %(default)s)",
    )
    option("--warm-up-s", type=float, default=150.0, metavar="S",
           help="requests of its first seconds are not reported (default %(default)s)")  # fmt: skip
    option(
        "--ramp-s",
        type=float,
        default=60.0,
        metavar="S",
        help="in which conversations in the middle of their lives come (default %(default)s)",
    )
    option("--seeds", default="0", metavar="SEEDS", help="comma between (default %(default)s)")
    option("--model", choices=MODELS, default="llama-2-13b-gqa", help="(default %(default)s)")
    add_hardware_options(parser)
    parser.set_defaults(gpu_kv_bytes="38147MiB", host_kv_bytes="64GiB")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("benchmarks.routing", lambda: print_lines(args, cluster_lines))


def cluster_lines(args: argparse.Namespace) -> Iterator[str]:
    runs = plan_cluster(args)
    if not args.json:
        yield title_line(COLUMNS)
    for run, report in in_processes(simulate_cluster, runs, args.jobs):
        yield cluster_json(run, report) if args.json else cluster_line(run, report)


def plan_cluster(args: argparse.Namespace) -> list[ClusterRun]:
    """Raises SettingError."""
    speeds = (args.flops_per_s, args.memory_bytes_per_s, args.link_bytes_per_s)
    replicas = numbers(args.replicas, "--replicas", int)
    routings = ROUTINGS if args.routing == "all" else tuple(args.routing.split(","))
    if unknown := [name for name in routings if name not in ROUTINGS]:
        raise SettingError("--routing", f"is all, or of {', '.join(ROUTINGS)}, not {unknown[0]!r}")
    if not 0 <= args.warm_up_s < args.seconds:
        raise SettingError(
            "--warm-up-s", f"must be below --seconds ({args.seconds:g}), not {args.warm_up_s:g}"
        )
    if min(replicas) < 1 or (args.simulated is not None and args.simulated < 1):
        raise SettingError("--replicas, --simulated", "must be at least 1")
    events = tuple(sorted(_event(text) for text in args.event))
    _check_events(events, min(replicas), args.simulated)
    runs = []
    for number, seed in product(replicas, numbers(args.seeds, "--seeds", int)):
        sessions = conversations(args, args.sessions_per_s * number, seed)
        cost = MODELS[args.model].cost(args.chunk_tokens, longest_context(sessions), *speeds)
        gpu_bytes = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes")
        host_kv_chunks = host_size(args.host_kv_bytes, gpu_bytes) // cost.chunk_bytes
        config = config_of(args, sessions, cost, host_kv_chunks=host_kv_chunks)
        runs += [
            ClusterRun(
                number,
                routing,
                args.simulated,
                seed,
                config,
                cost,
                sessions,
                events,
                args.seconds,
                args.warm_up_s,
            )
            for routing in routings
        ]
    return runs


def _event(text: str) -> ReplicaEvent:
    try:
        at, replica, kind = text.split(":")
        event = ReplicaEvent(float(at), int(replica), kind)  # type: ignore[arg-type]
    except ValueError:
        raise SettingError(
            "--event", f"needs SECONDS:REPLICA:KIND, as 120:0:fail, not {text!r}"
        ) from None
    if kind not in KINDS:
        raise SettingError("--event", f"{kind!r} is none of {', '.join(KINDS)}")
    return event


def _check_events(events: Sequence[ReplicaEvent], replicas: int, simulated: int | None) -> None:
    for event in events:
        if not 0 <= event.replica < min(replicas, simulated or replicas):
            raise SettingError("--event", f"there is no simulated replica {event.replica}")
    for failed, back in product(events, events):
        early = failed.kind == "fail" and back.kind == "back" and failed.replica == back.replica
        if early and failed.at <= back.at <= failed.at + DETECTION_S:
            raise SettingError(
                "--event", f"a replica is back more than {DETECTION_S:g} s after it failed"
            )


def simulate_cluster(run: ClusterRun) -> ClusterReport:
    cluster = Cluster(
        run.config,
        run.cost,
        run.sessions,
        run.replicas,
        run.routing,  # type: ignore[arg-type]
        events=run.events,
        simulated=run.simulated,
        warm_up_s=run.warm_up_s,
        seed=run.seed,
    )
    return cluster.run(run.seconds)


COLUMNS = {
    "replicas": ("replicas", "8"),
    "routing": ("routing", ">17"),
    "seed": ("seed", "4"),
    "requests": ("requests", "9,"),
    "hit_percent": ("hit %", "6.1f"),
    "ttft_p50": ("TTFT p50 s", "10.3f"),
    "ttft_p95": ("p95 s", "8.3f"),
    "ttft_p99": ("p99 s", "8.3f"),
    "ms_per_token": ("ms/token", "8.1f"),
    "busiest": ("busiest", "7.2f"),
    "moved_percent": ("moved %", "7.1f"),
    "retried": ("retried", "7"),
}
"""busiest: of the replicas, seconds in steps over the mean; moved: served elsewhere than before."""


def cluster_line(run: ClusterRun, report: ClusterReport) -> str:
    rates = {
        "hit_percent": 100 * report.hit_rate,
        "moved_percent": 100 * report.moved / report.requests,
    }
    rates["ms_per_token"] = 1e3 * report.seconds_per_token
    return result_line(
        COLUMNS, asdict(report) | rates | {name: getattr(run, name) for name in SETTING}
    )


def cluster_json(run: ClusterRun, report: ClusterReport) -> str:
    setting = {name: getattr(run, name) for name in (*SETTING, "simulated")}
    return json.dumps(
        {"bench": "simulate_cluster", **setting, **asdict(report), "hit_rate": report.hit_rate}
    )


if __name__ == "__main__":
    sys.exit(main())
