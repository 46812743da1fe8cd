"""The batch: joining, suspending, resuming, loading ahead, the two modes; and that no request
starves."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from pensieve.scheduler.config import SchedulerSettings
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import (
    ErrorKind,
    FinishReason,
    InvariantError,
    RequestError,
    RowResult,
    Sampling,
)

from .device_model import next_token
from .harness import Harness

TIGHT = {"gpu_kv_chunks": 16, "generation_reserve": 0.0, "swap_out_below": 0.0}


def states(harness, requests):
    return [harness.state(request) if request in harness.open else "ended" for request in requests]


# -- joining


def test_generation_and_prompts_share_a_step():
    harness = Harness()
    first = harness.submit(range(9), 20)
    harness.tick()
    harness.submit(range(20, 29), 20)
    plan = harness.tick()
    assert len(plan.generate) == 1 and len(plan.spans) == 1 and plan.tokens == 10
    assert [row.request for row in plan.samples] == [first, first + 1]
    harness.drain()


@pytest.mark.parametrize("budget, owners", [(22, "abc"), (23, "ab")])
def test_shares_that_do_not_divide_the_budget_stay_within_it(budget, owners):
    harness = Harness(max_num_batched_tokens=budget, gpu_kv_chunks=80)
    for number, owner in enumerate(owners):
        harness.submit(range(60 * number, 60 * number + 60), 3, owner=owner)
    assert harness.tick().tokens == budget
    harness.drain()


def test_long_prompts_come_in_pieces_within_the_token_budget():
    harness = Harness(max_num_batched_tokens=10)
    harness.submit(range(9), 20)
    harness.tick()
    harness.submit(range(20, 55), 5)
    pieces = []
    while not pieces or not pieces[-1].samples:
        plan = harness.tick()
        assert plan.tokens <= 10 and len(plan.generate) == 1, "generation goes on beside it"
        pieces += plan.spans
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 9), (9, 18), (18, 27), (27, 35)]
    harness.drain()


def test_new_requests_leave_the_reserve_free():
    """24 chunks, half of them reserved: a second request of 6 chunks must wait, an empty batch
    ignores the reserve."""
    harness = Harness(generation_reserve=0.5, max_model_len=48)
    first = harness.submit(range(44), 3)
    assert harness.tick().spans
    second = harness.submit(range(50, 58), 3)
    harness.tick()
    assert states(harness, (first, second)) == ["running", "waiting"]
    harness.run(first)
    harness.tick()
    assert harness.state(second) == "running"
    harness.drain()


@pytest.mark.parametrize("chunks", [1, 2, 8, 50])
@pytest.mark.parametrize("host", [0, 8])
def test_small_pools_serve_by_default(chunks, host):
    """Contexts may fill the pool except for the reserve, which is no chunk below 50. Six requests
    that need it all end: the later ones are suspended or wait."""
    longest = 4 * (chunks - chunks // 50)
    harness = Harness(
        gpu_kv_chunks=chunks,
        host_kv_chunks=host,
        max_model_len=longest,
        generation_reserve=SchedulerSettings().generation_reserve,
    )
    prompt = longest // 4
    requests = [
        harness.submit(range(100 * name, 100 * name + prompt), longest - prompt, f"{name}")
        for name in range(6)
    ]
    for request in requests:
        harness.run(request)
    assert all(len(harness.logs[f"{name}"]) == longest for name in range(6))
    harness.drain()
    assert harness.counts["suspensions"] or chunks < 8


def test_a_hit_is_not_counted_as_room():
    """A held reply keeps 8 of 16 slots. The history of 6 chunks is there, idle; with 3 more all
    slots would be needed and one more: the slots of hits cannot be taken for the same request."""
    harness = Harness(**TIGHT)
    harness.turn(range(23), 2, "a")
    held = harness.submit(range(200, 230), 3, confirm=True)
    harness.run(held)
    returning = harness.submit([*harness.logs["a"], *range(60, 69)], 2, "a")
    harness.tick()
    assert harness.state(returning) == "waiting"
    harness.finish(held, 3)
    harness.tick()
    assert harness.state(returning) == "running"
    harness.drain()


def test_a_head_that_does_not_fit_blocks_those_behind_it():
    harness = Harness(**TIGHT, queue_order="arrival")
    running = harness.submit(range(24), 8)
    harness.tick()
    large = harness.submit(range(100, 150), 3)
    small = harness.submit([1], 1)
    harness.tick()
    assert states(harness, (running, large, small)) == ["running", "waiting", "waiting"]
    harness.drain()


def test_generation_does_not_take_the_room_that_was_made_for_the_head():
    """Four rows take a slot a step between them, 24 chunks lie idle: room for 10 is made and is
    still there when the head is looked at again."""
    harness = Harness(
        gpu_kv_chunks=40,
        host_kv_chunks=40,
        max_model_len=128,
        generation_reserve=0,
        swap_out_below=0,
    )
    harness.turn(range(95), 2, "idle")
    rows = [harness.submit([10 * length] * length, 50) for length in (1, 2, 3, 4)]
    harness.run_until(lambda: harness.scheduler._store.available < 9)
    head = harness.submit(range(200, 236), 3)
    for _ in range(3):
        harness.tick()
    assert states(harness, (*rows, head)) == ["running"] * 5
    harness.drain()


@pytest.mark.parametrize("order", ["bounded-ratio", "arrival"])
def test_a_turn_whose_history_is_here_passes_one_that_must_be_computed(order):
    """Both have waited equally long, and there is one seat."""
    harness = Harness(max_num_seqs=1, queue_order=order)
    for name, first in (("lost", 100), ("kept", 200)):
        harness.turn(range(first, first + 40), 2, name)
    for chunk in harness.scheduler.conversations.get("lost").chunks:
        harness.place(chunk, "dropped")
    running = harness.submit([1, 2], 5)
    harness.tick()
    lost, kept = (harness.submit([*harness.logs[name], 7], 5, name) for name in ("lost", "kept"))
    harness.now += 0.1
    harness.run(running)
    harness.tick()
    assert (
        states(harness, (lost, kept))
        == [["waiting", "running"], ["running", "waiting"]][order == "arrival"]
    )
    harness.drain()


def test_seats_bound_the_batch():
    harness = Harness(max_num_seqs=2)
    requests = [harness.submit([10 * n], 5) for n in range(3)]
    harness.tick()
    assert states(harness, requests) == ["running", "running", "waiting"]
    harness.drain()


def test_a_long_history_loads_ahead_of_its_seat_and_stalls_no_row():
    """Per step no more is loaded than the link carries meanwhile; the running request gets its
    token in every step."""
    harness = Harness(chunks_a_step=1, host_kv_chunks=32)
    harness.turn(range(50), 2, "a")
    conversation = harness.scheduler.conversations.get("a")
    for chunk in (*conversation.chunks, conversation.tail):
        harness.place(chunk, "host")
    running = harness.submit([1, 2], 40)
    harness.tick()
    returning = harness.submit([*harness.logs["a"], 5], 3, "a")
    loaded = []
    while harness.state(returning) in ("waiting", "loading"):
        plan = harness.tick()
        swap_ins = [batch for batch in plan.copies if batch.lane == Lane.IN]
        loaded.append(sum(len(batch.sources) for batch in swap_ins))
        assert len(plan.generate) == 1 and harness.state(running) == "running"
    assert sum(loaded) == 13 and max(loaded) <= 2 and swap_ins[-1].gated
    harness.drain()


# -- suspension


def test_one_shortage_suspends_the_latest_arrival_alone():
    """Three rows of 5 chunks fill 15 of 16. The last one free goes to the oldest; then one row
    leaves, not two."""
    harness = Harness(**TIGHT, max_num_seqs=3)
    requests = [harness.submit(range(100 * n, 100 * n + 17), 20, f"c{n}") for n in range(3)]
    harness.run_until(lambda: harness.scheduler.stats().suspensions)
    assert states(harness, requests) == ["running", "running", "suspended"]
    for _ in range(3):
        harness.tick()
    assert harness.scheduler.stats().suspensions == 1
    assert states(harness, requests)[:2] == ["running", "running"]
    harness.drain()


def test_suspended_slots_on_their_way_free_count():
    """With steps in flight the leaving row's slots come later. Until then no other row is suspended
    for them."""
    harness = Harness(**TIGHT, max_num_seqs=3)
    requests = [harness.submit(range(100 * n, 100 * n + 17), 20, f"c{n}") for n in range(3)]
    harness.launch()
    harness.launch()
    while not harness.scheduler.stats().suspensions:
        harness.launch()
        harness.apply()
    assert "leaving" in states(harness, requests)
    harness.launch()
    assert harness.scheduler.stats().suspensions == 1
    assert states(harness, requests)[:2] == ["running", "running"]
    harness.drain()


def test_while_a_suspended_request_waits_no_later_arrival_joins():
    harness = Harness(**TIGHT, max_num_seqs=3)
    first = harness.submit(range(20), 40, "a")
    second = harness.submit(range(100, 120), 30, "b")
    harness.run_until(lambda: harness.state(second) == "suspended")
    late = harness.submit([7], 2)
    order = []
    while late in harness.open:
        harness.tick()
        order += [
            r
            for r in (second, late)
            if r in harness.open and harness.state(r) == "running" and r not in order
        ]
    assert order[0] == second and first not in harness.open
    harness.drain()


def test_the_suspended_resume_by_arrival():
    harness = Harness(**TIGHT, max_num_seqs=4)
    requests = [harness.submit(range(100 * n, 100 * n + 12), 36, f"c{n}") for n in range(4)]
    suspended = []
    resumed = 0
    while harness.open:
        harness.tick()
        now = dict(zip(requests, states(harness, requests), strict=True))
        back = [request for request in suspended if now[request] != "suspended"]
        suspended = [request for request in requests if now[request] == "suspended"]
        assert not back or not suspended or max(back) < min(suspended), "an elder still waits"
        resumed += len(back)
    assert resumed >= 3
    harness.drain()


@pytest.mark.parametrize("shared", [44, 41])
def test_a_reservation_is_cancelled_before_an_older_row_is_suspended(shared):
    """The request that still loads its history gives its slots back, and gets them again later.
    With 41 tokens in common it has one token of the tail's three: no more when it comes back."""
    harness = Harness(chunks_a_step=1, **TIGHT | {"host_kv_chunks": 32})
    harness.turn(range(40), 4, "a")
    for chunk in (
        *harness.scheduler.conversations.get("a").chunks,
        harness.scheduler.conversations.get("a").tail,
    ):
        harness.place(chunk, "host")
    running = harness.submit(range(200, 215), 30)
    harness.tick()
    returning = harness.submit([*harness.logs["a"][:shared], 95, 96], 3, "a")
    harness.run_until(lambda: harness.state(returning) == "loading")
    harness.run_until(lambda: harness.state(returning) == "waiting")
    assert harness.state(running) == "running" and harness.scheduler.stats().suspensions == 0
    harness.drain()


