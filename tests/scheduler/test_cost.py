from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.cost_estimate import analytic_profile, break_even_disk
from pensieve.scheduler.planning.step_limit import most_tokens
from pensieve.scheduler.sim.simulator import simulate
from pensieve.scheduler.swap_out_mark import propose_swap_out_below, swap_out_mark
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulate import parser, plan_runs


def a_profile(attention=((64, 1.0), (128, 3.0), (256, 4.0)), **changes):
    profile = CostProfile(
        chunk_tokens=32,
        chunk_seconds=10.0,
        attention=attention,
        step_base_seconds=100.0,
        chunk_bytes=1000,
        link_bytes_per_s=4000.0,
    )
    return replace(profile, **changes)


@pytest.mark.parametrize(
    ("context", "attention"),
    [
        *((64, 1.0), (128, 3.0), (256, 4.0)),  # at the points
        *((96, 2.0), (112, 2.5), (192, 3.5)),  # linear between
        *((0, 0.0), (32, 0.5), (512, 8.0), (2560, 40.0)),  # proportional beyond both ends
    ],
)
def test_attention_costs(context, attention):
    assert a_profile().recompute(context) == pytest.approx(10.0 + attention)


def test_kept_costs_of_chunks_equal_those_of_new_profiles():
    profile = a_profile()
    used = [profile.recompute(end) for _ in range(2) for end in range(320)]
    assert used == 2 * [a_profile().recompute(end) for end in range(320)]
    limited = replace(profile, most_context=64)
    assert limited.recompute(256) == limited.recompute(64) < profile.recompute(256)
    assert limited != profile == a_profile()
    assert asdict(profile) == asdict(a_profile())
    assert len(profile._by_end) == 10  # not by the lengths of prompts


def test_one_point_is_enough():
    assert a_profile(((64, 1.0),)).recompute(640) == pytest.approx(20.0)
    assert a_profile(((0, 1.0),)).recompute(640) == pytest.approx(11.0)


def test_a_step_costs_its_base_and_its_tokens():
    assert a_profile().step(0) == 100.0
    assert a_profile().step(64, context=128) == pytest.approx(100.0 + 2 * 13.0)


@pytest.mark.parametrize("row_attention", [(), ((64, 0.1), (128, 0.3))])
def test_no_context_costs_more_than_the_most_that_is_seen(row_attention):
    profile = a_profile(row_attention=row_attention, most_context=128)
    seen, longer = (profile.step(64, context, 2, context) for context in (128, 4000))
    assert seen == longer < a_profile(row_attention=row_attention).step(64, 4000, 2, 4000)
    assert profile.recompute(4000) == profile.recompute(128)
    assert profile.token_attention(4000) == profile.token_attention(128)


def test_a_chunk_loads_at_the_speed_of_the_link():
    assert a_profile().swap_in() == 0.25


@pytest.mark.parametrize("attention", [(), ((64, 1.0), (32, 2.0)), ((64, 1.0), (64, 2.0))])
def test_a_profile_without_ascending_points_names_itself(attention):
    with pytest.raises(SettingError, match="profile: ") as error:
        a_profile(attention)
    assert error.value.setting == "profile"


def test_the_estimate_counts_operations():
    profile = analytic_profile(
        chunk_tokens=32,
        parameters=10**9,
        layers=2,
        attention_width=128,
        chunk_bytes=1000,
        max_context=1000,
        flops_per_s=1e12,
        link_bytes_per_s=1e6,
        step_base_seconds=0.0,
    )
    assert profile.attention[0][0] == 32 and profile.attention[-1][0] == 1024
    for context in (32, 500, 1000, 4000):
        operations = 2 * 10**9 * 32 + 4 * 2 * 128 * 32 * context
        assert profile.recompute(context) == pytest.approx(operations / 1e12)


