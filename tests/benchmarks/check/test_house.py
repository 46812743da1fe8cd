"""The table of the code's goals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.check import house


def test_rooms_are_counted_as_they_are() -> None:
    assert {"runtime.loop", "scripts.simulate"} <= house.modules().keys()
    assert house.lines(house.sources("scripts")) < house.lines(house.sources(*house.ROOMS))
    assert house.loosely_checked() == ["scripts"]


@pytest.mark.slow
def test_the_table_has_every_goal() -> None:
    """In a separate process: the HTTP process's main thread ignores signals."""
    command = [sys.executable, "-m", "benchmarks.check.house"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.splitlines()
    assert said[0] == "| what | before | goal | now |"
    rows = {cells[1]: cells for cells in ([cell.strip() for cell in line.split("|")] for line in said[2:])}
    assert len(rows) == 7
    assert 30 < int(rows["files that run from a chat's arrival to the kernel"][4]) < 100
