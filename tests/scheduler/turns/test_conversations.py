from __future__ import annotations

import random

import pytest

from pensieve.scheduler.turns.conversations import common_prefix
from pensieve.scheduler.types import ErrorKind, RequestError

from ..harness import Harness


def test_common_prefix_is_that_of_a_plain_loop():
    draw = random.Random(1)
    for _ in range(2000):
        left = [draw.randrange(2) for _ in range(draw.randrange(70))]
        right = left[: draw.randrange(len(left) + 1)] + [
            draw.randrange(2) for _ in range(draw.randrange(9))
        ]
        plain = 0
        while plain < min(len(left), len(right)) and left[plain] == right[plain]:
            plain += 1
        assert common_prefix(Harness.tokens(left), Harness.tokens(right)) == plain, (left, right)
        assert common_prefix(Harness.tokens(right), Harness.tokens(left)) == plain, (right, left)


def conversation(harness, name):
    return harness.scheduler.conversations.get(name)


def test_a_turn_is_in_the_log_with_exactly_its_tokens():
    harness = Harness()
    harness.turn(range(9), 4, "a")
    log = harness.logs["a"]
    assert len(log) == 13 and log[:9] == harness.tokens(range(9))
    assert harness.scheduler.conversations.tokens("a") == log
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


def test_delete_forgets_the_log_and_drops_chunks_without_other_claims():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    chunks, tail = conversation(harness, "a").chunks, conversation(harness, "a").tail
    harness.turn([*range(8), *range(50, 58)], 2, "b")
    harness.delete("a")
    assert "a" not in harness.scheduler.conversations
    assert [chunk.claims for chunk in chunks] == [1, 1, 0, 0]
    assert [chunk.resident for chunk in chunks] == [True, True, False, False] and not tail.resident
    harness.check()
    assert harness.turn(range(18), 2) == {"gpu": 8, "recomputed": 8, "new": 2}
    harness.drain()


def test_delete_keeps_inactive_conversations_chunks_and_drops_an_abandoned_branch():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    left = harness.logs["a"]
    harness.turn([*range(10), *range(70, 78)], 2, "a")
    log = harness.logs["a"]
    scheduler = harness.scheduler
    scheduler.conversations.delete("a", 9, left)
    there = [
        scheduler._store.find(key) is not None
        for tokens in (log, left)
        for key in scheduler.lower.keys(tokens, b"")
    ]
    assert there == [True, True, False, False, False] * 2
    scheduler.check()


def test_a_conversation_that_is_cut_keeps_its_times_and_the_claims_on_what_stays():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    harness.fork("a", "b")
    harness.keep("a", 50.0, harness.now + 40.0)
    harness.scheduler.conversations.expected.set("a", harness.now + 30.0)
    before = conversation(harness, "a")
    log = harness.logs["a"]
    chunks = before.chunks
    tail = before.tail
    harness.cut("a", 10)
    after = conversation(harness, "a")
    assert after.tokens == log[:10] and after.chunks == chunks[:2]
    assert (after.ttl, after.pinned_until) == (50.0, before.pinned_until)
    assert harness.scheduler.conversations.expected.time("a") == harness.now + 30.0
    assert [(chunk.claims, chunk.pins) for chunk in chunks] == [(2, 1), (2, 1), (1, 0), (1, 0)]
    assert not tail.resident
    harness.delete("b")
    assert [chunk.resident for chunk in chunks] == [True, True, False, False]
    harness.check()
    assert harness.turn([*log[:10], 70], 2, "a")["gpu"] == 8
    assert conversation(harness, "a").pinned
    harness.drain()


