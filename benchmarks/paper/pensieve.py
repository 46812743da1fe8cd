"""Pensieve's evaluation (Yu et al., EuroSys 2025, section 6) simulated with its own settings.

A100s with 40 GB of KV and 220 GB of host memory each, ShareGPT's and UltraChat's means, a think
time of 60 s, contexts to 16,384 tokens. Conversations are in the middle of their lives at the
start. A stateless server is the same one without reuse, with prompts and generation in separate
steps and whole prompts in a step, as vLLM 0.2.0 had them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.sim.simulator import longest_context
from pensieve.scripts.simulation.load import LoadRun, conversations, simulate_load
from pensieve.scripts.simulation.models import MODELS, ModelShape

from .overlap import A100

CONTEXT, CHUNK, ROWS = 16_384, 32, 256
GPU_BYTES, HOST_BYTES = 40e9, 220e9  # a GPU
SECONDS, MEASURE_S, RAMP_S = 300.0, 100.0, 60.0
SETTINGS: dict[str, dict[str, Any]] = {
    "pensieve": {
        "queue_order": "arrival",
        "swap_out_below": 0.25,
        "generation_reserve": 0.1,
        "max_num_batched_tokens": 512,
    },
    "stateless": {
        "queue_order": "arrival",
        "generation_reserve": 0.01,
        "max_num_batched_tokens": CONTEXT,
    },
}
"""The paper's (sections 4.2, 4.3.2 and 4.3.5; it does not tell a step's tokens) and vLLM 0.2.0's.
Every record has them."""
SHAPES = {
    **MODELS,
    "opt-66b": ModelShape(65_720_000_000, 64, 72, 72),
    "llama-2-70b": ModelShape(68_980_000_000, 80, 64, 8),
}
GPUS = {"opt-66b": 4, "llama-2-70b": 4}
OPT, LLAMA = "opt-13b", "llama-2-13b-gqa"


@dataclass(frozen=True, slots=True)
class PensieveCase:
    """One point of a curve: `rate` conversations/s. `server`: pensieve, gpu-cache (no host memory),
    stateless, lru, or separate (steps for prompts and for generation)."""

    model: str
    data: str
    server: str
    rate: float
    think_s: float = 60.0
    trace: str = ""
    seed: int = 0


def curve(
    model: str, data: str, server: str, *rates: float, think_s: float = 60.0
) -> list[PensieveCase]:
    return [PensieveCase(model, data, server, rate, think_s) for rate in rates]


CHATS_OPT = curve(OPT, "sharegpt", "pensieve", 0.4, 0.6, 0.65, 0.7, 0.75, 0.8)
CHATS_LLAMA = curve(LLAMA, "sharegpt", "pensieve", 1.0, 1.4, 1.6, 1.7, 1.8)
FIGURES: dict[str, list[PensieveCase]] = {
    **{number: [] for number in ("3", "4", "section 5", "12")},  # on a GPU only
    "10a": [
        *CHATS_OPT,
        *curve(OPT, "sharegpt", "gpu-cache", 0.3, 0.45),
        *curve(OPT, "sharegpt", "stateless", 0.25, 0.35, 0.45, 0.55),
    ],
    "10b": [
        *CHATS_LLAMA,
        *curve(LLAMA, "sharegpt", "gpu-cache", 0.6, 1.0, 1.2),
        *curve(LLAMA, "sharegpt", "stateless", 0.4, 0.6, 0.8, 0.9, 1.0, 1.1),
    ],
    "10c": [
        *curve(OPT, "ultrachat", "pensieve", 0.8, 0.95, 1.1, 1.3),
        *curve(OPT, "ultrachat", "stateless", 0.4, 0.6, 0.8),
    ],
    "10d": [
        *curve(LLAMA, "ultrachat", "pensieve", 1.6, 2.2, 2.8),
        *curve(LLAMA, "ultrachat", "stateless", 0.6, 0.8, 1.1, 1.4),
    ],
    "11a": [
        *curve("opt-66b", "sharegpt", "pensieve", 0.5, 0.7, 0.85),
        *curve("opt-66b", "sharegpt", "stateless", 0.2, 0.3, 0.4, 0.5),
    ],
    "11b": [
        *curve("llama-2-70b", "sharegpt", "pensieve", 0.9, 1.2, 1.35, 1.5, 1.65, 1.8, 2.4),
        *curve("llama-2-70b", "sharegpt", "stateless", 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15),
    ],
    "13": [*CHATS_LLAMA, *curve(LLAMA, "sharegpt", "separate", 1.0, 1.4, 1.6)],
    "14": [*CHATS_OPT, *curve(OPT, "sharegpt", "lru", 0.6, 0.65, 0.7, 0.75, 0.8)],
    "15": [
        *CHATS_LLAMA,
        *(
            case
            for think in (120.0, 300.0, 600.0)
            for case in curve(LLAMA, "sharegpt", "pensieve", 1.0, think_s=think)
        ),
        *(
            case
            for server in ("pensieve", "stateless")
            for case in curve(LLAMA, "sharegpt", server, 0.6, 0.8, think_s=600.0)
        ),
    ],
}
LIMITS_MS = {"10a": 120, "10b": 180, "10c": 120, "10d": 100, "11a": 200, "11b": 400}
"""Milliseconds a token at which the paper compares throughputs (section 6.2 and 6.3)."""


def run(case: PensieveCase) -> dict[str, float]:
    """The numbers of `simulate --preset load`. A long think time is simulated for longer: each
    conversation must come back a few times."""
    shape = SHAPES[case.model]
    gpus = GPUS.get(case.model, 1)
    seconds = max(SECONDS, 4 * case.think_s)
    trace = Path(case.trace) if case.trace else None
    load = Namespace(
        trace=trace,
        synthetic=case.data,
        think_s=case.think_s,
        turn_counts="geometric",
        seconds=seconds,
        ramp_s=RAMP_S,
    )
    sessions = [
        one
        for one in conversations(load, case.rate, seed=case.seed)
        if longest_context([one]) <= CONTEXT
    ]
    memory = A100.memory * gpus
    cost = shape.cost(CHUNK, CONTEXT, A100.flops * gpus, memory, A100.link * gpus)
    contexts = (context for context, _ in cost.attention)
    cost = replace(
        cost,
        row_attention=tuple(
            (context, context * shape.token_bytes / memory) for context in contexts
        ),
    )
    held = case.server not in ("stateless", "gpu-cache")
    config = SchedulerConfig(
        gpu_kv_chunks=int(GPU_BYTES * gpus // cost.chunk_bytes),
        host_kv_chunks=int(HOST_BYTES * gpus // cost.chunk_bytes) if held else 0,
        max_model_len=CONTEXT,
        max_num_seqs=ROWS,
        chunk_tokens=CHUNK,
        conversation_ttl=inf,
        max_queue=30 * len(sessions),
        eviction="lru" if case.server == "lru" else "retention",
        batching="separate" if case.server in ("stateless", "separate") else "unified",
        reuse=case.server != "stateless",
        **SETTINGS["stateless" if case.server == "stateless" else "pensieve"],
    )
    windows = seconds, MEASURE_S, case.think_s
    report = simulate_load(
        LoadRun(case.rate, case.seed, config, cost, shape.token_bytes, sessions, *windows)
    )
    assert report is not None, f"no reply ended: {case}"
    return report


# -- the figures' values

Points = Mapping[PensieveCase, Mapping[str, float]]


def throughput_at(points: Points, cases: Iterable[PensieveCase], limit_ms: float) -> float | None:
    """Requests/s at a time per token, from the runs with these cases' settings at all rates."""
    settings = {replace(case, rate=0.0) for case in cases}
    curve = sorted(
        (case.rate, point["ms_per_token"], point["done_per_s"])
        for case, point in points.items()
        if replace(case, rate=0.0) in settings
    )
    return between_rates([point[1:] for point in curve], limit_ms)


