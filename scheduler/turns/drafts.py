"""Drafts of a reply's next tokens from the conversation's own tokens: prompt lookup
(docs/design/drafts.md)."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from math import exp, log
from operator import neg
from typing import NamedTuple

from ..types import Request, Tokens
from .conversations import common_prefix

LONGEST, SHORTEST = 8, 2  # tokens of a match; a longer match is preferred
MOST_DRAFTS = 32
# latest tokens in which matches are looked for: this bounds a row's time in a step, and its memory
SEARCHED = 8192
LEARNED, SHARED = 1 / 4, 1 / 16
# A reply whose proposals come true so rarely, or that so rarely has one, is searched only once in
# so many tokens.
RARELY_FIRST, RARELY_HITS, PAUSE = 0.12, 0.04, 8
LEAST, MOST = 0.02, 0.98  # of every share, so that no row is given up for ever
FIRST, LATER, HITS = 0.5, 0.8, 0.3  # before anything has been observed
# Kinds of drafts: the place before the proposal's had the same token, there is no such place, or it
# had another one. Their shares before anything has been observed.
AGREED, ALONE, DIFFERENT = range(3)
FIRST_SHARES = 0.7, 0.5, 0.3
OF_MATCH, OF_ROW = 1 / 32, 1 / 8  # weights of each new draft in the shares, and in a row's odds
MOST_ODDS = 5.0  # of a row, natural logarithm
LEAST_REACHED = 0.01  # drafts that come true more rarely are not checked
_NONE = array("i")
_CODE = "utf-32-le", "surrogatepass"  # of one character for each token


class Acceptance:
    """Shares of what has come true, each the mean of the latest observations.

    first   of a proposal's first tokens
    later   of its tokens behind one that has come true
    hits    searches that found a proposal, of all searches
    """

    __slots__ = ("first", "hits", "later")

    def __init__(self, first: float = FIRST, later: float = LATER, hits: float = HITS):
        self.first = first
        self.later = later
        self.hits = hits

    def settled(self, came: int, proposed: int, weight: float) -> None:
        """Of `proposed` tokens the first `came` have come true."""
        self.first += weight * ((came > 0) - self.first)
        if came:
            trials = min(came, proposed - 1)
            if trials:
                share = (came - 1) / trials
                self.later += (1 - (1 - weight) ** trials) * (share - self.later)

    def searched(self, hit: bool, weight: float) -> None:
        self.hits += weight * (hit - self.hits)


class MatchShares:
    """How often drafts behind true ones have come true in all replies, each share the mean of the
    latest observations: by the draft's kind, and by the tokens that match before it, the true
    drafts among them. LONGEST tokens and more are one."""

    def __init__(self) -> None:
        self._shares = [[share] * (LONGEST + 1) for share in FIRST_SHARES]

    def chance(self, kind: int, matched: int, times: float) -> float:
        """Returns the share, its odds multiplied by `times`."""
        share = _within(self._shares[kind][min(matched, LONGEST)])
        odds = times * share / (1 - share)
        return _within(odds / (1 + odds))

    def observed(self, kind: int, matched: int, true: bool) -> None:
        shares = self._shares[kind]
        matched = min(matched, LONGEST)
        shares[matched] += OF_MATCH * (true - shares[matched])


class Proposal(NamedTuple):
    """tokens   that followed where the text's end has occurred before, and would follow if that
             went on in the same way; "" if it has not occurred
    matched  tokens of the text's end that occurred there
    before   what followed where they occurred before that; "" if they did not
    """

    tokens: str
    matched: int
    before: str

    def kinds(self) -> list[int]:
        """Returns the kind of each draft."""
        agreed = common_prefix(self.tokens, self.before)
        kinds = [AGREED] * agreed
        if agreed < len(self.before):
            kinds.append(DIFFERENT)
        return kinds + [ALONE] * (len(self.tokens) - len(kinds))


class Drafts:
    """The drafts of one reply.

    A proposal is made where the latest tokens have occurred before: the tokens that followed there.
    It is open until one of its tokens has not come true, or all have. Proposals are settled whether
    a step checks them or not, so the shares in `own` are known without drafting.
    """

    __slots__ = (
        "_begin",
        "_came",
        "_chances",
        "_count",
        "_kinds",
        "_matched",
        "_next_search",
        "_odds",
        "_proposal",
        "_reached",
        "_text",
        "checked",
        "checking",
        "own",
        "shared",
        "shares",
    )

    def __init__(self, shared: Acceptance, shares: MatchShares):
        """`shared`, `shares`: of all replies. They learn from this one; this one begins with
        them."""
        # the latest tokens as text, because `str.rfind` is fast; the count of all
        self._text = ""
        self._count = 0
        self._proposal = _NONE
        self._begin = 0  # position of the proposal's first token
        self._came = 0  # tokens of the proposal that have come true
        self._next_search = 0  # none is made for fewer tokens
        self._matched = 0
        # of the proposal's drafts: kinds, chances behind true ones, and chances that they and all
        # before them come true, down to LEAST_REACHED
        self._kinds: list[int] = []
        self._chances: list[float] = []
        self._reached: list[float] = []
        # logarithm of the odds of this reply's drafts by those of all replies with the same match
        self._odds = 0.0
        self.shares = shares
        self.shared = shared
        self.own = Acceptance(shared.first, shared.later, shared.hits)
        self.checked = 0  # the last step that checks drafts
        self.checking = 0  # tokens of the row in the last step that `Drafting` planned, if a check

    def next(self, tokens: Tokens) -> array[int]:
        """Returns the tokens that the open proposal expects after `tokens`, MOST_DRAFTS at most.
        `tokens` only ever grows."""
        self._settle(tokens)
        return self._proposal[self._came :]

    def depth(self, left: int, least: float) -> int:
        """Returns how many of the next `left` drafts come true with a chance of `least` or more."""
        return self._depth(self._came, left, least)

    def expected(self, drafts: int) -> float:
        """Returns how many of the next `drafts` drafts are expected to come true."""
        return self._expected(self._came, drafts)

    def chances(self, drafts: int) -> list[float]:
        """Returns the chances of the next `drafts` drafts, descending."""
        return self._from(self._came, drafts)

    def coming(self, left: int, awaited: bool, least: float) -> tuple[float, float]:
        """Returns how many drafts the row will have in the next step, and how many of them come
        true, both as expected now.

        left      open tokens of the proposal
        awaited   the row's newest token is not known yet; the first open one stands for it
        least     as in `depth`
        """
        if not awaited:
            count = self.depth(left, least)
            return count, self.expected(count)
        if left > 1:
            behind = self._came + 1
            chance = self._chances[self._came] if behind < len(self._reached) else 0.0
            count = self._depth(behind, left - 1, least)
            return chance * count, chance * self._expected(behind, count)
        if self._next_search > self._count + 1:
            return 0, 0.0
        own = self.own
        first, later, chance = _within(own.first), _within(own.later), _within(own.hits)
        count = _depth(first, later, MOST_DRAFTS, least)
        return chance * count, chance * _expected(first, later, count)

    def _depth(self, begin: int, left: int, least: float) -> int:
        """`depth` behind `begin` true drafts."""
        if least <= 0:
            return left
        end = min(begin + left, len(self._reached))
        if begin >= end:
            return 0
        bound = least * (self._reached[begin - 1] if begin else 1.0)
        return bisect_right(self._reached, -bound, begin, end, key=neg) - begin

    def _expected(self, begin: int, drafts: int) -> float:
        return sum(self._from(begin, drafts))

    def _from(self, begin: int, drafts: int) -> list[float]:
        """The chances of `drafts` drafts behind `begin` true ones."""
        reached = self._reached[begin : begin + drafts]
        if not begin or not reached:
            return reached
        before = self._reached[begin - 1]
        return [chance / before for chance in reached]

    def _settle(self, tokens: Tokens) -> None:
        """Compares the open proposal with `tokens`, and makes a new one if it is settled."""
        count = len(tokens)
        if self._proposal:
            proposal = self._proposal
            sampled = tokens[self._begin : self._begin + len(proposal)]
            self._came = came = common_prefix(sampled, proposal)
            if came == len(sampled) and came < len(proposal):
                return
            self._learn(came)
            self.own.settled(came, len(proposal), LEARNED)
            self.shared.settled(came, len(proposal), SHARED)
            self._proposal = _NONE
            self._came = 0
        if count >= self._next_search:
            self._search(tokens, count)

    def _search(self, tokens: Tokens, count: int) -> None:
        new = tokens[max(self._count, count - SEARCHED) :]
        self._text = (self._text + new.tobytes().decode(*_CODE))[-SEARCHED:]
        self._begin = self._count = count
        proposal = propose(self._text)
        self._proposal = array("i", proposal.tokens.encode(*_CODE))
        hit = bool(self._proposal)
        if hit:
            self._foresee(proposal)
        self.own.searched(hit, LEARNED)
        self.shared.searched(hit, SHARED)
        rare = self.own.first < RARELY_FIRST or self.own.hits < RARELY_HITS
        self._next_search = count + (PAUSE if rare else 1)

    def _foresee(self, proposal: Proposal) -> None:
        self._kinds = proposal.kinds()
        self._matched = matched = proposal.matched
        times = exp(self._odds)
        self._chances, self._reached = [], []
        reached = 1.0
        for at, kind in enumerate(self._kinds):
            chance = self.shares.chance(kind, matched + at, times)
            reached *= chance
            if reached < LEAST_REACHED:
                break
            self._chances.append(chance)
            self._reached.append(reached)

    def _learn(self, came: int) -> None:
        """Of the proposal the first `came` tokens have come true, and the next one has not."""
        for at, kind in enumerate(self._kinds[: came + 1]):
            true = at < came
            self.shares.observed(kind, self._matched + at, true)
            chance = self._chances[at] if at < len(self._chances) else LEAST
            self._odds += OF_ROW * (true - chance)
        self._odds = min(max(self._odds, -MOST_ODDS), MOST_ODDS)


def _within(share: float) -> float:
    return min(max(share, LEAST), MOST)


def _depth(first: float, later: float, left: int, least: float) -> int:
    if first < least:
        return 0
    return min(left, 1 + int(log(least / first) / log(later))) if least > 0 else left


def _expected(first: float, later: float, drafts: int) -> float:
    return first * (1 - later**drafts) / (1 - later)


def propose(text: str) -> Proposal:
    """Proposes behind the latest earlier occurrence of the longest match with the text's end."""
    end = len(text) - 1
    matched = 0
    for length in range(SHORTEST, min(LONGEST, len(text)) + 1):
        # a longer match ends where a shorter one does, or before
        at = text.rfind(text[-length:], 0, end)
        if at < 0:
            break
        end = at + length
        matched = length
    if not matched:
        return Proposal("", 0, "")
    tokens = text[end : end + MOST_DRAFTS]
    at = text.rfind(text[-matched:], 0, end - 1)
    before = text[at + matched : at + matched + MOST_DRAFTS] if at >= 0 else ""
    return Proposal((tokens * MOST_DRAFTS)[:MOST_DRAFTS], matched, before)


def may_draft(request: Request) -> bool:
    """False if a draw depends on the tokens before it other than through the logits (grammar,
    bad words, penalties), or has more results than its token (log probabilities)."""
    sampling = request.sampling
    return not sampling.constrained and sampling.logprobs is None and not sampling.penalised
