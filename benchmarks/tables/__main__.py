"""benchmarks.tables: writes the measured tables of BENCHMARKS.md and docs/measured/ from records.

    python -m benchmarks.tables
    python -m benchmarks.tables --check

A measured table stands in its page between the lines "<!-- the table of `NAME` -->" and "<!-- its
end -->". NAME is a table of docs/measured/records/PAGE.jsonl, or a key of REPORTS (`reports.py`):
those come from the lines that benchmarks wrote. `--check` writes nothing, and names what differs.

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
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pensieve.runtime.launch.command_line import CommandParser
from pensieve.scripts.command import exit_status

from .records import MEASURED, RECORDS, markdown, read_rows
from .reports import REPORTS

PAGES = (MEASURED.parents[1] / "BENCHMARKS.md", *sorted(MEASURED.glob("*.md")))
NOT_MEASURED = (
    "| what | result | page |",
    "| the paper claims | we found | how |",
    "| | the paper | here |",
    "| | the paper | simulated here | on H200s, where a row is bold |",
    "| | chats | agents |",
    "| rows | other options |",
)
BEGIN = r"^(<!-- the table of `([^`\n]+)` -->\n)"
MARKED = re.compile(BEGIN + r"((?:(?!<!--).)*)(\n<!-- its end -->)$", re.M | re.S)
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
    rows_by_table = read_rows(records) if records.exists() else {}
    tables = {
        name: markdown(list(rows[0]), [list(row.values()) for row in rows])
        for name, rows in rows_by_table.items()
    }
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


if __name__ == "__main__":
    sys.exit(main())
