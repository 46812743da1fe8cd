"""The results of a serving benchmark as lines of a table and of JSON, and as a plot; the page and
plot of `versus`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pensieve.scheduler.sim.simulator import percentile
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import result_line, subplots, title_line

from .goodput import Promise, Record, goodput_table, judge

if TYPE_CHECKING:
    from .clients import LoadTally  # and aiohttp

Row = TypeVar("Row")

SOURCES = ("gpu", "host", "disk", "shared", "recomputed", "new")


@dataclass(frozen=True, slots=True)
class RateReport:
    """One rate's measurement. None: nothing to tell it from.

    rate                conversations that come a second
    offered_per_s       requests a second that this workload makes if all is answered: rate x mean
                        turns
    sent_per_s, completed_per_s
                        requests; fewer are sent than offered where replies are late, or
                        conversations failed
    output_tokens_per_s, prompt_tokens_per_s
                        generated; of prompts, cached or computed
    ms_per_token_*      normalised latency: from a request to the end of its reply, over the reply's
                        tokens
    inter_token_ms_*    between two events of a reply
    prompt_tokens, cached_tokens
                        over the window; cached as the server's `usage` tells
    sources             prompt tokens by where their KV came from, by the server's own counters
    open_at_start, open_at_end
                        requests in the server at the window's edges: it keeps up if they are about
                        equal
    client_busy         share of a core that the busiest client process used
    sessions, waits_ms, open_waits_ms, session_s, replies_ms_per_token, open_ms_per_token
                        for judgements that pool several windows (`goodput`): see LoadTally
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
    sessions: int = 0
    waits_ms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    open_waits_ms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    session_s: Mapping[str, float] = field(default_factory=dict)
    replies_ms_per_token: Sequence[float] = ()
    open_ms_per_token: Sequence[float] = ()

    @property
    def failed_share(self) -> float:
        """The share of failed requests among ended ones."""
        failed = sum(self.errors.values())
        return failed / (failed + self.completed_per_s * self.seconds) if failed else 0.0


def report(
    tally: LoadTally,
    *,
    rate: float,
    turns: float,
    seconds: float,
    sources: Mapping[str, int] | None = None,
    gpu_seconds: float | None = None,
    dollars_per_hour: float | None = None,
) -> RateReport:
    """`turns`: mean of a conversation. `gpu_seconds` None: the server does not tell, and costs all
    the time."""
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
        ms_per_token_mean=1e3 * sum(tally.per_token) / len(tally.per_token)
        if tally.per_token
        else None,
        ms_per_token_p90=milliseconds(tally.per_token, 0.9),
        ttft_ms_p50=milliseconds(tally.first_token, 0.5),
        ttft_ms_p90=milliseconds(tally.first_token, 0.9),
        ttft_ms_p95=milliseconds(tally.first_token, 0.95),
        ttft_ms_p99=milliseconds(tally.first_token, 0.99),
        inter_token_ms_p50=milliseconds(tally.gaps, 0.5),
        inter_token_ms_p99=milliseconds(tally.gaps, 0.99),
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens if tally.num_cache_reports else None,
        sources=sources,
        open_at_start=tally.open_at_start,
        open_at_end=tally.open_at_end,
        client_busy=tally.busy,
        errors={kind: count for kind, count in sorted(tally.errors.items()) if count},
        gpu_seconds=spent,
        dollars=dollars,
        dollars_per_million_output_tokens=1e6 * dollars / tokens
        if dollars is not None and tokens
        else None,
        sessions=tally.sessions,
        waits_ms=_sorted_ms(tally.waits),
        open_waits_ms=_sorted_ms(tally.open_waits),
        session_s={name: round(s, 1) for name, s in tally.session_seconds.items()},
        replies_ms_per_token=sorted(round(1e3 * seconds, 1) for seconds in tally.per_token),
        open_ms_per_token=sorted(round(1e3 * seconds, 1) for seconds in tally.open_per_token),
    )


def _sorted_ms(waits: Mapping[str, Sequence[float]]) -> dict[str, list[int]]:
    return {turn: sorted(round(1e3 * wait) for wait in each) for turn, each in waits.items()}


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


