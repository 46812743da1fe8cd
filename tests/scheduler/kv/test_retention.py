"""Victims come by ascending retention value at the time of the call, with any history."""

from __future__ import annotations

import math
import random

import pytest

from pensieve.scheduler.kv.chunk import Chunk
from pensieve.scheduler.kv.retention import SHORTEST_IDLE_S, eviction_policy
from pensieve.scheduler.kv.victim_sets import Head, VictimSet

from ..harness import profile

RETENTION = eviction_policy("retention", profile())


def a_chunk(end=4, active=0.0, created=0.0, claims=0):
    chunk = Chunk(end, 0, created)
    chunk.last_active = active
    chunk.claims = claims
    return chunk


def by_brute_force(policy, chunks, now, sign=1):
    return sorted((sign * policy.value(chunk, now), chunk.end) for chunk in chunks)


def taken(victims, now, descending=False):
    """(V, chunk) in the order in which the set's head gives them up; then all are victim_set
    again."""
    head = Head(victims, now, descending)
    gone = []
    while chunks := head.peek(1):
        gone.append((head.value, chunks[0]))
        victims.discard(chunks[0])
    for _, chunk in gone:
        victims.add(chunk)
    return gone


def as_taken(policy, victims, now, sign=1):
    gone = taken(victims, now, descending=sign < 0)
    assert all(value == policy.value(chunk, now) for value, chunk in gone)
    return [(sign * value, chunk.end) for value, chunk in gone]


