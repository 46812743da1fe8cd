"""Requests that do not fit wait, and join as soon as they do."""

from __future__ import annotations

import pytest

from pensieve.scheduler.planning.lookup import RequestNeeds
from pensieve.scheduler.types import InvariantError

from ..harness import Harness


def fits(harness, request):
    """True if the waiting request would join the next step: looked up anew, it gets all its
    slots."""
    scheduler = harness.scheduler
    turn = next(turn for turn in scheduler._queues.waiting if turn.request.id == request)
    needs = scheduler._lookup.look_up(turn, None, len(scheduler._queues.rows))
    return isinstance(needs, RequestNeeds) and scheduler._admission._fits(needs)


def steps_without(harness, request):
    """Counts the steps for which the waiting request would fit, and does not join."""
    steps = 0
    while harness.state(request) in ("waiting", "suspended"):
        steps += fits(harness, request)
        harness.tick()
    return steps


MOST_STEPS = 4  # in which generation takes the room first


def test_the_need_of_a_suspended_request_is_not_that_of_its_first_wait():
    """Another request holds its prompt's chunks meanwhile, so it needs fewer slots than when it
    first waited."""
    harness = Harness(gpu_kv_chunks=32, host_kv_chunks=0, generation_reserve=0.1, max_model_len=100)
    prompt = range(44)
    harness.submit(range(100, 172), 2)
    harness.tick()
    harness.tick()
    request = harness.submit(prompt, 28, priority=1)
    harness.run_until(lambda: harness.scheduler._turns[request].wanted)
    harness.run_until(lambda: harness.state(request) == "running")
    for _ in range(4):
        harness.tick()
    harness.submit([*prompt, 50], 39)
    for _ in range(3):
        harness.tick()
    for new, tokens in ((range(200, 236), 20), (range(300, 304), 30)):
        harness.submit(new, tokens)
    harness.run_until(lambda: harness.state(request) == "suspended")
    assert steps_without(harness, request) <= MOST_STEPS
    harness.drain()


def test_a_need_shrinks_when_another_request_computes_shared_chunks():
    harness = Harness(
        gpu_kv_chunks=24, generation_reserve=0.0, queue_order="arrival", max_num_batched_tokens=64
    )
    prompt = range(40)
    harness.submit(range(100, 132), 6)
    harness.submit(range(200, 220), 30)
    harness.tick()
    request = harness.submit(prompt, 2)
    harness.tick()
    urgent = harness.submit([*prompt[:32], 99], 28, priority=-1)
    harness.tick()
    assert (harness.state(request), harness.state(urgent)) == ("waiting", "running")
    assert steps_without(harness, request) <= MOST_STEPS
    harness.drain()


def two_that_wait_for_the_same_chunks():
    """Returns the harness, two requests in the queue that share a prompt, and its four chunks,
    which are idle."""
    harness = Harness(max_num_seqs=1)
    shared = range(100, 116)
    harness.turn(shared, 2, "a")
    harness.submit(range(8), 40)
    harness.tick()
    harness.submit([9] * 4, 2)
    requests = [harness.submit([*shared, n], 2) for n in (1, 2)]
    chunks = list(map(harness.scheduler._store.find, harness.scheduler._turns[requests[1]].keys))
    assert len(chunks) == 4
    return harness, requests, chunks


@pytest.mark.parametrize("leaves", [Harness.abort, Harness.run])
def test_a_chunk_stays_awaited_when_the_first_of_two_waiting_requests_leaves(leaves):
    harness, (first, second), chunks = two_that_wait_for_the_same_chunks()
    leaves(harness, first)
    assert harness.state(second) == "waiting"
    harness.check()
    assert all(chunk.queue_places for chunk in chunks)
    harness.abort(second)
    harness.check()
    assert not any(chunk.queue_places for chunk in chunks)
    harness.drain()


@pytest.mark.parametrize("places", [[], [(0, 5)], [(0, 1), (0, 4), (0, 5)]])
def test_check_finds_a_place_that_is_missing_and_one_that_is_left(places):
    harness, _, chunks = two_that_wait_for_the_same_chunks()
    harness.check()
    chunks[2].queue_places = places
    with pytest.raises(InvariantError, match="places in the queue"):
        harness.check()


def test_the_first_request_that_finds_no_seat_keeps_its_chunks():
    harness = Harness(max_num_seqs=1)
    harness.turn(range(100, 116), 2, "a")
    harness.submit(range(8), 40)
    harness.tick()
    waiting = harness.submit([*range(100, 116), 1], 2)
    turn = harness.scheduler._turns[waiting]
    chunk = harness.scheduler._store.find(turn.keys[0])
    assert harness.state(waiting) == "waiting" and chunk.queue_places == [turn.order]


def test_the_first_request_by_priority_loses_its_chunks_last():
    harness = Harness(max_num_seqs=1)
    prompts = range(100, 116), range(200, 216)
    for name, prompt in zip("ab", prompts, strict=True):
        harness.turn(prompt, 2, name)
    harness.submit(range(8), 40)
    harness.tick()
    harness.submit([9] * 4, 2)
    first_by_arrival, first = (
        harness.submit([*prompt, 1], 2, priority=p)
        for prompt, p in zip(prompts, (5, -5), strict=True)
    )
    turns = [harness.scheduler._turns[request] for request in (first_by_arrival, first)]
    store = harness.scheduler._store
    values = [store.policy.value(store.find(turn.keys[0]), harness.now) for turn in turns]
    assert values[0] < values[1]
    harness.drain()
