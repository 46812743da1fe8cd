"""Traces are read or refused with the line at fault; synthetic conversations have the published
means."""

import gzip
import json
import math
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from pensieve.scheduler.sim.simulator import Session, SessionTurn, longest_context
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.traces import CHATS, TURN_COUNTS, poisson, read_trace, synthetic

# beside the repository, not part of it
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

START = {
    "conversation": "a",
    "turn": 0,
    "arrival_s": None,
    "think_s": None,
    "input_tokens": 20,
    "output_tokens": 3,
}
NEXT = START | {"turn": 1, "think_s": 2.5, "history_tokens": 23, "input_tokens": 4}


def write(path, rows):
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path, rate=1.0, seed=7):
    return read_trace(path, sessions_per_s=rate, seed=seed)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_interleaved_conversations_are_read_in_the_order_of_their_first_turns(tmp_path, name):
    other = START | {
        "conversation": "b",
        "arrival_s": 4,
        "history_tokens": None,
        "system_tokens": 11,
    }
    sessions = read(write(tmp_path / name, [START, other, "\n", NEXT]))
    assert sessions == [
        Session(
            "a", next(poisson(1.0, Random(7))), (SessionTurn(0, 20, 3), SessionTurn(23, 4, 3, 2.5))
        ),
        Session("b", 4, (SessionTurn(0, 20, 3),), system_tokens=11),
    ]
    assert longest_context(sessions) == 30


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no requests"),
        (["{\n"], "line 1: Invalid JSON"),
        (["[]\n"], "line 1: Input should be an object"),
        (
            [START | {"conversation": 3}],
            "line 1: conversation: Input should be a valid string, not 3",
        ),
        (
            [START | {"input_tokens": 0}],
            "line 1: input_tokens: Input should be greater than or equal to 1, not 0",
        ),
        (
            [START | {"output_tokens": None}],
            "line 1: output_tokens: Input should be a valid integer, not None",
        ),
        ([START | {"turn": True}], "line 1: turn: Input should be a valid integer, not True"),
        (
            [START, NEXT | {"history_tokens": 1.5}],
            "line 2: history_tokens: Input should be a valid integer",
        ),
        (
            [START | {"arrival_s": -1}],
            "line 1: arrival_s: Input should be greater than or equal to 0, not -1",
        ),
        (
            [START, NEXT | {"think_s": "3"}],
            "line 2: think_s: Input should be a valid number, not '3'",
        ),
        ([START, NEXT | {"think_s": None}], "line 2: turn 1 of a needs think_s"),
        ([NEXT], "line 1: turn 1 of a where turn 0 was due"),
        ([START, START], "line 2: turn 0 of a where turn 1 was due"),
        ([START, NEXT | {"history_tokens": 24}], "line 2: keeps 24 tokens of a, which has 23"),
        (
            [START | {"system_tokens": 21}],
            "line 1: system_tokens are part of a first turn's input_tokens",
        ),
        (
            [START, NEXT | {"system_tokens": 1}],
            "line 2: system_tokens are part of a first turn's input_tokens",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path, rows, message):
    with pytest.raises(SettingError, match=r"^--trace: .*trace\.jsonl") as caught:
        read(write(tmp_path / "trace.jsonl", rows))
    assert message in str(caught.value)


def test_a_file_that_is_missing_or_torn_is_refused(tmp_path):
    with pytest.raises(SettingError, match="cannot be read"):
        read(tmp_path / "nowhere.jsonl")
    path = write(
        tmp_path / "trace.jsonl.gz", [START | {"conversation": str(index)} for index in range(50)]
    )
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[40] ^= 0xFF
    for broken in (whole[:-9], bytes(flipped), b"{}"):
        path.write_bytes(broken)
        with pytest.raises(SettingError, match="cannot be read"):
            read(path)


@pytest.mark.parametrize("name", ["sharegpt", "ultrachat"])
def test_synthetic_conversations_have_the_published_means(name):
    chats = CHATS[name]
    sessions = synthetic(chats, conversations=4000, sessions_per_s=2.0, think_s=15.0, seed=1)
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) / len(sessions) == pytest.approx(chats.turns, rel=0.05)
    assert fmean(turn.input_tokens for turn in turns) == pytest.approx(chats.input_tokens, rel=0.03)
    assert fmean(turn.output_tokens for turn in turns) == pytest.approx(
        chats.output_tokens, rel=0.03
    )
    assert fmean(
        turn.think_s for session in sessions for turn in session.turns[1:]
    ) == pytest.approx(15.0, rel=0.05)
    assert sessions[-1].start_s == pytest.approx(4000 / 2.0, rel=0.05)
    for session in islice(sessions, 100):
        log = 0
        for turn in session.turns:
            assert turn.history_tokens == log
            log += turn.input_tokens + turn.output_tokens


def test_documents_come_before_the_first_prompt():
    chats = CHATS["documents"]
    sessions = synthetic(chats, conversations=4000, sessions_per_s=2.0, think_s=15.0, seed=1)
    first = [session.turns[0].input_tokens for session in sessions]
    low, high = chats.document
    assert low < min(first) and high - 1000 < max(first) < high + 500
    assert fmean(map(math.log, first)) == pytest.approx(
        (math.log(low) + math.log(high)) / 2, rel=0.01
    )
    later = [turn.input_tokens for session in sessions for turn in session.turns[1:]]
    assert fmean(later) == pytest.approx(chats.input_tokens, rel=0.03)


def test_uniform_turns_have_the_same_mean_and_no_long_tail():
    chats = CHATS["sharegpt"]
    counts = {
        spread: [
            len(session.turns)
            for session in synthetic(
                chats,
                conversations=4000,
                sessions_per_s=2.0,
                think_s=15.0,
                seed=1,
                turn_counts=spread,
            )
        ]
        for spread in TURN_COUNTS
    }
    assert [fmean(counted) for counted in counts.values()] == [
        pytest.approx(chats.turns, rel=0.05)
    ] * 2
    assert max(counts["uniform"]) == 11 and max(counts["geometric"]) > 20


def test_a_seed_names_a_workload():
    def make(seed):
        return synthetic(
            CHATS["sharegpt"], conversations=20, sessions_per_s=1.0, think_s=5.0, seed=seed
        )

    assert make(3) == make(3) != make(4)


def test_texts_count_a_token_for_every_four_characters(tmp_path):
    messages = [
        {"role": role, "content": "x" * 38} for role in ("user", "assistant", "user", "assistant")
    ]
    (session,) = read(write(tmp_path / "text.jsonl", [{"conversation": "a", "messages": messages}]))
    first, second = session.turns
    assert first == SessionTurn(0, 14, 10) and second[:3] == (24, 10, 10) and second.think_s > 0


def test_recorded_traces_are_read_whole():
    if not DATA.is_dir():
        pytest.skip(f"no recorded traces at {DATA}")
    sessions = read(DATA / "claude_code_32k.jsonl.gz", rate=0.25)
    turns = [turn for session in sessions for turn in session.turns]
    assert (len(sessions), len(turns)) == (197, 1369)
    assert sum(turn.input_tokens for turn in turns) == 5_207_200
    assert longest_context(sessions) == 32_749
    assert all(session.system_tokens for session in sessions)
    chats = read(DATA / "azure_conv_2023.jsonl.gz")
    assert len(chats) == 19_366 and chats[1].start_s == 4.3146
