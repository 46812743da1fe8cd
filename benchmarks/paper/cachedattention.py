"""CachedAttention's evaluation (Gao et al., USENIX ATC 2024, section 4) replayed on a virtual
clock.

9,000 sessions start as a Poisson process at 1/s and bring 52,000 turns, of which the first 10,000
are warm-up. Its four models run on two or four A100s with 128 GB of host memory and 2 TB or 10 TB
of disk, in batches of 24. A conversation's KV lives for an hour (as in its section 4.3.6), and one
that outgrows the context window goes on with its newer half.

The scheduler is the real one. By default it does as the paper's: turns join in the order of
arrival, whole conversations are evicted, and chunks that waiting turns need are evicted last. To
save time, the clock counts units of 128 tokens (64 if a token's KV is large). One unit is one
chunk, and every length is rounded to units. One simulated step generates a unit for each row, and
takes as long as the steps for the unit's tokens. The scheduler limits copies in progress by
seconds, and these steps are long. So its profile gets a faster disk and faster copies to HOST; then
it reads all KV that is on disk, as the paper does. The paper does not state the think time: it is
assumed to be a minute on average. docs/measured/cachedattention.md has the results.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.context_window import KEEP, RECOMPUTE
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.sim.simulator import Report, Session, SessionTurn, Simulator, VirtualDevice
from pensieve.scheduler.types import Usage
from pensieve.scripts.command import result_line
from pensieve.scripts.simulation.models import ELEMENT_BYTES, ModelShape
from pensieve.scripts.simulation.traces import ChatStatistics, poisson, read_trace, synthetic

from .overlap import A100, H200, Machine
from .overlap import values as overlap_values

# The paper's turns, with the lengths that vLLM's paper gives for ShareGPT. A session then has 2,870
# tokens on average; 49% have more than 2,048 and 24% more than 4,096, in the paper 47% and 30%
# (figure 2).
CHAT = ChatStatistics(turns=5.75, input_tokens=161.31, output_tokens=337.99)
THINK_S = 60.0
TTL_S = 3600.0
SESSIONS, RATE, WARM_UP = 9_000, 1.0, 10_000
# of an A100's 80 GB, after the memory that steps need
GPU_BYTES, HOST_BYTES = 72 * 10**9, 128 * 10**9
TB = 10**12
HBM_CACHE_BYTES = 10 * 10**9  # of section 4.3.7, beside the KV of running requests
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
RATES = (0.5, 1.0, 1.5, 2.0)
PLAIN = ("lru-plain", "fifo-plain")


@dataclass(frozen=True, slots=True)
class CachedAttentionCase:
    """One run. Without `reuse` every turn computes its whole history. `gpu_cache`: None: all of the
    GPUs' memory."""

    model: str
    policy: str = "lru-conversation"
    host: int = HOST_BYTES
    disk: int = 10 * TB
    rate: float = RATE
    reuse: bool = True
    overflow: str = KEEP
    save: str = "async"
    order: str = "arrival"
    gpu_cache: int | None = HBM_CACHE_BYTES
    trace: str = ""


def recomputed(model: str) -> CachedAttentionCase:
    return CachedAttentionCase(model, host=0, disk=0, reuse=False)


def pensieves(model: str, **how: Any) -> CachedAttentionCase:
    """With the policy, queue and memory that Pensieve has by default."""
    return CachedAttentionCase(model, "retention", order="bounded-ratio", gpu_cache=None, **how)


def best(model: str) -> list[CachedAttentionCase]:
    return [CachedAttentionCase(model), recomputed(model)]


def only_13b(*cases: CachedAttentionCase) -> Callable[[str], list[CachedAttentionCase]]:
    return lambda model: list(cases) if model == "llama-13b" else []


