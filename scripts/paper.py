"""paper: CachedAttention's evaluation (Gao et al., USENIX ATC 2024, section 4) replayed on a virtual clock.

9,000 sessions start as a Poisson process at 1/s and bring 52,000 turns, of which the first 10,000 are warm-up. Its four
models run on two or four A100s with 128 GB of host memory and 2 TB or 10 TB of disk, in batches of 24. A conversation's
KV lives for an hour (as in its section 4.3.6), and one that outgrows the context window goes on with its newer half.

The scheduler is the real one. To save time, the clock counts units of 128 tokens (64 if a token's KV is large). One
unit is one chunk, and every length is rounded to units. One simulated step generates a unit for each row, and takes as
long as the steps for the unit's tokens. The scheduler limits copies in progress by seconds, and these steps are long.
So its profile gets a faster disk and faster copies to HOST; then it reads all KV that is on disk, as the paper does.
The paper does not state the think time: it is assumed to be a minute on average. docs/measured/cachedattention.md has
the results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..scheduler.config import SchedulerConfig
from ..scheduler.context_window import KEEP, RECOMPUTE
from ..scheduler.cost import CostProfile, analytic_profile
from ..scheduler.sim.simulator import Report, Session, SessionTurn, Simulator, VirtualDevice
from ..scheduler.types import SettingError, Usage
from .bench.traces import ChatStatistics, synthetic
from .command import check_least, exit_status, result_line, subplots, title_line
from .simulation.models import ELEMENT_BYTES, ModelShape

# The paper's turns, with the lengths that vLLM's paper gives for ShareGPT. A session then has 2,870 tokens on average;
# 49% have more than 2,048 and 24% more than 4,096, in the paper 47% and 30% (figure 2).
CHAT = ChatStatistics(turns=5.75, input_tokens=161.31, output_tokens=337.99)
THINK_S = 60.0
TTL_S = 3600.0
SESSIONS, RATE, WARM_UP = 9_000, 1.0, 10_000
GPU_BYTES, HOST_BYTES = 72 * 10**9, 128 * 10**9  # of an A100's 80 GB, after the memory that steps need
TB = 10**12
# One A100: half of its bf16 peak in large steps, four fifths of its memory's speed in small ones.
FLOPS_PER_S, MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 156e12, 1.6e12, 26e9
DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S = 5e9, 4e9
GPU_HOUR, HOST_GB_HOUR, DISK_GB_HOUR = 5.0, 0.0088, 0.000082  # dollars
DISK_SCALE = 32  # factor of the disk's speed in the scheduler's costs
POLL_S = 0.2
SEATS, STEP_TOKENS = 24, 2048


class Paper(NamedTuple):
    """A model as the paper serves it."""

    shape: ModelShape
    gpus: int
    window: int  # tokens
    unit: int = 128  # tokens

    @property
    def gpu_kv_bytes(self) -> int:
        return self.gpus * GPU_BYTES - self.shape.parameters * ELEMENT_BYTES


MODELS = {
    "llama-13b": Paper(ModelShape(13_020_000_000, 40, 40, 40), 2, 4096),
    "llama-65b": Paper(ModelShape(65_290_000_000, 80, 64, 64), 4, 2048, unit=64),
    "llama-70b": Paper(ModelShape(68_980_000_000, 80, 64, 8), 4, 4096),
    "falcon-40b": Paper(ModelShape(41_300_000_000, 60, 128, 8, 64), 4, 2048),
}
CAPACITIES = (TB // 2, TB, 2 * TB, 5 * TB, 10 * TB)
RATES = (0.5, 1.0, 1.5, 2.0)
POLICIES = ("retention", "lru-conversation", "fifo-conversation")


@dataclass(frozen=True, slots=True)
class Case:
    """One run. Without `reuse` every turn computes its whole history."""

    model: str
    policy: str = "retention"
    host: int = HOST_BYTES
    disk: int = 10 * TB
    rate: float = RATE
    reuse: bool = True
    overflow: str = KEEP
    save: str = "async"


Cases = Callable[[str], list[Case]]


def only(name: str, cases: Cases) -> Cases:
    """What is shown for one model."""
    return lambda model: cases(model) if model == name else []


def best(model: str) -> list[Case]:
    return [Case(model), Case(model, host=0, disk=0, reuse=False)]


FIGURES = {
    "13, 16, 17: hit rate, GPU time and cost, against recomputation": best,
    "21: hit rate and GPU time by policy and disk": lambda model: [
        Case(model, policy, disk=disk) for disk in (2 * TB, 10 * TB) for policy in POLICIES
    ],
    "22: hit rate if the history kept beyond the window is recomputed": lambda model: [
        Case(model),
        Case(model, overflow=RECOMPUTE),
    ],
    "23: hit rate by capacity": only("llama-13b", lambda model: [Case(model, disk=disk) for disk in CAPACITIES]),
    "24: hit rate by medium": lambda model: [Case(model, host=0, disk=0), Case(model, disk=0), Case(model)],
    "25: hit rate and GPU time by arrival rate": only(
        "llama-13b", lambda model: [Case(model, rate=rate) for rate in RATES]
    ),
    "save: hit rate if a turn ends when it is saved": only(
        "llama-65b", lambda model: [Case(model), Case(model, save="sync")]
    ),
}
"""The cases of each model; a case of several figures is run once."""


# -- one run


@cache
def chats(conversations: int, rate: float, model: Paper) -> list[Session]:
    """The conversations, in units; a reply ends at half of the window."""
    sessions = synthetic(CHAT, conversations=conversations, sessions_per_s=rate, think_s=THINK_S, seed=0)
    return [session._replace(turns=tuple(_in_units(session.turns, model))) for session in sessions]


def _in_units(turns: Sequence[SessionTurn], model: Paper) -> Iterator[SessionTurn]:
    """Ends of inputs and replies are rounded, not their lengths, so that errors do not add up."""
    unit, longest = model.unit, model.window // model.unit // 2
    tokens = units = 0
    for turn in turns:
        tokens += turn.input_tokens
        given = max(1, round(tokens / unit) - units)
        tokens += min(turn.output_tokens, longest * unit)
        reply = min(max(1, round(tokens / unit) - units - given), longest)
        yield SessionTurn(units, given, reply, turn.think_s)
        units += given + reply


def profile(model: Paper, sample: int = 1) -> CostProfile:
    """A unit costs as much as all of its tokens; a step reads the weights once for each of these tokens.

    With one session in `sample`, a token costs `sample` times as much: a step with its share of the rows takes as long
    as one with all of them.
    """
    shape, unit, speed = model.shape, model.unit, model.gpus / sample
    cost = analytic_profile(
        chunk_tokens=1,
        parameters=shape.parameters * unit,
        layers=shape.layers,
        attention_width=shape.heads * shape.head_dim * unit**2,
        chunk_bytes=shape.token_bytes * unit,
        max_context=model.window // unit,
        flops_per_s=speed * FLOPS_PER_S,
        link_bytes_per_s=LINK_BYTES_PER_S / sample,
        step_base_seconds=unit * shape.parameters * ELEMENT_BYTES / (model.gpus * MEMORY_BYTES_PER_S),
    )
    read_once = unit * shape.token_bytes * unit / (speed * MEMORY_BYTES_PER_S)  # the context, for each token
    return replace(
        cost,
        row_attention=tuple((context, context * read_once) for context, _ in cost.attention),
        disk_read_bytes_per_s=DISK_READ_BYTES_PER_S / sample,
        disk_write_bytes_per_s=DISK_WRITE_BYTES_PER_S / sample,
    )


def run(case: Case, conversations: int, warm_up: int, sample: int = 1) -> Report:
    """Runs one of `sample` sessions, with its share of all resources; `busy_s` is scaled to all turns."""
    model = MODELS[case.model]
    cost, sessions = profile(model, sample), chats(conversations // sample, case.rate / sample, model)
    config = SchedulerConfig(
        gpu_kv_chunks=model.gpu_kv_bytes // cost.chunk_bytes // sample,
        host_kv_chunks=case.host // cost.chunk_bytes // sample,
        disk_kv_chunks=case.disk // cost.chunk_bytes // sample,
        max_model_len=model.window // model.unit,
        max_num_seqs=SEATS // sample,
        max_num_batched_tokens=STEP_TOKENS // sample,  # units: a step stands for as many as a unit has tokens
        chunk_tokens=1,
        max_queue=sum(len(session.turns) for session in sessions),
        eviction=case.policy,
        conversation_ttl=TTL_S,
        reuse=case.reuse,
        overflow=case.overflow,
        save=case.save,
    )
    believed = replace(
        cost,
        out_bytes_per_s=cost.link_bytes_per_s * model.unit,
        disk_read_bytes_per_s=cost.disk_read_bytes_per_s * DISK_SCALE,
        disk_write_bytes_per_s=cost.disk_write_bytes_per_s * DISK_SCALE,
    )
    device = VirtualDevice(cost, POLL_S)
    report = Simulator(config, believed, sessions, warm_up // sample, device, truncate=True).run()
    return replace(report, busy_s=report.busy_s / sample)


# -- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="paper", description=__doc__.partition("\n")[0])
    option = made.add_argument
    numbers = ",".join(title.partition(":")[0].replace(" ", "") for title in FIGURES)
    option("--figures", default=numbers, metavar="NUMBERS", help="(default %(default)s)")
    option("--models", default=",".join(MODELS), metavar="NAMES", help="(default %(default)s)")
    option("--sessions", type=int, default=SESSIONS, metavar="N", help="(default %(default)s)")
    option("--warm-up", type=int, default=WARM_UP, metavar="N", help="turns not counted (default %(default)s)")
    option("--sample", type=int, default=1, metavar="N", help="one session in N on its share of everything (default 1)")
    option("--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at a time (default %(default)s)")
    option("--results", type=Path, metavar="FILE", help="JSON lines: runs that are there are not run again")
    option("--plots", type=Path, metavar="DIRECTORY", help="draws the figures there (needs matplotlib)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("paper", lambda: tell(args))


def tell(args: argparse.Namespace) -> None:
    """Runs missing cases, prints the tables, draws the plots. Raises SettingError."""
    figures = plan_figures(args)
    reports = results(figures, args)
    for title, cases in figures.items():
        print(f"\n{title}\n{title_line(COLUMNS)}")
        for case in cases:
            print(case_line(case, reports[case]))
    if args.plots:
        draw(figures, reports, args.plots)


def plan_figures(args: argparse.Namespace) -> dict[str, list[Case]]:
    """The cases of each requested figure. Raises SettingError."""
    models, numbers = args.models.split(","), set(args.figures.split(","))
    for model in models:
        if model not in MODELS:
            raise SettingError("--models", f"must be of {', '.join(MODELS)}, not {model!r}")
    check_least(args, sessions=1)
    if args.sample not in range(1, min(SEATS, args.sessions) + 1):
        raise SettingError("--sample", f"must be between 1 and {min(SEATS, args.sessions)}, not {args.sample}")
    turns = min(sum(len(chat.turns) for chat in chats(args.sessions, RATE, MODELS[model])) for model in models)
    if not 0 <= args.warm_up < turns:
        raise SettingError("--warm-up", f"must leave some of {turns} turns, not {args.warm_up}")
    chosen = {
        title: [case for model in models for case in cases(model)]
        for title, cases in FIGURES.items()
        if numbers & set(title.partition(":")[0].split(", "))
    }
    if not chosen:
        raise SettingError("--figures", f"there is none of {args.figures!r}")
    return chosen


def results(figures: dict[str, list[Case]], args: argparse.Namespace) -> dict[Case, Report]:
    """The report of each case; cases that are not in `--results` yet are run and added there."""
    reports: dict[Case, Report] = {}
    if args.results and args.results.exists():
        for line in args.results.read_text().splitlines():
            case, report = read_line(line, args)
            if case is not None:
                reports[case] = report
    missing = list(dict.fromkeys(case for cases in figures.values() for case in cases if case not in reports))
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.jobs, len(missing)))) as pool:
        made = pool.imap(_run, [(case, args.sessions, args.warm_up, args.sample) for case in missing])
        for case, report in zip(missing, made, strict=True):
            reports[case] = report
            line = json.dumps(
                {"sessions": args.sessions, "sample": args.sample, "case": asdict(case), "report": asdict(report)}
            )
            print(line, file=sys.stderr, flush=True)
            if args.results:
                with args.results.open("a") as file:
                    print(line, file=file)
    return reports


def read_line(line: str, args: argparse.Namespace) -> tuple[Case | None, Report]:
    """Reads a case and its report as written by `results`; no case if its sessions differ."""
    found: dict[str, Any] = json.loads(line)
    report = Report(**found["report"] | {"usage": Usage(**found["report"]["usage"])})
    ours = (found["sessions"], found["sample"]) == (args.sessions, args.sample)
    return (Case(**found["case"]) if ours else None), report


def _run(work: tuple[Case, int, int, int]) -> Report:
    return run(*work)


def hit_shares(report: Report) -> tuple[float, float, float]:
    """The shares of previously computed prompt tokens that were found on the GPU, on HOST and on DISK."""
    usage = report.usage
    known = max(1, usage.cached + usage.recomputed)
    return usage.gpu / known, usage.host / known, usage.disk / known


def gpu_hours(report: Report) -> float:
    """Hours in which the GPUs were busy, per 1,000 turns, to compare cases with other warm-ups and windows."""
    return report.busy_s / 3600 * 1000 / report.requests


def dollars(case: Case, report: Report) -> tuple[float, float]:
    """Per 1,000 turns, for GPUs and for storage, each for as long as the GPUs are busy."""
    storage = (case.host * HOST_GB_HOUR + case.disk * DISK_GB_HOUR) / 10**9
    return gpu_hours(report) * MODELS[case.model].gpus * GPU_HOUR, gpu_hours(report) * storage


COLUMNS = {
    "model": ("model", "<11"),
    "policy": ("policy", "<18"),
    "host_gb": ("host GB", "<8.0f"),
    "disk_tb": ("disk TB", "<8g"),
    "rate": ("1/s", "<4g"),
    "hit": ("hit %", "<6.1f"),
    "gpu": ("gpu", "<6.1f"),
    "host": ("host", "<6.1f"),
    "disk": ("disk", "<6.1f"),
    "full": ("full %", "<6.1f"),
    "gpu_hours": ("GPU h", "<7.3f"),
    "gpu_dollars": ("GPU $", "<7.2f"),
    "stored_dollars": ("stored $", "<8.2f"),
    "ttft": ("TTFT s", "<7.2f"),
}
"""GPU h, GPU $ and stored $ per 1,000 turns; full %: share of turns whose whole history was found; TTFT: the median (in
whole units)."""


def policy_label(case: Case) -> str:
    """The policy, with the case's unusual settings."""
    if not case.reuse:
        return "recompute all"
    unusual = [case.save] * (case.save != "async") + [case.overflow] * (case.overflow != KEEP)
    return " ".join([case.policy.removesuffix("-conversation"), *unusual])


