"""plan: finds the number of GPUs and the host memory that a load of conversations needs, and their
price.

    pensieve plan --config config.json --profile profile.json --synthetic sharegpt --load 10,100
    --ms-per-token 20

One replica is simulated (`simulation/load.py`). For each size of host memory and of disk, and each
seed, bisection finds the largest rate of conversations that meets the targets. The median over the
seeds counts; the lowest and the highest say how sure it is. A session stays with its replica, so
the replica with the most sessions must meet the targets too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ..runtime.launch.command_line import CommandParser
from ..runtime.launch.options import parse_bytes
from ..runtime.system import safe_path
from ..scheduler.config import StateConfig
from ..scheduler.cost import CostProfile
from ..scheduler.sim.ring import fullest_share
from ..scheduler.types import SettingError
from .command import (
    check_above_0,
    check_least,
    check_matplotlib,
    exit_status,
    numbers,
    result_line,
    subplots,
    title_line,
)  # fmt: skip
from .simulate import POSITIVE, add_common_options, add_disk_options, add_hardware_options
from .simulation.load import (
    add_run_options,
    add_workload,
    conversations,
    host_size,
    load_run,
    simulate_load,
)
from .simulation.models import ModelShape, read_costs, read_shape

TARGETS = ("ms_per_token", "ttft_ms_p95")  # options, and numbers of `simulate_load`
# the bisection ends at this ratio of bounds; this share of its first guess is nearly no load
CLOSE = 1.04
IDLE = 2**-6
# what arrives in a short run may exceed the rate at which tokens can be computed so many times
MOST = 4.0


def parser() -> CommandParser:
    command = CommandParser(prog="pensieve plan", description=__doc__.partition("\n")[0])
    option = command.add_argument
    option("--config", required=True, type=Path, metavar="FILE", help="the model's config.json")
    option(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile.json of `pensieve profile` (default: an estimate)",
    )
    option(
        "--load", required=True, metavar="RATES", help="conversations/s of all users, comma between"
    )
    add_workload(command)
    option(
        "--ms-per-token",
        type=float,
        metavar="MS",
        help="target: mean of (end - request) / tokens of the reply",
    )
    option(
        "--ttft-ms-p95",
        type=float,
        metavar="MS",
        help="target: 95th percentile of the time to the first token",
    )
    option(
        "--margin",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="of the targets, spared (default %(default)s)",
    )
    option(
        "--price",
        type=float,
        default=1.0,
        metavar="P",
        help="of a GPU for an hour (default 1: cost in GPU hours)",
    )
    option(
        "--host-price",
        type=float,
        default=0.0,
        metavar="P",
        help="of a GiB of host memory for an hour (default 0)",
    )
    option(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of a replica (default %(default)s)",
    )
    option(
        "--gpu-memory",
        default="139GiB",
        metavar="SIZE",
        help="KV `auto`: 0.9 of it without weights (%(default)s)",
    )
    option("--plot", type=Path, metavar="FILE", help="draw the cost over the load (matplotlib)")
    add_common_options(command)
    add_disk_options(command)
    add_run_options(command)
    add_hardware_options(command)
    command.set_defaults(
        gpu_kv_bytes="auto", host_kv_bytes="64GiB", seeds="0,1,2", measure_s=180.0, ramp_s=60.0
    )
    return command


class TierBytes(NamedTuple):
    """Bytes of KV for each GPU."""

    host: int
    disk: int


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("pensieve plan", lambda: plan(args))


def plan(args: argparse.Namespace) -> None:
    """Prints the plan. Raises SettingError."""
    loads, seeds = check(args)
    shape = read_shape(args.config, args.tensor_parallel)
    states = shape.states(args.chunk_tokens, args.max_num_seqs)
    cost, source = describe(args, shape, states)
    sizes = tier_sizes(args)
    cases = list(product(sizes, seeds))
    spawn = multiprocessing.get_context("spawn")
    with safe_path(), spawn.Pool(min(args.jobs, len(cases))) as pool:
        case_rates = pool.starmap(partial(largest_rate, args, cost, states), cases, chunksize=1)
    rates = {
        size: [rate for case, rate in zip(cases, case_rates, strict=True) if case[0] == size]
        for size in sizes
    }
    rows = [plan_row(args, load, size, rates[size]) for load, size in product(loads, sizes)]
    print("\n".join(map(json.dumps, rows) if args.json else table(source, rows)))
    if not args.json:
        print("\n".join(size_lines(args, shape, sizes)))
    if args.plot is not None:
        draw(args, rates, loads[-1])


def size_lines(
    args: argparse.Namespace, shape: ModelShape, sizes: Sequence[TierBytes]
) -> Iterator[str]:
    yield f"a GPU: {shape.sizes()}"
    for host in sorted({size.host for size in sizes}):
        held = shape.states_in_host(args.chunk_tokens, args.max_num_seqs, host)
        if held is not None:
            yield f"a GPU: {held.text}{held.few and ', '}{held.few}"


def tier_sizes(args: argparse.Namespace) -> list[TierBytes]:
    """Raises SettingError."""
    gpu_bytes = parse_bytes(args.gpu_kv_bytes, "--gpu-kv-bytes")
    host = sorted(host_size(size, gpu_bytes) for size in args.host_kv_bytes.split(","))
    disk = sorted(parse_bytes(size, "--disk-kv-bytes") for size in args.disk_kv_bytes.split(","))
    return [TierBytes(*sizes) for sizes in product(host, disk)]


def check(args: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Returns the loads, ascending, and the seeds. Raises SettingError."""
    check_above_0(args, (*POSITIVE, *TARGETS))
    check_least(args, price=0, host_price=0, margin=0, ramp_s=0, tensor_parallel=1, jobs=1)
    if not any(getattr(args, target) for target in TARGETS):
        raise SettingError("--ms-per-token, --ttft-ms-p95", "give one target or both")
    if args.measure_s >= args.seconds or args.margin >= 1:
        raise SettingError(
            "--measure-s, --margin", f"must be below --seconds ({args.seconds:g}), and below 1"
        )
    if args.ramp_s > args.seconds - args.measure_s:
        raise SettingError(
            "--ramp-s",
            f"must be at most --seconds less --measure-s ({args.seconds - args.measure_s:g}): "
            "what comes later is not measured",
        )
    loads = sorted(numbers(args.load, "--load", float))
    seeds = numbers(args.seeds, "--seeds", int)
    if not 0 < loads[0] <= loads[-1] < math.inf:
        raise SettingError("--load", f"must be above 0, not {args.load}")
    if args.plot is not None:
        check_matplotlib("--plot")  # before anything is simulated
    return loads, seeds


