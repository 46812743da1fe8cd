"""The record of what a step says of a row."""

from __future__ import annotations

import pickle
from array import array

from pensieve.scheduler.types import (
    Applied,
    ErrorKind,
    FinishReason,
    RequestError,
    RequestId,
    RowResult,
    TokenLogprobs,
    Usage,
)

ENTRIES = (TokenLogprobs(-0.5, 1, (7, 8), (-0.5, -1.5)), TokenLogprobs(-2.0, 3))


def test_each_row_has_one_result_and_the_rows_with_more_than_tokens_come_first():
    first, last = (
        RowResult(RequestId(5), (1,), usage=Usage(new=3)),
        RowResult(RequestId(6), (2, 3), FinishReason.STOP),
    )
    applied = Applied(array("q", [1, 2, 2, 3]), array("i", [10, 20, 21, 30]), (last, first))
    plain = [
        RowResult(RequestId(3), (30,)),
        RowResult(RequestId(2), (20, 21)),
        RowResult(RequestId(1), (10,)),
    ]
    assert list(applied.results()) == [first, last, *plain]


def test_results_are_the_same_after_the_pipe():
    rows = (
        RowResult(
            RequestId(1),
            (4,),
            usage=Usage(gpu=8),
            queued=0.25,
            logprobs=ENTRIES[:1],
            prompt_logprobs=ENTRIES,
        ),
        RowResult(RequestId(2), (), FinishReason.LENGTH, truncated=9),
        RowResult(RequestId(3)),
    )
    for applied in (
        Applied(),
        Applied(array("q", [9]), array("i", [4])),
        Applied(array("q"), array("i"), rows),
    ):
        there = pickle.loads(pickle.dumps(applied))
        assert there == applied
        assert all(
            type(entry) is TokenLogprobs
            for row in there.rows
            for entry in (*row.logprobs, *row.prompt_logprobs)
        )


def test_an_error_passes_the_pipe():
    error = RequestError(ErrorKind.TOO_MANY, "full", "prompt", "code")
    (row,) = pickle.loads(pickle.dumps(Applied(rows=(RowResult(RequestId(1), error=error),)))).rows
    assert row.error is not None
    assert (row.error.kind, row.error.message, row.error.subject, row.error.code) == (
        ErrorKind.TOO_MANY,
        "full",
        "prompt",
        "code",
    )
