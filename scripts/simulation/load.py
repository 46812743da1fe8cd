"""`simulate --preset load`: simulates the load of docs/measured/serving.md.

The times of steps and copies were measured on one H200 (docs/measured/steps.md), with Llama-2-13B
with 10 KV heads, bf16, 40 GB of KV on the GPU; or a profile of another model gives them.
Conversations start as a Poisson process on an empty server, or as in `benchmarks.serving`: in the
middle of their lives, each sending its whole history first. The report covers the run's last
seconds.
"""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from ...builder.choices import KV_CACHE_DTYPES
from ...runtime.launch.options import parse_bytes
from ...runtime.launch.settings import DEFAULT_HOST_KV
from ...runtime.shared.config import SharedConfig
from ...scheduler.config import EVICTION_POLICIES, SchedulerConfig, SchedulerSettings, StateConfig
from ...scheduler.cost import CostProfile, propose_swap_out_below
from ...scheduler.declaration import flag
from ...scheduler.sim.simulator import (
    Open,
    Session,
    SessionTurn,
    SimulatedStore,
    Simulator,
    VirtualDevice,
    longest_context,
    percentile,
)
from ...scheduler.types import Applied, RequestId, SettingError, Usage
from ..command import check_least, numbers
from .arrivals import Arrival, plan_arrivals
from .models import MODELS, read_costs, read_shape
from .traces import CHATS, TURN_COUNTS, read_trace, synthetic, synthetic_dialogue

MODEL = MODELS["llama-2-13b-gqa"]
LINK_BYTES_PER_S = 48.5e9  # each way, both at work
# of replies, to find where conversations are at a start in the middle of their lives
SECONDS_PER_TOKEN = 0.02
LOWER_TIER = {"same": 1.0, "packed": 0.782, "fp8": 0.5}  # of a chunk's bytes, on HOST
FP8_POOL = 129 / 256  # of a 16-bit chunk's bytes: 128 codes and their exponent
POOL = 4096  # conversations to draw from then


def measured(chunk_tokens: int) -> CostProfile:
    """One H200: steps at the shortest context by their tokens, attention at 1,024, the link busy in
    both directions."""
    chunk = 32  # tokens, of the measured one
    return CostProfile(
        chunk_tokens=chunk_tokens,
        chunk_seconds=1.19e-3 * chunk_tokens / chunk,
        attention=((1024, 0.05e-3 * chunk_tokens / chunk),),
        row_attention=((1024, 0.05e-3),),
        step_base_seconds=6.73e-3,
        steps=((1, 6.73e-3), (64, 7.48e-3), (256, 11.6e-3), (1024, 38.1e-3), (2048, 75.1e-3)),
        chunk_bytes=MODEL.token_bytes * chunk_tokens,
        link_bytes_per_s=LINK_BYTES_PER_S,
    )


def add_load_options(command: argparse.ArgumentParser) -> None:
    option = command.add_argument
    option(
        "--rate",
        default="2.5,4,5,5.75,7",
        metavar="RATES",
        help="conversations/s, comma between (%(default)s)",
    )
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines of request lengths, with `--start middle`",
    )
    option(
        "--synthetic",
        choices=CHATS,
        default="sharegpt",
        help="means of a data set (default %(default)s)",
    )
    option(
        "--config",
        type=Path,
        metavar="FILE",
        help="of another model: its config.json, with --profile",
    )
    option(
        "--profile",
        type=Path,
        metavar="FILE",
        help="its profile.json (default: Llama-2-13B, GQA, on one H200)",
    )
    option(
        "--start",
        choices=("empty", "middle"),
        default="empty",
        help="of conversations (default %(default)s)",
    )
    add_run_options(command)
    command.set_defaults(
        gpu_kv_bytes="38147MiB", host_kv_bytes="64GiB", max_num_batched_tokens=1024
    )


def add_run_options(command: argparse.ArgumentParser) -> None:
    """Of a run's conversations, its window and its server."""
    option = command.add_argument
    option("--turn-counts", choices=TURN_COUNTS, default="geometric",
           help="of synthetic conversations (default %(default)s)")  # fmt: skip
    option(
        "--ramp-s",
        type=float,
        default=100.0,
        metavar="S",
        help="in which those in the middle come (%(default)s)",
    )
    option(
        "--seconds", type=float, default=300.0, metavar="S", help="of a run (default %(default)s)"
    )
    option(
        "--measure-s",
        type=float,
        default=100.0,
        metavar="S",
        help="its last ones (default %(default)s)",
    )
    option(
        "--seeds",
        default="0",
        metavar="SEEDS",
        help="of arrivals and lengths, comma between (default %(default)s)",
    )
    option(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="of chunks on every tier; steps take their time in 16 bits (default %(default)s)",
    )
    option("--lower-tier-kv", choices=tuple(LOWER_TIER), default="same",
           help="how chunks are on HOST (default %(default)s)")  # fmt: skip
    option("--eviction", choices=EVICTION_POLICIES, default="lru", help="(default %(default)s)")
    option(
        "--swap-out-below",
        type=float,
        metavar="SHARE",
        help="(default: by the costs of steps and copies)",
    )
    option(
        "--generation-reserve",
        type=float,
        default=SchedulerSettings().generation_reserve,
        metavar="SHARE",
        help="(default %(default)s)",
    )
    option(
        "--shared-bytes-per-s",
        type=float,
        default=0.0,
        metavar="B",
        help="at which a replica reads and writes a store that all share, with room for all KV "
        "(default: no such store)",
    )