def test_a_cut_keeps_only_what_the_log_begins_with():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    left = harness.logs["a"]
    harness.turn([*range(10), *range(70, 78)], 2, "a")
    conversations = harness.scheduler.conversations
    conversations.cut("a", 16, 16, left, b"", harness.now)
    assert conversation(harness, "a").tokens == left[:10]
    conversations.cut("a", 8, 8, left, b"other", harness.now)
    assert conversation(harness, "a") is None
    harness.scheduler.check()


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
    for call, kind in (
        (lambda: scheduler.conversations.tokens("x"), ErrorKind.NOT_FOUND),
        (lambda: scheduler.conversations.fork("x", "y", 0.0), ErrorKind.NOT_FOUND),
        (lambda: scheduler.conversations.delete("x"), ErrorKind.NOT_FOUND),
        (lambda: scheduler.conversations.fork("a", "a", 0.0), ErrorKind.CONFLICT),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.kind == kind


def test_an_aborted_turn_leaves_the_log_as_it_was_and_its_chunks_as_cache():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    log = harness.logs["a"]
    request = harness.submit([*log, *range(50, 60)], 20, "a")
    harness.run_until(lambda: len(harness.reply(request)) > 3)
    harness.abort(request)
    assert harness.scheduler.conversations.tokens("a") == log
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


def test_a_conversation_lives_on_for_its_ttl_after_its_last_activity():
    harness = Harness(conversation_ttl=100.0)
    harness.turn(range(18), 2, "a")
    harness.turn(range(20, 38), 2, "b")
    chunks, tail = conversation(harness, "a").chunks, conversation(harness, "a").tail
    harness.lives = {"a": (conversation(harness, "a").active, 100.0)}
    harness.keep("b", ttl=1000.0)
    harness.now = conversation(harness, "a").active + 99.9
    harness.launch()
    assert "a" in harness.scheduler.conversations
    harness.now += 0.2
    harness.launch()
    assert "a" not in harness.scheduler.conversations and "b" in harness.scheduler.conversations
    assert {chunk.claims for chunk in chunks} == {0}
    assert not any(chunk.resident for chunk in (*chunks, tail)), "what only it claims goes with it"
    harness.check()
    harness.drain()


def test_writing_keeps_a_conversation_alive_and_a_shorter_ttl_counts_at_once():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    harness.keep("a", ttl=10.0)
    harness.now += 9
    request = harness.submit([*harness.logs["a"], 1], 2, "a")
    harness.now += 9
    harness.run(request)
    assert "a" in harness.scheduler.conversations
    harness.keep("a", ttl=1.0)
    harness.now += 2
    harness.launch()
    assert "a" not in harness.scheduler.conversations
    harness.drain()


def test_a_turn_that_outlives_its_conversation_begins_it_anew():
    harness = Harness(conversation_ttl=700.0)
    harness.turn(range(18), 2, "a")
    harness.keep("a", ttl=1.0, pinned_until=harness.now + 50)
    request = harness.submit([*harness.logs["a"], 1], 9, "a")
    harness.tick()
    harness.now += 2
    harness.launch()
    assert "a" not in harness.scheduler.conversations
    harness.run(request)
    assert len(harness.logs["a"]) == 30
    assert conversation(harness, "a").ttl == 700.0 and not conversation(harness, "a").pinned
    harness.check()


def test_beyond_so_many_logged_chunks_the_longest_idle_conversation_is_forgotten():
    """Its KV stays as cache: the same prompt finds it, but nothing claims it."""
    harness = Harness(log_chunks=12)  # a log of 20 tokens counts as 6
    harness.turn(range(18), 2, "a")
    harness.turn(range(20, 38), 2, "b")
    harness.launch()
    assert harness.scheduler.stats().conversations == 2
    log = harness.logs["a"]
    chunks = conversation(harness, "a").chunks
    tail = conversation(harness, "a").tail
    harness.turn(range(40, 58), 2, "c")
    harness.launch()
    assert set(harness.logs) == {"b", "c"} and harness.counts["forgotten"] == 1
    assert {chunk.claims for chunk in chunks} == {0} and all(chunk.resident for chunk in chunks)
    assert not tail.resident, "no prompt can find an unfilled chunk without its conversation"
    harness.check()
    assert harness.turn([*log, 1], 1, "a")["gpu"] == 16
    harness.drain()


def test_a_request_keeps_its_conversation_from_being_the_longest_idle():
    harness = Harness(log_chunks=12)
    harness.turn(range(18), 2, "a")
    harness.turn(range(20, 38), 2, "b")
    request = harness.submit([*harness.logs["a"], 1], 9, "a")
    harness.turn(range(40, 58), 2, "c")
    harness.tick()
    assert request in harness.open and "a" in harness.logs and "b" not in harness.logs
    harness.run(request)
    harness.launch()
    assert set(harness.logs) == {"a"}, "of 30 tokens now"
    harness.drain()


def test_a_conversation_that_alone_has_too_many_logged_chunks_stays():
    harness = Harness(log_chunks=2)
    harness.turn(range(18), 2, "a")
    harness.launch()
    assert set(harness.logs) == {"a"}
    harness.drain()


def test_a_fork_counts_and_a_deleted_conversation_does_not():
    harness = Harness(log_chunks=12)
    harness.turn(range(18), 2, "a")
    harness.fork("a", "b")
    harness.delete("a")
    harness.turn(range(40, 58), 2, "c")
    harness.launch()
    assert set(harness.logs) == {"b", "c"}
    harness.fork("c", "d")
    harness.launch()
    assert set(harness.logs) == {"c", "d"}
    harness.drain()


@pytest.mark.parametrize("eviction", ["retention", "lru", "lru-conversation"])
def test_a_pinned_conversation_is_evicted_last_until_the_pin_ends(eviction):
    harness = Harness(eviction=eviction, host_kv_chunks=0)
    harness.turn(range(16), 1, "pinned")
    harness.keep("pinned", pinned_until=harness.now + 1000)
    pinned = conversation(harness, "pinned").chunks
    for number in range(12):
        harness.now += 10
        harness.turn([50 + number] * 30, 2, f"other {number}")
    assert harness.scheduler.stats().dropped > 0 and all(chunk.resident for chunk in pinned)
    harness.now += 1000
    for number in range(12):
        harness.now += 10
        harness.turn([70 + number] * 30, 2, f"another {number}")
    assert not any(chunk.resident for chunk in pinned) and {chunk.pins for chunk in pinned} == {0}
    harness.drain()


def test_pins_follow_the_branch_and_end_with_the_conversation():
    harness = Harness()
    harness.turn(range(18), 2, "a")
    harness.fork("a", "b")
    harness.keep("a", pinned_until=harness.now + 1000)
    harness.keep("b", pinned_until=harness.now + 1000)
    before = conversation(harness, "a").chunks[:]
    assert {chunk.pins for chunk in before} == {2}
    harness.turn([*range(10), *range(70, 78)], 2, "a")
    assert [chunk.pins for chunk in before] == [2, 2, 1, 1]
    assert {chunk.pins for chunk in conversation(harness, "a").chunks[2:]} == {1}
    harness.delete("b")
    assert [chunk.pins for chunk in before] == [1, 1, 0, 0]
    harness.keep("a")
    assert not any(chunk.pins for chunk in before)
    harness.drain()
