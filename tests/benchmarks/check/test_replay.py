"""A real run and a simulated one of the same sessions: the results that must be equal under any
load of the machine."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.check.replay import main, shares, slowed
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.types import Usage


@pytest.mark.slow
def test_both_serve_the_same_prompts(capsys):
    options = [
        "--sessions",
        "4",
        "--sessions-per-s",
        "4",
        "--think-s",
        "0.2",
        "--gpu-kv-chunks",
        "40",
        "--json",
    ]
    assert main(options) in (0, 1), "how far they are apart depends on what else runs here"
    line = json.loads(capsys.readouterr().out)
    real, simulated = line["real"], line["simulated"]
    assert real["requests"] == simulated["requests"] and real["generated"] == simulated["generated"]
    assert sum(real["usage"].values()) == sum(simulated["usage"].values())
    assert line["points"] < 100


def test_shares_are_of_all_prompt_tokens():
    assert shares(Usage(gpu=5, host=1, disk=2, recomputed=1, new=1)) == (50, 10, 20, 0, 10, 10)


def test_a_slower_machine_takes_longer_for_steps_and_not_for_copies():
    cost = CostProfile(
        chunk_tokens=4,
        chunk_seconds=1.0,
        attention=((4, 0.5),),
        step_base_seconds=0.1,
        chunk_bytes=8,
        link_bytes_per_s=4.0,
        steps=((1, 0.2), (8, 1.0)),
        row_attention=((4, 0.3),),
    )
    slow = slowed(cost, 3.0)
    assert slow.step(4, 4, 2, 4) == pytest.approx(3 + cost.step(4, 4, 2, 4))
    assert slow.swap_in() == cost.swap_in() and slow.recompute(4) == cost.recompute(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sessions", "0"], "--sessions: must be at least 1"),
        (["--think-s", "0"], "--think-s: must be above 0"),
        (["--sessions-per-s", "-1"], "--sessions-per-s: must be above 0"),
        (["--gpu-kv-chunks", "4"], "--max-model-len"),
    ],
)
def test_a_wrong_setting_is_named(capsys, options, message):
    assert main(options) == 2
    assert re.search(message, capsys.readouterr().err)