def report_line(rate_report: RateReport) -> str:
    line = result_line(
        COLUMNS,
        asdict(rate_report) | {"open": f"{rate_report.open_at_start}>{rate_report.open_at_end}"},
    )
    return f"{line}    {_came_from(rate_report)}{_errors(rate_report)}{_cost(rate_report)}"


def _came_from(rate_report: RateReport) -> str:
    if rate_report.sources is not None:
        whole = sum(rate_report.sources.values()) or 1
        return ", ".join(
            f"{name} {count / whole:.1%}" for name, count in rate_report.sources.items() if count
        )
    if rate_report.cached_tokens is not None:
        return f"cached {rate_report.cached_tokens / (rate_report.prompt_tokens or 1):.1%}"
    return "sources unknown"


def _errors(rate_report: RateReport) -> str:
    return (
        "; " + ", ".join(f"{kind}: {count}" for kind, count in rate_report.errors.items())
        if rate_report.errors
        else ""
    )


def _cost(rate_report: RateReport) -> str:
    price = rate_report.dollars_per_million_output_tokens
    return "" if price is None else f"; ${price:.3f} per million output tokens"


def json_line(rate_report: RateReport, settings: Mapping[str, Any]) -> str:
    return json.dumps({"bench": "serving", **settings, **asdict(rate_report)})


