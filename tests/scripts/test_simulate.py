"""The command: a table or JSON lines, one a run; wrong settings are named."""

import json
from itertools import product
from pathlib import Path

import pytest

from pensieve.scheduler.config import EVICTION_POLICIES
from pensieve.scripts.simulate import main

# beside the repository, not part of it
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SMALL = [
    "--synthetic",
    "sharegpt",
    "--sessions",
    "12",
    "--sessions-per-s",
    "2",
    "--gpu-kv-bytes",
    "2GiB",
    "--jobs",
    "1",
]


def json_lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_one_json_line_for_each_policy_and_host_size(capsys):
    assert main([*SMALL, "--host-kv-bytes", "0,1GiB", "--json"]) == 0
    runs = json_lines(capsys)
    assert [(run["host_kv_bytes"], run["eviction"]) for run in runs] == list(
        product((0, 2**30), EVICTION_POLICIES)
    )
    assert len({sum(run["usage"].values()) for run in runs}) == 1
    assert len({run["generated"] for run in runs}) == 1


def test_the_table_is_aligned_and_does_not_depend_on_the_number_of_processes(capsys):
    options = [*SMALL, "--host-kv-bytes", "1GiB", "--eviction", "retention,lru"]
    assert main(options) == 0
    alone = capsys.readouterr().out
    assert main([*options, "--jobs", "2"]) == 0
    assert capsys.readouterr().out == alone
    _, titles, *lines = alone.splitlines()
    assert len(lines) == 2 and {len(line) for line in lines} == {len(titles)}


def test_a_disk_brings_back_what_host_has_lost(capsys):
    options = [
        *SMALL,
        "--sessions",
        "40",
        "--gpu-kv-bytes",
        "1.5GiB",
        "--host-kv-bytes",
        "0.5GiB",
        "--json",
    ]
    options += ["--eviction", "lru", "--warm-up", "20"]
    assert main([*options, "--disk-kv-bytes", "0,100GiB"]) == 0
    without, with_disk = json_lines(capsys)
    assert without["requests"] == with_disk["requests"] and not without["usage"]["disk"]
    assert with_disk["usage"]["disk"] and with_disk["hit_rate"] > without["hit_rate"] + 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eviction", "belady"], "--eviction: must be one of retention"),
        (["--gpu-kv-bytes", "lots"], "--gpu-kv-bytes: 'lots' is not a size"),
        (["--host-kv-bytes", "1GiB,"], "--host-kv-bytes: '' is not a size"),
        (
            ["--host-kv-bytes", "0", "--disk-kv-bytes", "1GiB"],
            "--disk-kv-bytes: needs --host-kv-bytes",
        ),
        (["--save", "sync"], "--save: needs --disk-kv-bytes above 0"),
        (
            ["--prefetch", "off", "--disk-kv-bytes", "0,0"],
            "--prefetch: needs --disk-kv-bytes above 0",
        ),
        (["--disk-read-bytes-per-s", "0"], "--disk-read-bytes-per-s: must be above 0"),
        (["--warm-up", "9999"], "--warm-up: must leave some of"),
        (["--sessions", "0"], "--sessions: must be at least 1"),
        (["--sessions-per-s", "0"], "--sessions-per-s: must be above 0"),
        (["--gpu-kv-bytes", "1MiB"], "--gpu-kv-chunks: must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(capsys, options, message):
    assert main([*SMALL, *options]) == 2
    assert capsys.readouterr().err.startswith(f"pensieve simulate: {message}")


def test_an_unknown_preset_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--preset", "foo", "--rate", "4"])
    assert ended.value.code == 2
    assert "pensieve simulate: argument --preset: invalid choice: 'foo'" in capsys.readouterr().err


def test_agent_sessions_under_pressure_reuse_most_of_their_history(capsys):
    trace = DATA / "claude_code_32k.jsonl.gz"
    if not trace.is_file():
        pytest.skip(f"no recorded trace at {trace}")
    options = [
        "--trace",
        str(trace),
        "--sessions",
        "8",
        "--gpu-kv-bytes",
        "16GiB",
        "--host-kv-bytes",
        "8GiB",
    ]
    assert main([*options, "--eviction", "retention", "--json", "--jobs", "1"]) == 0
    (run,) = json_lines(capsys)
    usage = run["usage"]
    assert usage["host"] and usage["recomputed"] and run["hit_rate"] > 0.5
