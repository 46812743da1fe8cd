"""A turn's history is loaded or recomputed: the chosen way is never much slower than the better
one. And the overlap of loading with compute, compared with CachedAttention's read buffer.

On a virtual clock, with the costs of a Llama-3-8B measured on an H200 (docs/measured/steps.md), for
disks and links around the speed at which both ways take equally long. To force one way, the
scheduler gets costs that the device does not have.
"""

from array import array
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.cost_estimate import break_even_disk
from pensieve.scheduler.plan import Lane, StepPlan, StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.sim.simulator import (
    STEPS_IN_FLIGHT,
    Session,
    SessionTurn,
    VirtualDevice,
    simulate,
)
from pensieve.scheduler.types import Request, RequestId, StoredRecord, Tier, Usage

pytestmark = pytest.mark.usefixtures("each_lower_tier")

SIZE, NEW_TOKENS = 32, 32
H200 = CostProfile(
    chunk_tokens=SIZE,
    chunk_seconds=0.73e-3,
    attention=((SIZE, 1e-6), (1024, 0.04e-3), (16384, 0.61e-3)),
    step_base_seconds=4.8e-3,
    chunk_bytes=4 * 2**20,
    link_bytes_per_s=49e9,
    steps=((1, 4.81e-3), (64, 5.35e-3), (256, 7.85e-3), (1024, 23.3e-3)),
    row_attention=((1024, 0.04e-3), (16384, 0.6e-3)),
)
CONFIG = SchedulerConfig(
    gpu_kv_chunks=4000,
    host_kv_chunks=1500,
    disk_kv_chunks=1500,
    max_model_len=40_000,
    chunk_tokens=SIZE,
)
AROUND = (0.2, 0.8, 0.95, 1.05, 1.25, 5.0)
INSTANTLY = 1e15  # bytes/s
TURN_AT = 0.5  # seconds: the rows beside it generate then


def always_load(cost):
    return replace(cost, chunk_seconds=1e3)


def never_load(cost):
    return replace(cost, chunk_seconds=1e-9, attention=((1, 0.0),))


def as_it_is(cost):
    return cost


WAYS = (always_load, never_load, as_it_is)


class Served(NamedTuple):
    """Seconds from a turn's arrival to its first token, and from each request's to its end, summed;
    the sources of the turn's history; the plans."""

    first_token: float
    total: float
    usage: Usage
    plans: list[StepPlan]


def serve(cost, belief, history, rows=0, reply=1):
    """A turn with that many tokens on DISK, beside rows that generate; replies are of `reply`
    tokens."""
    scheduler = Scheduler(CONFIG, belief(cost))
    device = VirtualDevice(cost)
    prompt = array("i", range(1, history + NEW_TOKENS + 1))
    records = enumerate(scheduler.lower.keys(prompt[:history], b""))
    scheduler.lower.adopt(
        {
            Tier.DISK: [
                StoredRecord(slot, key, (slot + 1) * SIZE, age_s=0.0) for slot, key in records
            ]
        },
        0.0,
    )
    arrivals = deque((0.0, array("i", [10**6 + row]) * 64) for row in range(rows))
    arrivals.append((TURN_AT, prompt))
    arrived = []
    ended = []
    plans = []
    launched = deque()
    now = 0.0
    first_token = usage = None
    while arrivals or not scheduler.idle:
        while arrivals and arrivals[0][0] <= now:
            at, tokens = arrivals.popleft()
            arrived.append(at)
            scheduler.add(Request(RequestId(len(arrived)), tokens, reply), now)
        plan = scheduler.next_plan(now)
        if plan is not None:
            plans.append(plan)
            launched.append((plan, device.launch(plan, now)))
        if len(launched) >= (STEPS_IN_FLIGHT if plan is not None else 1):
            done, end = launched.popleft()
            now = max(now, end)
            result = StepResult(
                done.step, done.samples, (7,) * len(done.samples), *device.reports(now)
            )
            for output in scheduler.apply(result, now).rows:
                if output.usage is not None and output.request == rows + 1:
                    first_token = now - TURN_AT
                    usage = output.usage
                if output.finish is not None:
                    ended.append(now)
        elif plan is None:
            now = arrivals[0][0]
    return Served(first_token, sum(ended) - sum(arrived), usage, plans)


def all_ways(cost, history, **load):
    """Results of loading all of it, of computing all of it, and of the scheduler's choice."""
    loaded, computed, chosen = (serve(cost, belief, history, **load) for belief in WAYS)
    assert loaded.usage.disk == history and computed.usage.recomputed == history
    return loaded, computed, chosen


