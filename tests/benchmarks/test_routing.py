"""The command: a line for each number of replicas and each routing; wrong settings are named."""

import json
import re

import pytest

from benchmarks.routing import COLUMNS, main

SMALL = [
    *(
        "--jobs",
        "1",
        "--synthetic",
        "sharegpt",
        "--sessions-per-s",
        "0.5",
        "--seconds",
        "12",
        "--warm-up-s",
        "4",
    ),
    *(
        "--ramp-s",
        "4",
        "--chunk-tokens",
        "128",
        "--gpu-kv-bytes",
        "5GiB",
        "--host-kv-bytes",
        "3GiB",
    ),
]


def test_every_cluster_with_every_routing_has_a_line(capsys):
    assert main([*SMALL, "--replicas", "1,2", "--routing", "session,random"]) == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert [text.split()[:2] for text in lines] == [
        ["1", "session"],
        ["1", "random"],
        ["2", "session"],
        ["2", "random"],
    ]
    widths = (max(len(title), int(re.findall(r"\d+", form)[0])) for title, form in COLUMNS.values())
    assert {len(text) for text in (titles, *lines)} == {sum(widths) + 2 * (len(COLUMNS) - 1)}


def test_lines_for_machines(capsys):
    options = ["--replicas", "3", "--routing", "session", "--simulated", "2", "--event", "6:0:fail"]
    assert main([*SMALL, *options, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["replicas"], line["simulated"], line["routing"]) == (3, 2, "session")
    assert line["requests"] > 0 and 0 <= line["hit_rate"] <= 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--replicas", "two"], "--replicas"),
        (["--replicas", "0"], "--replicas"),
        (["--replicas", "2", "--routing", "sticky"], "--routing"),
        (["--replicas", "2", "--event", "5:fail"], "--event"),
        (["--replicas", "2", "--event", "5:2:fail"], "--event"),
        (["--replicas", "2", "--event", "5:0:fail", "--event", "7:0:back"], "--event"),
        (["--replicas", "2", "--event", "5:0:stop"], "--event"),
        (["--replicas", "2", "--warm-up-s", "12"], "--warm-up-s"),
    ],
)
def test_a_wrong_setting_is_named(options, told, capsys):
    assert main([*SMALL, *options]) == 2
    assert told in capsys.readouterr().err
