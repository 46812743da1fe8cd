from __future__ import annotations

import random

import pytest

from pensieve.scheduler.conversations import common_prefix
from pensieve.scheduler.types import RequestError

from .harness import Harness


def test_common_prefix_is_that_of_a_plain_loop():
    draw = random.Random(1)
    for _ in range(2000):
        left = [draw.randrange(2) for _ in range(draw.randrange(70))]
        right = left[: draw.randrange(len(left) + 1)] + [draw.randrange(2) for _ in range(draw.randrange(9))]
        plain = 0
        while plain < min(len(left), len(right)) and left[plain] == right[plain]:
            plain += 1
        assert common_prefix(Harness.tokens(left), Harness.tokens(right)) == plain, (left, right)
        assert common_prefix(Harness.tokens(right), Harness.tokens(left)) == plain, (right, left)


def conversation(harness, name):
    return harness.scheduler._conversations.get(name)


def test_a_turn_is_in_the_log_with_exactly_its_tokens():
    harness = Harness()
    harness.turn(range(9), 4, "a")
    log = harness.logs["a"]
    assert len(log) == 13 and log[:9] == harness.tokens(range(9))
    assert harness.scheduler.conversation_tokens("a") == log
    assert len(conversation(harness, "a").keys) == len(conversation(harness, "a").chunks) == 12 // 4
    assert conversation(harness, "a").tail is None  # 12 tokens with KV: three full chunks
    harness.drain()


def test_a_branch_takes_the_name_and_leaves_the_rest_unclaimed():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    before = conversation(harness, "a").chunks[:]
    harness.turn([*range(10), *range(70, 78)], 2, "a")
    after = conversation(harness, "a").chunks
    assert after[:2] == before[:2] and not set(after[2:]) & set(before[2:])
    assert [chunk.claims for chunk in before] == [1, 1, 0, 0]
    assert all(chunk.resident for chunk in before), "unclaimed, but still cache"
    assert harness.turn([*range(18), 5], 1)["gpu"] == 16
    harness.drain()


def test_a_fork_shares_the_chunks_and_goes_its_own_way():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    tail = conversation(harness, "a").tail
    harness.fork("a", "b")
    assert conversation(harness, "b").chunks == conversation(harness, "a").chunks
    assert {chunk.claims for chunk in conversation(harness, "a").chunks} == {2}
    assert conversation(harness, "a").tail is tail and conversation(harness, "b").tail is None
    usage = harness.turn([*harness.logs["b"], 1], 3, "b")
    assert usage == {"gpu": 16, "recomputed": 3, "new": 2}
    assert len(harness.logs["a"]) == 20 and conversation(harness, "a").tail is tail
    harness.drain()


def test_delete_forgets_the_log_and_its_claims_and_drops_the_tail():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    chunks, tail = conversation(harness, "a").chunks, conversation(harness, "a").tail
    harness.delete("a")
    assert not harness.scheduler.has_conversation("a")
    assert {chunk.claims for chunk in chunks} == {0} and not tail.resident
    harness.check()
    assert harness.turn(range(18), 2)["gpu"] == 16
    harness.drain()


def test_a_conversation_deleted_while_its_turn_runs_begins_anew_with_that_turn():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    request = harness.submit([*harness.logs["a"], 1], 4, "a")
    harness.tick()
    harness.delete("a")
    harness.check()
    harness.run(request)
    assert len(harness.logs["a"]) == 25
    harness.drain()


def test_unknown_and_taken_names():
    harness = Harness()
    harness.turn(range(5), 1, "a")
    scheduler = harness.scheduler
    for call, status in (
        (lambda: scheduler.conversation_tokens("x"), 404),
        (lambda: scheduler.fork("x", "y"), 404),
        (lambda: scheduler.delete("x"), 404),
        (lambda: scheduler.fork("a", "a"), 409),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.status == status


def test_an_aborted_turn_leaves_the_log_as_it_was_and_its_chunks_as_cache():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    log = harness.logs["a"]
    request = harness.submit([*log, *range(50, 60)], 20, "a")
    harness.run_until(lambda: len(harness.reply(request)) > 3)
    harness.abort(request)
    assert harness.scheduler.conversation_tokens("a") == log
    usage = harness.turn([*log, *range(50, 60), 9], 1, "a")
    assert usage["gpu"] == 28
    harness.drain()


def test_a_turn_without_a_name_is_no_conversation_but_stays_as_cache():
    harness = Harness()
    harness.turn(range(18), 2)
    assert harness.scheduler.stats().conversations == 0
    assert harness.turn([*range(18), 1], 2) == {"gpu": 16, "new": 3}
    harness.drain()


def test_the_id_names_the_branch_committed_last_under_whichever_salt():
    harness = Harness()
    harness.turn(range(18), 2, "a", salt=b"one")
    harness.turn(range(18), 3, "a", salt=b"two")
    assert len(harness.logs["a"]) == 21 and conversation(harness, "a").salt == b"two"
    assert harness.turn([*harness.logs["a"], 1], 1, "a", salt=b"one")["gpu"] == 16 + 1 * 0
    harness.drain()
