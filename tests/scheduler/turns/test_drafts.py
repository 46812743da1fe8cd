"""Prompt lookup: what is proposed, and when it is expected to come true."""

from __future__ import annotations

from array import array

import pytest

from pensieve.scheduler.turns import drafts
from pensieve.scheduler.turns.drafts import (
    LEARNED,
    MOST_DRAFTS,
    SEARCHED,
    Drafts,
    may_draft,
    propose,
)
from pensieve.scheduler.types import Request, RequestId, Sampling


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ("", ""),
        ("abcd", ""),
        ("abcdxbcd", ""),  # three tokens are no match
        ("abcdxyzwabcd", "xyzwabcd"),
        ("abcd123456789-abcd", "12345678"),  # eight at most
        ("abcdX....abcdY....abcd", "Y....abc"),  # the latest
        ("__abcdX....abcdY....__abcd", "X....abc"),  # a longer match goes before a later one
        ("abababab", "abababab"),  # goes on in the same way
        ("-----", "--------"),
        # any id is a character
        ("x\ud800\U00020000abcdQR\ud800\U00020000abcd", "QR\ud800\U00020000abcd"),
    ],
)
def test_proposals(text: str, proposed: str) -> None:
    assert propose(text) == proposed


def ids(text: str) -> array[int]:
    return array("i", map(ord, text))


def test_drafts_shrink_while_they_come_true_and_are_replaced_when_one_has_not() -> None:
    drafts = Drafts()
    assert drafts.next(ids("abcd12345678+abcd"), 0) == ids("12345678")
    assert drafts.next(ids("abcd12345678+abcd12"), 0) == ids("345678")
    assert drafts.next(ids("abcd12345678+abcd12x"), 0) == ids("")
    assert drafts.next(ids("abcd12345678+abcd12xabcd"), 0) == ids("12xabcd1")[:MOST_DRAFTS]


def test_drafts_are_given_only_if_enough_of_them_are_expected_to_come_true() -> None:
    drafts = Drafts()
    text = "abcd12345678+abcd"
    assert drafts.next(ids(text), 2) and not drafts.next(ids(text), 3)
    assert drafts.next(ids(text + "123456"), 1) and not drafts.next(ids(text + "123456"), 2), (
        "two are left"
    )


def test_what_comes_true_is_learned_from_proposals_that_no_step_has_checked() -> None:
    drafting = Drafts()
    text = "abcd1234"
    mean = drafts.FIRST_MEAN
    for sign in "EFGHIJKLMNOPQRST":
        text += sign + "abcd"
        drafting.next(ids(text), 10)
        text += sign.lower()
        drafting.next(ids(text), 10)
        mean += LEARNED * (0 - mean)
        assert drafting._mean == pytest.approx(mean)
    assert not drafting.next(ids(text + "+abcd"), 1)


@pytest.mark.parametrize("step", [1, 1000, 5 * SEARCHED])
def test_matches_are_looked_for_in_the_latest_tokens_only(step: int) -> None:
    """However many tokens come at once; the text stays as long as what is searched."""
    other = "".join(chr(0x10000 + at) for at in range(2 * SEARCHED))
    for between, expected in ((SEARCHED - 16, "12345678"), (SEARCHED - 15, "")):
        drafts = Drafts()
        tokens = ids("abcd12345678" + other[:between] + "abcd")
        for end in range(step, len(tokens), step):
            drafts.next(tokens[:end], 0)
        assert drafts.next(tokens, 0) == ids(expected)
        assert len(drafts._text) == SEARCHED


@pytest.mark.parametrize("last", [0, 0xD7FF, 0xDFFF, 0xFEFF, 0xFFFE, 0x10FFFF])
def test_every_id_is_a_character(last: int) -> None:
    tokens = array("i", [last, 0xFEFF, 0xD800, 0xDC00, last, 5, last, 0xFEFF, 0xD800, 0xDC00])
    assert Drafts().next(tokens, 0)[:2] == tokens[4:6]


@pytest.mark.parametrize(
    ("sampling", "drafted"),
    [
        (Sampling(temperature=0.5, top_k=3, logit_bias=((1, 2.0),)), True),
        (Sampling(grammar="any"), False),
        (Sampling(logprobs=0), False),
        (Sampling(presence_penalty=0.1), False),
    ],
)
def test_which_requests_have_drafts(sampling: Sampling, drafted: bool) -> None:
    assert may_draft(Request(RequestId(1), array("i", [1]), 1, sampling=sampling)) == drafted
