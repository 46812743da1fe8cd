"""Every form of trace is read, or refused with the place at fault."""

import json
from array import array
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from benchmarks.traces import _sample, read_dialogues
from pensieve.scheduler.sim.simulator import Session, SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens, synthetic_dialogue

# beside the repository, not part of it
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

LENGTHS = {
    "conversation": "a",
    "turn": 0,
    "arrival_s": 3,
    "think_s": None,
    "input_tokens": 20,
    "output_tokens": 3,
}
MOONCAKE = {"timestamp": 2500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 9]}
MESSAGES = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "oh"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "bye"},
    {"role": "user", "content": "unanswered"},
]
GENERATED = {
    "filetype": "generate_conversations",
    "num_conversations": 3,
    "prompt_input": {
        "num_turns": {"distribution": "constant", "value": 5},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 50},
        "prefix_num_tokens": {"distribution": "uniform", "min": 10, "max": 10},
        "num_tokens": {"distribution": "constant", "value": 4},
    },
    "prompt_output": {"num_tokens": {"distribution": "constant", "value": 6}},
}


def encode(text):
    return [ord(character) for character in text]


def read(path, value, tokenizer=encode):
    text = "\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value)
    path.write_text(text)
    return read_dialogues(path, encode=tokenizer, think_s=2.0, seed=1)


def without_think_times(dialogue):
    assert all(turn.think_s > 0 for turn in dialogue.turns[1:])
    return dialogue._replace(turns=tuple(turn._replace(think_s=0.0) for turn in dialogue.turns))


def test_lengths_keep_their_clock_and_their_shared_system_prompt(tmp_path):
    following = LENGTHS | {"turn": 1, "think_s": 2.5, "history_tokens": 21, "input_tokens": 4}
    (dialogue,) = read(tmp_path / "t.jsonl", [LENGTHS | {"system_tokens": 15}, following], None)
    assert dialogue == Dialogue(
        "a",
        3,
        (SessionTurn(0, 20, 3), SessionTurn(21, 4, 3, 2.5)),
        ((SyntheticTokens(15, "system 15"), SyntheticTokens(5)), (SyntheticTokens(4),)),
    )


def test_a_first_turn_may_be_all_system_prompt():
    assert synthetic_dialogue(Session("a", 0.0, (SessionTurn(0, 9, 1),), 9)).inputs == (
        (SyntheticTokens(9, "system 9"),),
    )


def test_mooncake_blocks_are_shared_by_their_ids(tmp_path):
    one, other = read(
        tmp_path / "t.jsonl",
        [MOONCAKE, MOONCAKE | {"timestamp": 4000, "hash_ids": [0, 2, 3]}],
        None,
    )
    assert one == Dialogue(
        "m0",
        2.5,
        (SessionTurn(0, 1030, 7),),
        (
            (
                SyntheticTokens(512, "block 0"),
                SyntheticTokens(512, "block 1"),
                SyntheticTokens(6, "block 9"),
            ),
        ),
    )
    assert other.start_s == 4.0 and other.inputs[0][0] == one.inputs[0][0]


@pytest.mark.parametrize(("file", "name"), [("t.jsonl", "conversation"), ("t.json", "id")])
def test_messages_become_turns_of_token_ids(tmp_path, file, name):
    (dialogue,) = read(
        tmp_path / file, [{name: "c", "messages": MESSAGES}, {name: "d", "messages": MESSAGES[:2]}]
    )
    head = SyntheticTokens(4, "text", per_pass=True)
    assert without_think_times(dialogue) == Dialogue(
        "c",
        None,
        (SessionTurn(0, 4 + 7, 2), SessionTurn(13, 2, 3)),
        ((head, array("i", encode("behello"))), (array("i", encode("so")),)),
    )