def test_a_request_alone_gets_the_whole_pool():
    harness = Harness(**TIGHT)
    harness.turn(range(40), 24)
    assert harness.scheduler.stats().suspensions == 0
    harness.drain()


# -- modes


def test_separate_batching_never_mixes_and_puts_prompts_first():
    harness = Harness(batching="separate", max_num_batched_tokens=8)
    first = harness.submit(range(8), 20)
    harness.tick()
    assert harness.tick().generate
    harness.submit(range(20, 36), 5)
    plans = [harness.tick() for _ in range(4)]
    assert [(len(plan.generate), len(plan.spans)) for plan in plans] == [
        (0, 1),
        (0, 1),
        (2, 0),
        (2, 0),
    ]
    assert harness.state(first) == "running"
    harness.drain()


@pytest.mark.parametrize("batching", ["unified", "separate"])
@pytest.mark.parametrize("host", [0, 16])
def test_no_request_starves_while_new_ones_keep_coming(batching, host):
    """A long request, often suspended by older ones, with an endless stream of short ones."""
    harness = Harness(**TIGHT, batching=batching, host_kv_chunks=host, max_num_seqs=4)
    long_ones = [harness.submit(range(100 * n, 100 * n + 20), 40, f"c{n}") for n in range(3)]
    for number in range(600):
        if number % 2 == 0:
            try:
                harness.submit([number % 97, number // 97, 5], 6)
            except RequestError as refusal:
                assert refusal.kind == ErrorKind.TOO_MANY
        harness.tick()
    assert states(harness, long_ones) == ["ended"] * 3
    harness.drain()


# -- prompts beside generation, by time


def begin(harness, prompt, generating=True):
    """Submits the prompt, beside a row that generates. Returns the plans until its first token."""
    if generating:
        harness.submit([1, 2], 60)
        harness.tick()
    request = harness.submit(prompt, 2)
    plans = []
    while not plans or not any(row.request == request for row in plans[-1].samples):
        plans.append(harness.tick())
    harness.drain()
    return plans


def most_that_fit(plan, cost, seconds):
    """The slow twin: adds one token after the other to the plan's only span."""
    span = plan.spans[0]
    for tokens in count(1):
        longer = replace(
            plan,
            spans=(span._replace(end=span.start + tokens),),
            token_ids=array("i", [0] * tokens),
        )
        if cost.plan_seconds(longer) > seconds:
            return tokens - 1


@pytest.mark.parametrize(
    ("target", "attention"), [(5.0, 0.3e-3), (7.7, 0.3e-3), (12.0, 0.3e-3), (7.7, 0.0)]
)
def test_beside_generation_a_step_takes_the_prompt_tokens_that_fit_into_the_target(
    target, attention
):
    """A token takes 0.55 ms and a little more with context, the step 1 ms."""
    harness = Harness(target_ms_per_token=target)
    cost = replace(harness._cost, attention=((64, attention),))
    harness.scheduler = Scheduler(harness.config, cost)
    harness._cost = cost
    plans = begin(harness, range(100, 150))
    for plan in plans[:-1]:
        most = most_that_fit(plan, cost, target / 1e3)
        assert most - (attention > 0) <= len(plan.token_ids) <= most


def test_without_generation_a_step_takes_all_that_it_can():
    plans = begin(Harness(target_ms_per_token=7.7), range(100, 140), generating=False)
    assert [len(plan.token_ids) for plan in plans] == [24, 16]


@pytest.mark.parametrize("target", [0.01, 3.9])
def test_a_step_takes_a_chunk_of_prompts_however_short_the_target(target):
    plans = begin(Harness(target_ms_per_token=target), range(100, 118))
    assert [len(plan.token_ids) for plan in plans] == [4, 4, 4, 4, 2]


def test_the_longer_the_context_the_fewer_tokens_fit():
    harness = Harness(target_ms_per_token=14.0)
    cost = replace(harness._cost, attention=((64, 12e-3),))  # a token at 64 takes 3 ms more
    harness.scheduler = Scheduler(harness.config, cost)
    harness._cost = cost
    plans = begin(harness, range(100, 150))
    sizes = [len(plan.token_ids) for plan in plans]
    assert sizes[0] > 8 and sizes[:-1] == sorted(sizes[:-1], reverse=True) and sizes[-2] == 4, (
        "a chunk at least"
    )
    for plan, size in zip(plans, sizes, strict=True):
        assert size <= 4 or cost.plan_seconds(plan) <= 14e-3


@pytest.mark.parametrize(
    "sampling", [Sampling(grammar="anything"), Sampling(bad_words=((5,), (1, 2)))]
)
def test_a_row_that_waits_for_its_last_token_is_not_delayed_either(sampling):
    """A reply with a grammar or long bad words has a token in every second step."""
    harness = Harness(target_ms_per_token=7.7)
    harness.submit([1, 2], 9, sampling=sampling)
    harness.tick()
    harness.launch()
    harness.submit(range(100, 140), 2)
    plan = harness.launch()
    assert not plan.generate and len(plan.token_ids) == 11
    harness.drain()


# -- replies


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (3, 3)])
def test_stop_ids_end_a_reply_once_it_is_long_enough(min_tokens, expected):
    prompt = list(range(7))
    stops = []
    for _ in range(3):
        stops.append(next_token([*prompt, *stops]))
    harness = Harness()
    request = harness.submit(prompt, 9, "a", stop_ids=frozenset(stops), min_tokens=min_tokens)
    harness.tick()
    while request in harness.open:
        harness.launch()
        harness.apply()
    assert harness.logs["a"].tolist() == prompt + stops[:expected]


