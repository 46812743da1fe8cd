"""Rows that check drafts: what a step computes for them, what counts of it, and that nothing else
changes."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.planning.drafting import Drafting
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import GPU, FinishReason, Request, RequestId, Sampling

from .draft_policy import always_draft, decide_by_chance
from .driver import Driver
from .harness import Harness, profile

OPERATIONS = 1500
EVENTS = (
    *(
        "gpu tokens",
        "host tokens",
        "disk tokens",
        "recomputed tokens",
        "drafts",
        "accepted",
        "suspensions",
        "drops",
    ),
    *(
        "overflows",
        "moved on",
        "begun anew",
        "branches",
        "forks",
        "restarts",
        "aborted running",
        "finished running",
    ),
)


class KeyedDriver(Driver):
    """Checks that a chunk has a key only if it holds that key's tokens: none that was drafted and
    has not come true."""

    def check(self):
        super().check()
        if not self.config.reuse:
            return
        size = self.config.chunk_tokens
        queues = self.scheduler._queues
        store = self.scheduler._store
        for turn in (*queues.waiting, *(row.turn for row in queues.joined())):
            keyed = []
            self.scheduler._chunk_keys.extend(
                keyed, turn.context_start, turn.request.salt, turn.tokens, len(turn.keys) * size
            )
            assert len(turn.keys) * size <= len(turn.tokens) and turn.keys == keyed
            for index in range(turn.context_start // size, len(turn.keys)):
                chunk = store.find(turn.keys[index])
                if chunk is not None and chunk.slots[GPU] >= 0 and not chunk.awaits_swap_in:
                    held = self.device.pools["gpu"][chunk.slots[GPU]]
                    tokens = [held[offset][0] for offset in range(size)]
                    assert tokens == turn.tokens[index * size : (index + 1) * size].tolist()


@pytest.fixture
def always(monkeypatch):
    always_draft(monkeypatch)


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("overflow", OVERFLOW_MODES)
@pytest.mark.parametrize("batching", ["unified", "separate"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_with_drafts(seed, batching, overflow, monkeypatch, totals):
    """The model has two words, so matches are frequent, and each draft comes true half of the
    time."""
    decide_by_chance(monkeypatch, seed)
    driver = KeyedDriver(
        seed,
        vocabulary=2,
        speculate="lookup",
        overflow=overflow,
        batching=batching,
        gpu_kv_chunks=(18, 24, 20, 72)[seed],
        chunk_tokens=1 if seed == 3 else 4,
        host_kv_chunks=(16, 60, 16, 16)[seed],
        disk_kv_chunks=(0, 90, 20, 0)[seed],
        max_num_batched_tokens=(24, 12, 20, 24)[seed],
        max_num_seqs=(12, 6, 20, 12)[seed],
        target_ms_per_token=8.0 if batching == "unified" and seed == 1 else None,
        copies_may_fail=seed == 2,
        save=("async", "sync", "async", "off")[seed],
    )
    driver.play(OPERATIONS, totals)


@pytest.mark.parametrize("event", EVENTS)
def test_everything_happened(event, totals):
    if totals["runs"] < 16:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())


def play(drawn, prompt, max_tokens=9, seats=64, **fields):
    """The plans, and the tokens of each step, of a request whose samples are `drawn`: of each
    position its own."""
    config = dict(
        gpu_kv_chunks=40,
        host_kv_chunks=0,
        max_model_len=100,
        max_num_batched_tokens=64,
        chunk_tokens=8,
    )
    scheduler = Scheduler(
        SchedulerConfig(**config, max_num_seqs=seats, speculate="lookup"), profile()
    )
    whole = [*map(ord, prompt), *map(ord, drawn)]
    scheduler.add(Request(RequestId(1), array("i", map(ord, prompt)), max_tokens, **fields), 0.0)
    plans, texts, events = [], [], []
    while not scheduler.idle:
        plan = scheduler.next_plan(0.0)
        scheduler.check()
        ends = [position + 1 for position in plan.positions]
        for span in plan.spans:
            ends += range(span.end - span.samples + 1, span.end + 1)
        applied = scheduler.apply(
            StepResult(plan.step, plan.samples, tuple(whole[end] for end in ends)), 0.0
        )
        scheduler.check()
        plans.append(plan)
        results = list(applied.results())
        assert len(results) <= 1
        texts.append("".join(chr(token) for row in results for token in row.tokens))
        events += applied.rows
    return scheduler, plans, texts, events


PROMPT = "abcd12345678+abcd"


def test_a_step_checks_drafts_and_gives_the_right_ones_and_one_token_more(always):
    scheduler, plans, texts, _ = play("12345Xuvwyzq", PROMPT, 12)
    assert texts[:2] == ["1", "2345X"], (
        "the first is of the prompt's step; of ten drafts four were right"
    )
    (span,) = plans[1].spans
    assert (span.start, span.samples, "".join(map(chr, plans[1].token_ids))) == (
        len(PROMPT),
        11,
        "12345678+ab",
    )
    assert "".join(texts) == "12345Xuvwyzq"
    stats = scheduler.stats()
    assert (stats.drafts, stats.drafted, stats.accepted) == (1, 10, 4)


def test_all_drafts_come_true(always):
    assert play("12345678+abcd", PROMPT, 13)[2][1] == "2345678+abcd"


def test_tokens_behind_a_stop_id_are_cut(always):
    _, _, texts, events = play(
        "12345678....", PROMPT, 12, stop_ids=frozenset(map(ord, "4")), min_tokens=2
    )
    assert texts == ["1", "234"] and events[-1].finish is FinishReason.STOP
    _, _, texts, events = play(
        "12345678....", PROMPT, 12, stop_ids=frozenset(map(ord, "4")), min_tokens=5
    )
    assert texts[1] == "2345678." and events[-1].finish is FinishReason.LENGTH


def test_no_more_is_drafted_than_the_reply_may_have(always):
    _, plans, texts, events = play("1234", PROMPT, 4)
    assert texts == ["1", "234"] and plans[1].spans[0].samples == 3
    assert events[-1].finish is FinishReason.LENGTH


def two_rows(**settings):
    """A scheduler with a request that can draft and one that cannot, its first plan, and the
    result of that plan."""
    config = dict(
        gpu_kv_chunks=40,
        host_kv_chunks=0,
        max_model_len=100,
        max_num_batched_tokens=64,
        chunk_tokens=8,
    )
    scheduler = Scheduler(SchedulerConfig(**config, speculate="lookup", **settings), profile())
    for number, prompt in ((1, PROMPT), (2, "qrstuvwxyz")):
        scheduler.add(Request(RequestId(number), array("i", map(ord, prompt)), 20), 0.0)
    plan = scheduler.next_plan(0.0)
    return scheduler, plan, StepResult(plan.step, plan.samples, (ord("1"), ord("!")))


def requests_of(plan):
    return [row.request for row in plan.samples]


def test_the_next_plan_waits_for_the_tokens_behind_which_drafts_pay(always):
    scheduler, _, result = two_rows()
    assert scheduler.next_plan(0.0) is None and scheduler.awaits_result
    scheduler.apply(result, 0.0)
    plan = scheduler.next_plan(0.0)
    assert requests_of(plan) == [2, *[1] * 15] and not scheduler.awaits_result


def test_while_drafts_are_checked_other_rows_generate_if_waiting_does_not_pay(always, monkeypatch):
    """A plan that is made leaves the row out until the check is applied; then it takes part."""
    scheduler, _, result = two_rows()
    scheduler.apply(result, 0.0)
    monkeypatch.setattr(Drafting, "_pays", lambda self, *_: scheduler.in_flight == 0)
    check = scheduler.next_plan(0.0)
    assert requests_of(check) == [2, *[1] * 15]
    second = scheduler.next_plan(0.0)
    assert requests_of(second) == [2]
    tokens = (ord("."), ord("2"), *map(ord, "X" * 14))
    scheduler.apply(StepResult(check.step, check.samples, tokens), 0.0)
    third = scheduler.next_plan(0.0)
    assert requests_of(third) == [2, 1]
    assert "".join(map(chr, third.token_ids)) == "X", "the device keeps another sample"


@pytest.mark.parametrize("turnaround", [1e-5, 1.0])
def test_drafts_pay_if_they_save_more_than_the_turnaround_and_their_own_time(turnaround):
    """A step takes 1 ms and 0.55 ms a token, so a draft must be likely, and gives at most 1 ms."""
    scheduler, _, result = two_rows()
    scheduler.draft_timing.turnaround = turnaround
    plan = scheduler.next_plan(0.0)
    assert (plan is None) == (turnaround < 1)
    scheduler.apply(result, 0.0)
    drafted = any(span.samples > 1 for span in (plan or scheduler.next_plan(0.0)).spans)
    assert drafted == (turnaround < 1)


def test_without_free_seats_nothing_is_drafted_and_nothing_is_awaited(always):
    config = dict(
        gpu_kv_chunks=40,
        host_kv_chunks=0,
        max_model_len=100,
        max_num_batched_tokens=64,
        chunk_tokens=8,
    )
    scheduler = Scheduler(SchedulerConfig(**config, max_num_seqs=1, speculate="lookup"), profile())
    scheduler.add(Request(RequestId(1), array("i", map(ord, PROMPT)), 20), 0.0)
    assert len(scheduler.next_plan(0.0).spans) == 1
    assert len(scheduler.next_plan(0.0).generate) == 1


def test_drafts_leave_seats_to_requests_that_join(always):
    """So a step samples no more positions than there are seats."""
    scheduler, _, result = two_rows(max_num_seqs=8)
    for number in (3, 4, 5):
        scheduler.add(Request(RequestId(number), array("i", [number] * 3), 5), 0.0)
    scheduler.apply(result, 0.0)
    plan = scheduler.next_plan(0.0)
    assert len(plan.joins) == 3 and plan.samples.count(plan.samples[-1]) == 1
    assert requests_of(plan) == [2, 1, 1, 1, 1, 3, 4, 5]


def cut_drafts(monkeypatch):
    """No chunk can be had for drafts: they end with the row's last one."""
    plan = Drafting.plan

    def cut(self, row, drafts, builder, extend):
        return plan(self, row, drafts, builder, lambda *_: False)

    monkeypatch.setattr(Drafting, "plan", cut)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("event", ["abort", "finish", "suspend", "no chunk", "grammar"])
