"""Arrivals of conversations, and where they are in their lives then."""

from statistics import fmean

import pytest

from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scripts.simulation.arrivals import Arrival, join, lifetime, plan_arrivals
from pensieve.scripts.simulation.traces import (
    CHATS,
    Dialogue,
    SyntheticTokens,
    synthetic,
    synthetic_dialogue,
)

PER_TOKEN = 0.01
CHATTERS = [
    synthetic_dialogue(session)
    for session in synthetic(
        CHATS["sharegpt"], conversations=1000, sessions_per_s=1.0, think_s=5.0, seed=3
    )
]
MEAN_TURNS = fmean(len(chatter.turns) for chatter in CHATTERS)
TWO_TURNS = Dialogue(
    "d",
    None,
    (SessionTurn(0, 3, 100), SessionTurn(103, 2, 50, think_s=4.0)),
    ((SyntheticTokens(3),), (SyntheticTokens(2),)),
)


def plan(rate=4.0, seconds=60.0, seed=0, dialogues=CHATTERS, **start):
    return plan_arrivals(
        dialogues, rate=rate, seconds=seconds, seconds_per_token=PER_TOKEN, seed=seed, **start
    )


def rest(arrival):
    """Seconds from its first request to its end, if replies take the expected time."""
    turns = arrival.dialogue.turns[arrival.turn :]
    thought = sum(turn.think_s for turn in turns[1:])
    return thought + PER_TOKEN * (sum(turn.output_tokens for turn in turns) - arrival.done)


@pytest.mark.parametrize(
    ("start", "at", "turn", "done"),
    [
        (2.5, 2.5, 0, 0),  # it comes later
        (-0.25, 0.0, 0, 25),  # in its first reply
        (-2.0, 3.0, 1, 0),  # thinks until 3.0
        (-5.125, 0.0, 1, 12),
        (-5.499, 0.0, 1, 49),  # one token is always left
    ],
)
def test_a_conversation_is_joined_where_it_is(start, at, turn, done):
    assert join(TWO_TURNS, 7, start, PER_TOKEN) == Arrival(
        pytest.approx(at), TWO_TURNS, 7, turn, done
    )


def test_a_history_is_sent_while_its_user_thinks():
    assert join(TWO_TURNS, 7, -2.0, PER_TOKEN, True) == Arrival(
        0.0, TWO_TURNS, 7, 0, 99, pytest.approx(3.0)
    )
    for start in (2.5, -0.25, -5.125, -5.5):  # all others: as without
        assert join(TWO_TURNS, 7, start, PER_TOKEN, True) == join(TWO_TURNS, 7, start, PER_TOKEN)


def test_with_histories_every_conversation_of_the_start_comes_in_the_ramp():
    late = [arrival for arrival in plan(ramp_s=30.0, send_histories=True) if arrival.at > 30.0]
    assert late and {(arrival.turn, arrival.done) for arrival in late} == {(0, 0)}


def test_a_conversation_that_is_over_is_not_joined():
    assert lifetime(TWO_TURNS, PER_TOKEN) == pytest.approx(5.5)
    assert join(TWO_TURNS, 0, -5.5, PER_TOKEN) is None


def live(arrivals, moment):
    """Conversations that have begun (those joined: before 0) and are not over."""
    return sum(
        arrival.at + rest(arrival) > moment and (arrival.at <= moment or arrival.turn > 0)
        for arrival in arrivals
    )


def test_from_empty_every_conversation_begins_at_its_beginning():
    arrivals = [arrival for seed in range(5) for arrival in plan(seed=seed, from_empty=True)]
    assert {(arrival.turn, arrival.done) for arrival in arrivals} == {(0, 0)}
    assert len(arrivals) == pytest.approx(5 * 4.0 * 60.0, rel=0.1)


def test_over_a_ramp_the_load_grows_evenly():
    """After a third of the ramp a third of the conversations that live then are there; after the
    ramp, all of them."""
    runs = [plan(seed=seed, ramp_s=30.0) for seed in range(40)]
    expected = 4.0 * fmean(lifetime(dialogue, PER_TOKEN) for dialogue in CHATTERS)  # Little's law
    for moment, share in ((10.0, 1 / 3), (30.0, 1.0), (59.0, 1.0)):
        here = [sum(a.at <= moment < a.at + rest(a) for a in run) for run in runs]
        # some think before their first request
        assert share * expected * 0.65 < fmean(here) < share * expected * 1.05