def test_a_tool_answers_a_call_at_once(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    tool = {"role": "tool", "content": ""}
    (dialogue,) = read(
        tmp_path / "t.json", [{"id": "c", "messages": [*MESSAGES[:2], call, tool, *MESSAGES[2:5]]}]
    )
    called = len(json.dumps(call["tool_calls"]))
    assert dialogue.turns[:2] == (SessionTurn(0, 11, called), SessionTurn(11 + called, 1, 2))
    assert len(dialogue.turns) == 3 and dialogue.turns[2].think_s > 0


def test_conversations_are_made_up_as_vllms_settings_say(tmp_path):
    dialogues = read(tmp_path / "t.json", GENERATED, None)
    assert len(dialogues) == 3
    assert without_think_times(dialogues[0]) == Dialogue(
        "v0",
        None,
        (SessionTurn(0, 64, 6), SessionTurn(70, 4, 6), SessionTurn(80, 4, 6)),
        (
            (SyntheticTokens(50, "system 50"), SyntheticTokens(14)),
            (SyntheticTokens(4),),
            (SyntheticTokens(4),),
        ),
    )


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ({"distribution": "uniform", "min": 10, "max": 20}, 15),
        ({"distribution": "lognormal", "average": 1000}, 1000),
        ({"distribution": "lognormal", "mean": 3.0, "sigma": 0.5}, 22.76),
        ({"distribution": "poisson", "alpha": 12}, 12),
        (
            {"distribution": "zipf", "alpha": 2.0, "max": 3},
            (1 + 1 / 2 + 1 / 3) / (1 + 1 / 4 + 1 / 9),
        ),
        ({"distribution": "poisson", "alpha": 12, "max": 2}, 2),
    ],
)
def test_distributions_have_their_means(distribution, mean):
    draw = Random(5)
    values = [_sample(distribution, "here", draw) for _ in range(4000)]
    assert fmean(values) == pytest.approx(mean, rel=0.05)
    assert max(values) <= distribution.get("max", 10**6)


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("t.jsonl", [], "holds no"),
        ("t.jsonl", [[]], "line 1: needs an object"),
        ("t.jsonl", [MOONCAKE | {"hash_ids": [0, 1]}], "line 1: 2 hash_ids for 1030 tokens"),
        ("t.jsonl", [MOONCAKE, LENGTHS], "line 2: timestamp: Field required"),
        (
            "t.jsonl",
            [MOONCAKE | {"output_length": 0}],
            "output_length: Input should be greater than or equal to 1",
        ),
        (
            "t.jsonl",
            [{"conversation": "c", "messages": [{"role": "user"}]}],
            "a message needs a role, and a content",
        ),
        ("t.jsonl", [{"id": "c", "messages": []}], "line 1: needs an object with conversation"),
        (
            "t.jsonl",
            [LENGTHS, LENGTHS | {"conversation": "b", "arrival_s": None}],
            "some have none",
        ),
        ("t.json", {"filetype": "else"}, "filetype generate_conversations"),
        (
            "t.json",
            GENERATED | {"num_conversations": 0},
            "num_conversations must be a whole number",
        ),
        (
            "t.json",
            GENERATED | {"prompt_output": {}},
            "prompt_output.num_tokens: not a distribution",
        ),
        (
            "t.json",
            GENERATED | {"prompt_output": {"num_tokens": {"distribution": "flat"}}},
            "'flat' is no distribution",
        ),
        ("t.json", [{"id": "c", "messages": MESSAGES[:2]}], "holds no conversations"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, file, value, message):
    with pytest.raises(SettingError, match="--trace: ") as caught:
        read(tmp_path / file, value)
    assert message in str(caught.value)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(SettingError, match="--tokenizer: "):
        read(tmp_path / "t.json", [{"id": "c", "messages": MESSAGES}], None)


@pytest.mark.parametrize(
    ("name", "conversations", "turns"),
    [
        ("tau_airline_text", 200, 2454),
        ("azure_conv_2023", 19_366, 19_366),
        ("claude_code_32k", 197, 1369),
    ],
)
def test_recorded_traces_are_read_whole(name, conversations, turns):
    path = DATA / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no recorded trace at {path}")
    dialogues = read_dialogues(path, encode=lambda text: list(text.encode()), think_s=15.0, seed=0)
    assert len(dialogues) == conversations
    assert sum(len(dialogue.turns) for dialogue in dialogues) == turns