def test_a_layer_with_a_window_reads_no_more_than_its_window():
    profile_with = partial(
        analytic_profile,
        chunk_tokens=32,
        parameters=10**9,
        layers=3,
        attention_width=128,
        chunk_bytes=1000,
        max_context=1000,
        flops_per_s=1e12,
        link_bytes_per_s=1e6,
        step_base_seconds=0.0,
    )
    profile, without = profile_with(windows=(100, 0, 8)), profile_with()
    for context in (32, 100, 500, 1000):
        read = min(context, 100) + context + 8
        assert profile.token_attention(context) == pytest.approx(4 * 128 * read / 1e12)
        assert profile.recompute(context) < without.recompute(context)
    assert profile_with(windows=(0, 0, 0)) == without
    flat = profile_with(windows=(100, 8, 8))
    assert (
        flat.recompute(1000)
        == flat.recompute(100)
        == pytest.approx(flat.chunk_seconds + 32 * 4 * 128 * 116 / 1e12)
    )


MEASURED = dict(
    steps=((1, 2.0), (32, 3.0), (128, 9.0)),
    row_attention=((64, 0.5), (128, 1.5)),
    out_bytes_per_s=2000.0,
)


def test_at_the_break_even_a_history_is_read_as_quickly_as_it_is_computed():
    cost = a_profile()
    # 0.25 s each to copy in
    chunks = 4
    computed = 10.5 + 11 + 12 + 13
    assert break_even_disk(cost, 140) == pytest.approx(4000 / (computed - chunks * 0.25))
    assert break_even_disk(a_profile(link_bytes_per_s=1000 / 11), 64) == math.inf


def test_a_measured_step_is_read_off_its_curve():
    profile = a_profile(**MEASURED)
    assert [profile.step(tokens) for tokens in (1, 32, 80, 128, 256)] == pytest.approx(
        [2.0, 3.0, 6.0, 9.0, 18.0]
    )
    assert profile.step(32, context=128) == pytest.approx(3.0 + 3.0)
    assert profile.step(30, 128, rows=2, rows_context=96) == pytest.approx(
        3.0 + 30 / 32 * 3.0 + 2 * 1.0
    )
    assert profile.recompute(128) == a_profile().recompute(128)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("measured", [True, False])
def test_the_tokens_that_fit_are_as_many_as_one_after_the_other_finds(rows, measured):
    profile = a_profile(**MEASURED) if measured else a_profile()
    for tenths in range(1600):
        fitting = [n for n in range(100) if profile.step(n, 0, rows, 96) <= tenths / 10]
        most = most_tokens(lambda n: profile.step(n, 0, rows, 96), tenths / 10, 99)
        assert most == len(fitting) - 1


def test_unmeasured_rows_cost_their_share_of_a_chunk():
    assert a_profile().step(0, rows=6, rows_context=128) == pytest.approx(
        a_profile().step(6, context=128)
    )
    assert a_profile().step(64, 128, rows=6, rows_context=64) == pytest.approx(
        100.0 + 26.0 + 6 / 32 * 11.0
    )


def test_a_chunk_is_saved_at_its_own_speed():
    assert a_profile().swap_out() == a_profile().swap_in()
    assert a_profile(**MEASURED).swap_out() == 0.5 and a_profile(**MEASURED).swap_in() == 0.25


@pytest.mark.parametrize(
    "change",
    [
        dict(chunk_seconds=-1.0),
        dict(step_base_seconds=math.nan),
        dict(attention=((64, math.inf),)),
        dict(steps=((1, 1.0), (2, -1.0))),
        dict(steps=((2, 1.0), (1, 1.0))),
        dict(row_attention=((2, 1.0), (2, 1.0))),
        dict(link_bytes_per_s=0.0),
        dict(out_bytes_per_s=-5.0),
        dict(chunk_bytes=0),
    ],
)
def test_impossible_costs_are_refused(change):
    with pytest.raises(SettingError, match="profile: "):
        a_profile(**change)


# The mark for swapping out ahead of time. A step is 16 chunks of 4 tokens; of the pool's 1000
# chunks 100 are reserved.

