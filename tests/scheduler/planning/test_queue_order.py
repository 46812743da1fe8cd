"""The order in which waiting requests join: by response ratio, with a bound on overtaking, and
fairly between owners."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from functools import partial
from math import inf
from random import Random
from types import SimpleNamespace

import pytest

from pensieve.scheduler.config import QUEUE_ORDERS, SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.planning.admission import MOST_TRIED
from pensieve.scheduler.planning.queue_order import OVERTAKING, QueueOrder
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.sim.simulator import Session, SessionTurn, Simulator
from pensieve.scheduler.turns.turn import Turn
from pensieve.scheduler.types import Request, RequestId, Usage

from ..driver import Driver
from ..harness import Harness


def test_every_order_of_the_settings_has_its_factor():
    assert set(OVERTAKING) == set(QUEUE_ORDERS)


def queue(waits, **settings):
    """A queue of turns, each with (seconds of its arrival, of its prompt's work), by name."""
    harness = Harness(**settings)
    waiting = []
    for number, (name, (arrived, work)) in enumerate(waits.items(), start=1):
        request = Request(
            RequestId(number), array("i", [1]), 1, conversation=name, priority=-(name == "urgent")
        )
        turn = Turn(request, number, arrived)
        turn.work = work
        turn.allowance = 100.0
        waiting.append(turn)
    waiting.sort(key=lambda turn: turn.order)
    return waiting, QueueOrder(harness.config, harness._cost, harness.scheduler._lookup, waiting)


def names(turns):
    return [turn.request.conversation for turn in turns]


def test_a_longer_wait_makes_up_for_more_work():
    """With ten times the work, it is passed by requests that have waited a tenth as long."""
    waiting, order = queue(
        {"heavy": (0.0, 1.0), "light": (9.5, 0.1), "lighter": (9.95, 0.1), "urgent": (9.99, 5.0)}
    )
    assert names(order.candidates([], 9.9)) == ["urgent", "heavy", "light", "lighter"]
    assert names(order.candidates([], 10.6)) == ["urgent", "light", "heavy", "lighter"]
    suspended = waiting[-1]
    suspended.usage = Usage()
    assert list(order.candidates([], 10.0))[1] is suspended


def test_a_request_is_passed_until_its_allowance_is_used_up():
    """Each light turn that joins is subtracted from the heavy one's allowance."""
    waiting, order = queue({"heavy": (0.0, 1.0)} | {f"light {n}": (8.0, 0.1) for n in range(5)})
    waiting[0].allowance = 0.25
    joined = []
    for turn in order.candidates([], 10.0):
        assert order.may_join(turn, turn.work)
        order.joins(turn, turn.work)
        waiting.remove(turn)
        joined.append(turn.request.conversation)
    assert joined == ["light 0", "light 1", "heavy", "light 2", "light 3", "light 4"]


def test_a_prompt_that_has_become_longer_is_held_to_the_bound():
    """The turn's cached chunks are gone at its lookup: its work at that time counts."""
    waiting, order = queue({"heavy": (0.0, 1.0), "light": (8.0, 0.1)})
    waiting[0].allowance = 0.5
    assert next(order.candidates([], 10.0)) is waiting[1]
    assert order.may_join(waiting[1], 0.4) and not order.may_join(waiting[1], 0.6)


# -- a stream of short turns and one long prompt

SERVER = CostProfile(
    chunk_tokens=32,
    chunk_seconds=9e-3,
    attention=((32, 0.0),),
    step_base_seconds=10e-3,
    chunk_bytes=1,
    link_bytes_per_s=1e9,
)
CROWD = SchedulerConfig(
    gpu_kv_chunks=2048,
    host_kv_chunks=2048,
    max_model_len=1024,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    conversation_ttl=inf,
)
CLIENTS = 128


def wait_of_a_long_prompt(order, among=CLIENTS, target=None):
    """Seconds until the first token of a prompt of 900 tokens. The clients send one request after
    the other: 68 tokens, 64 of them cached, 16 generated. None: not in 60 s."""
    short = (SessionTurn(0, 68, 16), *[SessionTurn(64, 4, 16)] * 400)
    sessions = [Session(f"{client}", client / 100, short) for client in range(among)]
    sessions.append(Session("long", 5.0, (SessionTurn(0, 900, 4),)))
    waited = []

    def watch(now, applied, served):
        begun = [event.request for event in applied.rows if event.usage is not None]
        waited.extend(
            now - served[request].arrival
            for request in begun
            if served[request].session.name == "long"
        )

    config = replace(CROWD, queue_order=order, max_queue=len(sessions), target_ms_per_token=target)
    simulator = Simulator(config, SERVER, sessions, watch=watch)
    while not waited and simulator.now < 65.0:
        simulator.play(simulator.now + 1.0)
    return waited[0] if waited else None


@pytest.mark.parametrize("target", [None, 60.0, 1.0])
def test_a_long_prompt_among_short_turns_waits_at_most_three_times_as_long_as_by_arrival(target):
    """The largest step takes 82 ms. A target of 1 ms leaves a chunk a step."""
    wait = partial(wait_of_a_long_prompt, target=target)
    alone, arrival = wait("arrival", among=1), wait("arrival")
    assert 0.2 < alone < arrival
    assert wait("bounded-ratio") <= 3 * arrival


# -- the bound, counted by itself


class Bound:
    """The work that joins before each waiting request, counted independently of the scheduler."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.order = scheduler._order
        self.most = {}
        self.passed = {}
        self.joined = 0
        self._arrived, self._joins = self.order.arrived, self.order.joins
        self.order.arrived, self.order.joins = self.arrived, self.joins

    def arrived(self, turn, there):
        self._arrived(turn, there)
        before = [
            other
            for other in self.scheduler._queues.waiting
            if other.order < turn.order and not other.resumes
        ]
        self.most[turn] = OVERTAKING[self.scheduler.config.queue_order] * (
            sum(other.work + other.reply_work for other in before) + turn.work + turn.reply_work
        )
        self.passed[turn] = 0.0

    def joins(self, turn, work):
        rows = [*self.scheduler._queues.joined()]
        seats = lambda owner: sum(row.turn.request.owner == owner for row in rows)  # noqa: E731
        key = self.scheduler._lookup.must_wait
        self.joined += 1
        for other in self.scheduler._queues.waiting:
            later = other.order < turn.order and other.request.priority == turn.request.priority
            waits = other.waiting_for is not None and key(other.waiting_for)
            fair = seats(other.request.owner) <= seats(turn.request.owner)
            if later and fair and not waits and not turn.resumes and not other.resumes:
                self.passed[other] += work + turn.reply_work
                assert self.passed[other] <= self.most[other] + 1e-9
        self._joins(turn, work)


@pytest.mark.parametrize("order", ["bounded-ratio", "arrival"])
@pytest.mark.parametrize("owners", [("",), ("a", "b", "c")])
@pytest.mark.parametrize(("disk", "target"), [(0, None), (64, None), (0, 4.0)])
def test_later_arrivals_never_pass_a_request_beyond_its_bound(order, owners, disk, target):
    passed = joined = 0
    for seed in range(4):
        settings = {"disk_kv_chunks": disk, "target_ms_per_token": target}
        driver = Driver(seed, queue_order=order, max_num_seqs=2, max_queue=20, **settings)
        driver.restart_one = lambda: None  # would begin with another scheduler
        submit = driver.submit
        draw = Random(seed)
        driver.submit = lambda *a, submit=submit, draw=draw, **f: submit(
            *a, **({"owner": draw.choice(owners)} | f)
        )
        bound = Bound(driver.scheduler)
        for _ in range(800):
            driver.step()
        joined += bound.joined
        passed += sum(work > 0 for work in bound.passed.values())
    assert joined > 100
    assert (passed > 0) == (order == "bounded-ratio")


# -- long queues


def lookups(harness, monkeypatch):
    """Counts the lookups, by request."""
    tried = Counter()
    look_up = harness.scheduler._lookup.look_up

    def counted(turn, *rest):
        tried[turn.request.id] += 1
        return look_up(turn, *rest)

    monkeypatch.setattr(harness.scheduler._lookup, "look_up", counted)
    return tried


@pytest.mark.parametrize("order", QUEUE_ORDERS)
def test_one_step_tries_few_of_many_requests(order, monkeypatch):
    """A client sends a batch of requests with one new prefix. Each that is tried waits for the
    first one's chunks."""
    harness = Harness(
        max_queue=1000, queue_order=order, gpu_kv_chunks=200, max_num_seqs=20, check=False
    )
    requests = [harness.submit([*range(20), 100 + n], 1) for n in range(400)]
    tried = lookups(harness, monkeypatch)
    harness.tick()
    assert sum(tried.values()) <= MOST_TRIED + 1
    harness.run(*requests)
    assert len(tried) == 400


@pytest.mark.parametrize("owners", [("",), ("a", "b", "c")])
def test_a_request_is_not_looked_up_again_for_each_chunk_that_another_computes(owners, monkeypatch):
    """A long new document is computed in many steps. Requests about it wait for its last chunk. If
    there are several owners, every step has some budget for requests that join."""
    harness = Harness(
        max_queue=100,
        max_num_batched_tokens=12,
        max_num_seqs=4,
        gpu_kv_chunks=120,
        max_model_len=256,
    )
    tried = lookups(harness, monkeypatch)
    requests = [
        harness.submit([*range(180), 200 + n], 4, owner=owners[n % len(owners)]) for n in range(10)
    ]
    harness.run_until(lambda: any(harness.state(i) == "running" for i in requests[1:]))
    assert max(tried[i] for i in requests) <= 3
    harness.drain()


# -- owners


def test_the_free_seat_is_for_the_owner_with_fewest():
    harness = Harness(max_num_seqs=3, max_queue=20)
    first = [harness.submit([10 * n, 1], 40, owner="a") for n in range(8)]
    harness.tick()
    other = harness.submit([200, 1], 4, owner="b")
    harness.tick()
    assert harness.state(other) == "waiting"  # seats are not taken back
    harness.abort(first[1])
    harness.tick()
    assert harness.state(other) == "running"
    harness.drain()


@pytest.mark.parametrize("many", [2, 12])
def test_with_free_seats_a_request_waits_two_steps_at_most_however_many_prompts_another_owner_has(
    many,
):
    """The prompts of one owner fill every step for long; another owner's request begins at once and
    gets its share."""
    harness = Harness(max_num_seqs=20, gpu_kv_chunks=400, max_num_batched_tokens=24, max_queue=40)
    for n in range(many):
        harness.submit(range(1000 + 60 * n, 1060 + 60 * n), 2, owner="a")
    harness.tick()
    other = harness.submit(range(36), 2, owner="b")
    steps = 0
    while not harness.reply(other):
        plan = harness.launch()
        steps += 1
        shares = {"a": 0, "b": 0}
        for span in plan.spans:
            row = next(row for row in harness.scheduler._queues.rows if row.seat == span.seat)
            shares[row.turn.request.owner] += span.end - span.start
        assert (
            sum(shares.values()) >= 24 - len(plan.generate)
            or other not in harness.open
            or harness.reply(other)
        )
        if 1 <= steps <= 3:
            assert shares["b"] == 12
        harness.apply()
    assert steps == 3
    harness.drain()


def test_what_an_owner_does_not_need_of_its_share_goes_to_the_others():
    harness = Harness(gpu_kv_chunks=64, max_num_batched_tokens=24)
    harness.submit(range(60), 2, owner="a")
    harness.tick()
    harness.submit(range(100, 104), 2, owner="b")
    plan = harness.tick()
    assert sorted(span.end - span.start for span in plan.spans) == [4, 8, 12]
    harness.drain()


def test_owners_have_equal_shares_of_the_time_that_prompts_have_beside_generation():
    """The tokens of one owner have long contexts and take longer, so that it computes fewer."""
    harness = Harness(gpu_kv_chunks=96, target_ms_per_token=17.0)
    cost = replace(harness._cost, attention=((64, 10e-3),))  # a token at 64 takes 2.5 ms more
    harness.scheduler = Scheduler(harness.config, cost)
    harness._cost = cost
    harness.turn(range(40), 1, "long")
    harness.submit([1, 2], 40)
    harness.tick()
    harness.submit([*harness.logs["long"], *range(100, 118)], 2, "long", owner="a")
    harness.submit(range(200, 240), 2, owner="b")
    harness.tick()
    sizes = [span.end - span.start for span in harness.tick().spans]
    assert len(sizes) == 2 and 1 <= 2 * sizes[0] < sizes[1]
    harness.drain()


def test_a_shortage_suspends_a_row_of_the_owner_with_most_seats():
    harness = Harness(gpu_kv_chunks=16, generation_reserve=0.0, swap_out_below=0.0, max_num_seqs=3)
    requests = [
        harness.submit(range(100 * n, 100 * n + 17), 20, owner=owner)
        for n, owner in enumerate("aab")
    ]
    harness.run_until(lambda: harness.scheduler.stats().suspensions)
    assert [harness.state(request) in ("leaving", "suspended") for request in requests] == [
        False,
        True,
        False,
    ]
    harness.drain()


def test_owners_in_turn_draw_no_more_than_their_shares_of_seats():
    """Two owners, one with ten times the requests: while both wait each has half of the seats."""
    ids = SimpleNamespace(a=[], b=[])
    harness = Harness(max_num_seqs=4, gpu_kv_chunks=96, max_queue=60)
    for n in range(40):
        ids.a.append(harness.submit([1000 + 10 * n, 1], 6, owner="a"))
    for n in range(4):
        ids.b.append(harness.submit([5000 + 10 * n, 1], 6, owner="b"))
    begun = []
    while any(request in harness.open for request in ids.b):
        harness.tick()
        for request in (*ids.a, *ids.b):
            if request not in begun and (request not in harness.open or harness.reply(request)):
                begun.append(request)
    assert len([request for request in begun if request in ids.a]) <= 8
    harness.drain()


def seconds_beside(others, rows):
    """Seconds (until its first seat, until its reply's end) of another owner's request that comes
    after 3 s."""
    config = replace(
        CROWD, max_num_seqs=rows, max_num_batched_tokens=512, gpu_kv_chunks=4096, max_queue=1024
    )
    other = Session("other", 3.0, (SessionTurn(0, 200, 50),), owner="b")
    waits = []

    def watch(now, applied, served):
        events = [event for event in applied.rows if served[event.request].session.name == "other"]
        waits.extend(event.queued if event.finish is None else now - 3.0 for event in events)

    simulator = Simulator(config, SERVER, [*others, other], watch=watch)
    while len(waits) < 2:
        simulator.play(simulator.now + 1.0)
    return waits


def test_a_flood_of_prompts_delays_another_owner_no_more_than_an_ordinary_client_twice():
    """1,000 prompts at once, compared with a client that keeps as many requests running."""
    flood = [Session(f"{n}", 0.0, (SessionTurn(0, 200, 50),), owner="a") for n in range(1000)]
    client = [Session(f"{n}", 0.0, (SessionTurn(0, 200, 50),) * 40, owner="a") for n in range(63)]
    _, beside_a_client = seconds_beside(client, rows=64)
    _, beside_a_flood = seconds_beside(flood, rows=64)
    assert beside_a_flood <= 2 * beside_a_client
    queued, _ = seconds_beside(flood[:240], rows=256)  # there are free seats
    assert queued <= 2 * SERVER.step(512)
