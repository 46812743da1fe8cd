"""Rows that check drafts: what a step computes for them, what counts of it, and that nothing else
changes."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.turns import drafts
from pensieve.scheduler.types import GPU, FinishReason, Request, RequestId

from .driver import Driver
from .harness import profile

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
    """Every match is drafted, however little has come true so far."""
    monkeypatch.setattr(drafts, "FIRST_MEAN", 1e9)


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("overflow", OVERFLOW_MODES)
@pytest.mark.parametrize("batching", ["unified", "separate"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_with_drafts(seed, batching, overflow, always, totals):
    """The model has two words, so matches are frequent, and each draft comes true half of the
    time."""
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
    if totals["runs"] < 24:
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


def test_a_step_checks_drafts_and_gives_the_right_ones_and_one_token_more():
    scheduler, plans, texts, _ = play("12345X6789..", PROMPT, 12)
    assert texts[:2] == ["1", "2345X"], (
        "the first is of the prompt's step; of eight drafts four were right"
    )
    (span,) = plans[1].spans
    assert (span.start, span.samples, "".join(map(chr, plans[1].token_ids))) == (
        len(PROMPT),
        9,
        "12345678+",
    )
    assert "".join(texts) == "12345X6789.."
    stats = scheduler.stats()
    assert (stats.drafts, stats.drafted, stats.accepted) == (1, 8, 4)


def test_all_drafts_come_true():
    assert play("12345678+abcd", PROMPT, 13)[2][1] == "2345678+a"


def test_tokens_behind_a_stop_id_are_cut():
    _, _, texts, events = play(
        "12345678....", PROMPT, 12, stop_ids=frozenset(map(ord, "4")), min_tokens=2
    )
    assert texts == ["1", "234"] and events[-1].finish is FinishReason.STOP
    _, _, texts, events = play(
        "12345678....", PROMPT, 12, stop_ids=frozenset(map(ord, "4")), min_tokens=5
    )
    assert texts[1] == "2345678." and events[-1].finish is FinishReason.LENGTH


def test_no_more_is_drafted_than_the_reply_may_have():
    _, plans, texts, events = play("1234", PROMPT, 4)
    assert texts == ["1", "234"] and plans[1].spans[0].samples == 3
    assert events[-1].finish is FinishReason.LENGTH


def test_other_rows_generate_in_the_step_that_a_row_skips():
    config = dict(
        gpu_kv_chunks=40,
        host_kv_chunks=0,
        max_model_len=100,
        max_num_batched_tokens=64,
        chunk_tokens=8,
    )
    scheduler = Scheduler(SchedulerConfig(**config, speculate="lookup"), profile())
    for number, prompt in ((1, PROMPT), (2, "qrstuvwxyz")):
        scheduler.add(Request(RequestId(number), array("i", map(ord, prompt)), 20), 0.0)
    plans = [scheduler.next_plan(0.0), scheduler.next_plan(0.0)]
    rows = [[row.request for row in plan.samples] for plan in plans]
    assert rows == [[1, 2], [2]], "request 1 waits for its token, to draft behind it"
    scheduler.apply(StepResult(1, plans[0].samples, (ord("1"), ord("!"))), 0.0)
    third = scheduler.next_plan(0.0)
    assert [row.request for row in third.samples] == [2, *[1] * 8]


@pytest.mark.parametrize("seats", [1, 2, 3])
def test_without_seats_for_two_drafts_nothing_is_drafted_and_no_step_is_skipped(seats):
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
    scheduler.add(Request(RequestId(1), array("i", map(ord, PROMPT)), 20), 0.0)
    assert len(scheduler.next_plan(0.0).spans) == 1
    assert len(scheduler.next_plan(0.0).generate) == 1


def test_a_single_draft_is_checked_only_if_it_ends_the_reply():
    """Otherwise it gives at best the token of the step that the row then skips."""
    _, plans, texts, _ = play("12345678", PROMPT, 8, seats=2)
    assert [sum(span.samples for span in plan.spans) for plan in plans] == [1] * 6 + [2]
    assert texts == [*"123456", "78"]


def test_drafts_leave_half_of_the_budget_to_prompts():
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
