"""The table of the code's goals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.check import house


def test_folders_are_counted_as_they_are() -> None:
    assert {"runtime.loop", "scripts.simulate"} <= house.modules().keys()
    assert house.tokens(house.sources("scripts")) < house.tokens(house.sources(*house.SHIPPED))
    assert house.loosely_checked() == ["scripts"]


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    source = tmp_path / "source.py"
    source.write_text(
        '"""A docstring is no code."""\n\n# nor is a comment\n'
        "a, b = 1, 2\nx, y = a, [b]\nx, y = y, 'swapped'\n" + "z = " + "1" * 97 + "\n"
    )
    assert house.tokens([source]) == 7 + 9 + 7 + 3
    assert house.long_lines([source]) == ["source.py:7"]
    assert house.tuple_assignments([source]) == ["source.py:5"]


def test_comments_are_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PAGES", ("README.md",))
    (tmp_path / "README.md").write_text("one\n<!-- the table of `a` -->\ntwo\n<!-- its end -->\n")
    assert house.words() == 2


def test_no_line_is_too_long_and_none_assigns_unlike_things() -> None:
    assert house.long_lines(house.sources(*house.PYTHON)) == []
    assert house.tuple_assignments(house.sources(*house.PYTHON)) == []


@pytest.mark.slow
def test_the_table_has_every_goal() -> None:
    """In a separate process: the HTTP process's main thread ignores signals."""
    command = [sys.executable, "-m", "benchmarks.check.house"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    head, _, *rows = done.stdout.splitlines()
    assert head == "| what | before | goal | now |"
    goals = {
        cells[1]: cells for cells in ([cell.strip() for cell in row.split("|")] for row in rows)
    }
    assert len(goals) == 10
    assert 30 < int(goals["files from a chat's arrival to the kernel"][4]) < 100
