"""Owners' quotas: the order of owners in which KV is evicted when the tiers are full."""

from __future__ import annotations

import random

import pytest

from pensieve.scheduler.turns.quotas import Quotas

from ..harness import Harness


def over_quota_of(shares, most):
    """The slow way: all but the latest conversations that fit together."""
    names = set()
    for conversations in shares.values():
        left = most
        fits = True
        for name, chunks in reversed(conversations.items()):
            left -= chunks
            fits = fits and left >= 0
            if not fits:
                names.add(name)
    return names


def test_the_latest_conversations_up_to_the_quota_are_within_it():
    chance = random.Random(3)
    quotas = Quotas(10)
    shares = {"x": {}, "y": {}}
    over_quota = set()
    for _ in range(3000):
        owner = chance.choice("xy")
        name = f"{owner}{chance.randrange(8)}"
        if chance.random() < 0.3 and name in shares[owner]:
            del shares[owner][name]
            over_quota.discard(name)
            changes = quotas.remove(owner, name)
        else:
            shares[owner].pop(name, None)
            shares[owner][name] = chunks = chance.choice((0, 1, 2, 3, 5, 12))
            over_quota.discard(name)
            changes = quotas.put(owner, name, chunks)
        for other, beyond in changes:
            assert (other in over_quota) != beyond, "only changes are told"
            (over_quota.add if beyond else over_quota.discard)(other)
        assert over_quota == over_quota_of(shares, 10)


@pytest.mark.parametrize(("quota", "survives"), [(None, False), (8, True)])
@pytest.mark.parametrize("anonymous", [False, True])
def test_an_owner_beyond_its_quota_pushes_out_its_own(quota, survives, anonymous):
    """Also with prompts that belong to no conversation."""
    harness = Harness(gpu_kv_chunks=20, host_kv_chunks=10, owner_kv_chunks=quota)
    harness.turn(range(18), 3, "modest", owner="modest")
    for number in range(12):
        name = None if anonymous else f"greedy {number}"
        harness.turn(range(100 * number, 100 * number + 18), 3, name, owner="greedy")
    usage = harness.turn([*harness.logs["modest"], 7], 1, "modest", owner="modest")
    assert (usage.get("recomputed", 0) == 0) == survives
    harness.drain()


def test_a_conversation_that_is_waited_for_is_not_the_first_to_go():
    harness = Harness(owner_kv_chunks=1)
    harness.turn(range(18), 3, "a", owner="x")
    chunk = harness.scheduler.conversations.get("a").chunks[0]
    policy = harness.scheduler._store.policy
    assert chunk.over_quota == 1 and policy.value(chunk, harness.now) < 1e-9
    chunk.queue_places = [(0, 1)]
    assert policy.value(chunk, harness.now) > 1e9


def test_counts_agree_after_any_turns_of_owners():
    """`check` counts afresh after every step."""
    chance = random.Random(5)
    harness = Harness(gpu_kv_chunks=24, host_kv_chunks=10, disk_kv_chunks=20, owner_kv_chunks=7)
    for _ in range(150):
        name = f"c{chance.randrange(9)}"
        if chance.random() < 0.1 and name in harness.logs and not harness.open:
            harness.delete(name)
        elif chance.random() < 0.1 and name in harness.logs and "f" not in harness.logs:
            harness.fork(name, "f")
        elif not any(request.conversation == name for request, _ in harness.open.values()):
            log = harness.logs.get(name, ())[:40]
            new = range(chance.randrange(1, 12))
            harness.submit(
                [*log, *new], chance.randint(1, 6), name, owner="x" if name < "c5" else "y"
            )
        for _ in range(chance.randrange(4)):
            harness.tick()
    harness.drain()


def test_an_owner_that_just_fills_its_quota_changes_nothing():
    """Each reported change would file all of a conversation's chunks again."""
    quotas = Quotas(8)
    assert list(quotas.put("o", "a", 3)) == list(quotas.put("o", "b", 5)) == []
    assert list(quotas.put("o", "c", 1)) == [("a", True)]
