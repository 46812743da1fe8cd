"""Rows with recurrent states that check drafts: the state stays in front of them, and accepted
tokens are computed again."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest

from pensieve.scheduler.config import SchedulerConfig, StateConfig
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.planning.live_states import LiveStates
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import InvariantError, Request, RequestId

from .draft_policy import decide_by_chance
from .harness import profile
from .test_drafting import KeyedDriver
from .test_states import OPERATIONS, StateDriver, drawn

SEEDS = 24
FAST = 8


class DraftedStateDriver(StateDriver, KeyedDriver):
    """Counts checks that compute tokens again."""

    def launch(self):
        plan = super().launch()
        for span in plan.spans if plan is not None else ():
            again = span.write_from - span.start if span.samples else 0
            self.counts["checks again"] += span.samples > 1 and again > 0
            if span.samples > 1:
                assert span.end - span.start <= self.config.states.multiple
        if plan is not None:
            assert plan.tokens <= self.config.max_num_batched_tokens
        return plan


def drafting(seed):
    """Seats beyond the rows leave room for drafts. The model has two words, so matches are
    frequent, and each draft comes true half of the time."""
    settings = drawn(seed)
    pick = Random(f"drafts {seed}").choice
    seats = pick((8, 12, 20))
    multiple = pick((8, 16))
    unified = settings.get("batching", "unified") == "unified"
    states = StateConfig(
        settings["states"].chunks,
        seats + pick((1, 2, 8)),
        max(settings["states"].spacing, multiple),
        generated=16,
        multiple=multiple,
    )
    settings |= {
        "vocabulary": 2,
        "speculate": "lookup",
        "max_num_seqs": seats,
        "max_num_batched_tokens": seats + pick((8, 24, 60)),
        "states": states,
        "target_ms_per_token": pick((None, 4.5, 8.0)) if unified else None,
    }
    return settings


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= FAST)) for n in range(SEEDS)]
)
def test_random_operations_with_drafts(seed, monkeypatch, totals):
    decide_by_chance(monkeypatch, seed)
    DraftedStateDriver(seed, **drafting(seed)).play(OPERATIONS, totals)


@pytest.mark.parametrize(
    "event",
    [
        *(
            "drafts",
            "accepted",
            "checks again",
            "states kept",
            "states swapped_in",
            "suspensions",
        ),
        *("forks", "branches", "restarts", "states adopted", "begun anew", "aborted running"),
        *("finished running", "gpu tokens", "host tokens", "disk tokens", "recomputed tokens"),
    ],
)
def test_everything_happened(event, totals):
    if totals["runs"] < FAST:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())


def waiting_to_draft(states):
    """Drafting, and the rates of the next step, of two rows whose first tokens are applied."""
    scheduler = Scheduler(
        SchedulerConfig(
            gpu_kv_chunks=40,
            host_kv_chunks=0,
            max_model_len=100,
            max_num_batched_tokens=256,
            chunk_tokens=8,
            speculate="lookup",
            states=states,
        ),
        profile(),
    )
    for number in (1, 2):
        scheduler.add(Request(RequestId(number), array("i", range(9)), 20), 0.0)
    plan = scheduler.next_plan(0.0)
    scheduler.apply(StepResult(plan.step, plan.samples, (5, 5)), 0.0)
    drafting = scheduler._batcher.drafting
    return drafting, drafting._rates(drafting._watched(1))


def test_the_second_computation_of_accepted_tokens_counts():
    _, plain = waiting_to_draft(None)
    drafting, rates = waiting_to_draft(StateConfig(2, 65, spacing=64))
    assert rates.token == pytest.approx(plain.token - plain.draft) and rates.least > plain.least
    drafting._timing.turnaround = 0.0
    drafts = 4
    just = drafts * rates.draft / rates.token  # they pay if more come true
    assert drafting._pays(rates, 1.01 * just, drafts, 1)
    assert not drafting._pays(rates, 0.99 * just, drafts, 1)
    assert not drafting._pays(rates, 1.01 * just, drafts, 1, lag=1)
    assert drafting._pays(rates, 1.01 * just + rates.draft / rates.token, drafts, 1, lag=1)


def test_a_check_whose_result_is_awaited_counts_as_if_all_came_true():
    """Else two groups of rows that check one after the other would overfill the step that computes
    both again."""
    drafting, _ = waiting_to_draft(StateConfig(2, 65, spacing=64))
    row = drafting._queues.rows[0]
    row.position = len(row.tokens)  # its check is launched
    row.drafts.checking = 4
    assert drafting._lag(row) == 4


# -- mutants: each error is found


def state_of_a_rejected_token(monkeypatch):
    """A check moves the state in its slot."""
    check = LiveStates.check_drafts
    monkeypatch.setattr(LiveStates, "check_drafts", lambda *args: (check(*args)[0],) * 2)


def drafts_taken_for_tokens(monkeypatch):
    """A check moves the row's state on, as far as its first draft."""

    def check(self, row, builder):
        end = row.position + 2
        return self.compute(row, row.state.at, end, builder)

    monkeypatch.setattr(LiveStates, "check_drafts", check)


def accepted_tokens_twice(monkeypatch):
    """The state has seen the tokens that the row's next span computes again."""
    reply = LiveStates.reply

    def stays(self, row, start, end, builder):
        slots = reply(self, row, start, end, builder)
        if end - start > 1:
            row.state.at = start
        return slots

    monkeypatch.setattr(LiveStates, "reply", stays)


def accepted_tokens_never(monkeypatch):
    """The span behind a check begins at the row's newest token."""
    check = LiveStates.check_drafts

    def moves_on(self, row, builder):
        slots = check(self, row, builder)
        row.state.at = row.position + 1
        return slots

    monkeypatch.setattr(LiveStates, "check_drafts", moves_on)


def one_token_less(monkeypatch):
    """The span behind a check begins one token behind the state."""
    check = LiveStates.check_drafts

    def skips(self, row, builder):
        slots = check(self, row, builder)
        row.state.at += 1
        return slots

    monkeypatch.setattr(LiveStates, "check_drafts", skips)


@pytest.mark.parametrize(
    "mutate",
    [
        state_of_a_rejected_token,
        drafts_taken_for_tokens,
        accepted_tokens_twice,
        accepted_tokens_never,
        one_token_less,
    ],
)
def test_an_error_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        for seed in range(FAST):
            decide_by_chance(monkeypatch, seed)
            DraftedStateDriver(seed, **drafting(seed)).play(OPERATIONS, Counter())
