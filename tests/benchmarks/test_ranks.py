"""The commands that run as several ranks start the ranks themselves, and print their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ranks as bench_ranks
from benchmarks.check import ranks as check_ranks
from benchmarks.loop import LoopAnswer
from pensieve.builder.build import build_engine
from pensieve.scheduler.plan import StepPlan
from pensieve.scheduler.types import TokenLogprobs
from tests.models import tiny_checkpoint

ROOT = Path(__file__).parents[2]


def json_lines(command, *words, status=0):
    """The JSON lines of a command."""
    ended = subprocess.run(
        [sys.executable, "-m", command, *map(str, words)],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == status, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def answer(*tokens):
    """(token, its log probability, the other's)."""
    told = [TokenLogprobs(own, 1, (token, 99), (own, other)) for token, own, other in tokens]
    return LoopAnswer(tokens=[token for token, *_ in tokens], logprobs=told)


def test_replies_are_compared_until_they_part():
    ours = [answer((1, -0.5, -1.0), (2, -0.25, -3.0), (3, -9.0, -9.0))]
    exact = [answer((1, -0.75, -1.5), (4, -0.5, -2.0), (3, -0.1, -0.1))]
    assert check_ranks.off(ours, exact) == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(("worst", "status"), [(0.19, 0), (0.21, 1), (float("nan"), 1)])
def test_ranks_may_be_off_by_twice_as_much_as_one_device(worst, status, tmp_path, capsys):
    exact = [answer((1, -1.0, -2.0))]
    manifest = SimpleNamespace(dtype="bfloat16", tensor_parallel=2)
    ours, one = [answer((1, -1.0 - worst, -2.0))], [answer((1, -1.1, -2.0))]
    assert check_ranks.judge(tmp_path, manifest, ours, one, exact) == status
    printed = capsys.readouterr().out
    assert ("PASS" if status == 0 else "FAIL") in printed
    assert "1 of 1 replies are float32's" in printed


@pytest.mark.parametrize("make", [bench_ranks.generating, bench_ranks.mixed])
def test_the_plans_that_are_timed_are_of_as_many_rows(make):
    plan = make(40, 256)
    assert isinstance(plan, StepPlan)
    assert len(plan.samples) == 256 == len(plan.generate) + len(plan.spans)
    assert len(plan.token_ids) == sum(span.end - span.start for span in plan.spans)


def test_engines_of_one_rank_are_refused(tmp_path, capsys):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    assert check_ranks.main(["--engine", str(tmp_path / "engine")]) == 2
    assert "--engine: all need as many ranks, and at least 2, not [1]" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_say_what_one_device_says(tmp_path):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    for dtype in ("float32", "bfloat16"):
        build_engine(tmp_path / "checkpoint", tmp_path / dtype, dtype=dtype, tensor_parallel=2)
    engines = [tmp_path / "float32", tmp_path / "bfloat16"]
    lines = json_lines(
        "benchmarks.check.ranks", "--engine", *engines, "--prompts", 6, "--tokens", 100
    )
    assert [line["passed"] for line in lines] == [True, True]
    assert 0 < lines[0]["ranks_max"] < 1e-4 < lines[1]["ranks_max"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_add_up_and_say_what_one_says(tmp_path):
    lines = json_lines("benchmarks.ranks", "sums", "--tokens", 1, 64, 1024)
    assert all(line["us"].keys() == {"nccl", "one_shot", "auto"} for line in lines[:2])
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    for dtype in ("float32", "bfloat16"):
        build_engine(
            tmp_path / "checkpoint", tmp_path / dtype, dtype=dtype, tensor_parallel=2, device="cuda"
        )
    engines = [tmp_path / "float32", tmp_path / "bfloat16"]
    reports = json_lines(
        "benchmarks.check.ranks",
        "--device",
        "cuda",
        "--engine",
        *engines,
        "--prompts",
        6,
        "--tokens",
        100,
    )
    assert [line["passed"] for line in reports] == [True, True]


@pytest.mark.slow
def test_plans_and_sums_are_timed():
    lines = json_lines(
        "benchmarks.ranks", "plans", "--ranks", 3, "--rows", 16, "--steps", 20, "--step-ms", 1
    )
    assert [line["plans"] for line in lines] == ["generating", "mixed"]
    for line in lines:
        assert line["until_all_have_it_us"]["p50"] > line["unpacking_wall_us"]["p50"]
        parts = ("sending", "unpacking", "reporting", "merging")
        assert all(
            line[f"{part}_{clock}_us"]["p50"] > 0 for part in parts for clock in ("wall", "cpu")
        )
    lines = json_lines(
        "benchmarks.ranks", "sums", "--device", "cpu", "--tokens", 1, 4, "--width", 64
    )
    assert [line["tokens"] for line in lines] == [1, 4] and all(
        line["us"]["mpi"] > 0 for line in lines
    )
