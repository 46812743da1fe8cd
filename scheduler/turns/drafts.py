"""Drafts of a reply's next tokens from the conversation's own tokens: prompt lookup
(docs/design/drafts.md)."""

from __future__ import annotations

from array import array
from math import log

from ..types import Request, Tokens
from .conversations import common_prefix

LONGEST, SHORTEST = 6, 2  # tokens of a match; a longer match is preferred
MOST_DRAFTS = 16
# latest tokens in which matches are looked for: this bounds a row's time in a step, and its memory
SEARCHED = 8192
LEARNED, SHARED = 1 / 4, 1 / 16
# A reply whose proposals come true so rarely, or that so rarely has one, is searched only once in
# so many tokens.
RARELY_FIRST, RARELY_HITS, PAUSE = 0.12, 0.04, 8
LEAST, MOST = 0.02, 0.98  # of every share, so that no row is given up for ever
FIRST, LATER, HITS = 0.5, 0.8, 0.3  # before anything has been observed
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


class Drafts:
    """The drafts of one reply.

    A proposal is made where the latest tokens have occurred before: the tokens that followed there.
    It is open until one of its tokens has not come true, or all have. Proposals are settled whether
    a step checks them or not, so the shares in `own` are known without drafting.
    """

    __slots__ = (
        "_begin",
        "_came",
        "_count",
        "_next_search",
        "_proposal",
        "_text",
        "checked",
        "checking",
        "own",
        "shared",
    )

    def __init__(self, shared: Acceptance):
        """`shared`: of all replies. It learns from this one; this one begins with it."""
        # the latest tokens as text, because `str.rfind` is fast; the count of all
        self._text = ""
        self._count = 0
        self._proposal = _NONE
        self._begin = 0  # position of the proposal's first token
        self._came = 0  # tokens of the proposal that have come true
        self._next_search = 0  # none is made for fewer tokens
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
        return _depth(self._first, self._later, left, least)

    def expected(self, drafts: int) -> float:
        """Returns how many of the next `drafts` drafts are expected to come true."""
        return _expected(self._first, self._later, drafts)

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
        later = self._later
        if left > 1:
            chance = self._first
            count = _depth(later, later, left - 1, least)
            return chance * count, chance * _expected(later, later, count)
        if self._next_search > self._count + 1:
            return 0, 0.0
        first, chance = _within(self.own.first), _within(self.own.hits)
        count = _depth(first, later, MOST_DRAFTS, least)
        return chance * count, chance * _expected(first, later, count)

    @property
    def _first(self) -> float:
        return self._later if self._came else _within(self.own.first)

    @property
    def _later(self) -> float:
        return _within(self.own.later)

    def _settle(self, tokens: Tokens) -> None:
        """Compares the open proposal with `tokens`, and makes a new one if it is settled."""
        count = len(tokens)
        if self._proposal:
            proposal = self._proposal
            sampled = tokens[self._begin : self._begin + len(proposal)]
            self._came = came = common_prefix(sampled, proposal)
            if came == len(sampled) and came < len(proposal):
                return
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
        self._proposal = array("i", propose(self._text).encode(*_CODE))
        hit = bool(self._proposal)
        self.own.searched(hit, LEARNED)
        self.shared.searched(hit, SHARED)
        rare = self.own.first < RARELY_FIRST or self.own.hits < RARELY_HITS
        self._next_search = count + (PAUSE if rare else 1)


def _within(share: float) -> float:
    return min(max(share, LEAST), MOST)


def _depth(first: float, later: float, left: int, least: float) -> int:
    if first < least:
        return 0
    return min(left, 1 + int(log(least / first) / log(later))) if least > 0 else left


def _expected(first: float, later: float, drafts: int) -> float:
    return first * (1 - later**drafts) / (1 - later)


def propose(text: str) -> str:
    """Returns what followed the latest earlier occurrence of the text's end, and would follow if
    that went on in the same way; "" if there is no earlier occurrence."""
    end = len(text) - 1
    proposed = ""
    for length in range(SHORTEST, LONGEST + 1):
        # a longer match ends where a shorter one does, or before
        at = text.rfind(text[-length:], 0, end)
        if at < 0 or length > len(text):
            break
        end = at + length
        proposed = text[end : end + MOST_DRAFTS]
    return (proposed * MOST_DRAFTS)[:MOST_DRAFTS]


def may_draft(request: Request) -> bool:
    """False if a draw depends on the tokens before it other than through the logits (grammar,
    bad words, penalties), or has more results than its token (log probabilities)."""
    sampling = request.sampling
    return not sampling.constrained and sampling.logprobs is None and not sampling.penalised
