"""Which rate keeps a promise: bounds, pooled windows, and the words for the largest rate."""

import pytest

from benchmarks.goodput import Promise, goodput_table, judge, largest
from pensieve.scheduler.types import SettingError

PROMISE = Promise(first_s=15, later_s=5, token_ms=50)


def record(rate, server="pensieve", **changed):
    result = dict(
        rate=rate,
        seconds=70.0,
        sessions=40,
        first_waits_ms=[2000] * 20,
        later_waits_ms=[1000] * 80,
        replies_ms_per_token=[30.0] * 100,
        session_s=[10.0, 30.0],
        output_tokens_per_s=400.0,
        prompt_tokens_per_s=30000.0,
        completed_per_s=1.5,
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
        ({"first_waits_ms": [2000] * 18 + [16000] * 2}, ("first turns",)),
        ({"later_waits_ms": [1000] * 70 + [6000] * 10}, ("later turns",)),
        ({"later_waits_ms": []}, ()),
        ({"replies_ms_per_token": [30.0] * 80 + [60.0] * 20}, ("ms/token",)),
        ({"replies_ms_per_token": []}, ("ms/token",)),
        ({"errors": {"timeout": 2}}, ("failures",)),
    ],
)
def test_each_bound_is_checked(changed, broken):
    (each,) = judge([record(0.15, **changed)], PROMISE)
    assert each.broken == broken


def test_windows_of_a_rate_are_judged_together():
    slow = record(0.15, later_waits_ms=[6000] * 5, seconds=35.0, completed_per_s=3.0)
    (alone,) = judge([slow], PROMISE)
    (pooled,) = judge([slow, record(0.15, later_waits_ms=[1000] * 195)], PROMISE)
    assert alone.broken == ("later turns",) and pooled.broken == ()
    assert (pooled.windows, pooled.sessions, pooled.longest_wait) == (2, 80, 6.0)
    assert pooled.per_second == (400.0, 30000.0, 2.0), "of all seconds"
    assert pooled.session_s == (20.0, 30.0, 4)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ({0.12: True, 0.15: True, 0.185: False}, "0.15 (fails at 0.185)"),
        ({0.12: True, 0.15: True}, "at least 0.15"),
        ({0.12: False, 0.15: False}, "below 0.12"),
        ({0.15: True, 0.3: False}, "at least 0.15, below 0.3: more rates"),
        ({0.12: False, 0.15: True}, "0.15, though a smaller rate fails"),
    ],
)
def test_the_largest_rate_is_read_between_two_close_ones(rates, words):
    records = [
        record(rate, later_waits_ms=[1000 if holds else 9000] * 80) for rate, holds in rates.items()
    ]
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
    assert lines[2:4] == ["* `vllm`: at least 0.2", "* `pensieve`: at least 0.2"]
