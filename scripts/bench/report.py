"""What a serving benchmark says: a line of a table, a line of JSON, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...scheduler.sim.simulator import percentile
from ..command import read_records, result_line, title_line
from ..figures import subplots
from .clients import Tally

SOURCES = ("gpu", "host", "disk", "recomputed", "new")


@dataclass(frozen=True, slots=True)
class RateReport:
    """One rate's measurement. None: nothing to tell it from.

    rate                conversations that come a second
    offered_per_s       requests a second that this workload makes if all is answered: rate x mean turns
    sent_per_s, completed_per_s
                        requests; fewer are sent than offered where replies are late, or conversations failed
    output_tokens_per_s, prompt_tokens_per_s
                        generated; of prompts, cached or computed
    ms_per_token_*      normalised latency: from a request to the end of its reply, over the reply's tokens
    inter_token_ms_*    between two events of a reply
    prompt_tokens, cached_tokens
                        over the window; cached as the server's `usage` tells
    sources             prompt tokens by where their KV came from, by the server's own counters
    open_at_start, open_at_end
                        requests in the server at the window's edges: it keeps up if they are about equal
    client_busy         share of a core that the busiest client process used
    gpu_seconds         the server's own count, or the window's length
    dollars             of them
    """

    rate: float
    seconds: float
    offered_per_s: float
    sent_per_s: float
    completed_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ms_per_token_mean: float | None
    ms_per_token_p90: float | None
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p95: float | None
    ttft_ms_p99: float | None
    inter_token_ms_p50: float | None
    inter_token_ms_p99: float | None
    prompt_tokens: int
    cached_tokens: int | None
    sources: Mapping[str, int] | None
    open_at_start: int
    open_at_end: int
    client_busy: float
    errors: Mapping[str, int] = field(default_factory=dict)
    gpu_seconds: float | None = None
    dollars: float | None = None
    dollars_per_million_output_tokens: float | None = None

    @property
    def failed_share(self) -> float:
        """Of the requests that ended, those that failed."""
        failed = sum(self.errors.values())
        return failed / (failed + self.completed_per_s * self.seconds) if failed else 0.0


def report(
    tally: Tally,
    *,
    rate: float,
    turns: float,
    seconds: float,
    sources: Mapping[str, int] | None = None,
    gpu_seconds: float | None = None,
    dollars_per_hour: float | None = None,
) -> RateReport:
    """`turns`: mean of a conversation. `gpu_seconds` None: the server does not tell, and costs all the time."""
    spent = seconds if gpu_seconds is None else gpu_seconds
    dollars = None if dollars_per_hour is None else spent / 3600 * dollars_per_hour
    tokens = tally.output_tokens
    return RateReport(
        rate=rate,
        seconds=seconds,
        offered_per_s=rate * turns,
        sent_per_s=tally.sent / seconds,
        completed_per_s=tally.completed / seconds,
        output_tokens_per_s=tokens / seconds,
        prompt_tokens_per_s=tally.prompt_tokens / seconds,
        ms_per_token_mean=1e3 * sum(tally.per_token) / len(tally.per_token) if tally.per_token else None,
        ms_per_token_p90=milliseconds(tally.per_token, 0.9),
        ttft_ms_p50=milliseconds(tally.first_token, 0.5),
        ttft_ms_p90=milliseconds(tally.first_token, 0.9),
        ttft_ms_p95=milliseconds(tally.first_token, 0.95),
        ttft_ms_p99=milliseconds(tally.first_token, 0.99),
        inter_token_ms_p50=milliseconds(tally.gaps, 0.5),
        inter_token_ms_p99=milliseconds(tally.gaps, 0.99),
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens if tally.cached_known else None,
        sources=sources,
        open_at_start=tally.open_at_start,
        open_at_end=tally.open_at_end,
        client_busy=tally.busy,
        errors={kind: count for kind, count in sorted(tally.errors.items()) if count},
        gpu_seconds=spent,
        dollars=dollars,
        dollars_per_million_output_tokens=1e6 * dollars / tokens if dollars is not None and tokens else None,
    )


def milliseconds(seconds: Sequence[float], share: float) -> float | None:
    return 1e3 * percentile(seconds, share) if seconds else None


COLUMNS = {
    "rate": ("conv/s", "9.4g"),
    "offered_per_s": ("offered", "9.2f"),
    "completed_per_s": ("req/s", "9.2f"),
    "output_tokens_per_s": ("out tok/s", "9.0f"),
    "prompt_tokens_per_s": ("prompt tok/s", "9.0f"),
    "ms_per_token_mean": ("ms/token", "9.1f"),
    "ms_per_token_p90": ("p90", "9.1f"),
    "ttft_ms_p50": ("TTFT p50", "9.0f"),
    "ttft_ms_p90": ("p90", "9.0f"),
    "ttft_ms_p95": ("p95", "9.0f"),
    "ttft_ms_p99": ("p99", "9.0f"),
    "inter_token_ms_p50": ("ITL p50", "9.1f"),
    "inter_token_ms_p99": ("p99", "9.1f"),
    "open": ("open", ">9"),
}
"""Times in ms."""


def titles() -> str:
    return f"{title_line(COLUMNS)}    prompt tokens; errors"


def report_line(made: RateReport) -> str:
    found = result_line(COLUMNS, asdict(made) | {"open": f"{made.open_at_start}>{made.open_at_end}"})
    return f"{found}    {_came_from(made)}{_errors(made)}{_cost(made)}"


def _came_from(made: RateReport) -> str:
    if made.sources is not None:
        whole = sum(made.sources.values()) or 1
        return ", ".join(f"{name} {count / whole:.1%}" for name, count in made.sources.items() if count)
    if made.cached_tokens is not None:
        return f"cached {made.cached_tokens / (made.prompt_tokens or 1):.1%}"
    return "sources unknown"


def _errors(made: RateReport) -> str:
    return "; " + ", ".join(f"{kind}: {count}" for kind, count in made.errors.items()) if made.errors else ""


def _cost(made: RateReport) -> str:
    price = made.dollars_per_million_output_tokens
    return "" if price is None else f"; ${price:.3f} per million output tokens"


def json_line(made: RateReport, settings: Mapping[str, Any]) -> str:
    return json.dumps({"bench": "serving", **settings, **asdict(made)})


def read_reports(path: Path, option: str) -> list[RateReport]:
    """The lines that `json_line` wrote. SettingError names the option and the line."""
    names = [each.name for each in fields(RateReport)]
    return read_records(path, option, "bench_serving", lambda row: RateReport(**{name: row[name] for name in names}))


def plot(curves: Mapping[str, Sequence[RateReport]], path: Path) -> None:
    """Normalised latency over throughput, a curve a name: mean, and p90 dashed."""
    figure, axes = subplots("--plot", figsize=(7, 4.5))
    for name, reports in curves.items():
        drawn = [each for each in sorted(reports, key=lambda each: each.rate) if each.ms_per_token_mean is not None]
        reached = [each.completed_per_s for each in drawn]
        (line,) = axes.plot(reached, [each.ms_per_token_mean for each in drawn], marker="o", label=name)
        axes.plot(reached, [each.ms_per_token_p90 for each in drawn], linestyle="--", color=line.get_color())
    axes.set_xlabel("requests completed a second")
    axes.set_ylabel("ms a token: mean, p90 dashed")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
