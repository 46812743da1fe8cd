"""Draws what routing costs by the number of replicas, from recorded lines of `benchmarks.routing
--json`.

    python -m benchmarks.routing_plot docs/measured/routing-2026-11-24.jsonl --plot
    docs/figures/routing.png

A line's `load` names the row of panels. If a whole cluster was simulated, lines of a part of it are
left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pensieve.runtime.launch.command_line import CommandParser
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status, subplots

from .cluster_model import ROUTINGS

PANELS: dict[str, Callable[[dict], float]] = {
    "hit rate, %": lambda row: 100 * row["hit_rate"],
    "requests done, a replica": lambda row: row["requests"] / (row["simulated"] or row["replicas"]),
    "ms/token": lambda row: 1e3 * row["seconds_per_token"],
    "TTFT p95, s": lambda row: row["ttft_p95"],
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="routing_plot", description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--plot", required=True, type=Path, metavar="FILE", help="the figure")
    args = parser.parse_args(argv)
    return exit_status("routing_plot", lambda: draw(args))


def read_rows(path: Path) -> list[dict]:
    """One for each load, routing and number of replicas, by their number. Raises SettingError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows_by_run = {
            (row["load"], row["routing"], row["replicas"]): row
            for row in rows
            if row["simulated"] is not None
        }
        rows_by_run |= {
            (row["load"], row["routing"], row["replicas"]): row
            for row in rows
            if row["simulated"] is None
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            "FILE", f"{path} holds no lines of `benchmarks.routing` with a load ({error!r})"
        ) from None
    return sorted(rows_by_run.values(), key=lambda row: row["replicas"])


def draw(args: argparse.Namespace) -> None:
    """Writes the figure; a hollow mark is a cluster of which a part was simulated. Raises
    SettingError."""
    rows = read_rows(args.records)
    loads, sizes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("load", "replicas"))
    figure, grid = subplots(
        "--plot", len(loads), len(PANELS), figsize=(12, 2.8 * len(loads)), squeeze=False
    )
    for axes, load in zip(grid, loads, strict=True):
        for axis, (title, value) in zip(axes, PANELS.items(), strict=True):
            for place, routing in enumerate(ROUTINGS):
                points = [row for row in rows if (row["load"], row["routing"]) == (load, routing)]
                color = f"C{place}"
                numbers = [row["replicas"] for row in points]
                style = "--" if place % 2 else "-"  # neighbours may lie on one another
                axis.plot(
                    numbers, [value(row) for row in points], style, color=color, label=routing
                )
                for row in points:
                    face = color if row["simulated"] is None else "white"
                    axis.plot(
                        row["replicas"],
                        value(row),
                        marker="o",
                        color=color,
                        markerfacecolor=face,
                        markersize=4,
                    )
            axis.set_xscale("log")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
            axis.minorticks_off()
            axis.set(title=f"{load}: {title}", xlabel="replicas")
            axis.set_ylim(bottom=0)
    grid[0][0].legend(fontsize="small")
    figure.savefig(args.plot, dpi=90)


if __name__ == "__main__":
    sys.exit(main())