def test_a_row_whose_check_comes_to_nothing_is_not_waited_for(event, waits, always, monkeypatch):
    """It leaves, or its drafts are cut, while they are checked or behind that. Every reply ends."""
    if event == "no chunk":
        cut_drafts(monkeypatch)
    harness = Harness(
        vocabulary=2, speculate="lookup", max_num_seqs=20, gpu_kv_chunks=60, max_model_len=64
    )
    if not waits:
        monkeypatch.setattr(Drafting, "awaits_result", lambda *_: False)
    first = harness.submit([0, 1] * 8, 40, "c1", confirm=event == "finish")
    second = harness.submit([1, 1, 0] * 4, 40, "c2")

    def checks(plan):
        spans = plan.spans if plan is not None else ()
        return any(span.samples > 1 and span.seat == row().seat for span in spans)

    def row():
        return next(row for row in harness.scheduler._queues.rows if row.id.request == first)

    while not checks(harness.launch()):
        while harness.results:
            harness.apply()
    if event == "abort":
        harness.abort(first)
    elif event == "finish":
        harness.finish(first, 1)
    elif event == "suspend":
        harness.scheduler._queues.suspend(row())
    elif event == "grammar":
        harness.submit([0, 1, 1], 9, sampling=Sampling(grammar="g"))
    assert second in harness.open
    harness.drain()
    assert harness.counts["drafts"]