@pytest.mark.parametrize("history", [4096, 8192])
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_no_first_token_comes_later_than_by_the_better_way(history, tier):
    """HOST is a disk without delay behind a link that is slow."""
    for times in AROUND:
        if tier == "disk":
            cost = replace(H200, disk_read_bytes_per_s=times * break_even_disk(H200, history))
        else:
            # of one copy, not two
            even = break_even_disk(replace(H200, link_bytes_per_s=INSTANTLY), history)
            cost = replace(H200, link_bytes_per_s=times * even, disk_read_bytes_per_s=INSTANTLY)
        loaded, computed, chosen = all_ways(cost, history)
        assert chosen.first_token <= 1.1 * min(loaded.first_token, computed.first_token), times
        if not 0.5 < times < 2:  # clear cases, in which one way is clearly worse
            assert max(loaded.first_token, computed.first_token) > 1.5 * chosen.first_token, times


def test_beside_rows_it_is_the_delay_of_all_that_counts():
    """A request that reads a disk waits alone; one that computes delays every row that has not
    ended meanwhile."""
    rows, history = 8, 2048
    for times in (0.5 / (1 + rows), 0.8 / (1 + rows), 1.25 / (1 + rows), 0.5):
        cost = replace(H200, disk_read_bytes_per_s=times * break_even_disk(H200, history))
        loaded, computed, chosen = all_ways(cost, history, rows=rows, reply=200)
        assert chosen.total <= 1.01 * min(loaded.total, computed.total), times
    assert chosen.usage.disk == history and computed.total > 1.02 * chosen.total


def test_what_is_measured_wrongly_costs_no_more_than_the_error():
    """A disk that is believed to be a tenth faster, or slower, than it is."""
    for times in (0.8, 0.95, 1.05, 1.25):
        cost = replace(H200, disk_read_bytes_per_s=times * break_even_disk(H200, 8192))
        better = min(way.first_token for way in all_ways(cost, 8192))
        for error in (0.9, 1.1):
            believed = replace(cost, disk_read_bytes_per_s=error * cost.disk_read_bytes_per_s)
            assert serve(cost, lambda _, told=believed: told, 8192).first_token <= 1.12 * better, (
                times,
                error,
            )


@pytest.mark.parametrize("history", [2048, 8192, 32_768])
@pytest.mark.parametrize("rows", [4, 32])
def test_what_is_loaded_before_a_row_joins_is_the_papers_read_buffer(history, rows):
    """CachedAttention, section 3.2.1: S_buf = B (T_load L_hist - T_pref L_new), the part of the
    copy that a step is too short to hide.

    T_pref L_new is the step that the row joins. Its own tokens are negligible in it, and a step's
    copies are whole chunks. So more is loaded before, by less than the link copies in two steps.
    """
    cost = replace(H200, disk_read_bytes_per_s=INSTANTLY)
    plans = serve(cost, always_load, history, rows, reply=300).plans
    joined = next(plan for plan in plans if any(batch.gated for batch in plan.copies))
    copies = [batch for plan in plans for batch in plan.copies if batch.lane is Lane.IN]
    before = sum(len(batch.sources) for batch in copies if not batch.gated) * cost.chunk_bytes
    step = cost.step(len(joined.token_ids), history, len(joined.generate), 64)
    buffer = cost.link_bytes_per_s * (history / SIZE * cost.swap_in() - step)
    assert max(0.0, buffer) <= before < max(0.0, buffer) + 2 * cost.link_bytes_per_s * step
    assert sum(len(batch.sources) for batch in copies) == history / SIZE
    # It caused no wait: rows that generate ran in every step meanwhile.
    first = next(plan.step for plan in plans if plan.copies and plan.copies[0].lane is Lane.IN)
    assert all(len(plan.generate) == rows for plan in plans if first <= plan.step <= joined.step)


@pytest.mark.slow
def test_a_read_buffer_for_the_queue_would_gain_next_to_nothing():
    """All seats are taken, so histories of waiting requests stay on HOST. A link that takes no time
    gives the bound of what earlier loading could gain: a wait shorter by one history's copy, and
    the seats that are empty during the copy."""
    seats, sessions, rate = 16, 200, 25.0
    config = SchedulerConfig(
        gpu_kv_chunks=(seats + 3) * 300,
        host_kv_chunks=sessions * 270,
        max_model_len=9000,
        max_num_seqs=seats,
    )
    first, second = SessionTurn(0, 8192, 1), SessionTurn(8192, NEW_TOKENS, 100)
    thinking = [0.3 * (sessions - number) + number / rate for number in range(sessions)]
    returning = [
        Session(f"c{number}", 0.3 * number, (first, second._replace(think_s=think)))
        for number, think in enumerate(thinking)
    ]
    as_it_is, without_time = (
        simulate(config, replace(H200, link_bytes_per_s=link), returning, warm_up=sessions)
        for link in (H200.link_bytes_per_s, INSTANTLY)
    )
    copy = 8192 / SIZE * H200.swap_in()
    # it does queue
    assert as_it_is.usage.host > 0.9 * sessions * 8192 and as_it_is.ttft_p50 > 10 * copy
    assert as_it_is.seconds < 1.02 * without_time.seconds
    assert as_it_is.ttft_p50 < 1.05 * without_time.ttft_p50
