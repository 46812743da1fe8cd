"""The records of a page's measured tables, and their Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pensieve.scheduler.types import SettingError

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
RECORDS = MEASURED / "records"
ABOUT = ("date", "hardware", "command")

Row = Mapping[str, str]
"""A cell's text by its column."""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(columns), f"|{'---|' * len(columns)}", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    """An empty cell has one space."""
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def read_rows(path: Path) -> dict[str, list[Row]]:
    """The rows of a file's tables by name. SettingError names a line that is no record."""
    tables: dict[str, list[Row]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            add_record(json.loads(line), tables)
        except ValueError as error:
            raise SettingError("records", f"{path}, line {number}: {error}") from error
    for name, rows in tables.items():
        if not rows:
            raise SettingError("records", f"{path}: the table {name} has no rows")
    return tables


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
