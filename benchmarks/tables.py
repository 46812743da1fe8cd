"""benchmarks.tables: writes the measured tables of BENCHMARKS.md and docs/measured/ from records.

    python -m benchmarks.tables
    python -m benchmarks.tables --check

A measured table stands in its page between the lines "<!-- the table of `NAME` -->" and "<!-- its
end -->". NAME is a table of docs/measured/records/PAGE.jsonl, or a key of REPORTS: those tables
come from the lines that a benchmark wrote. `--check` writes nothing and names what differs.

A file of records has for each table one line with its name, date, hardware and command, then a line
for each row:

    {"table": "copies", "date": "2026-11-23", "hardware": "one H200", "command": "pytest ..."}
    {"row": {"form": "fp8", "GB/s in": "52.0"}}

All rows of a table have the same columns. Cells are texts, as the page shows them. Every table with
numbers of a run needs records. Tables of settings, options, and sentences about numbers of other
pages need none: NOT_MEASURED has them by their columns.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pensieve.runtime.launch.command_line import CommandParser
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

from .cluster_model import ROUTINGS
from .paper import __main__ as paper
from .paper.report import table as paper_table
from .report import read_runs, write_report

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
RECORDS = MEASURED / "records"
PAGES = (ROOT / "BENCHMARKS.md", *sorted(MEASURED.glob("*.md")))

ABOUT = ("date", "hardware", "command")
NOT_MEASURED = (
    "| what | result | page |",
    "| the paper claims | we found | how |",
    "| | the paper | here |",
    "| | the paper | simulated here | on H200s, where a row is bold |",
    "| | chats | agents |",
    "| rows | other options |",
)
MARKED = re.compile(r"^(<!-- the table of `(.+?)` -->\n)(.*?)(\n<!-- its end -->)$", re.M | re.S)
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
BELOW_COLUMNS = re.compile(r"\|[-:| ]+\|")


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="benchmarks.tables", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing: tell what differs")
    args = parser.parse_args(argv)
    return exit_status("benchmarks.tables", lambda: write_tables(args))


def write_tables(args: argparse.Namespace) -> int:
    """Returns 1 if a table differs from its records, or has none. Raises SettingError."""
    status = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        tables = tables_of(page, text)
        if not args.check:
            text = regenerated(text, tables)
            page.write_text(text, encoding="utf-8")
        for problem in problems(text, tables):
            print(f"{page}: {problem}")
            status = 1
    return status


# -- the text of a page


def tables_of(page: Path, text: str) -> dict[str, str]:
    """The Markdown of the page's tables by name. Raises SettingError."""
    records = RECORDS / f"{page.stem}.jsonl"
    tables = read_tables(records) if records.exists() else {}
    for _, name, *_ in MARKED.findall(text):
        if name in REPORTS:
            tables[name] = REPORTS[name](page)
    return tables


def regenerated(text: str, tables: Mapping[str, str]) -> str:
    """The text with each of `tables` between the marks of its name."""

    def filled(marked: re.Match[str]) -> str:
        begin, name, table, end = marked.groups()
        return f"{begin}{tables.get(name, table)}{end}"

    return MARKED.sub(filled, text)


def problems(text: str, tables: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each table that differs from its records, or lacks its records or marks."""
    placed = set()
    for _, name, table, _ in MARKED.findall(text):
        if name in placed:
            yield f"two tables have the name `{name}`"
        placed.add(name)
        if name not in tables:
            yield f"the table `{name}` has no records"
        elif table != tables[name]:
            yield f"the table `{name}` differs from its records"
    for name in tables:
        if name not in placed:
            yield f"no marks have the name `{name}`"
    rest = FENCED.sub("", MARKED.sub("", text)).splitlines()
    for columns, line in pairwise(rest):
        if BELOW_COLUMNS.fullmatch(line) and columns not in NOT_MEASURED:
            yield f"the table {columns} has no marks and no records"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(columns), f"|{'---|' * len(columns)}", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    """An empty cell has one space."""
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


# -- the records of a page


Row = Mapping[str, str]  # a cell's text by its column


def read_tables(path: Path) -> dict[str, str]:
    """The Markdown of a file's tables by name. SettingError names a line that is no record."""
    tables: dict[str, list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            add_record(json.loads(line), tables)
        except ValueError as error:
            raise SettingError("records", f"{path}, line {number}: {error}") from error
    for name, rows in tables.items():
        if not rows:
            raise SettingError("records", f"{path}: the table {name} has no rows")
    return {
        name: markdown(list(rows[0]), [list(row.values()) for row in rows])
        for name, rows in tables.items()
    }


def add_record(record: Any, tables: dict[str, list[Row]]) -> None:
    """Adds a table, or a row to the last one. ValueError: the record is neither."""
    match record:
        case {"table": name, **rest}:
            if name in tables:
                raise ValueError(f"a second table {name}")
            if not all(rest.get(each) for each in ABOUT):
                raise ValueError(f"a table needs {', '.join(ABOUT)}")
            tables[name] = []
        case {"row": dict(row)}:
            if not tables:
                raise ValueError("a row before any table")
            rows = tables[list(tables)[-1]]
            if not all(isinstance(cell, str) for cell in row.values()):
                raise ValueError("cells are texts, as the page shows them")
            if rows and list(row) != list(rows[0]):
                raise ValueError(f"other columns than the table's first row: {', '.join(row)}")
            rows.append(row)
        case _:
            raise ValueError("neither a table nor a row")


# -- tables of the lines that a benchmark wrote


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
    return markdown(columns, rows)


def reused(result: Mapping[str, Any]) -> str:
    """Percent of the prompt tokens, by the server's counters, or else by its replies."""
    if result["sources"]:
        total = sum(result["sources"].values())
        percent = {name: 100 * count / total for name, count in result["sources"].items()}
        return f"{percent['gpu']:.0f}, {percent['host']:.0f}; {percent['recomputed']:.0f}"
    if result["cached_tokens"] is None:
        return "not reported"
    return f"{100 * result['cached_tokens'] / result['prompt_tokens']:.0f}"


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
    return markdown(columns, rows)


def partial_routing_table(page: Path) -> str:
    """Clusters of 1,000 replicas, of which a part was simulated."""
    records = [record for record in lines("routing-*.jsonl") if record["replicas"] == 1000]
    records.sort(key=lambda record: (record["load"], ROUTINGS.index(record["routing"])))
    rows = [
        routing_row(record, f"{record['replicas']:,}, {record['simulated']}", record["routing"])
        for record in records
    ]
    columns = (
        "load, for each replica",
        "replicas, simulated",
        "routing",
        "requests at the simulated replicas",
        *ROUTING_COLUMNS,
    )
    return markdown(columns, rows)


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


REPORTS: Mapping[str, Callable[[Path], str]] = {
    "versus --report": versus_table,
    "paper": figures_table,
    "paper --device": curves_table,
    "routing": routing_table,
    "routing --simulated": partial_routing_table,
}


if __name__ == "__main__":
    sys.exit(main())
