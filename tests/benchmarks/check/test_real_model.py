"""The checks with a real model, on the demo model: which tokens count, pools, sums by hand, and a
run of each part."""

from __future__ import annotations

import gzip
import json
from array import array

import numpy as np
import pytest
import torch

from benchmarks.check.quality import CHUNK, Context, Quality, truncated_logits
from benchmarks.check.real_model import reference as reference_file
from benchmarks.check.real_model.__main__ import PARTS, main
from benchmarks.check.real_model.conversations import (
    KINDS,
    ChatText,
    RecordedChat,
    mixed,
    read_conversations,
)
from benchmarks.check.real_model.exactness import Agreement, compare
from benchmarks.check.real_model.gaps import gap_row
from benchmarks.check.real_model.lookup import lookup_prompts
from benchmarks.check.real_model.losses import (
    quality_rows,
    quality_turns,
    round_to_int4,
)
from benchmarks.check.real_model.play import (
    TIERS,
    PlayedTurn,
    PlayLimits,
    context_bounds,
    pools,
)
from benchmarks.check.real_model.reference import TransformersReference, TurnLogits, batches
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.engine_cache import engine_for
from pensieve.runtime.engine import open_engine
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.context_window import KEEP, ContextWindow
from pensieve.scheduler.types import SettingError, Usage

SYSTEM = {"role": "system", "content": "Answer in one short sentence, and never with a list. " * 4}
LIMITS = PlayLimits(turns=2, reply_tokens=8, context=400, rows=4, batch=64)