def sessions_of(args: argparse.Namespace, rate: float, seed: int) -> list[Session]:
    if args.start == "empty":
        most = int(2 * rate * args.seconds) + 100  # beyond what chance brings
        sessions = synthetic_sessions(args, seed, most, rate)
        return [session for session in sessions if session.start_s < args.seconds]
    return conversations(args, rate, seed)


def synthetic_sessions(
    args: argparse.Namespace, seed: int, conversations: int, sessions_per_s: float
) -> list[Session]:
    return synthetic(
        CHATS[args.synthetic],
        conversations=conversations,
        sessions_per_s=sessions_per_s,
        think_s=args.think_s,
        seed=seed,
        turn_counts=args.turn_counts,
    )


def conversations(args: argparse.Namespace, rate: float, seed: int) -> list[Session]:
    """So many a second. They are under way at the start, and come evenly during `--ramp-s`. Raises
    SettingError."""
    if args.trace is not None:
        sessions = read_trace(args.trace, sessions_per_s=1.0, seed=seed)
    else:
        sessions = synthetic_sessions(args, seed, POOL, 1.0)
    system = {session.name: session.system_tokens for session in sessions}
    arrivals = plan_arrivals(
        [synthetic_dialogue(session) for session in sessions],
        rate=rate,
        seconds=args.seconds,
        seconds_per_token=SECONDS_PER_TOKEN,
        seed=seed,
        ramp_s=args.ramp_s,
    )
    if not arrivals:
        raise SettingError(
            "--seconds",
            f"none comes in {args.seconds:g} s at {rate:.3g} conversations/s: take more",
        )
    return [
        joined(arrival, f"{number}")._replace(system_tokens=system[arrival.dialogue.name])
        for number, arrival in enumerate(arrivals)
    ]


def joined(arrival: Arrival, name: str) -> Session:
    """What is left of the conversation: its history is the first prompt's."""
    first, *later = arrival.dialogue.turns[arrival.turn :]
    context = first.history_tokens + first.input_tokens + arrival.done
    return Session(
        name, arrival.at, (SessionTurn(0, context, first.output_tokens - arrival.done), *later)
    )


def add_workload(command: argparse.ArgumentParser) -> None:
    """Of the simulators that replay a trace as well."""
    workload = command.add_mutually_exclusive_group(required=True)
    workload.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines of request lengths (.gz or plain)"
    )
    workload.add_argument(
        "--synthetic", choices=CHATS, help="conversations with the means of a data set"
    )


def host_size(text: str, gpu_bytes: int) -> int:
    """Bytes of `--host-kv-bytes`; `auto` is the default of `pensieve serve` on this machine, beside
    a GPU's pool of `gpu_bytes`. SettingError."""
    if text != "auto":
        return parse_bytes(text, "--host-kv-bytes")
    from ...runtime.device.memory import host_memory, host_pool_bytes  # and torch

    return max(DEFAULT_HOST_KV, host_pool_bytes(host_memory(), gpu_bytes))


def config_of(
    args: argparse.Namespace, sessions: Sequence[Session], cost: CostProfile, **how: Any
) -> SchedulerConfig:
    """From the options that all simulators have, and `how`, as `SchedulerConfig` has it: without
    `conversation_ttl` conversations last for ever. SettingError."""
    return SchedulerConfig(
        gpu_kv_chunks=parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes") // cost.chunk_bytes,
        max_model_len=longest_context(sessions),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        target_ms_per_token=args.target_ms_per_token,
        chunk_tokens=args.chunk_tokens,
        max_queue=len(sessions),
        queue_order=args.queue_order,
        **{"conversation_ttl": inf, **how},
    )


class LoadRun(NamedTuple):
    """One line of the table. `cost`: of chunks as they are on HOST; `token_bytes`: KV of a token on
    the GPU."""

    rate: float
    seed: int
    config: SchedulerConfig
    cost: CostProfile
    token_bytes: float
    sessions: list[Session]
    seconds: float
    measure_s: float
    think_s: float
    shared_bytes_per_s: float = 0.0


