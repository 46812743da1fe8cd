"""The script that measures the error of KV in eight bits: its sums by hand, and a run of it."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch

from benchmarks.check.quality import CHUNK, Context, Quality, main
from pensieve.plugins.kv_forms.forms import FP8
from tests.runtime.tiny_engine import TinyEngine


def test_sums_are_those_counted_by_hand():
    quality = Quality("m", "w")
    exact = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    # a constant more does not count; the second choice is another one
    got = torch.tensor([[5.0, 1.0], [1.0, 0.0]])
    quality.compare(got, exact, torch.tensor([0, 0]))
    losses = [math.log(1 + math.exp(-4)), math.log(1 + math.exp(-1))]
    assert quality.perplexity == pytest.approx(math.exp(sum(losses) / 2))
    assert (quality.turns, quality.tokens, quality.agreed) == (1, 2, 1)
    assert quality.squared_error == pytest.approx(2 * 1.0**2 + 2 * 1.5**2)
    assert quality.squared_logits == pytest.approx(4.0)
    quality.compare_replies([1, 2, 3], [1, 2, 4, 5])
    quality.compare_replies([7], [7])
    assert (quality.equal_replies, quality.equal_tokens, quality.reply_tokens) == (1, 3, 5)


def test_a_context_goes_on_from_its_history_exact_or_coded():
    engine = TinyEngine("llama")
    engine.manifest.stop_ids = ()
    tokens = [(7 * at) % 160 for at in range(3 * CHUNK)]
    whole = Context(engine, 4 * CHUNK)
    logits = whole.compute(tokens, 0)
    start = 2 * CHUNK
    exact, coded = (whole.copied(2, form) for form in (None, FP8))
    assert torch.allclose(exact.compute(tokens[start:], start), logits[start:], atol=1e-4)
    difference = (coded.compute(tokens[start:], start) - logits[start:]).norm() / logits[
        start:
    ].norm()
    assert 1e-3 < difference < 0.5
    reply = exact.reply(tokens, start, 5)
    assert len(reply) == 5 and reply[0] == int(logits[-1].argmax())


@pytest.mark.slow
def test_a_run_prints_a_table_and_a_line_of_json(tmp_path, capsys):
    chats = tmp_path / "chats.jsonl.gz"
    with gzip.open(chats, "wt") as lines:
        for number in range(3):
            words = [
                f"Tell me about the sea, the Moon and the number {number}. " * 6,
                "It is far away. " * 6,
            ]
            messages = [
                {"role": role, "content": text} for text in words for role in ("user", "assistant")
            ]
            lines.write(json.dumps({"conversation": f"chat-{number}", "messages": messages}) + "\n")
    assert main(["fp8", "--chats", str(chats), "--turns", "1", "--reply-tokens", "4"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 8 and "| llama | fp8 | " in table[3]
    exact, coded, half, everywhere = json.loads(last)[:4]
    assert exact["squared_error"] == 0.0 < coded["squared_error"] and half["turns"] == 1
    assert everywhere["way"] == "fp8 on every tier" and everywhere["squared_error"] > 0.0
