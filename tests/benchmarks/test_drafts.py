"""The benchmark of drafts: simulated, and with a tiny engine."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks import drafts
from benchmarks.check.replay import small_engine
from pensieve.builder.build import build_engine
from pensieve.scheduler.turns.drafts import propose
from tests.models import save_random, tiny_config
from tests.scheduler.draft_policy import always_draft

PROFILE = {
    "hardware": "none",
    "date": "2026-11-27",
    "cost": {
        "chunk_tokens": 16,
        "chunk_seconds": 1e-4,
        "attention": [[1024, 1e-5]],
        "step_base_seconds": 5e-3,
        "chunk_bytes": 1024,
        "link_bytes_per_s": 1e10,
        "steps": [[1, 5e-3], [256, 6e-3]],
    },
}


@pytest.fixture
def files(tmp_path):
    """Arguments: a conversation whose second reply repeats its first prompt."""
    words = Tokenizer(models.WordLevel({str(at): at for at in range(100)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    numbers = list(map(str, range(1, 61)))
    spoken = [
        {"role": "user", "content": " ".join(numbers)},
        {"role": "assistant", "content": " ".join(numbers[::-1])},
        {"role": "user", "content": "99"},
        {"role": "assistant", "content": " ".join(numbers)},
    ]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": spoken}) + "\n")
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    return [
        *("--data", str(tmp_path / "data.jsonl")),
        *("--tokenizer", str(tmp_path / "tokenizer.json")),
        *("--profile", str(tmp_path / "profile.json")),
        *("--context", "256", "--max-num-seqs", "64", "--max-num-batched-tokens", "128"),
    ]


def lines(capsys, arguments):
    assert drafts.main(arguments) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_simulated_runs_gain_by_true_drafts_and_lose_nothing_by_wrong_ones(files, capsys):
    printed = lines(capsys, [*files, "--rows", "1", "4", "--tokens", "400"])
    assert [(line["text"], line["rows"], line["speculate"]) for line in printed] == [
        (text, rows, speculate)
        for text in ("recorded", "misleading")
        for rows in (1, 4)
        for speculate in ("off", "lookup")
    ]
    assert all(line["simulated"] for line in printed)
    for off, lookup in zip(printed[::2], printed[1::2], strict=True):
        assert off["gain"] == 1 and not off["checks"]
        if off["text"] == "recorded":
            assert lookup["gain"] > 1.2 and lookup["accepted_per_check"] > 4
        else:
            assert lookup["gain"] > 0.99 and not lookup["accepted_per_check"]


def test_a_tiny_engine_computes_the_recorded_tokens(files, capsys, tmp_path, monkeypatch):
    always_draft(monkeypatch)
    engine = small_engine(tmp_path)
    options = ["--rows", "2", "--tokens", "130", "--texts", "recorded", "--chunk-tokens", "16"]
    off, lookup = lines(capsys, [*files, "--engine", str(engine), *options])
    assert not off["simulated"] and off["tokens_per_step"] <= 2
    assert lookup["accepted_per_check"] > 4 and lookup["tokens_per_step"] > 3


def test_a_model_with_states_gains(files, capsys, tmp_path, monkeypatch):
    """Simulated, and with a tiny engine."""
    options = ["--rows", "2", "--tokens", "400", "--texts", "recorded", "--state-chunks", "4"]
    off, lookup = lines(capsys, [*files, *options])
    assert off["gain"] == 1 and lookup["gain"] > 1.2 and lookup["accepted_per_check"] > 4
    always_draft(monkeypatch)
    save_random(tiny_config("qwen3-5"), tmp_path / "checkpoint", gain=1.0)
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    options = ["--rows", "2", "--tokens", "130", "--texts", "recorded", "--chunk-tokens", "16"]
    options += ["--max-num-batched-tokens", "256"]
    off, lookup = lines(capsys, [*files, "--engine", str(tmp_path / "engine"), *options])
    assert not off["simulated"] and off["tokens_per_step"] <= 2
    assert lookup["accepted_per_check"] > 4 and lookup["tokens_per_step"] > 3


@pytest.mark.parametrize("end", [[1, 2], [2, 2], [1, 2, 2, 2]])
def test_no_token_of_a_misleading_reply_is_proposed(end):
    prompt = [1, 2, 3, 4, 1, 2, 3, 4, *end]
    turn = drafts.RecordedTurn(drafts.array("i", prompt), drafts.array("i", [3, 4, 1, 2] * 9))
    ((misled,),) = drafts.misled([[turn]])
    assert misled.prompt == turn.prompt and len(misled.reply) == len(turn.reply)
    whole = "".join(map(chr, misled.prompt + misled.reply))
    proposed = [propose(whole[:end])[:1] for end in range(len(prompt), len(whole))]
    assert all(one != two for one, two in zip(proposed, whole[len(prompt) :], strict=True))
    assert sum(map(bool, proposed)) > 20


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["--rows", "65"], "--rows"),
        (["--context", "64"], "--context"),
        (["--tokenizer", "none"], "--tokenizer"),
    ],
)
def test_wrong_options_are_named(files, wrong, named, capsys):
    assert drafts.main([*files, *wrong]) == 2
    assert named in capsys.readouterr().err