def run_of(args: argparse.Namespace, rate: float, seed: int) -> LoadRun:
    """Raises SettingError."""
    sessions = sessions_of(args, rate, seed)
    if not sessions:
        raise SettingError(
            "--rate", f"at {rate:g} conversations/s none comes in {args.seconds:g} s"
        )
    cost = measured(args.chunk_tokens)
    states = None
    if args.profile is not None:
        shape = read_shape(args.config, ranks=1)
        cost, _ = read_costs(args.profile, shape, args.chunk_tokens)
        states = shape.states(args.chunk_tokens, args.max_num_seqs)
    return load_run(args, cost, sessions, rate, seed, states)


def load_run(
    args: argparse.Namespace,
    cost: CostProfile,
    sessions: list[Session],
    rate: float,
    seed: int,
    states: StateConfig | None = None,
) -> LoadRun:
    """A run of one server with these costs and states. Raises SettingError."""
    for name, plain in (("kv_cache_dtype", "auto"), ("lower_tier_kv", "same")):
        if states is not None and getattr(args, name) != plain:
            raise SettingError(flag(name), f"must be {plain} for a model with states")
    if args.kv_cache_dtype != "auto":
        if args.lower_tier_kv != "same":
            raise SettingError("--lower-tier-kv", "cannot be given beside --kv-cache-dtype")
        cost = replace(cost, chunk_bytes=int(cost.chunk_bytes * FP8_POOL))
    lower = replace(
        cost,
        chunk_bytes=int(cost.chunk_bytes * LOWER_TIER[args.lower_tier_kv]),
        disk_read_bytes_per_s=args.disk_read_bytes_per_s,
        disk_write_bytes_per_s=args.disk_write_bytes_per_s,
    )
    how = {
        name: getattr(args, name) for name in ("eviction", "swap_out_below", "generation_reserve")
    }
    gpu_bytes = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes")
    how["host_kv_chunks"] = host_size(args.host_kv_bytes, gpu_bytes) // lower.chunk_bytes
    disk_bytes = parse_bytes(args.disk_kv_bytes, "--disk-kv-bytes")
    how["disk_kv_chunks"] = disk_bytes // lower.chunk_bytes
    check_least(args, shared_bytes_per_s=0)
    if args.shared_bytes_per_s:
        if states is not None:
            raise SettingError("--shared-bytes-per-s", "must be 0 for a model with states")
        how["shared_min_tokens"] = SharedConfig.min_tokens
    config = config_of(args, sessions, cost, states=states, **how)
    if config.swap_out_below is None:  # so that results can tell it
        config = replace(config, swap_out_below=propose_swap_out_below(lower, config))
    token_bytes = cost.chunk_bytes / cost.chunk_tokens
    windows = args.seconds, args.measure_s, args.think_s
    speed = args.shared_bytes_per_s
    return LoadRun(rate, seed, config, lower, token_bytes, sessions, *windows, speed)


@dataclass(slots=True)
class Tally:
    """What happened from `start` on, seconds. Times in seconds.

    ttft, usage      of the requests whose first token came
    waits            of first and of later turns: `ttft`, and the waits so far of the requests that
                     have no token at the end
    latency, tokens  of the replies that ended: from request to end, and their tokens
    logs, returning  tokens of these conversations behind their replies; how many of their users
                     come back
    gaps             between two tokens of a reply
    """

    start: float
    usage: list[Usage] = field(default_factory=list)
    ttft: array[float] = field(default_factory=lambda: array("d"))
    waits: dict[str, list[float]] = field(default_factory=lambda: {"first": [], "later": []})
    latency: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    logs: int = 0
    returning: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    _latest: dict[RequestId, float] = field(default_factory=dict)

    def watch(self, now: float, applied: Applied, served: Mapping[RequestId, Open]) -> None:
        latest = self._latest
        measured = now >= self.start
        for row in applied.results():
            request = row.request
            if row.tokens:
                if measured and request in latest:
                    self.gaps.append(now - latest[request])
                latest[request] = now
        for row in applied.rows:
            opened = served[row.request]
            if row.usage is not None and measured:
                self.usage.append(row.usage)
                self.ttft.append(now - opened.arrival)
                self._waited(opened, now)
            if row.finish is not None:
                del latest[row.request]
                if measured:
                    self._ended(opened, now)

    def end(self, now: float, served: Mapping[RequestId, Open]) -> None:
        """The run is over. Without the requests that still wait, an order that lets long prompts
        wait for ever would look best."""
        for request, opened in served.items():
            if request not in self._latest:
                self._waited(opened, now)

    def _waited(self, request: Open, now: float) -> None:
        self.waits["later" if request.turn else "first"].append(now - request.arrival)

    def _ended(self, request: Open, now: float) -> None:
        turns = request.session.turns
        turn = turns[request.turn]
        self.latency.append(now - request.arrival)
        self.tokens.append(turn.output_tokens)
        self.logs += turn.history_tokens + turn.input_tokens + turn.output_tokens
        self.returning += request.turn + 1 < len(turns)