POOL = SchedulerConfig(
    gpu_kv_chunks=1000,
    host_kv_chunks=1000,
    max_model_len=400,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    chunk_tokens=4,
    generation_reserve=0.1,
)


def mark(save_s, step_s=1.0, config=POOL):
    """The mark of a model that takes `step_s` for a full step, and for generating."""
    cost = CostProfile(
        4, step_s / 16, ((4, 0.0),), 0.0, 1000, 1e9, ((1, step_s), (64, step_s)), (), 1000 / save_s
    )
    return propose_swap_out_below(cost, config)


def test_a_quick_link_needs_slots_for_the_steps_in_flight_only():
    assert mark(save_s=1e-9) == 0.15  # 100 + 3 steps of 16 chunks, and whole percents
    assert mark(save_s=1e-9, step_s=7.0) == 0.15  # slower steps take as many slots, only later
    assert mark(1e-9, config=replace(POOL, generation_reserve=0.3)) == 0.35


def test_copying_takes_time_too():
    assert mark(save_s=1 / 32) == 0.16  # 16 chunks in half a step, in which 8 more are taken


def test_a_slow_link_needs_slots_for_what_it_falls_behind():
    # 16 chunks a step are taken and 4 freed: of the longest context's 100, 75 are missing, and
    # copying lasts 4 steps.
    assert mark(save_s=1 / 4) == pytest.approx(0.1 + 0.001 * (7 * 16 + 75), abs=0.01)
    assert mark(save_s=1e6) == 1.0
    assert mark(save_s=1.0, step_s=0.0) == 1.0
    assert mark(save_s=1 / 4, config=replace(POOL, max_model_len=800)) > mark(save_s=1 / 4)


def test_generation_counts_where_it_takes_more_slots():
    # Known tokens: 16 chunks in 100 s. Generation: 8 rows, 2 chunks in 1 s.
    steps = ((1, 1.0), (8, 1.0), (64, 100.0))
    cost = CostProfile(4, 1.0, ((4, 0.0),), 0.0, 1000, 1e9, steps, (), 1e12)
    share = propose_swap_out_below(cost, replace(POOL, gpu_kv_chunks=10_000))
    assert share == pytest.approx(0.1 + 600 / 10_000)  # in 300 s, of three full steps


def test_the_mark_falls_as_the_pool_grows_and_is_a_setting_that_works():
    marks = [
        mark(1 / 20, config=replace(POOL, gpu_kv_chunks=chunks))
        for chunks in (200, 1000, 5000, 100_000)
    ]
    assert marks == sorted(marks, reverse=True) and marks[-1] > POOL.generation_reserve
    for share in marks:
        replace(POOL, swap_out_below=share)


def test_without_a_mark_the_proposed_one_counts():
    quick_link = a_profile()
    proposed = propose_swap_out_below(quick_link, POOL)
    assert swap_out_mark(quick_link, POOL) == int(proposed * 1000) != 250
    assert swap_out_mark(quick_link, replace(POOL, swap_out_below=0.5)) == 500
    assert swap_out_mark(quick_link, replace(POOL, swap_out_below=0.0)) == 0


@pytest.mark.slow
def test_the_proposed_mark_serves_as_quickly_as_a_higher_one():
    words = (
        "--synthetic ultrachat --sessions 80 --sessions-per-s 4 --think-s 8 --eviction retention"
    )
    words += (
        " --gpu-kv-bytes 8GiB --host-kv-bytes 64GiB --max-num-seqs 64 --max-num-batched-tokens 1024"
    )
    (run,) = plan_runs(parser().parse_args(words.split()))
    proposed = propose_swap_out_below(run.cost, run.config)
    assert run.config.generation_reserve < proposed < 0.25
    reports = [
        simulate(replace(run.config, swap_out_below=m), run.cost, run.sessions)
        for m in (run.config.generation_reserve, proposed, 0.5)
    ]
    late, good, generous = (report.ttft_p99 for report in reports)
    assert good <= 1.02 * generous and good < 0.9 * late
    assert reports[1].swapped_out < reports[2].swapped_out
