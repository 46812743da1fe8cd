"""What a step with drafts costs, as it is measured."""

from __future__ import annotations

from array import array

import pytest

from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.draft_timing import FIRST_TURNAROUND, DraftTiming
from pensieve.scheduler.plan import Span
from pensieve.scheduler.plan_contexts import mean_contexts
from tests.runtime.fake_engine import plan, span

# 5 ms and 20 us a token; a row's attention 1 us a context token, a known token's half of it
COST = CostProfile(
    32,
    0.0,
    ((1000, 16e-3),),
    0.0,
    1,
    1.0,
    steps=((1, 0.00502), (1001, 0.02502)),
    row_attention=((1000, 1e-3),),
)
ROWS = plan(1, generate={0: 99, 1: 99})
CHECK = plan(1, generate={0: 99}, spans=[Span(1, 99, 104, 99, 5)], token_ids=array("i", range(5)))


def test_a_check_reads_its_context_as_a_row_does_and_its_drafts_are_known_tokens():
    assert mean_contexts(CHECK) == ((101 + 104 + 1) // 2 - 1, 100)
    assert COST.plan_seconds(CHECK) == pytest.approx(
        COST.step(4, mean_contexts(CHECK)[0], rows=2, rows_context=100)
    )
    assert DraftTiming(COST).step(0, 2, 100, drafts=4) == pytest.approx(
        COST.plan_seconds(CHECK), rel=0.01
    )


def test_steps_with_and_without_drafts_are_corrected_apart():
    timing = DraftTiming(COST)
    for _ in range(100):
        timing.took(CHECK, 1.5 * COST.plan_seconds(CHECK))
    plain, drafted = timing.step(0, 2, 100), timing.step(0, 2, 100, drafts=4)
    assert plain == COST.step(0, 0, 2, 100)
    assert drafted == pytest.approx(1.5 * COST.step(4, 100, 2, 100), rel=0.01)
    for _ in range(3000):
        timing.took(ROWS, 1.1 * COST.plan_seconds(ROWS))
    assert timing.step(0, 2, 100) == pytest.approx(1.1 * plain, rel=0.01)
    assert timing.step(0, 2, 100, drafts=4) == pytest.approx(drafted * 1.1 / 1.5, rel=0.01), (
        "without new checks, the old ones are forgotten"
    )


def test_steps_with_prompts_and_without_samples_teach_nothing():
    timing = DraftTiming(COST)
    prompt = plan(1, spans=[span(0, 0, 9)], token_ids=array("i", range(9)))
    for each in (prompt, plan(1)):
        timing.took(each, 9.0)
    assert timing.step(0, 2, 100) == COST.step(0, 0, 2, 100)


def test_a_step_that_computes_tokens_again_teaches_as_others_do():
    """With states the step behind a check has the accepted tokens once more."""
    timing = DraftTiming(COST)
    again = plan(1, spans=[Span(0, 95, 100, 99, 1)], token_ids=array("i", range(5)))
    for _ in range(100):
        timing.took(again, 1.5 * COST.plan_seconds(again))
    assert timing.step(0, 2, 100) == pytest.approx(1.5 * COST.step(0, 0, 2, 100), rel=0.01)


def test_the_turnaround_follows_what_is_measured_and_no_single_pause():
    timing = DraftTiming(COST)
    timing.turned_round(10.0)
    assert timing.turnaround < 1.1 * FIRST_TURNAROUND
    for _ in range(200):
        timing.turned_round(0.4e-3)
    assert timing.turnaround == pytest.approx(0.4e-3, rel=0.01)