FIGURES: dict[str, Callable[[str], list[CachedAttentionCase]]] = {
    **dict.fromkeys(("13", "14", "15", "16", "17"), best),
    **dict.fromkeys(("18", "19", "20"), lambda model: []),  # arithmetic, see overlap.py
    "21": only_13b(
        *(
            CachedAttentionCase("llama-13b", policy, disk=disk)
            for disk in (2 * TB, 10 * TB)
            for policy in (CachedAttentionCase("").policy, *PLAIN)
        )
    ),
    "22": lambda model: [
        CachedAttentionCase(model),
        CachedAttentionCase(model, overflow=RECOMPUTE),
    ],
    "23": only_13b(
        *(
            CachedAttentionCase("llama-13b", disk=disk)
            for disk in (2 * TB, 29 * TB // 10, 74 * TB // 10, 10 * TB)
        )
    ),
    "24": lambda model: [
        CachedAttentionCase(model, host=0, disk=0),
        CachedAttentionCase(model, disk=0),
        CachedAttentionCase(model),
    ],
    "25": only_13b(*(CachedAttentionCase("llama-13b", rate=rate) for rate in RATES)),
    "default": lambda model: [pensieves(model), pensieves(model, disk=2 * TB)],
    "save": lambda model: [pensieves(model, save="sync")] if model == "llama-65b" else [],
}
"""The cases of each model; a case of several figures is run once."""
COMPUTED = ("14", "15", "18", "19", "20")
"""Figures whose values are arithmetic: 14 and 15 with simulated counts of tokens, the others from
speeds."""


# -- one run


@cache
def chats(conversations: int, rate: float, model: Paper, trace: str = "") -> list[Session]:
    """The conversations, in units; a reply ends at half of the window. Those of a trace are drawn
    from it again and again, and their new prompts end there too. Raises SettingError."""
    if trace:
        draw = random.Random(0)
        starts = poisson(rate, random.Random(1))
        recorded = [
            tuple(
                turn._replace(input_tokens=min(turn.input_tokens, model.window // 2))
                for turn in session.turns
            )
            for session in read_trace(Path(trace), sessions_per_s=rate, seed=0)
        ]
        sessions = [
            Session(f"s{n}", next(starts), draw.choice(recorded)) for n in range(conversations)
        ]
    else:
        sessions = synthetic(
            CHAT, conversations=conversations, sessions_per_s=rate, think_s=THINK_S, seed=0
        )
    return [session._replace(turns=tuple(_in_units(session.turns, model))) for session in sessions]


def _in_units(turns: Sequence[SessionTurn], model: Paper) -> Iterator[SessionTurn]:
    """Ends of inputs and replies are rounded, not their lengths, so that errors do not add up."""
    unit = model.unit
    longest = model.window // model.unit // 2
    tokens = units = 0
    for turn in turns:
        tokens += turn.input_tokens
        given = max(1, round(tokens / unit) - units)
        tokens += min(turn.output_tokens, longest * unit)
        reply = min(max(1, round(tokens / unit) - units - given), longest)
        yield SessionTurn(units, given, reply, turn.think_s)
        units += given + reply


def profile(model: Paper, sample: int = 1, machine: Machine = A100) -> CostProfile:
    """A unit costs as much as all of its tokens; a step reads the weights once for each of these
    tokens.

    With one session in `sample`, a token costs `sample` times as much: a step with its share of the
    rows takes as long as one with all of them.
    """
    shape = model.shape
    unit = model.unit
    speed = model.gpus / sample
    cost = analytic_profile(
        chunk_tokens=1,
        parameters=shape.parameters * unit,
        layers=shape.layers,
        attention_width=shape.heads * shape.head_dim * unit**2,
        chunk_bytes=shape.token_bytes * unit,
        max_context=model.window // unit,
        flops_per_s=speed * machine.flops,
        link_bytes_per_s=machine.link / sample,
        step_base_seconds=unit * shape.parameters * ELEMENT_BYTES / (model.gpus * machine.memory),
    )
    # the context, for each token
    read_once = unit * shape.token_bytes * unit / (speed * machine.memory)
    return replace(
        cost,
        row_attention=tuple((context, context * read_once) for context, _ in cost.attention),
        disk_read_bytes_per_s=DISK_READ_BYTES_PER_S / sample,
        disk_write_bytes_per_s=DISK_WRITE_BYTES_PER_S / sample,
    )


def run(case: CachedAttentionCase, conversations: int, warm_up: int, sample: int = 1) -> Report:
    """Runs one of `sample` sessions, with its share of all resources; `busy_s` is scaled to all
    turns."""
    model = MODELS[case.model]
    cost = profile(model, sample)
    sessions = chats(conversations // sample, case.rate / sample, model, case.trace)
    gpu = model.gpu_kv_bytes
    if case.gpu_cache is not None:
        gpu = min(gpu, case.gpu_cache + SEATS * model.window * model.shape.token_bytes)
    config = SchedulerConfig(
        gpu_kv_chunks=gpu // cost.chunk_bytes // sample,
        host_kv_chunks=case.host // cost.chunk_bytes // sample,
        disk_kv_chunks=case.disk // cost.chunk_bytes // sample,
        max_model_len=model.window // model.unit,
        max_num_seqs=SEATS // sample,
        # units: a step stands for as many as a unit has tokens
        max_num_batched_tokens=STEP_TOKENS // sample,
        chunk_tokens=1,
        max_queue=sum(len(session.turns) for session in sessions),
        eviction=case.policy,
        conversation_ttl=TTL_S,
        reuse=case.reuse,
        overflow=case.overflow,
        save=case.save,
        queue_order=case.order,
        prefetch=case.policy not in PLAIN,
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


def simulate_case(
    conversations: int, warm_up: int, sample: int, case: CachedAttentionCase
) -> dict[str, Any]:
    """`run`'s report, as `read_report` takes it."""
    return asdict(run(case, conversations, warm_up, sample))


def hit_shares(report: Report) -> tuple[float, float, float]:
    """The shares of previously computed prompt tokens that were found on the GPU, on HOST and on
    DISK."""
    usage = report.usage
    history = max(1, usage.cached + usage.recomputed)
    return usage.gpu / history, usage.host / history, usage.disk / history


def gpu_hours(report: Report) -> float:
    """Hours in which the GPUs were busy, per 1,000 turns, to compare cases with other warm-ups and
    windows."""
    return report.busy_s / 3600 * 1000 / report.requests


def dollars(case: CachedAttentionCase, report: Report) -> tuple[float, float]:
    """Per 1,000 turns, for GPUs and for storage, each for as long as the GPUs are busy."""
    storage = (case.host * HOST_GB_HOUR + case.disk * DISK_GB_HOUR) / 10**9
    return gpu_hours(report) * MODELS[case.model].gpus * GPU_HOUR, gpu_hours(report) * storage


def first_token_s(case: CachedAttentionCase, report: Report, machine: Machine) -> float:
    """Mean seconds to prefill one turn's prompt alone, without its wait: unknown tokens are
    computed while known ones are loaded. The paper's TTFT is this time
    (docs/measured/cachedattention.md)."""
    cost = profile(MODELS[case.model], machine=machine)
    usage = report.usage
    unknown = usage.new + usage.recomputed
    context = round((unknown + usage.cached) / report.requests)
    return (
        max(unknown * cost.recompute(context), (usage.host + usage.disk) * cost.swap_in())
        / report.requests
    )


def read_report(fields: Mapping[str, Any]) -> Report:
    return Report(**{**fields, "usage": Usage(**fields["usage"])})


# -- the figures' values


def values(reports: Mapping[CachedAttentionCase, Report]) -> dict[str, dict[str, float]]:
    """By figure and claim, of the runs that are there; as claims.json names them."""
    figures: defaultdict[str, dict[str, float]] = defaultdict(dict, overlap_values())
    hits = {case: 100 * report.full_hits / report.requests for case, report in reports.items()}
    for model in MODELS:
        case = CachedAttentionCase(model)
        none = recomputed(model)
        if case not in hits:
            continue
        figures["13"][model] = hits[case]
        for name, other in (
            ("GPU", CachedAttentionCase(model, host=0, disk=0)),
            ("GPU and host", CachedAttentionCase(model, disk=0)),
        ):
            if other in hits:
                figures["24"][f"{model}, {name}"] = hits[other]
        if (other := CachedAttentionCase(model, overflow=RECOMPUTE)) in hits:
            figures["22"][model] = hits[case] - hits[other]
        figures["17"][f"{model}, storage, % of the cost"] = storage_percent(case, reports[case])
        if none in reports:
            for number, value in _against(case, none, reports).items():
                figures[number][model] = value
            for number, value in _against(case, none, reports, H200).items():
                figures[number][f"{model}, H200's costs"] = value
    names = {CachedAttentionCase("").policy: "CA", "lru-plain": "LRU", "fifo-plain": "FIFO"}
    for case, hit in hits.items():
        if (
            case == CachedAttentionCase("llama-13b", case.policy, disk=case.disk)
            and case.policy in names
        ):
            setting = f"{names[case.policy]}, {case.disk / TB:g} TB"
            figures["21"][setting] = hit
            gpu, host, disk = hit_shares(reports[case])
            if case.disk == 10 * TB:
                figures["21"][f"{setting}, hits found on HOST or GPU, %"] = (
                    100 * (gpu + host) / max(gpu + host + disk, 1e-9)
                )
        if case == CachedAttentionCase("llama-13b", disk=case.disk) and case.disk:
            ratio = (case.host + case.disk) / all_sessions_bytes(case)
            figures["23"][f"RCC/CCpUT {ratio:.2f}"] = 100 * reports[case].hit_rate
        if case == CachedAttentionCase("llama-13b", rate=case.rate):
            figures["25"][f"hit rate at {case.rate:g}/s"] = hit
            figures["25"][f"TTFT at {case.rate:g}/s"] = first_token_s(case, reports[case], A100)
            figures["25"][f"GPU hours at {case.rate:g}/s"] = (
                42 * gpu_hours(reports[case]) * MODELS[case.model].gpus
            )
    return dict(figures)


def _against(
    case: CachedAttentionCase,
    none: CachedAttentionCase,
    reports: Mapping[CachedAttentionCase, Report],
    machine: Machine = A100,
) -> dict[str, float]:
    """Reuse against recomputation: what figures 14 to 17 compare. GPU time and cost are of the
    simulated A100s."""
    ours, theirs = reports[case], reports[none]
    ratio = first_token_s(none, theirs, machine) / first_token_s(case, ours, machine)
    values = {"14": 100 * (1 - 1 / ratio), "15": ratio}
    if machine is A100:
        values["16"] = gpu_hours(theirs) / gpu_hours(ours)
        values["17"] = 100 * (1 - sum(dollars(case, ours)) / dollars(none, theirs)[0])
    return values


def storage_percent(case: CachedAttentionCase, report: Report) -> float:
    """Of the cost of a case."""
    gpus, storage = dollars(case, report)
    return 100 * storage / (gpus + storage)


def all_sessions_bytes(case: CachedAttentionCase) -> int:
    """CCpUT if it counts all of the workload's sessions: a full context for each of them."""
    model = MODELS[case.model]
    return SESSIONS * model.window * model.shape.token_bytes


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
"""GPU h, GPU $ and stored $ per 1,000 turns; full %: share of turns whose whole history was found;
TTFT: the median (in whole units)."""


def policy_label(case: CachedAttentionCase) -> str:
    """The policy, with the case's unusual settings."""
    if not case.reuse:
        return "recompute all"
    unusual = [case.save] * (case.save != "async") + [case.overflow] * (case.overflow != KEEP)
    unusual += [case.order] * (case.order != "arrival")
    return " ".join([case.policy.removesuffix("-conversation"), *unusual])


def case_line(case: CachedAttentionCase, report: Report) -> str:
    shares, (gpus, storage) = hit_shares(report), dollars(case, report)
    columns = dict(zip(("gpu", "host", "disk"), (100 * share for share in shares), strict=True))
    columns |= {
        "hit": sum(columns.values()),
        "full": 100 * report.full_hits / report.requests,
        "ttft": report.ttft_p50,
    }
    columns |= {"gpu_hours": gpu_hours(report), "gpu_dollars": gpus, "stored_dollars": storage}
    columns |= {"host_gb": case.host / 10**9, "disk_tb": case.disk / TB, "rate": case.rate}
    return result_line(COLUMNS, {"model": case.model, "policy": policy_label(case), **columns})
