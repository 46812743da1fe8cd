"""The contents of conversations."""

from array import array
from random import Random
from statistics import fmean

import pytest

from benchmarks.workload import Words, fitting
from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens

TWO_TURNS = Dialogue(
    "d",
    None,
    (SessionTurn(0, 3, 100), SessionTurn(103, 2, 50, think_s=4.0)),
    ((SyntheticTokens(3),), (SyntheticTokens(2),)),
)


def test_conversations_end_before_the_turn_that_does_not_fit():
    assert fitting([TWO_TURNS], 155) == [TWO_TURNS]
    (cut,) = fitting([TWO_TURNS], 154)
    assert cut.turns == TWO_TURNS.turns[:1] and cut.inputs == TWO_TURNS.inputs[:1]
    with pytest.raises(SettingError, match="--max-context"):
        fitting([TWO_TURNS], 102)


def test_histories_are_as_long_as_the_trace_says_and_go_on_where_a_turn_does():
    words = Words(50, "salt")
    cut = TWO_TURNS._replace(
        turns=(TWO_TURNS.turns[0], TWO_TURNS.turns[1]._replace(history_tokens=40))
    )
    for dialogue, kept in ((TWO_TURNS, 103), (cut, 40)):
        joined = words.history(Arrival(0.0, dialogue, 0, 1, 6))
        assert len(joined) == kept + 2 + 6
        assert joined[:3] == words.input(Arrival(0.0, dialogue), 0)
        assert joined[kept : kept + 2] == words.input(Arrival(0.0, dialogue), 1)
        assert all(0 <= token < 50 for token in joined)


def test_made_up_words_are_shared_only_where_the_trace_says():
    pieces = (
        SyntheticTokens(8, "system 8"),
        SyntheticTokens(4, "text", per_pass=True),
        array("i", [1, 2]),
        SyntheticTokens(8),
    )
    one, other = (Dialogue(name, None, (SessionTurn(0, 22, 1),), (pieces,)) for name in "ab")
    words = Words(1000, "salt")

    def parts(dialogue, number=0, words=words):
        ids = words.input(Arrival(0.0, dialogue, number), 0)
        return ids[:8], ids[8:12], ids[12:14], ids[14:]

    system, head, text, own = parts(one)
    assert parts(one) == (system, head, text, own)
    assert [mine == theirs for mine, theirs in zip(parts(one), parts(other), strict=True)] == [
        True,
        True,
        True,
        False,
    ]
    assert [mine == later for mine, later in zip(parts(one), parts(one, 1), strict=True)] == [
        True,
        False,
        True,
        False,
    ]
    assert [
        a == b for a, b in zip(parts(one), parts(one, 0, Words(1000, "pepper")), strict=True)
    ] == [
        False,
        False,
        True,
        False,
    ]


def test_ids_are_drawn_evenly():
    dialogue = Dialogue("d", None, (SessionTurn(0, 20_000, 1),), ((SyntheticTokens(20_000),),))
    ids = Words(10, f"{Random(1).random()}").input(Arrival(0.0, dialogue), 0)
    assert fmean(ids) == pytest.approx(4.5, rel=0.03)