def case_line(case: Case, report: Report) -> str:
    shares, (gpus, storage) = hit_shares(report), dollars(case, report)
    found = dict(zip(("gpu", "host", "disk"), (100 * share for share in shares), strict=True))
    found |= {"hit": sum(found.values()), "full": 100 * report.full_hits / report.requests, "ttft": report.ttft_p50}
    found |= {"gpu_hours": gpu_hours(report), "gpu_dollars": gpus, "stored_dollars": storage}
    found |= {"host_gb": case.host / 10**9, "disk_tb": case.disk / TB, "rate": case.rate}
    return result_line(COLUMNS, {"model": case.model, "policy": policy_label(case), **found})


TIERS = (("GPU", "tab:green"), ("host", "tab:blue"), ("disk", "tab:orange"))


def draw(figures: Mapping[str, Sequence[Case]], reports: Mapping[Case, Report], directory: Path) -> None:
    """Writes paper_NN.png for each figure: hit rates by tier above; GPU hours and, if the paper has it, cost below."""
    directory.mkdir(parents=True, exist_ok=True)
    for title, cases in figures.items():
        number, _, what = title.partition(":")
        size = (max(6.0, 0.35 * len(cases)), 6.5)
        figure, (hits, costs) = subplots("--plots", 2, 1, figsize=size, sharex=True)
        places = list(range(len(cases)))
        bottom = [0.0] * len(cases)
        for tier, (name, color) in enumerate(TIERS):
            shares = [100 * hit_shares(reports[case])[tier] for case in cases]
            hits.bar(places, shares, 0.7, bottom=bottom, label=name, color=color)
            bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
        hits.set(title=what.strip(), ylabel="of known prompt tokens, %", ylim=(0, 118))
        hits.legend(ncols=3, loc="upper left", fontsize=8)
        if "cost" in title:
            gpus, storage = zip(*(dollars(case, reports[case]) for case in cases), strict=True)
            costs.bar(places, gpus, 0.7, label="GPUs")
            costs.bar(places, storage, 0.7, bottom=gpus, label="storage")
            costs.set_ylabel("dollars per 1,000 turns")
            costs.legend()
        else:
            costs.bar(places, [gpu_hours(reports[case]) for case in cases], 0.7, color="grey")
            costs.set_ylabel("busy hours per 1,000 turns")
        costs.set_xticks(places, [label(case) for case in cases], rotation=60, ha="right", fontsize=7)
        figure.savefig(directory / f"paper_{number.replace(', ', '_')}.png", dpi=80)


def label(case: Case) -> str:
    what = f"{case.model}, {policy_label(case)}"
    if not case.reuse:
        return what
    tiers = f"{case.disk / TB:g} TB disk" if case.disk else "no disk" if case.host else "GPU only"
    return f"{what}, {tiers}, {case.rate:g}/s"


if __name__ == "__main__":
    sys.exit(main())