def test_usage_comes_with_the_first_token_and_the_end_with_the_last():
    harness = Harness()
    request = harness.submit(range(7), 3)
    results = []
    while request in harness.open:
        harness.launch()
        results += harness.apply().results()
    first, second, third = results
    assert first.usage.new == 7 and len(first.tokens) == 1
    assert second == RowResult(request, second.tokens)
    assert third == RowResult(request, third.tokens, FinishReason.LENGTH)


def test_a_held_reply_is_committed_when_its_length_is_confirmed():
    harness = Harness()
    request = harness.submit(range(7), 5, "a", confirm=True)
    harness.run()
    assert harness.state(request) == "held" and "a" not in harness.scheduler.conversations
    assert not harness.scheduler.idle and harness.scheduler.stats().slots["gpu"]["in_use"] == 3
    harness.finish(request, 2)
    first = next_token(range(7))
    assert harness.logs["a"].tolist() == [*range(7), first, next_token([*range(7), first])]
    assert harness.scheduler.finish(request, 2, 0.0) is None, "it has ended"
    harness.drain()


@pytest.mark.parametrize("tokens", [0, 6])
def test_an_end_that_is_not_there_is_an_error(tokens):
    harness = Harness()
    request = harness.submit(range(7), 5, "a", confirm=True)
    harness.run()
    with pytest.raises(InvariantError, match="does not have"):
        harness.scheduler.finish(request, tokens, 0.0)


