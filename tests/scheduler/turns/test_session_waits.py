"""The waits of a session's earlier turns, by its conversation or by the chunks of its prompts."""

from __future__ import annotations

from functools import partial

import pytest

from pensieve.scheduler.turns import session_waits

from ..harness import Harness

seconds = partial(pytest.approx, abs=0.2)  # a step takes 0.01 s
SETTINGS = {"max_num_seqs": 1, "gpu_kv_chunks": 200, "host_kv_chunks": 200}


def turns_behind_another(harness, wait, *turns):
    """The turns, each a prompt and fields of its request, wait so long for the only seat. Then all
    end. Returns their logs."""
    blocker = harness.submit([90, 91], 30)
    harness.tick()
    requests = [harness.submit(prompt, 6, **fields) for prompt, fields in turns]
    opened = [harness.open[request] for request in requests]
    assert {harness.state(request) for request in requests} == {"waiting"}
    harness.now += wait
    harness.abort(blocker)
    harness.run(*requests)
    return [[*request.prompt, *reply] for request, reply in opened]


def waited(harness, prompt, **fields):
    """Seconds that the session of a new turn is found to have waited."""
    request = harness.submit(prompt, 1, **fields)
    turn = harness.scheduler._turns[request]
    harness.abort(request)
    return turn.waited


def conversation(harness, name):
    return harness.scheduler.conversations.get(name)


def test_the_waits_of_a_conversation_are_summed_up_to_a_limit():
    harness = Harness(**SETTINGS)
    assert waited(harness, range(9), conversation="a") == 0
    turns_behind_another(harness, 7, (range(9), {"conversation": "a"}))
    # a branch from the beginning is the same session
    assert waited(harness, [1, 2], conversation="a") == seconds(7)
    turns_behind_another(harness, 5, ([*harness.logs["a"], 1], {"conversation": "a"}))
    assert waited(harness, [1, 2], conversation="a") == seconds(12)
    assert waited(harness, [1, 2], conversation="b") == 0
    turns_behind_another(harness, 115, ([*harness.logs["a"], 1], {"conversation": "a"}))
    assert waited(harness, [1, 2], conversation="a") == session_waits.LONGEST == 120
    harness.drain()


def test_parallel_turns_of_a_conversation_add_their_waits():
    harness = Harness(**SETTINGS)
    own = {"conversation": "a"}
    turns_behind_another(harness, 7, (range(9), own), (range(40, 49), own))
    assert waited(harness, [1, 2], **own) == seconds(14)
    harness.drain()


def test_a_fork_has_waited_and_a_deleted_conversation_has_not():
    harness = Harness(**SETTINGS)
    turns_behind_another(harness, 7, (range(9), {"conversation": "a"}))
    harness.fork("a", "b")
    harness.delete("a")
    assert waited(harness, [1, 2], conversation="b") == seconds(7)
    assert waited(harness, [1, 2], conversation="a") == 0
    harness.drain()
    assert not len(harness.scheduler._waits)


def test_another_salt_is_another_session():
    harness = Harness(**SETTINGS)
    turns_behind_another(harness, 7, (range(9), {"conversation": "a"}))
    assert waited(harness, harness.logs["a"], conversation="a", salt=b"other") == 0
    harness.drain()


def test_without_a_name_a_prompt_continues_the_turn_whose_last_chunk_it_contains():
    harness = Harness(**SETTINGS)
    (log,) = turns_behind_another(harness, 7, (range(10), {}))
    assert waited(harness, [*log, *range(50, 80)]) == seconds(7)
    (log,) = turns_behind_another(harness, 5, ([*log, *range(50, 60)], {}))
    assert waited(harness, log) == seconds(12)
    assert waited(harness, range(10)) == 0, "it shares the first question only"
    assert waited(harness, log, salt=b"other") == 0
    (log,) = turns_behind_another(harness, 115, (log, {}))
    assert waited(harness, [*log, *range(50, 60)]) == session_waits.LONGEST
    harness.drain()


def test_sessions_that_share_a_system_prompt_share_no_waits():
    """Their questions and replies are too short to fill a chunk of their own."""
    harness = Harness(**SETTINGS | {"chunk_tokens": 16})
    system = [*range(32)]
    harness.turn([*system, 1], 1)
    for question in range(50, 54):
        turns_behind_another(harness, 7, ([*system, question], {}))
    assert waited(harness, [*system, 60]) == 0
    harness.drain()


def test_a_turn_that_never_had_a_seat_counts_nothing():
    harness = Harness(**SETTINGS)
    harness.turn(range(9), 3, "a")
    blocker = harness.submit([90, 91], 30)
    harness.tick()
    request = harness.submit(harness.logs["a"], 3, "a")
    harness.now += 50
    harness.abort(request)
    assert waited(harness, [1, 2], conversation="a") == seconds(0)
    harness.abort(blocker)
    harness.drain()


def test_keys_are_few_and_the_longest_unused_are_left_out(monkeypatch):
    monkeypatch.setattr(session_waits, "MOST_KEYS", 3)
    harness = Harness(**SETTINGS)
    logs = [
        log
        for start in range(0, 50, 10)
        for log in turns_behind_another(harness, 7, (range(start, start + 9), {}))
    ]
    assert len(harness.scheduler._waits) == 3
    assert [waited(harness, log) > 0 for log in logs] == [False, False, True, True, True]
    harness.drain()


def test_the_last_chunk_decides_however_long_the_prompt_is():
    """Keys are looked at in pieces."""
    harness = Harness(**SETTINGS | {"max_model_len": 800, "gpu_kv_chunks": 600})
    (first,) = turns_behind_another(harness, 7, (range(9), {}))
    assert waited(harness, [*first, *range(700)]) == seconds(7)
    (second,) = turns_behind_another(harness, 5, ([*first, *range(400)], {}))
    assert waited(harness, [*second, *range(300)]) == seconds(12)
    assert waited(harness, [*first, *range(1, 400)]) == seconds(7)
    harness.drain()
