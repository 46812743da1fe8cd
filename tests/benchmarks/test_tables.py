"""Each table of docs/measured/ and BENCHMARKS.md equals the one that its records give."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import __main__ as tables
from benchmarks.tables.records import markdown, read_rows
from pensieve.scheduler.types import SettingError

NO_TABLES = {"papers.md", "BENCHMARKS.md"}  # sentences about the numbers of the other pages
PAGE = tables.MEASURED / "tenants.md"  # a small one


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_every_table_is_what_its_records_give(page: Path):
    """`python -m benchmarks.tables` makes it so."""
    text = page.read_text()
    tables_by_name = tables.tables_of(page, text)
    assert list(tables.problems(text, tables_by_name)) == []
    assert tables.regenerated(text, tables_by_name) == text
    assert bool(tables_by_name) != (page.name in NO_TABLES)


def test_every_file_of_records_has_its_page():
    assert {path.stem for path in tables.RECORDS.iterdir()} <= {page.stem for page in tables.PAGES}


@pytest.fixture
def page(tmp_path, monkeypatch) -> Path:
    """A copy of a page, the only one that the command writes."""
    copy = tmp_path / PAGE.name
    copy.write_text(PAGE.read_text())
    monkeypatch.setattr(tables, "PAGES", [copy])
    return copy


def test_a_changed_cell_is_told_and_written_again(page, capsys):
    page.write_text(page.read_text().replace("| 77.7 |", "| 7.7 |"))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == (
        f"{page}: the table `first-token` differs from its records\n"
    )
    assert "| 7.7 |" in page.read_text()
    assert tables.main([]) == 0
    assert page.read_text() == PAGE.read_text()
    assert tables.main(["--check"]) == 0


def test_a_report_is_regenerated_too():
    page = tables.MEASURED / "routing.md"
    text = page.read_text()
    changed = text.replace("| 241 | 87.0 |", "| 241 | 88.0 |")
    tables_by_name = tables.tables_of(page, text)
    assert list(tables.problems(changed, tables_by_name)) == [
        "the table `routing` differs from its records"
    ]
    assert tables.regenerated(changed, tables_by_name) == text


def test_a_table_needs_marks_records_and_a_place(page, capsys):
    text = page.read_text()
    begin, _, rest = text.partition("<!-- the table of `first-token` -->\n")
    page.write_text(begin + rest)
    assert tables.main([]) == 1
    assert capsys.readouterr().out == (
        f"{page}: no marks have the name `first-token`\n"
        f"{page}: the table | prompts | median ms | quartiles ms | has no marks and no records\n"
    )
    page.write_text(text.replace("`first-token`", "`other`"))
    assert tables.main([]) == 1
    assert capsys.readouterr().out == (
        f"{page}: the table `other` has no records\n{page}: no marks have the name `first-token`\n"
    )
    page.write_text(text + text)
    assert tables.main([]) == 1
    assert capsys.readouterr().out == f"{page}: two tables have the name `first-token`\n"


def test_a_table_without_its_end_loses_nothing_behind_it():
    text = "<!-- the table of `a` -->\n| a |\n|---|\n\nWords.\n\n"
    text += "<!-- the table of `b` -->\n| b |\n|---|\n<!-- its end -->\n"
    tables_by_name = {"a": "new", "b": "new"}
    written = tables.regenerated(text, tables_by_name)
    assert written == text.replace("| b |\n|---|", "new")
    assert list(tables.problems(written, tables_by_name)) == [
        "no marks have the name `a`",
        "the table | a | has no marks and no records",
    ]


def test_settings_and_examples_need_no_records():
    settings = f"{tables.NOT_MEASURED[0]}\n|---|---|---|\n| a | b | c |\n"
    example = "```\n| a |\n|---|\n| b |\n```\n"
    assert list(tables.problems(settings + example, {})) == []


HEADING = '{"table": "t", "date": "d", "hardware": "h", "command": "c"}\n'


def test_records_are_rows_by_table(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(HEADING + '{"row": {"a": "1", "": ""}}\n{"row": {"a": "", "": "x"}}\n')
    assert read_rows(path) == {"t": [{"a": "1", "": ""}, {"a": "", "": "x"}]}


def test_an_empty_cell_is_one_space():
    table = markdown(["a", ""], [["1", ""], ["", "x"]])
    assert table == "| a | |\n|---|---|\n| 1 | |\n| | x |"


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ("no JSON\n", 1, "Expecting value"),
        ("[]\n", 1, "neither a table nor a row"),
        ('{"row": {"a": "1"}}\n', 1, "a row before any table"),
        (HEADING.replace('"d"', '""'), 1, "a table needs date, hardware, command"),
        ('{"table": "t"}\n', 1, "a table needs date, hardware, command"),
        (HEADING + HEADING, 2, "a second table t"),
        (HEADING + '{"row": {"a": "1"}}\n{"row": {"b": "1"}}\n', 3, "other columns"),
        (HEADING + '{"row": {"a": 1}}\n', 2, "cells are texts"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, lines, number, words):
    path = tmp_path / "records.jsonl"
    path.write_text(lines)
    with pytest.raises(SettingError, match=words) as error:
        read_rows(path)
    assert f"{path}, line {number}: " in str(error.value)


def test_a_table_without_rows_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text(HEADING)
    with pytest.raises(SettingError, match="the table t has no rows"):
        read_rows(path)