def describe(
    args: argparse.Namespace, shape: ModelShape, states: StateConfig | None
) -> tuple[CostProfile, str]:
    """Costs of a replica, and where they come from; settles `args.gpu_kv_bytes`. Raises
    SettingError."""
    if args.gpu_kv_bytes == "auto":
        taken = shape.weight_bytes
        if states is not None:
            taken += states.slots * states.chunks * shape.token_bytes * args.chunk_tokens
        left = int(0.9 * parse_bytes(args.gpu_memory, "--gpu-memory")) - taken
        args.gpu_kv_bytes = str(left)
        if left <= 0:
            message = (
                f"{taken / 1e9:.3g} GB of weights{' and states' if states else ''} leave no room "
                "for KV: use more GPUs a replica"
            )
            raise SettingError("--tensor-parallel", message)
    if args.profile is not None:
        return read_costs(args.profile, shape, args.chunk_tokens)
    speeds = args.flops_per_s, args.memory_bytes_per_s, args.link_bytes_per_s
    return shape.cost(args.chunk_tokens, 2**17, *speeds), "not measured: estimated from the shape"


def largest_rate(
    args: argparse.Namespace,
    cost: CostProfile,
    states: StateConfig | None,
    sizes: TierBytes,
    seed: int,
) -> float:
    """Conversations/s at which one replica meets the targets. Raises SettingError if it never
    does, or if the run is too short to tell: if it meets them with more than it can compute."""
    tiers = {"host_kv_bytes": str(sizes.host), "disk_kv_bytes": str(sizes.disk)}
    args = argparse.Namespace(**{**vars(args), **tiers})

    sample = conversations(args, 10.0, seed)
    sums = [sum(turn.input_tokens + turn.output_tokens for turn in one.turns) for one in sample]
    tokens = sum(sums) / len(sample)
    own_tokens = max(tokens - sum(one.system_tokens for one in sample) / len(sample), 1.0)
    per_second = cost.chunk_tokens / cost.chunk_seconds  # in a full batch
    most = MOST * per_second / own_tokens

    def good(rate: float) -> bool:
        if rate > most:
            raise SettingError(
                "--seconds, --measure-s",
                f"{rate:.3g} conversations/s, more than a replica can compute, miss no target in "
                f"{args.seconds:g} s: take more seconds, or lower targets",
            )
        sessions = conversations(args, rate, seed)
        figures = simulate_load(load_run(args, cost, sessions, rate, seed, states))
        if figures is None:
            raise SettingError(
                "--measure-s", f"no reply ended at {rate:.2g} conversations/s: take more seconds"
            )
        limits = [(figures[name], getattr(args, name)) for name in TARGETS]
        return all(limit is None or value <= (1 - args.margin) * limit for value, limit in limits)

    return bisect(good, per_second / tokens / 2)


