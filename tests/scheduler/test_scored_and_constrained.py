"""Rows that wait for their last token, prompts that are scored, and the tokens that a seat gets."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence

import pytest

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.plan import Span, StepResult
from pensieve.scheduler.planning.lookup import _scoring
from pensieve.scheduler.planning.plan_builder import MOST_SCORED
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import (
    ErrorKind,
    Request,
    RequestError,
    RequestId,
    RowId,
    RowResult,
    Sampling,
    TokenLogprobs,
)

GRAMMAR = Sampling(grammar="anything")


def scheduler(**settings) -> Scheduler:
    defaults = dict(
        gpu_kv_chunks=400, host_kv_chunks=0, max_model_len=2000, max_num_batched_tokens=1000
    )
    config = SchedulerConfig(**(defaults | settings))
    cost = analytic_profile(
        chunk_tokens=32,
        parameters=1_000_000,
        layers=2,
        attention_width=64,
        chunk_bytes=1 << 16,
        max_context=2000,
        flops_per_s=1e12,
        link_bytes_per_s=1e9,
        step_base_seconds=1e-3,
    )
    return Scheduler(config, cost)


def request(number: int, tokens: int, max_tokens: int = 9, **options) -> Request:
    return Request(RequestId(number), array("i", range(tokens)), max_tokens, **options)


def result(
    plan, token: int = 7, scored_row: RowId | None = None, stuck: Sequence[RowId] = ()
) -> StepResult:
    """Every sample is `token`; the score of a known token is its id, and all spans that score are
    of one row."""
    rows = {
        row: RowResult(row.request, (token,), logprobs=(TokenLogprobs(-1.0, 1),))
        for row in plan.samples
    }
    if plan.scored:
        entries = tuple(TokenLogprobs(-float(scored_token), 1) for scored_token in plan.scored)
        rows[scored_row] = rows.get(scored_row, RowResult(scored_row.request))._replace(
            prompt_logprobs=entries
        )
    rows |= {
        row: RowResult(row.request, error=RequestError(ErrorKind.INTERNAL, "stuck"))
        for row in stuck
    }
    return StepResult(plan.step, plan.samples, (token,) * len(plan.samples), rows=rows)


def test_a_constrained_row_joins_a_step_only_after_its_last_token_is_applied():
    loop = scheduler()
    loop.add(request(1, 40, sampling=GRAMMAR), 0.0)
    loop.add(request(2, 40), 0.0)
    plans = [loop.next_plan(0.0)]
    while len(plans[0].samples) < 2:  # the second one waits for the first one's prompt
        loop.apply(result(plans[0]), 0.0)
        plans = [loop.next_plan(0.0)]
    plans.append(loop.next_plan(0.0))
    assert [row.request for row in plans[1].samples] == [2]
    loop.apply(result(plans[0]), 0.0)
    assert [row.request for row in loop.next_plan(0.0).samples] == [1, 2]


@pytest.mark.parametrize("confirm", [False, True])
def test_a_stuck_row_ends_without_its_token_and_without_a_commit(confirm: bool):
    """Even if the token would be its last one. The other row, and its own KV as cache, are
    unchanged."""
    loop = scheduler()
    for number in (1, 2):
        new_request = request(
            number, 40, 2, sampling=GRAMMAR, conversation=f"c{number}", confirm=confirm
        )
        loop.add(new_request, 0.0)
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while loop.open_requests() or loop.in_flight:
        plan = loop.next_plan(0.0)
        if plan is not None:
            stuck = tuple(row for row in plan.samples if row.request == 1 and tokens[1])
            results = list(loop.apply(result(plan, stuck=stuck), 0.0).results())
            assert [row.request for row in results if row.error] == [row.request for row in stuck]
            for row in results:
                tokens[row.request] += row.tokens
        for number in {row.request for row in results if row.finish} if confirm else ():
            loop.finish(number, 2, 0.0)
    loop.check()
    assert tokens == {1: [7], 2: [7, 7]}
    assert "c1" not in loop.conversations and "c2" in loop.conversations
    loop.add(request(3, 40), 0.0)
    (row,) = loop.apply(result(loop.next_plan(0.0)), 0.0).results()
    assert row.usage.cached == 32


def test_a_row_that_is_stuck_after_its_client_left_is_passed_over():
    loop = scheduler()
    loop.add(request(1, 40, sampling=GRAMMAR), 0.0)
    plan = loop.next_plan(0.0)
    loop.abort(RequestId(1), 0.0)
    assert not list(loop.apply(result(plan, stuck=plan.samples), 0.0).results())
    loop.check()


def test_constrained_rows_alone_leave_nothing_to_plan():
    loop = scheduler()
    loop.add(request(1, 40, sampling=GRAMMAR), 0.0)
    first = loop.next_plan(0.0)
    assert loop.next_plan(0.0) is None
    loop.apply(result(first), 0.0)
    assert list(loop.next_plan(0.0).positions) == [40]


def spans(*ranges: tuple[int, int, bool]) -> deque[Span]:
    return deque(Span(-1, start, end, start, samples) for start, end, samples in ranges)


@pytest.mark.parametrize("position", [0, 5, 8, 12, 20, 29])
def test_scoring_spans_cover_all_that_is_left_and_write_what_they_did(position):
    before = spans((8, 16, False), (24, 30, True))
    scoring = _scoring(before, position)
    computed = [at for span in scoring for at in range(span.start, span.end)]
    assert computed == sorted(set(computed)) and set(range(position, 30)) <= set(computed)
    written = {at for span in scoring for at in range(max(span.start, span.write_from), span.end)}
    assert written == set(range(8, 16)) | set(range(24, 30))
    scored = [at for span in scoring if span.scores for at in range(span.start, span.end)]
    assert scored == list(range(position, 30))
    assert [span.samples for span in scoring] == [False] * (len(scoring) - 1) + [True]


def test_a_prompt_is_scored_in_pieces_once_each_token():
    """With the prompt not cached, then fully cached: the pieces stay small and no cached chunk is
    written again."""
    loop = scheduler()
    for number, choice in ((1, 0), (2, 1)):
        loop.add(request(number, 700, conversation="c", prompt_logprobs=0, choice=choice), 0.0)
        entries = []
        usage = None
        scored_row = None
        while usage is None:
            plan = loop.next_plan(0.0)
            scored_row = plan.joins[0].row if plan.joins else scored_row
            assert len(plan.scored) <= MOST_SCORED
            if number == 2:
                assert all(span.write_from >= min(span.end, 672) for span in plan.spans)
            (row,) = loop.apply(result(plan, scored_row=scored_row), 0.0).results()
            entries += row.prompt_logprobs
            usage = row.usage
            assert len(row.logprobs) == len(row.tokens)
        assert [entry.logprob for entry in entries] == [-float(token) for token in range(1, 700)]
        assert usage.cached == 0 and usage.recomputed + usage.new == 700
        assert usage.recomputed >= (0 if number == 1 else 672)
        loop.abort(RequestId(number), 0.0)


def test_seats_are_told_the_tokens_so_far_where_the_next_one_depends_on_them():
    kinds = [
        (Sampling(), 0, 0),
        (Sampling(logprobs=1, logit_bias=((3, 1.0),)), 0, 0),
        (Sampling(frequency_penalty=1.0), 40, 0),
        (GRAMMAR, 0, 0),
    ]
    for sampling, prompt, reply in kinds:
        loop = scheduler()
        loop.add(request(1, 40, sampling=sampling), 0.0)
        (join,) = loop.next_plan(0.0).joins
        assert (len(join.prompt), len(join.reply)) == (prompt, reply)


def test_a_resumed_seat_is_told_its_reply():
    loop = scheduler(
        gpu_kv_chunks=5, host_kv_chunks=5, max_model_len=120, max_num_seqs=2, generation_reserve=0.0
    )
    fields = dict(max_tokens=50, sampling=Sampling(repetition_penalty=2.0))
    loop.add(Request(RequestId(1), array("i", range(40)), **fields), 0.0)
    loop.add(Request(RequestId(2), array("i", range(100, 140)), **fields), 0.0)
    joins = []
    for step in range(400):
        plan = loop.next_plan(step * 0.1)
        if plan is None:
            break
        joins += plan.joins
        loop.apply(result(plan, token=step), step * 0.1)
    assert loop.idle and loop.stats().suspensions
    resumed = [join for join in joins if join.reply]
    assert resumed
    for join in resumed:
        assert len(join.prompt) == 40 and list(join.reply) == sorted(join.reply)


def test_the_device_is_told_once_of_each_constrained_request_that_will_not_come_back():
    """A suspended request is not reported: its matcher is needed again."""
    loop = scheduler(
        gpu_kv_chunks=9, host_kv_chunks=5, max_model_len=120, max_num_seqs=5, generation_reserve=0.0
    )
    for number in range(1, 6):
        kind = Sampling() if number == 5 else GRAMMAR
        prompt = array("i", range(100 * number, 100 * number + 40))
        loop.add(Request(RequestId(number), prompt, 50, sampling=kind, confirm=number == 2), 0.0)
    joins = Counter()
    ended = []
    for step in range(1, 2000):
        plan = loop.next_plan(float(step))
        if plan is not None:
            ended += plan.ended
            joins.update(join.row.request for join in plan.joins)
            assert not {*plan.ended}.intersection(row.request for row in plan.samples)
            stuck = tuple(row for row in plan.samples if (row.request, joins[4]) == (4, 2))
            loop.apply(result(plan, stuck=stuck), float(step))
        if step == 45:
            loop.abort(RequestId(1), float(step))
        if not loop.open_requests():
            break
        if loop.open_requests() == [2] and plan is None:
            assert 2 not in ended, "how long its reply is has not been confirmed"
            loop.finish(RequestId(2), 50, float(step))
    assert joins[4] > 1, "it was suspended"
    loop.add(request(6, 4), 3000.0)
    ended += loop.next_plan(3000.0).ended
    assert sorted(ended) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (dict(min_p=-0.1), "min_p"),
        (dict(repetition_penalty=0.0), "repetition_penalty"),
        (dict(presence_penalty=2.1), "presence_penalty"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty"),
        (dict(logit_bias=((1, 100.5),)), "logit_bias"),
        (dict(logprobs=21), "logprobs"),
    ],
)
def test_sampling_checks_itself(wrong, param):
    with pytest.raises(RequestError) as caught:
        Sampling(**wrong)
    assert (caught.value.kind, caught.value.subject) == (ErrorKind.INVALID, param)


def test_requests_check_their_prompt_logprobs():
    with pytest.raises(RequestError, match="prompt_logprobs must be between 0 and 20"):
        request(1, 3, prompt_logprobs=-1)