def spoken(number: int, turns: int = 3) -> list[dict[str, str]]:
    return [
        {"role": role, "content": f"{words} {number} and {turn}? " * 5}
        for turn in range(turns)
        for role, words in (("user", "What of the sea"), ("assistant", "The sea is far"))
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for kind in KINDS:
        with gzip.open(directory / f"{kind}_text.jsonl.gz", "wt") as lines:
            for number in range(4):
                messages = [SYSTEM, *spoken(number)] if kind == "tau_airline" else spoken(number)
                lines.write(json.dumps({"conversation": str(number), "messages": messages}) + "\n")
    return directory


@pytest.fixture(scope="module")
def text():
    return ChatText(Tokenizer.load(DEMO_CHECKPOINT))


def test_conversations_alternate_and_results_of_tools_are_the_users(tmp_path):
    messages = [
        ("system", "s"), ("user", "a"), ("assistant", "b"), ("assistant", "c"), ("tool", "d"),
        ("user", "e"), ("assistant", " "),
    ]  # fmt: skip
    line = {"messages": [{"role": role, "content": words} for role, words in messages]}
    with gzip.open(tmp_path / "miniswe_text.jsonl.gz", "wt") as lines:
        lines.write(json.dumps(line) + "\n{}\n")
    (one,) = read_conversations(tmp_path, "miniswe", 1)
    contents = [(message["role"], message["content"]) for message in one.messages]
    assert contents == [("system", "s"), ("user", "a"), ("assistant", "b\n\nc"), ("user", "d\n\ne")]
    assert [message["content"] for message in one.users] == ["a", "d\n\ne"]
    with pytest.raises(SettingError, match="line 2: needs an object with messages"):
        read_conversations(tmp_path, "miniswe", 2)
    with pytest.raises(SettingError, match=r"there is no file .*mtbench101"):
        mixed(tmp_path, 4)


def test_the_text_of_replies_is_counted_and_nothing_else(text):
    replies = text.replies(spoken(1))
    marked = [
        token for token, counts in zip(replies.tokens, replies.is_reply, strict=True) if counts
    ]
    by_the_assistant = [one["content"] for one in spoken(1) if one["role"] == "assistant"]
    assert text.text(marked) == "".join(by_the_assistant)


def test_the_last_fitting_turn_is_measured(text):
    (turn,) = quality_turns(text, [RecordedChat("x", spoken(1))], 400, 6)
    assert turn.history % CHUNK == 0 and 0 < turn.history < len(turn.prompt)
    assert turn.prompt == list(text.prompt(spoken(1)[:5])) and len(turn.reply) == 6
    (shorter,) = quality_turns(text, [RecordedChat("x", spoken(1))], len(turn.prompt), 6)
    assert shorter.prompt == list(text.prompt(spoken(1)[:3]))
    assert quality_turns(text, [RecordedChat("x", spoken(1, turns=1))], 400, 6) == []


def test_the_longest_fitting_prompt_is_looked_up_in(text):
    prompts = [text.prompt(spoken(1)[:place]) for place in (1, 3, 5)]
    conversation = RecordedChat("x", spoken(1))
    assert lookup_prompts(text, [conversation], len(prompts[2]) - 1) == [prompts[1]]
    assert lookup_prompts(text, [conversation], 1) == []


@pytest.mark.parametrize("tier", TIERS)
def test_one_tier_holds_all_conversations(text, tier):
    contexts = context_bounds(text, [RecordedChat("x", spoken(1))] * 40, LIMITS)
    chunks = sum(-(-tokens // CHUNK) for tokens in contexts)
    config = pools(tier, contexts, LIMITS, reuse=True)
    slots = {
        "gpu": config.gpu_kv_chunks,
        "host": config.host_kv_chunks,
        "disk": config.disk_kv_chunks,
        "recomputed": 0,
    }
    assert {name for name, count in slots.items() if count > chunks} == {tier} - {"recomputed"}


def test_contexts_are_bounded_by_their_replies_and_the_limit(text):
    conversation = RecordedChat("x", [SYSTEM, *spoken(1)])
    (bound,) = context_bounds(text, [conversation], LIMITS)
    played = [{"role": "assistant", "content": ""}]
    shown = [SYSTEM, conversation.users[0], *played, conversation.users[1]]
    assert len(text.prompt(shown)) + 2 * LIMITS.reply_tokens < bound <= 400
    short = PlayLimits(turns=2, reply_tokens=8, context=90, rows=4, batch=64)
    assert context_bounds(text, [conversation], short) == [90]


def test_ties_and_differences_are_told_apart():
    logits = torch.tensor([[3.0, 1.0, 0.0], [3.0, 2.9995, 0.0], [3.0, 2.9995, 0.0], [3.0, 2.0, 0]])
    agreement = Agreement()
    agreement.add((0, 0), logits[:2])
    assert (agreement.equal_turns, agreement.close, agreement.ties) == (1, 1, 0)
    agreement.add((1,), logits[2:3])
    assert (agreement.equal_turns, agreement.ties, agreement.differing) == (1, 1, 0)
    assert agreement.equal
    agreement.add((0, 1), logits[[0, 3]])
    assert (agreement.turns, agreement.equal_turns, agreement.tokens) == (3, 1, 5)
    assert (agreement.ties, agreement.differing, not agreement.equal) == (1, 1, True)
    assert agreement.gaps == pytest.approx([0.0005, 1.0], abs=1e-5)


def played(prompt: list[int], reply: tuple[int, ...]) -> PlayedTurn:
    return PlayedTurn("x", 0, array("i", prompt), reply, Usage())


class Chooser:
    """A reference that always chooses token 1; it counts what it computes."""

    computed = 0

    def logits(self, turns):
        self.computed += len(turns)
        for number, turn in enumerate(turns):
            yield TurnLogits(number, torch.tensor([[0.0, 2.0, 1.0]] * len(turn.reply)))


def test_equal_replies_are_computed_once_and_another_one_is_found():
    chooser = Chooser()
    right, wrong = played([5, 6], (1, 1)), played([5, 6], (1, 2))
    agreements = compare({"gpu": [right], "host": [right], "disk": [wrong]}, chooser)
    assert chooser.computed == 2
    assert [agreements[tier].equal for tier in ("gpu", "host", "disk")] == [True, True, False]


def test_batches_hold_as_many_tokens_as_allowed():
    turns = [played([0] * (length - 1), (1,)) for length in (10, 3, 4, 30, 9)]
    assert list(batches(turns, 20)) == [[3], [0, 4], [2, 1]]


def test_padding_changes_no_logits(monkeypatch):
    reference = TransformersReference(DEMO_CHECKPOINT, "cpu")
    turns = [played(list(range(40, 40 + length)), (7, 9)) for length in (5, 20, 12)]
    alone = dict(reference.logits(turns))
    monkeypatch.setitem(reference_file.BATCH_TOKENS, "cpu", 1000)
    together = dict(reference.logits(turns))
    for number, logits in alone.items():
        assert logits.shape[0] == 2
        assert torch.allclose(logits, together[number], atol=1e-3)


def test_a_window_hides_what_lies_before_it_but_the_first_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reference = TransformersReference(DEMO_CHECKPOINT, "cpu")
    engine = open_engine(engine_for(DEMO_CHECKPOINT, dtype="float32"))
    tokens = [40 + place % 90 for place in range(150)]
    windows = ContextWindow(64, 32, KEEP)
    pieces = truncated_logits(Context(engine, len(tokens)), tokens, windows)
    ours = torch.cat([logits for _, logits in pieces])
    hidden, seen, all_seen = (
        reference.windowed_logits(tokens[:-1], windows, always) for always in (0, 1, 150)
    )
    assert torch.allclose(hidden, ours, atol=1e-3)
    turn = played(tokens[:65], tuple(tokens[65:]))
    ((_, whole),) = reference.logits([turn])
    assert torch.allclose(all_seen, whole, atol=1e-3)
    assert (seen - hidden).abs().max() > 1e-2


def test_int4_has_sixteen_numbers_in_a_group():
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    weight[0, :64] = 0.25
    rounded = round_to_int4(weight, 64)
    assert torch.equal(rounded[0, :64], weight[0, :64])
    grouped = rounded.unflatten(1, (2, 64))
    before = weight.unflatten(1, (2, 64))
    assert max(len(group.unique()) for group in grouped.flatten(0, 1)) <= 16
    step = (before.amax(-1) - before.amin(-1)) / 15
    assert ((grouped - before).abs().amax(-1) <= step / 2 + 1e-6).all()


def test_rows_show_changes_against_the_first_way():
    exact, other = (Quality("", way, turns=1, tokens=10, agreed=9) for way in ("exact", "other"))
    exact.loss, other.loss = 10.0, 11.0
    other.reply_tokens = 4
    first, second = quality_rows([exact, other])
    assert first["change"] == "+0.00%" and "equal replies" not in first
    assert second["change"] == "+10.52%" and second["equal replies"] == "0 of 1"
    row = gap_row("way", np.array([0.0, 0.5, 1.0]), {})
    assert (row["tokens"], row["mean"], row["largest"]) == (3, 0.5, 1.0)


@pytest.mark.slow
def test_each_part_writes_its_tables(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counts = {
        "conversations": 4, "turns": 2, "reply-tokens": 4, "rows": 2, "context": 400,
        "scored-turns": 1, "scored-tokens": 4, "overflow-context": 64, "overflow-steps": 1,
        "overflow-texts": 1, "lookup-conversations": 1, "lookup-tokens": 8,
    }  # fmt: skip
    options = [words for name, count in counts.items() for words in (f"--{name}", str(count))]
    place = ["--checkpoint", str(DEMO_CHECKPOINT), "--data", str(data), "--output", str(tmp_path)]
    assert main(["all", *place, *options]) == 0
    reports = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in PARTS}
    for part, report in reports.items():
        assert report["passed"] and all(report["tables"].values())
        assert all(title in (tmp_path / f"{part}.md").read_text() for title in report["tables"])
    (rows,) = reports["exactness"]["tables"].values()
    for row in rows:
        assert row[row["history from"]] > 0 and row["equal replies"] == "8 of 8"
    (rows,) = reports["overflow"]["tables"].values()
    assert [row["way"] for row in rows][1:] == [
        "keep",
        "recompute",
        "restart positions",
        "keep, and the first token",
    ]
    (rows,) = reports["gaps"]["tables"].values()
    assert all(0 < row["largest"] < 1 for row in rows)
    (rows,) = reports["losses"]["tables"].values()
    by_way = {row.pop("way"): row for row in rows}
    assert by_way["bfloat16, packed lower tiers"] == by_way["bfloat16"]