def test_as_many_conversations_live_at_the_start_as_later():
    runs = [plan(seed=seed) for seed in range(40)]
    expected = 4.0 * fmean(lifetime(dialogue, PER_TOKEN) for dialogue in CHATTERS)  # Little's law
    for moment in (0.0, 20.0, 59.0):
        assert fmean(live(run, moment) for run in runs) == pytest.approx(expected, rel=0.05)


def test_turns_in_progress_at_the_start_are_spread_as_later():
    """The index of the turn that is being waited for or answered, by time: the same at 0 as at 40
    s."""

    def turn_at(arrival, moment):
        now = arrival.at
        turns = arrival.dialogue.turns
        for index in range(arrival.turn, len(turns)):
            now += turns[index].think_s if index > arrival.turn else 0.0
            answered = now + PER_TOKEN * (
                turns[index].output_tokens - (arrival.done if index == arrival.turn else 0)
            )
            if answered > moment:
                return index
            now = answered
        return None

    def mean_turn(moment):
        indexes = [
            turn_at(a, moment)
            for seed in range(30)
            for a in plan(seed=seed)
            if a.at <= moment or a.turn
        ]
        return fmean(index for index in indexes if index is not None)

    assert mean_turn(0.0) == pytest.approx(mean_turn(40.0), rel=0.1)


def requests(arrival):
    """When each of its requests is sent, replies taken to last as expected; not one that was sent
    before it joined."""
    now = arrival.at
    turns = arrival.dialogue.turns
    for index in range(arrival.turn, len(turns)):
        first = index == arrival.turn
        now += 0.0 if first else turns[index].think_s
        if not (first and arrival.done):
            yield now
        now += PER_TOKEN * (turns[index].output_tokens - (arrival.done if first else 0))


def test_requests_come_at_one_rate_from_the_first_second_on():
    sent = [0] * 6
    for seed in range(40):
        for at in (at for arrival in plan(seed=seed) for at in requests(arrival) if at < 60):
            sent[int(at / 10)] += 1
    offered = 4.0 * MEAN_TURNS * 10 * 40
    assert sent == [pytest.approx(offered, rel=0.06)] * 6


def test_behind_a_ramp_requests_come_at_the_rate_that_was_asked_for():
    runs = [
        [at for arrival in plan(seed=seed, ramp_s=30.0) for at in requests(arrival)]
        for seed in range(40)
    ]
    behind = sum(30.0 <= at < 60.0 for run in runs for at in run)
    assert behind / 40 / 30.0 == pytest.approx(4.0 * MEAN_TURNS, rel=0.03)


def test_arrivals_are_a_poisson_process():
    counts = []
    for seed in range(60):
        fresh = [
            arrival.at for arrival in plan(seed=seed) if arrival.turn == 0 and not arrival.done
        ]
        counts += [sum(second <= at < second + 1 for at in fresh) for second in range(60)]
    assert fmean(counts) == pytest.approx(4.0, rel=0.05)
    # variance = mean
    assert fmean((count - 4.0) ** 2 for count in counts) == pytest.approx(4.0, rel=0.1)


def test_a_seed_names_the_arrivals():
    assert plan(seed=1) == plan(seed=1) != plan(seed=2)


def test_a_workload_is_played_once_in_each_pass():
    few = [TWO_TURNS._replace(name=name) for name in "abc"]
    played = [(arrival.number, arrival.dialogue.name) for arrival in plan(dialogues=few)]
    assert len(set(played)) == len(played) > 100
    assert {name for number, name in played if number == 5} == set("abc")


def test_at_a_higher_rate_the_same_conversations_come_sooner_and_more_after_them():
    slow, fast = (plan(rate=rate, from_empty=True) for rate in (2.0, 3.0))
    fast_starts = {(arrival.number, arrival.dialogue.name): arrival.at for arrival in fast}
    assert len(fast) > len(slow) > 50
    for arrival in slow:
        assert fast_starts[arrival.number, arrival.dialogue.name] <= arrival.at


def test_the_conversations_that_are_open_at_the_start_are_among_those_of_a_higher_rate():
    slow, fast = (
        {(arrival.number, arrival.dialogue.name) for arrival in plan(rate=rate, seconds=1e-9)}
        for rate in (2.0, 3.0)
    )
    assert 0 < len(slow) < len(fast)
    # a conversation that began sooner has gone further by the start, or is over
    assert len(slow - fast) == 0