def read_records(path: Path, option: str, command: str, row_of: Callable[[Any], Row]) -> list[Row]:
    """Calls `row_of` with each line of JSON that `command` wrote. SettingError names the option and
    the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(option, f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(row_of(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError(
                option, f"{path}, line {number}: not a line of {command}: {error!r}"
            ) from error
    if not records:
        raise SettingError(option, f"{path} holds no results")
    return records


def read_reports(path: Path, option: str) -> list[RateReport]:
    """The lines that `json_line` wrote. SettingError names the option and the line."""
    names = [each.name for each in fields(RateReport)]
    needed = names[: names.index("errors")]

    def rate_report(row: Any) -> RateReport:
        if absent := [name for name in needed if name not in row]:
            raise KeyError(*absent)
        return RateReport(**{name: row[name] for name in names if name in row})

    return read_records(path, option, "benchmarks.serving", rate_report)


def plot(curves: Mapping[str, Sequence[RateReport]], path: Path) -> None:
    """Normalised latency over throughput, a curve a name: mean, and p90 dashed."""
    figure, axes = subplots("--plot", figsize=(7, 4.5))
    for name, reports in curves.items():
        drawn = [
            each
            for each in sorted(reports, key=lambda each: each.rate)
            if each.ms_per_token_mean is not None
        ]
        reached = [each.completed_per_s for each in drawn]
        (line,) = axes.plot(
            reached, [each.ms_per_token_mean for each in drawn], marker="o", label=name
        )
        axes.plot(
            reached,
            [each.ms_per_token_p90 for each in drawn],
            linestyle="--",
            color=line.get_color(),
        )
    axes.set_xlabel("requests completed a second")
    axes.set_ylabel("ms a token: mean, p90 dashed")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)


# What `versus` has appended.


BEGIN, END = "<!-- the table of `versus --report` -->", "<!-- its end -->"
TITLES = (
    "run",
    "conversations/s",
    "server",
    "offered, done req/s",
    "ms/token, p90",
    "TTFT p50, p90, p95, p99",
    "inter-token p50, p99",
    "GPU, HOST, DISK, recomputed, new, %",
    "open",
    "failed",
)


def read_runs(paths: Sequence[Path]) -> list[Record]:
    """SettingError names the line that cannot be read."""

    def checked(record: Any) -> Record:
        if "streams" in record["result"]:
            _text_row(record)
        elif "slo" in record:
            judge([record], Promise(*record["slo"]))
        else:
            _row(record)
        _about(record)
        return dict(record)

    return [
        record for path in paths for record in read_records(path, "--report", "versus", checked)
    ]


def write_report(records: Sequence[Record], page: Path | None, picture: Path | None) -> str:
    """Returns the table. Also writes it between the marks of `page` (created if missing), and the
    plot to `picture`."""
    text = "\n".join(_tables(records))
    if page is not None:
        before, after = "", ""
        if page.exists():
            before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
            _, end, after = rest.partition(END)
            if not (begin and end):
                raise SettingError(
                    "--page", f"{page} lacks a line {BEGIN} with a line {END} behind it"
                )
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after or chr(10)}", encoding="utf-8")
    if picture is not None:
        plot_runs(records, picture)
    return text


def _tables(records: Sequence[Record]) -> list[str]:
    """A workload's tables of goodput, then older runs by run and rate: only results of one run may
    be compared there."""
    judged: dict[tuple[str, ...], list[Record]] = {}
    older: dict[str, list[Record]] = {}
    for record in records:
        if "slo" in record:
            judged.setdefault(_comparable(record), []).append(record)
        else:
            older.setdefault(record["workload"], []).append(record)
    lines = []
    for (workload, title, *settings), rows in judged.items():
        # the promise stands in the table
        lines += ["", f"**{workload}{': ' if title else ''}{title}** ({', '.join(settings[:-1])})"]
        lines += ["", *_runs(rows), ""]
        if "streams" in rows[0]["result"]:
            lines += _text_table(rows)
        else:
            lines += goodput_table(rows, Promise(*rows[0]["slo"]))
    for workload, rows in older.items():
        lines += ["", f"**{workload}**, times in ms", "", *_runs(rows)]
        lines += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
        runs = list(dict.fromkeys(record["run"] for record in rows))
        rows.sort(
            key=lambda record: (
                runs.index(record["run"]),
                record["result"]["rate"],
                record["result"]["seed"],
            )
        )
        lines += [f"| {' | '.join(_row(record))} |" for record in rows]
    return [*lines, ""]


def _comparable(record: Record) -> tuple[str, ...]:
    """What must be equal in one table: the workload, the title, and settings, in words."""
    result = record["result"]
    gpu, host = (
        "each its own" if size is None else f"{size / 2**30:.1f} GiB"
        for size in (record["gpu_kv_bytes"], record["host_kv_bytes"])
    )
    ranks = record.get("ranks", 1)  # older records have neither this nor the model
    return (
        record["workload"],
        record["title"],
        *([record["model"]] if "model" in record else ()),
        record["machine"]["name"] + (f", {ranks} for each server" if ranks > 1 else ""),
        f"KV on {'the' if ranks == 1 else 'each'} GPU {gpu}, on the host {host}"
        + (" for each GPU" if ranks > 1 else ""),
        f"Pensieve {record['versions']['pensieve']}",
        f"windows of {result['seconds']:g} s",
        f"promise {record['slo']}",
    )


TEXT_TITLES = (
    "streams",
    "server",
    "output tokens/s",
    "TTFT p50, p99, ms",
    "ms/token, p90",
    "between events p50, p99, ms",
    "tokens an event",
    "cached, %",
    "failed",
)


def _text_table(rows: Sequence[Record]) -> list[str]:
    servers = list(dict.fromkeys(record["server"] for record in rows))
    ordered = sorted(
        rows, key=lambda record: (record["result"]["streams"], servers.index(record["server"]))
    )
    lines = [f"| {' | '.join(TEXT_TITLES)} |", f"|{'---|' * len(TEXT_TITLES)}"]
    return [*lines, *(f"| {' | '.join(_text_row(record))} |" for record in ordered)]


def _text_row(record: Record) -> list[str]:
    result = record["result"]
    cached = result["cached_tokens"]
    return [
        f"{result['streams']}",
        f"`{record['server']}`",
        _shown(result, ",.0f", "output_tokens_per_s"),
        _shown(result, ",.0f", "ttft_ms_p50", "ttft_ms_p99"),
        _shown(result, ".1f", "ms_per_token_mean", "ms_per_token_p90"),
        _shown(result, ".1f", "inter_token_ms_p50", "inter_token_ms_p99"),
        _shown(result, ".2f", "tokens_per_event"),
        "-" if cached is None else f"{100 * cached / (result['prompt_tokens'] or 1):.0f}",
        ", ".join(f"{kind}: {count}" for kind, count in result["errors"].items()),
    ]


def _shown(result: Record, form: str, *names: str) -> str:
    return ", ".join(
        "-" if (value := result[name]) is None else format(value, form) for name in names
    )


def _runs(rows: Sequence[Record]) -> list[str]:
    """A line for each run. What all of several runs share has a line of its own."""
    runs = {record["run"]: _about(record) for record in rows}
    shared = [part for part in _about(rows[0]) if all(part in parts for parts in runs.values())]
    if len(runs) == 1 or not shared:
        return [f"* run {name}: {', '.join(parts)}" for name, parts in runs.items()]
    own = {name: [part for part in parts if part not in shared] for name, parts in runs.items()}
    return [
        f"* all runs: {', '.join(shared)}",
        *(f"* run {name}: {', '.join(parts)}" for name, parts in own.items()),
    ]


def _about(record: Record) -> list[str]:
    machine, versions, result = record["machine"], record["versions"], record["result"]
    parts = [_date(result["time"]), machine["name"], f"{machine['cores']} cores"]
    if "driver" in machine:
        parts.append(f"driver {machine['driver']}")
        parts.append(
            f"link {machine['link_in_gb_s']:.1f} GB/s in and {machine['link_out_gb_s']:.1f} out"
        )
        parts.append(f"bf16 product {machine['product_tflop_s']:.0f} TFLOP/s")
    parts.append(f"torch {versions['torch']}")
    parts.append(f"Pensieve {versions['pensieve']}")
    for package, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if package in versions:
            own = versions[package]
            parts.append(f"{name} {own[package]} with torch {own['torch']}")
    windows = (
        f"ramp {result.get('ramp_s', 0):g}, warm-up {result['warm_up_s']:g}, measured "
        f"{result['seconds']:g} s"
    )
    return [*parts, windows]


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _row(record: Record) -> list[str]:
    result = record["result"]
    return [
        record["run"],
        f"{result['rate']:g}" + (f" (seed {seed})" if (seed := result["seed"]) else ""),
        f"`{record['server']}`",
        _shown(result, ".2f", "offered_per_s", "completed_per_s"),
        _shown(result, ".1f", "ms_per_token_mean", "ms_per_token_p90"),
        _shown(result, ",.0f", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p95", "ttft_ms_p99"),
        _shown(result, ".1f", "inter_token_ms_p50", "inter_token_ms_p99"),
        _sources(result),
        f"{result['open_at_start']}, {result['open_at_end']}",
        ", ".join(f"{kind}: {count}" for kind, count in result["errors"].items()),
    ]


def _sources(result: Record) -> str:
    if result["sources"]:
        whole = sum(result["sources"].values()) or 1
        return ", ".join(f"{100 * count / whole:.0f}" for count in result["sources"].values())
    if result["cached_tokens"] is not None:
        return f"cached {100 * result['cached_tokens'] / (result['prompt_tokens'] or 1):.0f}"
    return ""


def plot_runs(records: Sequence[Record], path: Path) -> None:
    """By rate and workload: time a token, and the 99th percentile of TTFT; a line a server and run.
    Workloads with one rate are left out, where there are others."""
    records = [record for record in records if "rate" in record["result"]]
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    rates = {
        name: {each["result"]["rate"] for each in records if each["workload"] == name}
        for name in workloads
    }
    workloads = [name for name in workloads if len(rates[name]) > 1] or workloads
    servers = list(dict.fromkeys(record["server"] for record in records))
    figure, grid = subplots(
        "--plot", 2, len(workloads), figsize=(6 * len(workloads), 7), squeeze=False
    )
    for column, workload in enumerate(workloads):
        for row, (name, title) in enumerate(
            (("ms_per_token_mean", "ms a token"), ("ttft_ms_p99", "TTFT p99, ms"))
        ):
            axes = grid[row][column]
            lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for record in records:
                if record["workload"] == workload and record["result"][name] is not None:
                    points = lines.setdefault((record["run"], record["server"]), [])
                    points.append((record["result"]["rate"], record["result"][name]))
            named: set[str] = set()
            for (_, server), points in lines.items():
                label = None if server in named else server
                named.add(server)
                axes.plot(
                    *zip(*sorted(points), strict=True),
                    "o-",
                    color=f"C{servers.index(server)}",
                    label=label,
                )
            axes.set_xlabel(f"{workload}: conversations a second")
            axes.set_ylabel(title)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("{x:,g}")
            axes.tick_params(axis="y", which="minor", labelsize=6)
            axes.grid(alpha=0.3, which="both")
            if named and row == 0:
                axes.legend(
                    fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2
                )
    figure.savefig(path, dpi=130, bbox_inches="tight")
