"""The paper's evaluation in small: what is run, what is printed, what is not run again."""

from __future__ import annotations

import json

import pytest

from pensieve.scheduler.simulator import SessionTurn
from pensieve.scripts.simulate_paper import MODELS, UNIT, _in_units, main, profile

SMALL = ["--sessions", "40", "--warm-up", "20", "--models", "falcon-40b", "--jobs", "1"]


def test_lengths_are_rounded_without_a_drift_and_end_with_the_window():
    turns, history = [], 0
    for _ in range(30):
        turns.append(SessionTurn(history, 38, 205, 1.0))
        history += 243
    units = list(_in_units(turns, 60))
    assert [turn.history_tokens for turn in units] == [
        sum(turn.input_tokens + turn.output_tokens for turn in units[:index]) for index in range(len(units))
    ]
    total = units[-1].history_tokens + units[-1].input_tokens + units[-1].output_tokens
    assert len(units) < 30 and total <= 60 and abs(total - len(units) * 243 / UNIT) < 2


def test_a_unit_takes_as_long_as_its_tokens():
    model = MODELS["llama-13b"]
    cost = profile(model)
    prefill = 2 * model.shape.parameters * UNIT / (2 * 156e12)
    assert cost.chunk_seconds == pytest.approx(prefill)
    weights, context = 2 * model.shape.parameters, 10 * UNIT * model.shape.token_bytes
    steps = UNIT * (weights + context) / (2 * 1.6e12)
    assert cost.step(0, rows=1, rows_context=10) == pytest.approx(steps + prefill, rel=1e-6)


def test_a_table_and_a_line_for_each_case_which_is_run_once(capsys, tmp_path):
    results = tmp_path / "runs.jsonl"
    options = [*SMALL, "--results", str(results), "--figures", "13,23"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("falcon-40b") == 2 + 3
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(lines) == 4, "one case is in both figures"
    assert main(options) == 0
    assert capsys.readouterr().out == printed and len(results.read_text().splitlines()) == 4


@pytest.mark.slow
def test_the_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*SMALL, "--figures", "13", "--plots", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["paper_13_16_17.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "gpt"], "--models: must be of llama-13b"),
        (["--figures", "99"], "--figures: there is none"),
        (["--warm-up", "99999"], "--warm-up: must leave some of"),
        (["--sessions", "0"], "--sessions: must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(capsys, options, message):
    assert main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err