def test_drafts_leave_half_of_the_budget_to_prompts(always):
    """Two replies that repeat themselves, as many seats as tokens in a step, and a prompt that
    comes later."""
    config = dict(
        gpu_kv_chunks=99,
        host_kv_chunks=0,
        max_model_len=300,
        max_num_batched_tokens=12,
        chunk_tokens=8,
    )
    scheduler = Scheduler(SchedulerConfig(**config, max_num_seqs=12, speculate="lookup"), profile())
    prompt = array("i", range(1000, 1040))
    word = "abcdefghijk" * 30
    for number in (1, 2):
        scheduler.add(Request(RequestId(number), array("i", map(ord, word[:40])), 200), 0.0)
    taken = []
    while len(taken) < 24:
        plan = scheduler.next_plan(0.0)
        if scheduler.stats().accepted > 20 and not taken:
            scheduler.add(Request(RequestId(3), prompt, 1), 0.0)
            taken.append(0)
        elif taken:
            taken.append(sum(span.end - span.start for span in plan.spans if span.seat == 2))
        ends = [position + 1 for position in plan.positions]
        for span in plan.spans:
            ends += range(span.end - span.samples + 1, span.end + 1)
        scheduler.apply(
            StepResult(plan.step, plan.samples, tuple(ord(word[end]) for end in ends)), 0.0
        )
    first = next(at for at, tokens in enumerate(taken) if tokens)
    assert first <= 2 and sum(taken[first : first + 8]) == len(prompt), taken