def simulate_load(run: LoadRun) -> dict[str, float] | None:
    """One line's numbers; None if no reply began or none ended while it was measured."""
    tally = Tally(run.seconds - run.measure_s)
    store = SimulatedStore(run.shared_bytes_per_s) if run.shared_bytes_per_s else None
    device = VirtualDevice(run.cost, store=store)
    simulator = Simulator(run.config, run.cost, run.sessions, device=device, watch=tally.watch)
    simulator.play(run.seconds)
    tally.end(simulator.now, simulator.in_progress)
    return line_of(run, tally, simulator) if tally.latency and tally.ttft else None


def line_of(run: LoadRun, tally: Tally, simulator: Simulator) -> dict[str, float]:
    """`needs_gb`: the KV of running requests and of users who will return, if none of it were lost,
    GB."""
    ended = len(tally.latency)
    stats = simulator.scheduler.stats()
    prompts = {
        item.name: sum(getattr(usage, item.name) for usage in tally.usage) for item in fields(Usage)
    }
    per_token = [
        seconds / tokens for seconds, tokens in zip(tally.latency, tally.tokens, strict=True)
    ]
    waits = {
        f"{turns}_wait_s_p{percent}": percentile(seconds, percent / 100)
        for turns, seconds in tally.waits.items()
        for percent in (50, 95, 100)
        if seconds
    }
    held_s = (sum(tally.latency) + run.think_s * tally.returning) / ended
    return {
        "rate": run.rate,
        "seed": run.seed,
        "done_per_s": ended / run.measure_s,
        "output_tokens_per_s": (len(tally.ttft) + len(tally.gaps)) / run.measure_s,
        "ms_per_token": 1e3 * sum(per_token) / ended,
        "ms_per_token_p50": 1e3 * percentile(per_token, 0.5),
        "ms_per_token_p99": 1e3 * percentile(per_token, 0.99),
        "ttft_ms_p50": 1e3 * percentile(tally.ttft, 0.5),
        "ttft_ms_p95": 1e3 * percentile(tally.ttft, 0.95),
        "ttft_ms_p99": 1e3 * percentile(tally.ttft, 0.99),
        "inter_token_ms_p50": 1e3 * percentile(tally.gaps, 0.5),
        "inter_token_ms_p99": 1e3 * percentile(tally.gaps, 0.99),
        **waits,
        **{
            f"{name}_percent": 100 * tokens / sum(prompts.values())
            for name, tokens in prompts.items()
        },
        "prompt_tokens": sum(prompts.values()) / len(tally.usage),
        "needs_gb": held_s * tally.logs / run.measure_s * run.token_bytes / 1e9,
        "running": stats.running,
        "waiting": stats.waiting,
    }


COLUMNS = {
    "rate": ("rate", "5.2f"),
    "seed": ("seed", "4.0f"),
    "done_per_s": ("req/s", "6.1f"),
    "ms_per_token": ("ms/token", "8.1f"),
    "ttft_ms_p50": ("TTFT p50", "8.0f"),
    "ttft_ms_p99": ("p99", "7.0f"),
    "inter_token_ms_p50": ("gap p50", "7.1f"),
    "inter_token_ms_p99": ("p99", "6.1f"),
    "gpu_percent": ("GPU %", "5.0f"),
    "host_percent": ("HOST", "4.0f"),
    "recomputed_percent": ("again", "5.0f"),
    "new_percent": ("new", "4.0f"),
    "prompt_tokens": ("prompt", "6.0f"),
    "needs_gb": ("needs GB", "8.0f"),
    "running": ("running", "7.0f"),
    "waiting": ("waiting", "7.0f"),
}
"""Times in ms; `again`: computed again. running, waiting: at the run's end."""


def plan_load(args: argparse.Namespace) -> list[LoadRun]:
    """Raises SettingError."""
    if args.measure_s > args.seconds:
        raise SettingError(
            "--measure-s", f"is part of --seconds ({args.seconds:g}), not {args.measure_s:g}"
        )
    rates, seeds = numbers(args.rate, "--rate", float), numbers(args.seeds, "--seeds", int)
    if args.trace is not None and args.start == "empty":
        raise SettingError("--trace", "needs `--start middle`")
    if (args.config is None) != (args.profile is None):
        raise SettingError("--config, --profile", "are of one model: give both or none")
    if min(rates) <= 0:
        raise SettingError("--rate", f"must be above 0, not {args.rate}")
    return [run_of(args, rate, seed) for rate, seed in product(rates, seeds)]