def between_rates(points: Sequence[tuple[float, float]], limit_ms: float) -> float | None:
    """Requests/s at `limit_ms` a token, of points (ms a token, requests/s) by ascending rates:
    between the last one below the limit and the next. None without such a pair."""
    for (low, before), (high, after) in reversed(list(pairwise(points))):
        if low <= limit_ms < high:
            return before + (after - before) * (limit_ms - low) / (high - low)
    return None


def values_by_seed(points: Points) -> dict[str, dict[str, list[float]]]:
    """By figure and claim, the values of each seed that has all runs of a value."""
    figures: dict[str, dict[str, list[float]]] = {}
    for seed in sorted({case.seed for case in points}):
        runs = {replace(case, seed=0): point for case, point in points.items() if case.seed == seed}
        for number, figure in values(runs).items():
            for name, value in figure.items():
                figures.setdefault(number, {}).setdefault(name, []).append(value)
    return figures


def values(points: Points) -> dict[str, dict[str, float]]:
    """Of one seed, by figure and claim, of the runs that are there; as claims.json names them."""
    figures: dict[str, dict[str, float]] = {}

    def ratio(number: str, name: str, ours: float | None, theirs: float | None) -> None:
        if ours and theirs:
            figures.setdefault(number, {})[name] = ours / theirs

    for number, limit_ms in LIMITS_MS.items():
        servers = {
            kind: throughput_at(
                points, [case for case in FIGURES[number] if case.server == kind], limit_ms
            )
            for kind in ("pensieve", "gpu-cache", "stateless")
        }
        ratio(
            number,
            "requests/s over a stateless server's",
            servers["pensieve"],
            servers["stateless"],
        )
        ratio(
            number,
            "requests/s over those of the GPU cache alone",
            servers["pensieve"],
            servers["gpu-cache"],
        )
    for case in FIGURES["13"]:
        unified = points.get(replace(case, server="pensieve"))
        if case.server == "separate" and case in points and unified:
            ratio(
                "13",
                f"time a token, separate over unified, at {case.rate:g}/s",
                points[case]["ms_per_token"],
                unified["ms_per_token"],
            )
    for case in FIGURES["14"]:
        ours = points.get(replace(case, server="pensieve"))
        if case.server == "lru" and case in points and ours:
            lru = points[case]
            at = f"at {case.rate:g}/s"
            figure = figures.setdefault("14", {})
            figure[f"host hits, points above LRU's, {at}"] = (
                ours["host_percent"] - lru["host_percent"]
            )
            fewer = 1 - ours["recomputed_percent"] / max(lru["recomputed_percent"], 1e-9)
            figure[f"tokens recomputed, % fewer than LRU's, {at}"] = 100 * fewer
    both = [
        points.get(PensieveCase(LLAMA, "sharegpt", server, 0.6, 600.0), {})
        for server in ("stateless", "pensieve")
    ]
    times = [point.get("ms_per_token") for point in both]
    ratio("15", "time a token, stateless server over Pensieve, at 0.6/s, think time 600 s", *times)
    slow = [
        PensieveCase(LLAMA, "sharegpt", server, 0.0, 600.0) for server in ("pensieve", "stateless")
    ]
    reached = [throughput_at(points, [case], LIMITS_MS["10b"]) for case in slow]
    ratio(
        "15", "requests/s over a stateless server's at 180 ms a token, think time 600 s", *reached
    )
    base = points.get(PensieveCase(LLAMA, "sharegpt", "pensieve", 1.0))
    for case in FIGURES["15"]:
        if (
            case.server == "pensieve"
            and case.rate == 1
            and case.think_s > 60
            and case in points
            and base
        ):
            ratio(
                "15",
                f"time a token at 1/s, think time {case.think_s:g} s over 60 s",
                points[case]["ms_per_token"],
                base["ms_per_token"],
            )
    return figures
