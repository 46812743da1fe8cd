"""Prompt lookup: what is proposed, and how much of it is expected to come true."""

from __future__ import annotations

import random
from array import array

import pytest

from pensieve.scheduler.turns.drafts import (
    AGREED,
    ALONE,
    DIFFERENT,
    FIRST,
    FIRST_SHARES,
    HITS,
    LATER,
    LEARNED,
    LONGEST,
    MOST_DRAFTS,
    OF_MATCH,
    OF_ROW,
    PAUSE,
    SEARCHED,
    SHORTEST,
    Acceptance,
    Drafts,
    MatchShares,
    Proposal,
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
        ("abcdxyzwabcd", "xyzwabcd" * 4),
        ("abcd" + "1234567890" * 4 + "-abcd", "1234567890" * 3 + "12"),  # 32 at most
        ("abcdX....abcdY....abcd", ("Y....abcd" * 4)[:MOST_DRAFTS]),  # the latest
        # a longer match goes before a later one
        ("__abcdX" + "." * 40 + "abcdY.......__abcd", "X" + "." * 31),
        ("abababab", "ab" * 16),  # goes on in the same way
        ("-----", "-" * 32),
        # any id is a character
        ("x\ud800\U00020000abcdQR\ud800\U00020000abcd", "QR\ud800\U00020000abcd" * 4),
    ],
)
def test_proposals(text: str, proposed: str) -> None:
    assert propose(text).tokens == proposed


def slow_propose(text: str) -> Proposal:
    """Looks at every place, for the longest match first."""
    for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        followed = [
            text[at + length :][:MOST_DRAFTS]
            for at in range(len(text) - 2 - length + 1, -1, -1)
            if text[at : at + length] == text[-length:]
        ]
        if followed:
            tokens = (followed[0] * MOST_DRAFTS)[:MOST_DRAFTS]
            return Proposal(tokens, length, followed[1] if len(followed) > 1 else "")
    return Proposal("", 0, "")


@pytest.mark.parametrize("words", ["a", "ab", "abc", "abcdefgh"])
def test_the_search_finds_what_a_look_at_every_place_finds(words: str) -> None:
    dice = random.Random(words)
    for _ in range(500):
        text = "".join(dice.choice(words) for _ in range(dice.randrange(40)))
        assert propose(text) == slow_propose(text), text


def ids(text: str) -> array[int]:
    return array("i", map(ord, text))


def test_drafts_shrink_while_they_come_true_and_are_replaced_when_one_has_not() -> None:
    drafts = Drafts(Acceptance(), MatchShares())
    text = "abcd1234567890123456+abcd"
    assert drafts.next(ids(text))[:17] == ids("1234567890123456+")
    assert drafts.next(ids(text + "12"))[:15] == ids("34567890123456+")
    assert drafts.next(ids(text + "12x")) == ids("")
    assert drafts.next(ids(text + "12xabcd")) == ids(("12xabcd" * 5)[:MOST_DRAFTS])


def test_what_comes_true_is_learned_from_proposals_that_no_step_has_checked() -> None:
    shared = Acceptance()
    drafts = Drafts(shared, MatchShares())
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
    assert Drafts(shared, MatchShares()).own.first == shared.first, "the next reply begins with it"


def test_tokens_behind_a_right_one_are_learned_apart() -> None:
    drafts = Drafts(Acceptance(), MatchShares())
    text = "abcd12345+abcd"
    drafts.next(ids(text))
    drafts.next(ids(text + "123x"))
    assert drafts.own.first == pytest.approx(FIRST + LEARNED * (1 - FIRST))
    weight = 1 - (1 - LEARNED) ** 3  # "2" and "3" were right, "4" was not
    assert drafts.own.later == pytest.approx(LATER + weight * (2 / 3 - LATER))


