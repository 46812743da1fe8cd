"""The paper's evaluation in small: the runs, the output, and the cases that are not run again."""

from __future__ import annotations

import json

import pytest

from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scripts.paper import (
    MODELS,
    Case,
    _in_units,
    chats,
    main,
    parser,
    plan_figures,
    policy_label,
    profile,
)

SMALL = ["--sessions", "40", "--warm-up", "20", "--models", "falcon-40b", "--jobs", "1"]


def test_lengths_are_rounded_without_a_drift_and_replies_end_at_half_a_window():
    model, turns, history = MODELS["llama-13b"], [], 0
    for _ in range(30):
        turns.append(SessionTurn(history, 38, 305, 1.0))
        history += 343
    units = list(_in_units(turns, model))
    assert [turn.history_tokens for turn in units] == [
        sum(turn.input_tokens + turn.output_tokens for turn in units[:index]) for index in range(len(units))
    ]
    total = units[-1].history_tokens + units[-1].input_tokens + units[-1].output_tokens
    assert len(units) == 30 and abs(total - 30 * 343 / model.unit) < 2
    (long,) = _in_units([SessionTurn(0, 100, 9000, 0.0)], model)
    assert long.output_tokens == model.window // model.unit // 2


def test_sessions_are_as_long_as_the_paper_says():
    """Figure 2: 47% of them have more than 2,048 tokens and 30% more than 4,096; there are 52,000 turns."""
    sessions = chats(9000, 1.0, MODELS["llama-13b"])
    lengths = [sum(session.turns[-1][:3]) * MODELS["llama-13b"].unit for session in sessions]
    assert sum(len(session.turns) for session in sessions) == pytest.approx(52_000, rel=0.02)
    assert sum(length > 2048 for length in lengths) / 9000 == pytest.approx(0.47, abs=0.03)
    assert sum(length > 4096 for length in lengths) / 9000 == pytest.approx(0.27, abs=0.03)


def test_a_unit_takes_as_long_as_its_tokens():
    model = MODELS["llama-13b"]
    cost = profile(model)
    prefill = 2 * model.shape.parameters * model.unit / (2 * 156e12)
    assert cost.chunk_seconds == pytest.approx(prefill)
    weights, context = 2 * model.shape.parameters, 10 * model.unit * model.shape.token_bytes
    steps = model.unit * (weights + context) / (2 * 1.6e12)
    assert cost.step(0, rows=1, rows_context=10) == pytest.approx(steps + prefill, rel=1e-6)


def test_a_label_tells_what_is_not_as_usual():
    assert policy_label(Case("llama-13b", "lru-conversation")) == "lru"
    assert policy_label(Case("llama-13b", save="sync", overflow="recompute")) == "retention sync recompute"
    assert policy_label(Case("llama-13b", reuse=False)) == "recompute all"


def test_figures_have_the_papers_numbers():
    """Policies are its figure 21, context overflow 22, capacity 23, media 24, arrival rates 25."""
    differ = {"21": "policy", "22": "overflow", "23": "disk", "24": "host", "25": "rate"}
    for number, setting in differ.items():
        options = ["--models", "llama-13b", "--figures", number]
        ((title, cases),) = plan_figures(parser().parse_args(options)).items()
        assert title.partition(":")[0] == number
        assert len({getattr(case, setting) for case in cases}) > 1, f"figure {number} is about {setting}"


def test_a_table_and_a_line_for_each_case_which_is_run_once(capsys, tmp_path):
    results = tmp_path / "runs.jsonl"
    options = [*SMALL, "--results", str(results), "--figures", "13,24"]
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
