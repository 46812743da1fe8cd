"""Measured tables that the lines of benchmarks give."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cluster_model import ROUTINGS
from ..paper import __main__ as paper
from ..paper.report import table as paper_table
from ..report import read_runs, write_report
from .records import MEASURED, markdown


def versus_table(page: Path) -> str:
    return write_report(read_runs(sorted(MEASURED.glob("versus-*.jsonl"))), None, None)


def figures_table(page: Path) -> str:
    """Of the paper that has the page's name."""
    args = paper.parser().parse_args([page.stem, "--report"])
    return paper_table(*paper.figures_and_values(args, sorted(MEASURED.glob("paper-*.jsonl"))))


def lines(pattern: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(MEASURED.glob(pattern))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


SERVERS = {
    "pensieve": "Pensieve",
    "pensieve:--eviction lru": "Pensieve, LRU",
    "pensieve:--batching separate": "Pensieve, separate steps",
    "vllm": "vLLM",
}


def curves_table(page: Path) -> str:
    """Pensieve's figures on a GPU, a row a server and rate. Several runs of one figure: the first
    is named so."""
    records = lines("curves-*.jsonl")
    runs: dict[tuple[str, ...], list[str]] = {}
    for run in dict.fromkeys(record["run"] for record in records):
        figures = dict.fromkeys(each["figure"] for each in records if each["run"] == run)
        runs.setdefault(tuple(figures), []).append(run)
    titles = {
        run: ", ".join(figures) + (", first run" if len(named) > 1 and run == named[0] else "")
        for figures, named in runs.items()
        for run in named
    }
    rows = []
    for record in records:
        result = record["result"]
        rows.append(
            [
                titles[record["run"]],
                SERVERS[record["server"]],
                f"{result['rate']:g}",
                f"{result['offered_per_s']:.1f}, {result['completed_per_s']:.1f}",
                f"{result['ms_per_token_mean']:.1f}",
                f"{result['ttft_ms_p50'] / 1e3:.2f}, {result['ttft_ms_p99'] / 1e3:.1f}",
                reused(result),
            ]
        )
    columns = (
        "figures",
        "server",
        "conversations/s",
        "requests/s offered, done",
        "ms/token",
        "TTFT p50, p99, s",
        "% of prompt tokens found on GPU, host; recomputed",
    )
    return markdown(columns, without_repeats(rows))


def without_repeats(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Leaves a row's first cell empty where it is that of the row above."""
    above = [None, *(row[0] for row in rows[:-1])]
    return [
        ["" if row[0] == cell else row[0], *row[1:]] for row, cell in zip(rows, above, strict=True)
    ]


def reused(result: Mapping[str, Any]) -> str:
    """By the server's counters, or else by its replies."""
    if result["sources"]:
        return f"{percents(result, 'gpu', 'host')}; {percents(result, 'recomputed')}"
    if result["cached_tokens"] is None:
        return "not reported"
    return f"{100 * result['cached_tokens'] / result['prompt_tokens']:.0f}"


def percents(result: Mapping[str, Any], *sources: str) -> str:
    """Of the prompt tokens."""
    total = sum(result["sources"].values())
    return ", ".join(f"{100 * result['sources'][source] / total:.0f}" for source in sources)


LOADS = {"agents": "0.3 agent sessions/s", "chats": "5 chats/s"}
ROUTING_COLUMNS = ("hit %", "TTFT p50, p95 s", "ms/token")


def routing_table(page: Path) -> str:
    """Clusters of which all replicas were simulated. To one replica every routing is the same."""
    rows = []
    for record in lines("routing-*.jsonl"):
        one = record["replicas"] == 1
        if record["simulated"] is None and (not one or record["routing"] == ROUTINGS[0]):
            routing = "any" if one else record["routing"]
            rows.append(routing_row(record, f"{record['replicas']:,}", routing))
    columns = ("load, for each replica", "replicas", "routing", "requests", *ROUTING_COLUMNS)
    return markdown(columns, without_repeats(rows))


def routing_row(record: Mapping[str, Any], replicas: str, routing: str) -> list[str]:
    return [
        LOADS[record["load"]],
        replicas,
        routing,
        f"{record['requests']:,}",
        f"{100 * record['hit_rate']:.1f}",
        f"{record['ttft_p50']:.2f}, {record['ttft_p95']:.1f}",
        f"{1e3 * record['seconds_per_token']:.0f}",
    ]


MODELS = {"opt-13b": "OPT-13B, 16k", "llama-3-8b": "Llama-3-8B, 128k"}


def retention_table(page: Path) -> str:
    """With the paper's mark and reserve, simulated: means of the seeds, ranges of ms/token."""
    policies = ("retention", "lru")
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for record in lines("eviction-*.jsonl"):
        key = (record["model"], record["rate"], record["eviction"])
        if record["eviction"] in policies:
            groups.setdefault(key, []).append(record)
    models = list(MODELS)
    rows = []
    for model, rate, policy in sorted(
        groups, key=lambda key: (models.index(key[0]), key[1], policies.index(key[2]))
    ):
        runs = groups[model, rate, policy]

        times = [run["ms_per_token"] for run in runs]
        hits = [
            100 * (run["gpu_percent"] + run["host_percent"]) / (100 - run["new_percent"])
            for run in runs
        ]
        means = {
            name: sum(run[name] for run in runs) / len(runs)
            for name in ("done_per_s", "recomputed_percent", "ttft_ms_p50", "ttft_ms_p95")
        }
        rows.append(
            [
                MODELS[model],
                f"{rate:g}",
                policy,
                f"{means['done_per_s']:.2f}",
                f"{sum(hits) / len(hits):.1f}",
                f"{means['recomputed_percent']:.1f}",
                f"{sum(times) / len(times):.0f} ({min(times):.0f} to {max(times):.0f})",
                f"{means['ttft_ms_p50'] / 1e3:.1f}, {means['ttft_ms_p95'] / 1e3:.1f}",
            ]
        )
    columns = (
        "model, contexts",
        "conversations/s",
        "policy",
        "requests/s",
        "hits %",
        "recomputed %",
        "ms/token",
        "TTFT p50, p95, s",
    )
    return markdown(columns, without_repeats(rows))


POLICIES = {
    "pensieve": "retention",  # the default of that run
    "pensieve:--eviction lru": "lru",
    "pensieve:--eviction lru-conversation": "lru-conversation",
}


def documents_table(page: Path) -> str:
    """Eviction policies with long contexts, of one run of `versus`."""
    results = [
        (POLICIES[record["server"]], record["result"]) for record in lines("documents-*.jsonl")
    ]
    rows = [
        [
            f"{result['seed']}",
            policy,
            f"{result['completed_per_s']:.2f}",
            f"{result['output_tokens_per_s']:.0f}",
            f"{result['ms_per_token_mean']:.0f}, {result['ms_per_token_p90']:.0f}",
            ", ".join(f"{result[f'ttft_ms_p{share}'] / 1e3:.1f}" for share in (50, 90, 95, 99)),
            percents(result, "gpu", "host", "recomputed", "new"),
        ]
        for policy, result in sorted(results, key=lambda each: each[1]["seed"])
    ]
    columns = (
        "seed",
        "policy",
        "requests/s",
        "tokens/s of replies",
        "ms/token, mean, p90",
        "TTFT p50, p90, p95, p99, s",
        "GPU, HOST, recomputed, new, %",
    )
    return markdown(columns, rows)


STEPS = {
    ("f7694756", "pensieve"): "384 (the workload's own)",
    ("4bad5c72", "pensieve:--max-num-batched-tokens 1024"): "1,024",
    ("f7694756", "pensieve:--max-num-batched-tokens 2048"): "2,048",
    ("f7694756", "pensieve:--max-num-batched-tokens 2048 --target-ms-per-token 30"): "30 ms",
}
"""Runs of `versus` and their servers, at 5 conversations/s."""


def steps_table(page: Path) -> str:
    """Prompts beside generation, by the size of a step."""
    results = {
        (record["run"], record["server"]): record["result"] for record in lines("steps-*.jsonl")
    }
    rows = []
    for run_and_server, step in STEPS.items():
        result = results[run_and_server]
        rows.append(
            [
                step,
                f"{result['completed_per_s']:.2f}",
                f"{result['ms_per_token_mean']:.1f}",
                ", ".join(f"{result[f'ttft_ms_p{share}']:.0f}" for share in (50, 95, 99)),
                f"{result['inter_token_ms_p50']:.1f}, {result['inter_token_ms_p99']:.1f}",
            ]
        )
    columns = (
        "step, tokens, or target",
        "req/s",
        "ms/token",
        "TTFT p50, p95, p99, ms",
        "between tokens p50, p99, ms",
    )
    return markdown(columns, rows)


REPORTS: Mapping[str, Callable[[Path], str]] = {
    "versus --report": versus_table,
    "paper": figures_table,
    "paper --device": curves_table,
    "versus: documents": documents_table,
    "retention at 25% and 10%": retention_table,
    "versus: steps": steps_table,
    "routing": routing_table,
}
