"""What `versus` has appended: a table, and a plot."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...scheduler.types import SettingError
from ..command import read_records
from ..figures import subplots

BEGIN, END = "<!-- the table of `versus --report` -->", "<!-- its end -->"
TITLES = (
    "run", "conversations/s", "server", "offered, done req/s", "ms/token, p90", "TTFT p50, p90, p95, p99",
    "inter-token p50, p99", "GPU, HOST, DISK, recomputed, new, %", "open", "failed",
)  # fmt: skip

Record = Mapping[str, Any]


def read_runs(paths: Sequence[Path]) -> list[Record]:
    """SettingError names the line that cannot be read."""

    def checked(record: Any) -> Record:
        _row(record)
        return dict(record)

    return [record for path in paths for record in read_records(path, "--report", "versus", checked)]


def write_report(records: Sequence[Record], page: Path | None, picture: Path | None) -> str:
    """Returns the table. Also writes it between the marks of `page` (created if missing), and the plot to `picture`."""
    text = "\n".join(_tables(records))
    if page is not None:
        before, after = "", ""
        if page.exists():
            before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
            _, end, after = rest.partition(END)
            if not (begin and end):
                raise SettingError("--page", f"{page} lacks a line {BEGIN} with a line {END} behind it")
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after or chr(10)}", encoding="utf-8")
    if picture is not None:
        plot(records, picture)
    return text


def _tables(records: Sequence[Record]) -> list[str]:
    """A workload's runs, then its rows by run and rate: only results of one run may be compared."""
    lines = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        rows = [record for record in records if record["workload"] == workload]
        lines += ["", f"**{workload}**, times in ms", ""]
        runs = {record["run"]: record for record in rows}
        lines += [f"* run {name}: {_about(record)}" for name, record in runs.items()]
        lines += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
        places = {name: place for place, name in enumerate(runs)}
        rows.sort(key=lambda record: (places[record["run"]], record["result"]["rate"]))
        lines += [f"| {' | '.join(_row(record))} |" for record in rows]
    return [*lines, ""]


def _about(record: Record) -> str:
    machine, versions, result = record["machine"], record["versions"], record["result"]
    parts = [_date(result["time"]), machine["name"], f"{machine['cores']} cores"]
    if "driver" in machine:
        parts.append(f"driver {machine['driver']}")
        parts.append(f"link {machine['link_in_gb_s']:.1f} GB/s in and {machine['link_out_gb_s']:.1f} out")
        parts.append(f"bf16 product {machine['product_tflop_s']:.0f} TFLOP/s")
    parts.append(f"torch {versions['torch']}")
    parts.append(f"Pensieve {versions['pensieve']}")
    if "vllm" in versions:
        parts.append(f"vLLM {versions['vllm']['vllm']} with torch {versions['vllm']['torch']}")
    windows = f"ramp {result['ramp_s']:g}, warm-up {result['warm_up_s']:g}, measured {result['seconds']:g} s"
    return ", ".join([*parts, f"seed {result['seed']}", windows])


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _row(record: Record) -> list[str]:
    result = record["result"]

    def shown(form: str, *names: str) -> str:
        return ", ".join("-" if (value := result[name]) is None else format(value, form) for name in names)

    return [
        record["run"],
        f"{result['rate']:g}",
        f"`{record['server']}`",
        shown(".2f", "offered_per_s", "completed_per_s"),
        shown(".1f", "ms_per_token_mean", "ms_per_token_p90"),
        shown(",.0f", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p95", "ttft_ms_p99"),
        shown(".1f", "inter_token_ms_p50", "inter_token_ms_p99"),
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


def plot(records: Sequence[Record], path: Path) -> None:
    """By rate and workload: time a token, and the 99th percentile of TTFT; a line a server and run."""
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    servers = list(dict.fromkeys(record["server"] for record in records))
    figure, grid = subplots("--plot", 2, len(workloads), figsize=(6 * len(workloads), 7), squeeze=False)
    for column, workload in enumerate(workloads):
        for row, (name, title) in enumerate((("ms_per_token_mean", "ms a token"), ("ttft_ms_p99", "TTFT p99, ms"))):
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
                axes.plot(*zip(*sorted(points), strict=True), "o-", color=f"C{servers.index(server)}", label=label)
            axes.set_xlabel(f"{workload}: conversations a second")
            axes.set_ylabel(title)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("{x:,g}")
            axes.grid(alpha=0.3, which="both")
            if named:
                axes.legend()
    figure.savefig(path, dpi=130)