def test_depth_and_expectation_are_those_of_the_chances() -> None:
    drafts = Drafts(Acceptance(), MatchShares())
    tokens = ids("abcd1234567890123456+abcd")
    drafts.next(tokens)
    chance = FIRST_SHARES[ALONE]  # of each
    chances = [chance ** (behind + 1) for behind in range(MOST_DRAFTS)]
    assert drafts.chances(MOST_DRAFTS) == pytest.approx(chances)
    for least in (0.01, 0.1, 0.3, 0.45, 0.51):
        assert drafts.depth(MOST_DRAFTS, least) == sum(chance >= least for chance in chances)
    assert drafts.depth(3, 0.01) == 3 and drafts.depth(0, 0.01) == 0
    assert drafts.depth(9, 0.0) == 9
    assert drafts.expected(5) == pytest.approx(sum(chances[:5]))
    assert drafts.coming(4, False, 0.01) == (4, pytest.approx(sum(chances[:4])))
    assert drafts.coming(4, True, 0.01) == (3 * chance, pytest.approx(chance * sum(chances[:3])))
    drafts.next(tokens + ids("12"))
    assert drafts.chances(5) == pytest.approx(chances[:5]), "behind the true ones"
    assert drafts.depth(MOST_DRAFTS, 0.1) == 3


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("ab12..ab", [ALONE] * MOST_DRAFTS),
        ("ab12X;;ab12Y,,ab", [AGREED] * 2 + [DIFFERENT] + [ALONE] * (MOST_DRAFTS - 3)),
        ("ab12X;;ab.Y,,ab", [DIFFERENT] + [ALONE] * (MOST_DRAFTS - 1)),
    ],
)
def test_kinds_are_those_of_the_place_before(text: str, kinds: list[int]) -> None:
    assert propose(text).kinds() == kinds


def test_shares_are_learned_by_kind_and_match() -> None:
    shares = MatchShares()
    drafts = Drafts(Acceptance(), shares)
    text = "ab12X;;ab12Y,,ab"
    drafts.next(ids(text))
    drafts.next(ids(text + "12X"))  # the third draft, Y, has not come true
    agreed, _, different = FIRST_SHARES
    for matched, true in ((2, 1), (3, 1)):
        expected = agreed + OF_MATCH * (true - agreed)
        assert shares.chance(AGREED, matched, 1.0) == pytest.approx(expected)
    assert shares.chance(DIFFERENT, 4, 1.0) == pytest.approx(different * (1 - OF_MATCH))
    assert shares.chance(DIFFERENT, 3, 1.0) == pytest.approx(different), "another match"
    assert drafts._odds == pytest.approx(OF_ROW * (2 * (1 - agreed) - different))


def test_a_reply_whose_drafts_never_come_true_has_lower_chances() -> None:
    drafts = Drafts(Acceptance(), MatchShares())
    text = ""
    chances = []
    for at in range(10):
        text += "ab"
        drafts.next(ids(text))
        chances += drafts.chances(1)
        text += chr(0x1000 + at)
    others = drafts.shares.chance(DIFFERENT, 2, 1.0)
    assert len(chances) == 9 and chances[-1] < others < chances[0]


def test_a_reply_without_matches_is_searched_only_now_and_then() -> None:
    drafts = Drafts(Acceptance(), MatchShares())
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
        drafts = Drafts(Acceptance(), MatchShares())
        for end in range(step, len(tokens) - PAUSE, step):
            drafts.next(tokens[:end])
        assert drafts.next(tokens)[: len(expected)] == ids(expected)
        assert bool(drafts._proposal) == bool(expected)
        assert len(drafts._text) == SEARCHED


@pytest.mark.parametrize("last", [0, 0xD7FF, 0xDFFF, 0xFEFF, 0xFFFE, 0x10FFFF])
def test_every_id_is_a_character(last: int) -> None:
    tokens = array("i", [last, 0xFEFF, 0xD800, 0xDC00, last, 5, last, 0xFEFF, 0xD800, 0xDC00])
    assert Drafts(Acceptance(), MatchShares()).next(tokens)[:2] == tokens[4:6]


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
