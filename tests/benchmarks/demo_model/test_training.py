"""The demo models' training data, and a training run of two steps."""

from __future__ import annotations

import gzip
import json
from itertools import islice

import pytest
from jinja2 import Template

from benchmarks.demo_model import data, train
from benchmarks.demo_model.chats import TOPICS, ChatWords, written_chats

WORDS = ChatWords(["house", "apple"], ["paint", "open"], ["old", "red"])
LICENCE = "  1 This is the licence in front of the data  \n"
DATA = {
    "noun": '00000001 06 n 01 house 0 000 | a building to live in; "they built a house"  \n'
    "00000002 05 n 01 Zebu 0 000 | ox  \n",
    "verb": (
        "00000003 30 v 01 paint 0 000 01 + 08 00 | apply colour to  \n00000004 30 v 01 yaw 0 "
        "000 | turn  \n"
    ),
    "adj": "00000005 00 s 02 old(a) 0 aged 1 000 | not young  \n",
    "adv": "00000006 02 r 01 very_much 0 000 | greatly  \n",
}


@pytest.fixture
def wordnet(tmp_path):
    directory = tmp_path / "wordnet"
    directory.mkdir()
    for part, lines in DATA.items():
        (directory / f"data.{part}").write_text(LICENCE + lines)
    words = ("house", "zebu", "paint", "old", "very_much")
    (directory / "cntlist.rev").write_text("".join(f"{word}%1:00:00:: 1 5\n" for word in words))
    return directory


@pytest.fixture
def chat_file(tmp_path):
    path = tmp_path / "chats.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as lines:
        for i in range(40):
            chat = [
                {"role": "system", "content": "Rules."},
                {"role": "user", "content": f"Question {i}?"},
                {"role": "assistant", "content": "Let me see."},
                {"role": "tool", "content": "{}"},
                {"role": "assistant", "content": None},
                {"role": "assistant", "content": f"Answer {i}."},
                {"role": "user", "content": "###STOP###"},
            ]
            lines.write(
                json.dumps({"conversation": f"task-{i // 2}-{i % 2}", "messages": chat}) + "\n"
            )
    return path


def test_what_users_and_assistants_say_is_read(chat_file):
    name, chat = next(data.read_chats(chat_file))
    assert name == "task-0-0"
    assert chat == [
        {"role": "user", "content": "Question 0?"},
        {"role": "assistant", "content": "Let me see.\n\nAnswer 0."},
    ]


def test_the_split_depends_on_names_alone_and_keeps_trials_together(chat_file):
    named = list(data.read_chats(chat_file))
    kept, away = data.split(named)
    assert data.split(named[::-1])[1] == away[::-1]
    assert len(kept) == 38 and len(away) == 2
    first, second = (int(chat[0]["content"].split()[1].rstrip("?")) for chat in away)
    assert first // 2 == second // 2


def test_common_words_are_read_from_wordnet(wordnet):
    entries = list(data.read_wordnet(wordnet))
    assert [entry.word for entry in entries] == ["house", "paint", "old", "very much"]
    assert data.single_words(entries) == ChatWords(["house"], ["paint"], ["old"])
    chats = dict(data.word_chats(entries, seed=1))
    answers = {
        message["content"]
        for chat in chats.values()
        for message in chat
        if message["role"] == "assistant"
    }
    assert (
        'As a noun, "house" means: a building to live in. For example: "they built a house."'
        in answers
    )
    assert len(answers) == 4


def test_written_chats_alternate_and_are_always_the_same():
    chats = list(islice(written_chats(WORDS, seed=4), 300))
    assert chats == list(islice(written_chats(WORDS, seed=4), 300))
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        assert not any("{" in message["content"] for message in chat)
    questions = " ".join(
        message["content"] for chat in chats for message in chat if message["role"] == "user"
    )
    assert all(name in questions for name in TOPICS)


def test_rendering_is_that_of_the_template():
    chat = next(written_chats(WORDS, seed=2))
    assert data.render(chat) == Template(data.CHAT_TEMPLATE).render(messages=chat)


def test_rows_have_their_length_and_begin_with_a_chat(chat_file, wordnet, monkeypatch):
    monkeypatch.setattr(data, "WRITTEN_CHATS", 40)
    corpus = data.Corpus([chat_file], wordnet, seed=1)
    assert list(corpus.train) == ["chats.jsonl.gz", "wordnet", "written"]
    shares = {"chats.jsonl.gz": 0.5, "written": 0.5}
    rows, again = data.Rows(corpus, shares, 3), data.Rows(corpus, shares, 3)
    start = corpus.tokenizer.token_to_id(data.TURN_START)
    for length in (64, 300, 64):
        row = rows.next(length)
        assert len(row) == length and row[0] == start and row == again.next(length)
    packed = corpus.packed([[5] * 7, [6] * 4], 3)
    assert packed == [[5, 5, 5], [5, 5, 5], [5, corpus.separator, 6], [6, 6, 6]]


@pytest.mark.slow
def test_two_steps_of_training_write_both_checkpoints(
    chat_file, wordnet, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(data, "WRITTEN_CHATS", 40)
    common = f"--output {tmp_path} --wordnet {wordnet} --chats {chat_file} --steps 2 --eval-every 1"
    common += " --batch-tokens 64 --device cpu --row-tokens "
    assert train.main((common + "8").split()) == 0
    reports = [
        json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")
    ]
    assert [report["model"] for report in reports] == ["llama", "opt"]
    for report in reports:
        assert set(report["perplexity"]) == {"chats.jsonl.gz", "wordnet", "written"}
        config = json.loads((tmp_path / report["model"] / "config.json").read_text())
        assert config["dtype"] == "bfloat16" and config["eos_token_id"] == [2, 0]
        assert (tmp_path / report["model"] / "tokenizer_config.json").exists()
    assert train.main((common + "100000").split()) == 2
    assert "--row-tokens" in capsys.readouterr().err
