"""The order of service: smaller priorities, then earlier arrivals; and requests that wait too
long."""

from __future__ import annotations

import pytest

from pensieve.scheduler.types import ErrorKind, RequestError

from .harness import Harness

TIGHT = {"gpu_kv_chunks": 16, "generation_reserve": 0.0, "swap_out_below": 0.0}
ONE_SEAT = {"max_num_seqs": 1}


def order_of_first_tokens(harness, requests):
    """Runs until all have ended; returns them in the order in which their first tokens came."""
    order = []
    while harness.open:
        harness.tick()
        order += [
            r for r in requests if r not in order and (r not in harness.open or harness.reply(r))
        ]
    return order


# -- priorities


def test_smaller_priorities_are_served_first_equal_ones_by_arrival():
    harness = Harness(**ONE_SEAT)
    running = harness.submit([1], 4)
    harness.tick()
    late, soon, default, urgent, soon_too = (
        harness.submit([10 + n], 2, priority=priority)
        for n, priority in enumerate((7, 1, 0, -3, 1))
    )
    order = order_of_first_tokens(harness, (running, late, soon, default, urgent, soon_too))
    assert order == [running, urgent, default, soon, soon_too, late]
    harness.drain()


def test_a_seat_is_not_taken_back():
    """Priorities order the queue; they alone suspend no request."""
    harness = Harness(**ONE_SEAT)
    running = harness.submit([1], 4, priority=9)
    harness.tick()
    urgent = harness.submit([2], 2)
    assert order_of_first_tokens(harness, (running, urgent)) == [running, urgent]
    assert harness.scheduler.stats().suspensions == 0
    harness.drain()


@pytest.mark.parametrize(
    ("priorities", "suspended"), [((5, 0, 0), 0), ((0, 5, 0), 1), ((0, 5, 5), 2), ((1, 1, 0), 1)]
)
def test_a_shortage_suspends_the_lowest_priority_then_the_latest_arrival(priorities, suspended):
    harness = Harness(**TIGHT, max_num_seqs=3)
    requests = [
        harness.submit(range(100 * n, 100 * n + 17), 20, f"c{n}", priority=p)
        for n, p in enumerate(priorities)
    ]
    harness.run_until(lambda: harness.scheduler.stats().suspensions)
    assert [harness.state(request) == "suspended" for request in requests] == [
        n == suspended for n in range(3)
    ]
    harness.drain()


def test_requests_before_a_suspended_one_join_and_those_behind_it_wait():
    harness = Harness(**TIGHT, max_num_seqs=3)
    harness.submit(range(20), 40, "a")
    second = harness.submit(range(100, 120), 30, "b")
    harness.run_until(lambda: harness.state(second) == "suspended")
    behind, before = harness.submit([7], 2), harness.submit([8], 2, priority=-1)
    harness.run(before)
    assert harness.state(second) == "suspended" and harness.state(behind) == "waiting"
    harness.run(behind)
    assert second not in harness.open or harness.state(second) != "suspended"
    harness.drain()


def test_no_request_starves_behind_equal_or_lower_priorities():
    harness = Harness(**TIGHT, max_num_seqs=4)
    long_ones = [
        harness.submit(range(100 * n, 100 * n + 20), 40, f"c{n}", priority=2) for n in range(3)
    ]
    for number in range(600):
        if number % 2 == 0:
            try:
                harness.submit([number % 97, number // 97, 5], 6, priority=2 + number % 3)
            except RequestError as refusal:
                assert refusal.kind == ErrorKind.TOO_MANY
        harness.tick()
    assert not set(long_ones) & set(harness.open)
    harness.drain()


# -- waiting too long


def test_a_request_without_a_seat_in_time_is_refused():
    harness = Harness(**ONE_SEAT, queue_timeout=1.0)
    scheduler = harness.scheduler
    running = harness.submit([1], 40, "a")
    harness.tick()
    harness.now = 0.5
    first, second = harness.submit([2], 2), harness.submit([3], 2)
    harness.now = 1.0
    third = harness.submit([4], 2)
    assert scheduler.time_out(1.25) == []
    assert scheduler.time_out(1.5) == [first, second]
    assert scheduler.time_out(1.5) == []
    assert scheduler.open_requests() == [running, third]
    harness.check()
    for gone in (first, second):
        del harness.open[gone]
    harness.drain()


def test_a_suspended_request_had_its_seat():
    harness = Harness(**TIGHT, max_num_seqs=3, queue_timeout=1.0)
    harness.submit(range(20), 40, "a")
    second = harness.submit(range(100, 120), 30, "b")
    harness.run_until(lambda: harness.state(second) == "suspended")
    assert harness.scheduler.time_out(1e6) == []
    harness.drain()


def test_one_that_left_is_not_taken_for_a_later_one_of_its_id():
    harness = Harness(**ONE_SEAT, queue_timeout=1.0)
    running = harness.submit([1], 40)
    harness.tick()
    first = harness.submit([2], 2)
    harness.abort(first)
    harness.now = 0.8
    again = harness.submit([3], 2, id=first)
    assert harness.scheduler.time_out(1.2) == []
    assert harness.scheduler.open_requests() == [running, again]
    assert harness.scheduler.time_out(1.8) == [again]
    del harness.open[again]
    harness.drain()


def test_no_request_is_refused_without_a_time_out():
    harness = Harness(**ONE_SEAT)
    harness.submit([1], 4)
    harness.submit([2], 4)
    harness.tick()
    assert harness.scheduler.time_out(1e9) == []
    harness.drain()


def test_the_time_in_the_queue_is_told_with_the_first_token():
    harness = Harness(**ONE_SEAT)
    first, second = harness.submit([1], 2), harness.submit([2], 2)
    told = {}
    while harness.open:
        harness.now += 0.25
        harness.launch()
        told |= {row.request: row.queued for row in harness.apply().rows if row.usage is not None}
    assert told == {first: 0.25, second: 0.75}
