"""Requests that do not fit wait, and join as soon as they do."""

from __future__ import annotations

from pensieve.scheduler.planning.lookup import RequestNeeds

from ..harness import Harness


def fits(harness, request):
    """True if the waiting request would join the next step: looked up anew, it gets all its slots."""
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
    """Another request holds its prompt's chunks meanwhile, so it needs fewer slots than when it first waited."""
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
    harness = Harness(gpu_kv_chunks=24, generation_reserve=0.0, queue_order="arrival", max_num_batched_tokens=64)
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
