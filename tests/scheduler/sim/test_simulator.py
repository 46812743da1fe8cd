"""The simulator: times that can be worked out by hand, tokens that are never lost, and runs that
repeat exactly."""

from array import array
from collections import deque
from dataclasses import replace
from math import inf

import pytest

from pensieve.scheduler.config import EVICTION_POLICIES, PLAIN_POLICIES, SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import (
    NO_TICKETS,
    CopyBatch,
    Lane,
    Span,
    StepPlan,
    StepResult,
    Tickets,
    mean_contexts,
)
from pensieve.scheduler.sim.fast_forward import FastForwardScheduler
from pensieve.scheduler.sim.simulator import (
    Session,
    SessionTurn,
    SimulatedStore,
    Simulator,
    VirtualDevice,
    longest_context,
    percentile,
    simulate,
)
from pensieve.scheduler.types import Request, RequestError, RequestId, Usage

# A token takes 1 s and a step 0.5 s more, a copied chunk 2 s; attention is free.
COST = CostProfile(
    chunk_tokens=4,
    chunk_seconds=4.0,
    attention=((4, 0.0),),
    step_base_seconds=0.5,
    chunk_bytes=20,
    link_bytes_per_s=10,
)
QUICK = replace(COST, chunk_seconds=0.4, step_base_seconds=0.05, chunk_bytes=1)
CONFIG = SchedulerConfig(
    gpu_kv_chunks=32,
    host_kv_chunks=32,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    chunk_tokens=4,
    conversation_ttl=inf,
)


def crowd(sessions=24, shared=0):
    """Sessions of several turns that overlap and together need far more than the pools; some
    histories are cut."""
    return [
        Session(
            f"c{index}",
            3.0 * index,
            (
                SessionTurn(0, 9 + index % 5, 3 + index % 4),
                SessionTurn(8 + index % 4, 5, 6, think_s=20.0 + index % 7),
                SessionTurn(18, 3 + index % 9, 1, think_s=3.0),
            ),
            system_tokens=shared,
        )
        for index in range(sessions)
    ]


def plan(step=1, copies=(), after=NO_TICKETS, positions=(), spans=()):
    tokens = sum(span.end - span.start for span in spans)
    seats = tuple(range(len(positions)))
    return StepPlan(
        step,
        tuple(copies),
        after,
        (),
        (),
        seats,
        tuple(positions),
        tuple(spans),
        array("i", range(tokens)),
        (),
    )


def copy(lane, ticket, chunks, after=NO_TICKETS, gated=False):
    return CopyBatch(
        lane, ticket, array("i", range(chunks)), array("i", range(chunks)), after, gated
    )


# -- worked out by hand


def test_two_turns_take_the_time_that_is_their_due():
    session = Session("c", 100.0, (SessionTurn(0, 8, 3), SessionTurn(11, 2, 1, think_s=10.0)))
    report = simulate(CONFIG, COST, [session])
    # First turn: 0.5 + 8 s, then twice 1.5 s. Of its 11 tokens the last has no KV yet: 10 are on
    # the GPU, 3 are new.
    assert report.usage == Usage(gpu=10, new=8 + 3)
    assert report.generated == 4 and report.requests == 2 and report.steps == 4
    assert (report.ttft_p50, report.ttft_p99) == (3.5, 8.5)
    assert report.seconds_per_token == pytest.approx((11.5 / 3 + 3.5 / 1) / 2)
    assert report.busy_s == 8.5 + 1.5 + 1.5 + 3.5
    assert report.seconds == report.busy_s + 10.0
    assert report.hit_rate == 1.0


def test_a_history_cut_short_is_no_longer_a_hit_behind_the_cut():
    session = Session("c", 0.0, (SessionTurn(0, 8, 4), SessionTurn(4, 6, 1)))
    assert simulate(CONFIG, COST, [session]).usage == Usage(gpu=4, new=8 + 6)


def test_a_conversation_outgrows_its_context_if_it_may():
    session = Session("c", 0.0, tuple(SessionTurn(20 * turn, 12, 8, 1.0) for turn in range(8)))
    with pytest.raises(RequestError):
        simulate(CONFIG, COST, [session])
    config = replace(CONFIG, overflow="keep")
    report = Simulator(config, replace(COST, attention=((4, 4.0),)), [session], truncate=True).run()
    # Nothing is computed twice: 12 tokens of each prompt, and the last one of the reply before it.
    assert report.usage.recomputed == 0 and report.usage.new == 8 * 12 + 7
    assert report.usage.cached < sum(20 * turn for turn in range(8)) - 7, (
        "tokens beyond the window are not seen"
    )
    assert report.full_hits == 7


