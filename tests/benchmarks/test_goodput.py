"""Which rate keeps a promise: bounds, pooled windows, and the words for the largest rate."""

import pytest

from benchmarks.goodput import Promise, goodput_table, judge, largest
from pensieve.scheduler.types import SettingError

PROMISE = Promise(first_s=15, later_s=5, token_ms=50)


def record(rate, server="pensieve", seed=0, first=(2000,) * 30, later=(1000,) * 80, **changed):
    result = dict(
        rate=rate,
        seed=seed,
        seconds=70.0,
        sessions=40,
        waits_ms={"first": list(first), "later": list(later), "joined": []},
        open_waits_ms={"first": [], "later": [], "joined": []},
        replies_ms_per_token=[30.0] * 100,
        open_ms_per_token=[],
        session_s={"1": 10.0, "2": 30.0},
        output_tokens_per_s=400.0,
        prompt_tokens_per_s=30000.0,
        prompt_tokens=1000,
        cached_tokens=None,
        sent_per_s=1.6,
        completed_per_s=1.5,
        open_at_start=3,
        open_at_end=4,
        errors={},
    )
    return {"server": server, "result": result | changed}


def test_a_promise_is_read_and_a_wrong_one_is_named():
    assert Promise.read("first=15,later=5,token=50") == PROMISE
    assert "first turns and 5 s" in str(PROMISE)
    for text in ("first=15", "first=x,later=5,token=50", "first=1,later=2,token=3,p99=4", ""):
        with pytest.raises(SettingError, match=r"--slo: .* is not of the form"):
            Promise.read(text)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, ()),
        ({"first": [2000] * 18 + [16000] * 2}, ("first turns",)),
        ({"later": [1000] * 70 + [6000] * 10}, ("later turns",)),
        ({"later": []}, ()),
        ({"replies_ms_per_token": [30.0] * 80 + [60.0] * 20}, ("ms/token",)),
        ({"errors": {"timeout": 2}}, ("failures",)),
    ],
)
def test_each_bound_is_checked(changed, broken):
    (each,) = judge([record(0.15, **changed)], PROMISE)
    assert each.broken == broken and not each.too_few


def test_what_is_open_counts_where_it_is_beyond_the_bound():
    waits = {"first": [], "later": [100] * 20, "joined": [90000]}
    (each,) = judge([record(0.15, open_waits_ms=waits)], PROMISE)
    assert each.broken == () and each.later_p95 == 1.0 and each.longest_wait == 90.0
    waits = {"first": [], "later": [100] * 20 + [7000] * 10, "joined": []}
    (each,) = judge([record(0.15, open_waits_ms=waits)], PROMISE)
    assert each.broken == ("later turns",) and each.later_p95 == 7.0
    (each,) = judge([record(0.15, open_ms_per_token=[1.0] * 50 + [80.0] * 20)], PROMISE)
    assert each.broken == ("ms/token",)


@pytest.mark.parametrize(
    ("changed", "too_few"),
    [
        ({"first": [2000] * 19}, ("first turns",)),
        ({"first": [], "later": []}, ("first turns",)),
        ({"later": [1000] * 5}, ("later turns",)),
        ({"replies_ms_per_token": []}, ("replies",)),
    ],
)
def test_few_samples_show_nothing(changed, too_few):
    (each,) = judge([record(0.15, **changed)], PROMISE)
    assert each.too_few == too_few and not each.holds
    assert largest([each]) == "no rate holds; too few samples at 0.15"


def test_windows_of_a_rate_are_judged_together():
    slow = record(0.15, later=[6000] * 20, seconds=35.0, completed_per_s=3.0)
    (alone,) = judge([slow], PROMISE)
    (pooled,) = judge([slow, record(0.15, seed=1, later=[1000] * 780)], PROMISE)
    assert alone.broken == ("later turns",) and pooled.broken == ()
    assert (pooled.windows, pooled.sessions, pooled.longest_wait) == (2, 80, 6.0)
    assert pooled.per_second == (400.0, 30000.0, 1.6, 2.0), "of all seconds"
    assert pooled.open == (6, 8)


def test_a_window_counts_once():
    with pytest.raises(SettingError, match=r"pensieve has two windows at 0.15 with seed 0"):
        judge([record(0.15), record(0.15)], PROMISE)


def test_whole_sessions_are_those_that_ended_at_every_server():
    records = [
        record(0.15, "a", session_s={"1": 10.0, "2": 30.0, "5": 90.0}),
        record(0.15, "b", session_s={"1": 20.0, "2": 50.0}),
        record(0.15, "a", seed=1, session_s={"1": 40.0}),
        record(0.2, "b", session_s={"7": 5.0}),
    ]
    sessions = {(each.server, each.rate): each.session_s for each in judge(records, PROMISE)}
    # with seed 1 there is one server alone
    assert sessions["a", 0.15] == (10.0, 30.0, 40.0)
    assert sessions["b", 0.15] == (20.0, 50.0) and sessions["b", 0.2] == (5.0,)


def test_enough_sessions_have_a_95th_percentile():
    few, many = ({f"{n}": float(n) for n in range(1, count + 1)} for count in (5, 21))
    records = [record(0.15, "a", session_s=few), record(0.2, "a", session_s=many)]
    lines = goodput_table(records, PROMISE)
    assert " 3 (5) " in lines[-4] and " 11, 20 (21) " in lines[-3]


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({0.12: True, 0.15: True, 0.185: False}, "0.15 (fails at 0.185); single windows"),
        ({0.12: True, 0.15: True}, "at least 0.15; single windows"),
        ({0.12: False, 0.15: False}, "below 0.12; single windows"),
        ({0.15: True, 0.3: False}, "between 0.15 and 0.3: rates between them are needed; single"),
        ({0.12: False, 0.15: True}, "below 0.12; 0.15 holds, which can only be chance; single"),
    ],
)
def test_the_largest_rate_is_read_between_two_close_ones(rates, words):
    records = [record(rate, later=[1000 if holds else 9000] * 80) for rate, holds in rates.items()]
    assert largest(judge(records, PROMISE)).startswith(words)


def test_servers_stay_in_the_order_of_their_first_record():
    records = [record(0.2, "vllm"), record(0.15, "pensieve"), record(0.1, "vllm", sessions=90)]
    records.append(record(0.2, "pensieve"))
    assert [(each.server, each.rate) for each in judge(records, PROMISE)] == [
        ("vllm", 0.1),
        ("pensieve", 0.15),
        ("vllm", 0.2),
        ("pensieve", 0.2),
    ]
    lines = goodput_table(records, PROMISE)
    assert lines[2:4] == [
        "* `vllm`: at least 0.2; single windows",
        "* `pensieve`: at least 0.2; single windows",
    ]


def test_the_share_of_prompts_that_was_found_is_pooled():
    records = [record(0.15, cached_tokens=900), record(0.15, seed=1, prompt_tokens=2000)]
    (unknown,) = judge(records, PROMISE)
    assert unknown.cached_share is None, "a window does not tell"
    records[1]["result"]["cached_tokens"] = 600
    (each,) = judge(records, PROMISE)
    assert each.cached_share == 0.5
    assert "| 400, 30,000 | 50 | 1.60, 1.50 |" in "\n".join(goodput_table(records, PROMISE))