def in_order(victims, now):
    return [chunk for _, chunk in taken(victims, now)]


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", ["retention", "lru", "fifo"])
@pytest.mark.parametrize("seed", range(4))
def test_order_is_that_of_a_sort_by_value(name, descending, seed):
    """At random moments, between random filings, re-filings (new activity, other claims) and
    departures."""
    draw = random.Random(seed)
    policy = eviction_policy(name, profile())
    victims = VictimSet(policy)
    chunks = []
    sign = -1 if descending else 1
    now = 0.0
    for _ in range(60):
        now += draw.choice((0.01, 1.0, 300.0))
        for _ in range(draw.randrange(8)):
            chunk = a_chunk(
                4 * draw.randrange(1, 200),
                now - draw.random() - SHORTEST_IDLE_S,
                now - 2,
                draw.randrange(4),
            )
            victims.add(chunk)
            chunks.append(chunk)
        for chunk in draw.sample(chunks, len(chunks) // 3):
            chunk.last_active = now - SHORTEST_IDLE_S
            chunk.claims = draw.randrange(4)
            victims.add(chunk)
        for chunk in draw.sample(chunks, len(chunks) // 8):
            victims.discard(chunk)
            chunks.remove(chunk)
        moment = now + draw.random()
        assert as_taken(policy, victims, moment, sign) == by_brute_force(
            policy, chunks, moment, sign
        )
        assert len(victims) == len(chunks) and set(victims) == set(chunks)


def test_order_changes_as_time_passes():
    """A costly chunk idle for long against a cheap one just left: no order of filing stays
    right."""
    cheap, costly = a_chunk(4, active=9.9), a_chunk(4000, active=0.0)
    victims = VictimSet(RETENTION)
    victims.add(cheap)
    victims.add(costly)
    assert in_order(victims, 10.0)[0] is costly
    assert in_order(victims, 1000.0)[0] is cheap


def test_ties_lead_with_the_leading_chunk():
    for name in ("retention", "lru", "fifo"):
        victims = VictimSet(eviction_policy(name, profile()))
        for end in (12, 4, 8):
            victims.add(a_chunk(end, active=5.0))
        assert [chunk.end for chunk in in_order(victims, 9.0)] == [4, 8, 12]


def test_claims_multiply_and_an_unclaimed_chunk_counts_once():
    now = 8.0
    values = [RETENTION.value(a_chunk(64, claims=claims), now) for claims in range(5)]
    assert values[0] == values[1]
    for claims in (1, 2, 3, 4):
        assert values[claims] / values[1] == pytest.approx(claims, rel=2 ** (1 / 8) - 1)


def test_classes_are_close_to_the_value():
    """V = Cost(l) x claims / T, up to half the width of a class for each of the two factors."""
    for end in range(4, 4000, 68):
        exact = profile().recompute(end) * 3 / 50.0
        assert abs(math.log2(RETENTION.value(a_chunk(end, claims=3), 50.0) / exact)) <= 1 / 8 + 1e-9


def test_an_idle_time_is_at_least_one_step():
    chunk = a_chunk(active=5.0)
    assert RETENTION.value(chunk, 5.0) == RETENTION.value(chunk, 5.0 + SHORTEST_IDLE_S / 2)
    assert RETENTION.value(chunk, 5.0) > RETENTION.value(chunk, 5.0 + 2 * SHORTEST_IDLE_S)


def test_of_contexts_that_outgrew_their_windows_one_goes_before_the_next_is_touched():
    """If one of its chunks is lost, the others are useless."""
    victims = VictimSet(RETENTION)
    old, young = ([a_chunk(end=4 * n, active=active) for n in range(1, 9)] for active in (1.0, 1.1))
    for chunk in (*old, *young):
        victims.add(chunk)
    assert in_order(victims, 10.0)[:8] != old
    for chunk in (*old, *young):
        chunk.past_window = True
        victims.add(chunk)
    assert in_order(victims, 10.0) == [*old, *young]


def test_lru_and_fifo_look_at_their_stamp_only():
    for name, first in (("lru", 4), ("fifo", 4000)):
        victims = VictimSet(eviction_policy(name, profile()))
        victims.add(a_chunk(4000, active=9.0, created=1.0, claims=5))
        victims.add(a_chunk(4, active=3.0, created=2.0))
        assert in_order(victims, 10.0)[0].end == first


@pytest.mark.parametrize("kind", ["lru", "fifo"])
def test_plain_policies_do_not_see_the_queue(kind):
    """CachedAttention's baselines: an awaited chunk goes by its stamp, and not behind all
    others."""
    for form, first in (("conversation", 4000), ("plain", 4)):
        policy = eviction_policy(f"{kind}-{form}", profile())
        victims = VictimSet(policy)
        awaited, idle = a_chunk(4, active=1.0, created=1.0), a_chunk(4000, active=2.0, created=2.0)
        awaited.queue_places = [(0, 1)]
        victims.add(awaited)
        victims.add(idle)
        assert policy.whole and in_order(victims, 10.0)[0].end == first


def test_asking_changes_nothing():
    victims = VictimSet(RETENTION)
    for end in range(4, 40, 4):
        victims.add(a_chunk(end, active=end % 3))
    first = in_order(victims, 10.0)
    assert Head(victims, 10.0, descending=True).peek(1) != Head(victims, 10.0).peek(1) == first[:1]
    assert in_order(victims, 10.0) == first


def test_a_head_stays_until_it_leaves_and_sees_what_is_filed_meanwhile():
    victims = VictimSet(RETENTION)
    chunks = [a_chunk(end, active=1.0) for end in (4, 8, 12)]
    for chunk in chunks:
        victims.add(chunk)
    head = Head(victims, 10.0)
    assert head.peek(1) == head.peek(1) == chunks[:1]
    victims.discard(chunks[0])
    late = a_chunk(16, active=0.5)
    victims.add(late)
    seen = []
    while entries := head.peek(1):
        seen += entries
        victims.discard(entries[0])
    assert set(seen) == {*chunks[1:], late}
    victims.add(chunks[2])
    assert head.peek(9) == [chunks[2]]
    assert in_order(victims, 10.0) == [chunks[2]]


def test_the_departed_leave_nothing_behind():
    """A chunk that is active five thousand times costs no more memory than one that is active once
    or twice."""
    victims = VictimSet(RETENTION)
    chunk = a_chunk()
    other = a_chunk(8, active=0.5)
    victims.add(other)
    for now in range(5000):
        chunk.last_active = float(now)
        victims.add(chunk)
    assert [weight_class.stamps for weight_class in victims._classes.values()] == [[0.5], [4999.0]]
    assert set(in_order(victims, 1e6)) == {other, chunk}


def test_a_class_that_empties_under_a_head():
    """A plan pins all hits of one class, and files others again and again: the head's merge still
    names the class, which is now empty."""
    victims = VictimSet(RETENTION)
    light = [a_chunk(4, active=float(second)) for second in range(3)]
    heavy, just_left = a_chunk(4000, active=90.0), a_chunk(400, active=99.9)
    for chunk in (*light, heavy, just_left):
        victims.add(chunk)
    head = Head(victims, 100.0)
    assert head.peek(1) == light[:1]
    victims.discard(heavy)
    for number in range(3000):
        light[2].last_active = 2.0 + number / 10_000
        victims.add(light[2])
    for chunk in (*light, just_left):
        assert head.peek(1) == [chunk]
        victims.discard(chunk)
    assert head.peek(1) == []
    assert len(victims) == 0


@pytest.mark.parametrize("seed", range(4))
def test_moving_members_of_a_group_is_taking_them_out_one_by_one_and_filing_them_elsewhere(seed):
    draw = random.Random(seed)
    quick, slow = ([VictimSet(RETENTION), VictimSet(RETENTION)] for _ in range(2))
    for active in range(30):
        for end in draw.sample(range(4, 400, 4), draw.randrange(1, 9)):
            for sets in (quick, slow):
                sets[active % 2].add(a_chunk(end, active=float(active)))
    for now in range(30, 90):
        source = draw.randrange(2)
        most = draw.randrange(1, 6)
        gone = draw.random() < 0.2
        chunks, twins = (Head(sets[source], float(now)).peek(most) for sets in (quick, slow))
        quick[source].move(chunks, None if gone else quick[1 - source])
        for twin in twins:
            slow[source].discard(twin)
            if not gone:
                slow[1 - source].add(twin)
        for moved, victim_set in zip(quick, slow, strict=True):
            assert len(moved) == len(victim_set) and as_taken(RETENTION, moved, now) == as_taken(
                RETENTION, victim_set, now
            )


@pytest.mark.parametrize("name", ["retention", "lru", "fifo"])
@pytest.mark.parametrize(
    "places",
    [
        ((0, 1), (0, 2), (0, 2**32 - 1)),
        ((0, 3), (1, 2), (2, 1)),
        ((-2, 3), (-1, 2), (0, 1)),
        ((-(10**9), 1), (-5, 2**31 + 1), (10**9, 2**31)),
    ],
)
def test_chunks_that_the_queue_waits_for_go_last_those_of_its_tail_first(name, places):
    """At any cost and age: the first request in the queue is the next to need its chunks."""
    victims = VictimSet(eviction_policy(name, profile()))
    third, first, second = (
        a_chunk(end, active=float(end), created=float(end)) for end in (4000, 4, 400)
    )
    for place, chunk in zip(places, (first, second, third), strict=True):
        chunk.queue_places = [place, (10**9, 9)]
        victims.add(chunk)
    not_awaited, pinned = a_chunk(40_000, active=9_999.0, created=9_999.0), a_chunk(4)
    pinned.queue_places = [(10**9, 4)]
    pinned.pins = 1
    victims.add(not_awaited)
    victims.add(pinned)
    assert in_order(victims, 10_000.0) == [not_awaited, third, second, first, pinned]
