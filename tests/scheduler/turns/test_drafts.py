"""Prompt lookup: what is proposed, and how much of it is expected to come true."""

from __future__ import annotations

import random
from array import array

import pytest

from pensieve.scheduler.turns.drafts import (
    FIRST,
    HITS,
    LATER,
    LEARNED,
    LONGEST,
    MOST_DRAFTS,
    PAUSE,
    SEARCHED,
    SHORTEST,
    Acceptance,
    Drafts,
    may_draft,
    propose,
)
from pensieve.scheduler.types import Request, RequestId, Sampling


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ("", ""),
        ("a", ""),
        ("ab", ""),
        ("abcdxbd", ""),  # one token is no match
        ("abcdxyzwabcd", "xyzwabcd" * 2),
        ("abcd123456789012345-abcd", "1234567890123456"[:15] + "-"),  # sixteen at most
        ("abcdX....abcdY....abcd", "Y....abcdY....abcd"[:MOST_DRAFTS]),  # the latest
        # a longer match goes before a later one
        ("__abcdX..................abcdY.......__abcd", "X..............."),
        ("abababab", "ab" * 8),  # goes on in the same way
        ("-----", "-" * 16),
        # any id is a character
        ("x\ud800\U00020000abcdQR\ud800\U00020000abcd", "QR\ud800\U00020000abcd" * 2),
    ],
)
def test_proposals(text: str, proposed: str) -> None:
    assert propose(text) == proposed


def slow_propose(text: str) -> str:
    """Looks at every place, for the longest match first."""
    for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        for at in range(len(text) - 1 - length, -1, -1):
            if text[at : at + length] == text[-length:]:
                followed = text[at + length :][:MOST_DRAFTS]
                return (followed * MOST_DRAFTS)[:MOST_DRAFTS]
    return ""


@pytest.mark.parametrize("words", ["a", "ab", "abc", "abcdefgh"])
def test_the_search_finds_what_a_look_at_every_place_finds(words: str) -> None:
    dice = random.Random(words)
    for _ in range(500):
        text = "".join(dice.choice(words) for _ in range(dice.randrange(40)))
        assert propose(text) == slow_propose(text), text


def ids(text: str) -> array[int]:
    return array("i", map(ord, text))


def test_drafts_shrink_while_they_come_true_and_are_replaced_when_one_has_not() -> None:
    drafts = Drafts(Acceptance())
    text = "abcd1234567890123456+abcd"
    assert drafts.next(ids(text)) == ids("1234567890123456")
    assert drafts.next(ids(text + "12")) == ids("34567890123456")
    assert drafts.next(ids(text + "12x")) == ids("")
    assert drafts.next(ids(text + "12xabcd")) == ids("12xabcd12xabcd12")


def test_what_comes_true_is_learned_from_proposals_that_no_step_has_checked() -> None:
    shared = Acceptance()
    drafts = Drafts(shared)
    first = FIRST
    hits = HITS
    text = "ab12"
    for sign in "EFG":
        text += sign + "ab"
        drafts.next(ids(text))
        hits += LEARNED * (1 - hits)
        text += sign.lower()
        drafts.next(ids(text))
        first += LEARNED * (0 - first)
        hits += LEARNED * (0 - hits)
        assert drafts.own.first == pytest.approx(first)
        assert drafts.own.hits == pytest.approx(hits)
    assert drafts.own.later == LATER, "no token came behind one that had come true"
    assert first < shared.first < FIRST
    assert Drafts(shared).own.first == shared.first, "the next reply begins with it"


def test_tokens_behind_a_right_one_are_learned_apart() -> None:
    drafts = Drafts(Acceptance())
    text = "abcd12345+abcd"
    drafts.next(ids(text))
    drafts.next(ids(text + "123x"))
    assert drafts.own.first == pytest.approx(FIRST + LEARNED * (1 - FIRST))
    weight = 1 - (1 - LEARNED) ** 3  # "2" and "3" were right, "4" was not
    assert drafts.own.later == pytest.approx(LATER + weight * (2 / 3 - LATER))


def test_depth_and_expectation_are_those_of_the_chances() -> None:
    drafts = Drafts(Acceptance(first=0.5, later=0.8))
    drafts.next(ids("abcd1234567890123456+abcd"))
    chances = [0.5 * 0.8**behind for behind in range(MOST_DRAFTS)]
    for least in (0.01, 0.1, 0.3, 0.45, 0.51):
        assert drafts.depth(MOST_DRAFTS, least) == sum(chance >= least for chance in chances)
    assert drafts.depth(3, 0.01) == 3 and drafts.depth(0, 0.01) == 0
    assert drafts.depth(9, 0.0) == 9
    assert drafts.expected(5) == pytest.approx(sum(chances[:5]))
    assert drafts.coming(4, False, 0.01) == (4, pytest.approx(sum(chances[:4])))
    behind = [0.8**count for count in range(1, 4)]
    assert drafts.coming(4, True, 0.01) == (1.5, pytest.approx(0.5 * sum(behind)))


def test_a_reply_without_matches_is_searched_only_now_and_then() -> None:
    drafts = Drafts(Acceptance())
    tokens = ids("".join(map(chr, range(1000, 1100))))
    for end in range(10, 60):
        drafts.next(tokens[:end])
    assert drafts.coming(0, True, 0.1) == (0, 0)
    after = tokens[:60]
    hits = []
    for sign in range(2000, 2000 + PAUSE):
        for token in (1001, 1002, sign):
            after.append(token)
            hits.append(bool(drafts.next(after)))
    assert any(hits) and not all(hits[1::3]), "each second token ends a match"


@pytest.mark.parametrize("step", [1, 1000, 5 * SEARCHED])
def test_matches_are_looked_for_in_the_latest_tokens_only(step: int) -> None:
    """However many tokens come at once; the text stays as long as what is searched."""
    other = "".join(chr(0x10000 + at) for at in range(2 * SEARCHED))
    for between, expected in ((SEARCHED - 24, "1234567890123456"), (SEARCHED - 10, "")):
        tokens = ids("abcd1234567890123456" + other[:between] + "abcd")
        drafts = Drafts(Acceptance())
        for end in range(step, len(tokens) - PAUSE, step):
            drafts.next(tokens[:end])
        assert drafts.next(tokens) == ids(expected)
        assert len(drafts._text) == SEARCHED


@pytest.mark.parametrize("last", [0, 0xD7FF, 0xDFFF, 0xFEFF, 0xFFFE, 0x10FFFF])
def test_every_id_is_a_character(last: int) -> None:
    tokens = array("i", [last, 0xFEFF, 0xD800, 0xDC00, last, 5, last, 0xFEFF, 0xD800, 0xDC00])
    assert Drafts(Acceptance()).next(tokens)[:2] == tokens[4:6]


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