def bisect(good: Callable[[float], bool], guess: float) -> float:
    """The largest rate that is good, within CLOSE. Raises SettingError if none is, down to IDLE of
    the guess."""
    low = guess
    high = math.inf
    while not good(low):
        low, high = low / 2, low
        if low < IDLE * guess:
            message = (
                "an idle replica misses them: raise them, or divide the model (--tensor-parallel)"
            )
            raise SettingError("--ms-per-token, --ttft-ms-p95", message)
    while high > CLOSE * low:
        middle = math.sqrt(low * high) if high < math.inf else 2 * low
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def replicas(load: float, rate: float) -> int:
    """So many that the one with the most sessions has at most `rate` of the load."""
    count = math.ceil(load / rate)
    while load * fullest_share(count) > rate:
        count += 1 + count // 50
    return count


def plan_row(
    args: argparse.Namespace, load: float, sizes: TierBytes, rates: Sequence[float]
) -> dict:
    gpus, most, fewest = (
        args.tensor_parallel * replicas(load, of(rates)) for of in (median, min, max)
    )
    host_gib = gpus * sizes.host / 2**30
    cost = args.price * gpus + args.host_price * host_gib
    even = args.tensor_parallel * math.ceil(load / median(rates))
    spread = f"{min(rates):.3g} to {max(rates):.3g}", gpus, f"{fewest} to {most}"
    values = (
        sizes.host / 2**30,
        sizes.disk / 2**30,
        load,
        median(rates),
        *spread,
        even,
        host_gib,
        cost,
        cost / load / 3.6,
    )
    return dict(zip(COLUMNS, values, strict=True))


COLUMNS = {
    "host_gib_per_gpu": ("host GiB/GPU", "5.4g"),
    "disk_gib_per_gpu": ("disk", "5.4g"),
    "load": ("load/s", "6.4g"),
    "rate": ("a replica/s", "5.3g"),
    "rates_by_seed": ("by seed", ">14"),
    "gpus": ("GPUs", "5"),
    "gpus_by_seed": ("by seed", ">9"),
    "gpus_if_even": ("if even", "5"),
    "host_gib": ("host GiB", "8,.0f"),
    "cost": ("cost/h", "9,.2f"),
    "cost_1000": ("of 1,000", "8.4g"),
}
"""if even: GPUs if all replicas had equally many sessions; of 1,000: cost of 1,000
conversations."""


def table(source: str, rows: Sequence[Mapping]) -> Iterator[str]:
    yield title_line(COLUMNS)
    yield from (result_line(COLUMNS, row) for row in rows)
    best = min(
        rows,
        key=lambda row: (-row["load"], row["cost"], row["host_gib"], row["disk_gib_per_gpu"]),
    )
    disk = ", --disk-kv-bytes {disk_gib_per_gpu:.0f}GiB" if best["disk_gib_per_gpu"] else ""
    line = "{load:g}/s: {gpus} GPUs, {host_gib:,.0f} GiB of host memory" + disk
    yield (line + ", {cost:,.2f} an hour").format(**best)
    yield "how sure: by seed {gpus_by_seed} GPUs; other traffic and failures are not in it".format(
        **best
    )
    yield f"costs of steps: {source}; simulated beside measured: docs/measured/planning.md"


def _label(sizes: TierBytes) -> str:
    disk = f", {sizes.disk / 2**30:g} of disk" if sizes.disk else ""
    return f"{sizes.host / 2**30:g} GiB of host memory{disk} a GPU"


def draw(args: argparse.Namespace, rates: Mapping[TierBytes, Sequence[float]], most: float) -> None:
    """Writes the figure: a line a size of host memory, shaded between the seeds."""
    figure, axis = subplots("--plot", figsize=(7, 4))
    loads = [most * step / 200 for step in range(1, 201)]
    for size, by_seed in rates.items():
        low, middle, high = (
            [plan_row(args, x, size, [of(by_seed)])["cost"] for x in loads]
            for of in (max, median, min)
        )
        (line,) = axis.plot(loads, middle, drawstyle="steps", label=_label(size))
        axis.fill_between(loads, low, high, step="pre", alpha=0.2, color=line.get_color())
    axis.set(
        title="Shaded: between the seeds",
        xlabel="conversations/s",
        ylabel="cost of an hour",
        xlim=0,
        ylim=0,
    )
    axis.legend()
    figure.savefig(args.plot, dpi=100)
