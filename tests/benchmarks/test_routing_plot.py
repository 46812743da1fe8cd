"""Recorded lines are read and drawn; a file of something else is named."""

import json

import pytest

from benchmarks.routing_plot import main, read_rows

ROW = {
    "load": "chats",
    "routing": "session",
    "hit_rate": 0.5,
    "requests": 8,
    "seconds_per_token": 0.02,
    "ttft_p95": 1,
}


def written(path, *changes):
    path.write_text("".join(json.dumps({**ROW, **change}) + "\n" for change in changes))
    return path


def test_a_cluster_that_was_simulated_whole_counts(tmp_path):
    rows = [
        {"replicas": 64, "simulated": None, "requests": 9},
        {"replicas": 64, "simulated": 16},
        {"replicas": 8, "simulated": None},
        {"replicas": 1000, "simulated": 16},
    ]
    read = read_rows(written(tmp_path / "rows.jsonl", *rows))
    assert [(row["replicas"], row["simulated"]) for row in read] == [
        (8, None),
        (64, None),
        (1000, 16),
    ]


def test_a_file_without_such_lines_is_named(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"load": "chats"}\n')
    assert main([str(path), "--plot", str(tmp_path / "figure.png")]) == 2
    assert f"{path} holds no lines" in capsys.readouterr().err


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = written(
        tmp_path / "rows.jsonl",
        {"replicas": 1, "simulated": None},
        {"replicas": 64, "simulated": 16},
    )
    assert main([str(path), "--plot", str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").stat().st_size > 1000