def test_sessions_with_equal_system_tokens_share_them():
    sessions = [
        Session("a", 0.0, (SessionTurn(0, 12, 1),), 8),
        Session("b", 50.0, (SessionTurn(0, 12, 1),), 8),
    ]
    assert simulate(CONFIG, COST, sessions).usage == Usage(gpu=8, new=16)
    sessions[1] = sessions[1]._replace(system_tokens=9)
    assert simulate(CONFIG, COST, sessions).usage == Usage(new=24)


def test_percentiles_are_values_that_occurred():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.01, 0.2, 0.21, 0.5, 0.99, 1.0)] == [
        1.0,
        1.0,
        2.0,
        3.0,
        5.0,
        5.0,
    ]


# -- the device's time


def test_mean_context_counts_each_token_with_what_it_sees():
    assert mean_contexts(plan(positions=(9,))) == (0, 10)
    assert mean_contexts(plan(spans=[Span(0, 0, 4, 0, True)])) == ((1 + 2 + 3 + 4) // 4, 0)
    assert mean_contexts(plan(positions=(0, 2), spans=[Span(2, 5, 7, 5, True)])) == (
        (6 + 7) // 2,
        (1 + 3) // 2,
    )


def test_a_row_whose_window_has_moved_sees_less():
    rows = plan(positions=(9, 12), spans=[Span(2, 8, 12, 8, True)])
    assert mean_contexts(rows, {1: 8, 2: 6}) == (10 - 6, (9 + 12 - 8) // 2 + 1)


def test_a_gated_copy_hides_behind_compute_and_only_the_rest_shows():
    short, long = copy(Lane.IN, 1, 1, gated=True), copy(Lane.IN, 1, 5, gated=True)
    assert VirtualDevice(COST).launch(plan(copies=[short], positions=(3, 3)), 1.0) == 1.0 + 2.5
    device = VirtualDevice(COST)
    assert device.launch(plan(copies=[long], positions=(3, 3)), 1.0) == 1.0 + 10.0
    assert device.busy_s == 10.0


def test_lanes_work_in_order_and_wait_for_the_tickets_they_name():
    device = VirtualDevice(COST)
    early, save = copy(Lane.IN, 2, 3), copy(Lane.OUT, 2, 1)
    # neither copy holds it up
    assert device.launch(plan(1, [early, save], positions=(3,)), 0.0) == 1.5
    assert device.launch(plan(2, after=Tickets(swap_in=2), positions=(3,)), 0.0) == 6.0 + 1.5
    behind = copy(Lane.OUT, 5, 1, after=Tickets(compute=2))
    # no tokens: complete when its copies are
    assert device.launch(plan(3, [behind]), 0.0) == 7.5 + 2.0
    assert device.launch(plan(4, positions=(3,)), 20.0) == 21.5
    assert device.busy_s == 1.5 + 1.5 + 1.5


# -- properties of every run


@pytest.mark.parametrize("eviction", (*EVICTION_POLICIES, *PLAIN_POLICIES))
@pytest.mark.parametrize("host_kv_chunks", [0, 32])
def test_every_prompt_token_is_accounted_for_once(eviction, host_kv_chunks):
    sessions = crowd()
    simulator = Simulator(
        replace(CONFIG, eviction=eviction, host_kv_chunks=host_kv_chunks), QUICK, sessions
    )
    report = simulator.run()
    simulator.scheduler.check()
    turns = [turn for session in sessions for turn in session.turns]
    usage = report.usage
    assert usage.cached + usage.recomputed + usage.new == sum(
        turn.history_tokens + turn.input_tokens for turn in turns
    )
    assert usage.new >= sum(turn.input_tokens for turn in turns)
    assert usage.gpu and usage.recomputed and bool(usage.host) == bool(host_kv_chunks)
    assert report.generated == sum(turn.output_tokens for turn in turns)
    assert report.requests == len(turns)
    assert 0.0 < report.busy_s <= report.seconds


@pytest.mark.parametrize("save", ["async", "off", "sync"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_with_a_disk_histories_outlive_host(save, prefetch):
    sessions = crowd(40)
    config = replace(
        CONFIG,
        host_kv_chunks=16,
        disk_kv_chunks=400,
        save=save,
        prefetch=prefetch,
        queue_order="arrival",
    )
    cost = replace(QUICK, disk_read_bytes_per_s=20.0, disk_write_bytes_per_s=10.0)
    simulator = Simulator(config, cost, sessions)
    report = simulator.run()
    simulator.scheduler.check()
    without = simulate(replace(config, disk_kv_chunks=0), cost, sessions)
    assert report.usage.disk and report.promoted and report.spilled and not without.usage.disk
    assert report.hit_rate > without.hit_rate + {"async": 0.15, "off": 0.05, "sync": 0.0}[save]
    assert sum(getattr(report.usage, name) for name in ("cached", "recomputed", "new")) == sum(
        turn.history_tokens + turn.input_tokens for session in sessions for turn in session.turns
    )


def play_with(store, config, cost, sessions):
    """A server's report, of a run with that store."""
    simulator = Simulator(config, cost, sessions, device=VirtualDevice(cost, store=store))
    report = simulator.run()
    simulator.scheduler.check()
    return report


def test_histories_come_back_from_a_store():
    sessions = crowd(40)
    config = replace(CONFIG, host_kv_chunks=16, shared_min_tokens=8, queue_order="arrival")
    without = simulate(replace(config, shared_min_tokens=0), QUICK, sessions)
    fast, slow = (
        play_with(SimulatedStore(speed), config, QUICK, sessions) for speed in (1e3, 1e-3)
    )
    assert fast.usage.shared and not slow.usage.shared and not without.usage.shared
    assert fast.hit_rate > without.hit_rate + 0.15


def test_another_server_finds_what_one_has_written():
    """A conversation moves: its full chunks are fetched."""
    store = SimulatedStore(1e3)
    config = replace(CONFIG, shared_min_tokens=8)
    session = Session("a", 0.0, (SessionTurn(0, 22, 1), SessionTurn(23, 2, 1, think_s=9.0)))
    reports = [play_with(store, config, QUICK, [session]) for _ in range(2)]
    assert [report.usage.shared for report in reports] == [0, 20]
    assert reports[1].seconds < reports[0].seconds - 1.5, "20 tokens take 2 s to compute"


def test_a_user_may_think_for_longer_than_a_conversation_lives():
    session = Session("c", 0.0, (SessionTurn(0, 8, 4), SessionTurn(12, 2, 1, think_s=100.0)))
    usage = simulate(
        replace(CONFIG, conversation_ttl=50.0),
        COST,
        [session, session._replace(name="d", start_s=200.0)],
    )
    assert usage.usage.cached == 0 and usage.usage.recomputed == 2 * 8


def test_an_end_may_be_kept_back_for_longer_than_a_conversation_lives():
    """The disk takes 40 s to write a chunk, and the user, who gets the end after that, writes at
    once."""
    config = replace(CONFIG, disk_kv_chunks=8, save="sync", conversation_ttl=50.0)
    cost = replace(COST, disk_read_bytes_per_s=20.0, disk_write_bytes_per_s=0.5)
    session = Session("c", 0.0, (SessionTurn(0, 8, 4), SessionTurn(12, 2, 1)))
    report = simulate(config, cost, [session])
    assert report.seconds > 50.0 and report.usage.cached == 11


def test_the_warm_up_is_served_but_not_counted():
    sessions = crowd(12)
    whole, part = simulate(CONFIG, QUICK, sessions), simulate(CONFIG, QUICK, sessions, warm_up=6)
    assert part.requests == whole.requests - 6 and part.usage.new < whole.usage.new
    assert (
        part.busy_s < whole.busy_s
        and part.seconds < whole.seconds
        and part.generated < whole.generated
    )


def test_without_reuse_every_token_is_new():
    sessions = crowd(6, shared=8)
    report = simulate(replace(CONFIG, reuse=False), QUICK, sessions)
    assert report.usage == Usage(
        new=sum(sum(turn[:2]) for session in sessions for turn in session.turns)
    )
    assert report.hit_rate == 0.0
    assert simulate(CONFIG, QUICK, sessions).busy_s < report.busy_s


def test_the_same_run_gives_the_same_report():
    assert simulate(CONFIG, QUICK, crowd()) == simulate(CONFIG, QUICK, crowd())


def test_a_context_that_cannot_be_served_is_refused():
    assert longest_context(crowd()) == 18 + 11 + 1
    with pytest.raises(RequestError, match="context of 16 tokens"):
        simulate(replace(CONFIG, max_model_len=16), QUICK, crowd())


# -- policies


def test_retention_keeps_what_is_dear_and_lru_what_is_recent():
    """Chats that never come back push at one long history, whose last chunks are the dearest, while
    its user thinks."""
    long = Session("long", 0.0, (SessionTurn(0, 64, 1), SessionTurn(65, 3, 1, think_s=200.0)))
    chats = [
        Session(f"s{index}", 100.0 + 10.0 * index, (SessionTurn(0, 12, 1),)) for index in range(10)
    ]
    cost = replace(QUICK, attention=((4, 0.01), (64, 4.0)))
    config = replace(CONFIG, gpu_kv_chunks=24, host_kv_chunks=0, max_model_len=72)
    retention, lru = (
        simulate(replace(config, eviction=eviction), cost, [long, *chats])
        for eviction in ("retention", "lru")
    )
    assert retention.usage.gpu > 20 and lru.usage.gpu == 0
    assert retention.usage.recomputed < lru.usage.recomputed
    assert retention.busy_s < lru.busy_s


# -- steps by the dozen


@pytest.mark.parametrize("policy", (*EVICTION_POLICIES, *PLAIN_POLICIES))
@pytest.mark.parametrize(
    ("batching", "disk", "target"),
    [("unified", 0, None), ("separate", 0, None), ("unified", 60, None), ("unified", 0, 700)],
)
def test_skipping_steps_changes_nothing(policy, batching, disk, target):
    """Replies of a few chunks, so that most steps can be skipped, over pools that are far too
    small."""
    sessions = [
        Session(
            f"c{index}",
            7.0 * index,
            (
                SessionTurn(0, 9 + index % 5, 5 + index),
                SessionTurn(8, 5, 30, think_s=2.0 + index % 7),
            ),
            system_tokens=8 * (index % 2),
        )
        for index in range(20)
    ]
    how = {"eviction": policy, "batching": batching, "target_ms_per_token": target}
    config = replace(CONFIG, **how, host_kv_chunks=12, disk_kv_chunks=disk)
    reports, planned = [], []
    for skips in (True, False):
        simulator = Simulator(config, QUICK, sessions)
        simulator.skips = skips
        plans = count_plans(simulator)
        reports.append(simulator.run())
        simulator.scheduler.check()
        planned.append(len(plans))
    assert reports[0] == reports[1]
    assert reports[0].steps <= planned[1] and planned[0] < (0.8 if not disk else 1.0) * planned[1]


def test_what_is_skipped_leaves_rows_and_plans_as_they_would_be():
    """Two schedulers, one of which skips as much as it may: after every skip both are in the same
    state."""
    quick, slow = (FastForwardScheduler(CONFIG, QUICK) for _ in range(2))
    for scheduler in (quick, slow):
        for number in (1, 2, 3):
            scheduler.add(
                Request(RequestId(number), array("i", range(5 * number)), 9 + 7 * number), 0.0
            )
    flights = {quick: deque(), slow: deque()}
    skipped = 0
    while not slow.idle:
        for scheduler in (quick, slow):
            one_step(scheduler, flights[scheduler])
        if steps := quick.steady_steps():
            flights[quick] = deque([quick.skip(steps)])
            for _ in range(steps):
                one_step(slow, flights[slow])
            skipped += steps
        assert state(quick) == state(slow)
        quick.check()
    assert skipped > 10 and quick.idle


def one_step(scheduler, flight):
    """Does what the loop does: plan, then apply the step before."""
    plan = scheduler.next_plan(1.0)
    if plan is not None:
        flight.append(plan)
    if len(flight) > (plan is not None):
        done = flight.popleft()
        scheduler.apply(StepResult(done.step, done.samples, (done.step,) * len(done.samples)), 1.0)


def state(scheduler):
    rows = [
        (row.id, row.position, row.launched, row.first_without_slot, row.tokens[:].tolist())
        for row in scheduler._queues.rows
    ]
    return rows, [
        (plan.step, plan.generate, plan.positions, plan.samples) for plan, _ in scheduler._inflight
    ]


def count_plans(simulator):
    plans = []
    next_plan = simulator.scheduler.next_plan

    def counted(now):
        plans.append(now)
        return next_plan(now)

    simulator.scheduler.next_plan = counted
    return plans