def test_results_come_in_the_order_of_their_plans():
    harness = Harness()
    harness.submit(range(7), 5)
    harness.launch()
    harness.launch()
    harness.results.reverse()
    with pytest.raises(InvariantError, match="step 2 came where that of step 1 was due"):
        harness.apply()


# -- state for callers


def test_stats_add_up():
    harness = Harness()
    assert harness.scheduler.stats().slots["gpu"] == {
        "free": 24,
        "reclaimable": 0,
        "idle": 0,
        "in_use": 0,
    }
    harness.turn(range(21), 1, "a")
    harness.place(harness.scheduler.conversations.get("a").chunks[0], "both")
    harness.place(harness.scheduler.conversations.get("a").chunks[1], "host")
    harness.submit([1, 2], 9)
    harness.submit([3, 4], 9)
    harness.tick()
    waiting = harness.submit([5], 9)
    stats = harness.scheduler.stats()
    assert (stats.running, stats.waiting, stats.conversations, stats.suspensions) == (2, 1, 1, 0)
    assert stats.slots["gpu"] == {"free": 24 - 7, "reclaimable": 1, "idle": 4, "in_use": 2}
    assert stats.slots["host"] == {"free": 14, "copy": 1, "idle": 1}
    assert set(harness.scheduler.open_requests()) == set(harness.open) and waiting in harness.open
    harness.drain()
    stats = harness.scheduler.stats()
    copied = {
        name: harness.counts[name]
        for name in ("gated swap-ins", "early swap-ins", "evictions", "saves")
    }
    assert stats.swapped_in == copied["gated swap-ins"] + copied["early swap-ins"]
    assert stats.swapped_out == copied["evictions"] + copied["saves"]


def test_nothing_to_do_is_no_plan_and_no_step():
    harness = Harness()
    assert harness.launch() is None and harness.scheduler.idle
    request = harness.submit([1], 1)
    assert (
        harness.launch().step == 1 and harness.launch() is None and harness.scheduler.in_flight == 1
    )
    harness.apply()
    assert harness.scheduler.idle and request not in harness.open
    assert harness.scheduler.abort(request, 1.0) is None, "unknown ids have ended"


def test_a_suspended_row_keeps_its_seat_until_its_launched_steps_are_applied():
    """Or the token that it has in flight would be computed again."""
    harness = Harness()
    request = harness.submit(range(9), 20)
    harness.tick()
    harness.launch()
    queues = harness.scheduler._queues
    scheduler = harness.scheduler
    queues.suspend(queues.rows[0])
    queues.release_suspended(scheduler._applied, harness.now)
    assert harness.state(request) == "leaving"
    harness.apply()
    queues.release_suspended(scheduler._applied, harness.now)
    assert harness.state(request) == "suspended" and len(harness.reply(request)) == 2
    harness.drain()


def test_slots_on_their_way_free_are_no_room_yet():
    """They count against the needs of other requests, not as slots that are free besides hits."""
    harness = Harness(**TIGHT)
    harness.turn(range(23), 2, "a")
    harness.submit(range(200, 210), 20)
    harness.tick()
    scheduler = harness.scheduler
    scheduler._queues.coming_free = lambda: 8
    new = scheduler._store.available - 2
    for idle_spare, fits in ((2, True), (3, False)):
        needs = SimpleNamespace(new_slots=new, idle_spare=idle_spare, idle_only=0)
        assert scheduler._admission._fits(needs) is fits
