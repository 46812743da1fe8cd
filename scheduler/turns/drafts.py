"""Drafts of a reply's next tokens from the conversation's own tokens: prompt lookup
(docs/design/drafts.md)."""

from __future__ import annotations

from array import array
from math import log

from ..types import Request, Tokens
from .conversations import common_prefix

LONGEST, SHORTEST = 6, 3  # tokens of a match; a longer match is preferred
MOST_DRAFTS = 32
# latest tokens in which matches are looked for: this bounds a row's time in a step, and its memory
SEARCHED = 8192
LEARNED = 1 / 8  # weight of each new observation in a row's shares, in all rows' an eighth of it
LEAST, MOST = 0.02, 0.98  # of every share, so that no row is given up for ever
FIRST, LATER, FOUND = 0.6, 0.8, 0.3  # shares before anything has been observed
_CODE = "utf-32-le", "surrogatepass"  # of one character for each token


class Acceptance:
    """Shares of what has come true, each the mean of the latest observations.

    first   of a proposal's first tokens
    later   of its tokens behind one that has come true
    found   of the searches for a proposal, those that found one
    """

    __slots__ = ("first", "found", "later")

    def __init__(self, first: float = FIRST, later: float = LATER, found: float = FOUND):
        self.first, self.later, self.found = first, later, found

    def settled(self, came: int, proposed: int, weight: float) -> None:
        """Of `proposed` tokens the first `came` have come true."""
        self.first += weight * ((came > 0) - self.first)
        if came:
            trials = min(came, proposed - 1)
            if trials:
                share = (came - 1) / trials
                self.later += (1 - (1 - weight) ** trials) * (share - self.later)

    def searched(self, found: bool, weight: float) -> None:
        self.found += weight * (found - self.found)


class Drafts:
    """The drafts of one reply.

    A proposal is made where the latest tokens have occurred before: the tokens that followed there.
    It is open until one of its tokens has not come true, or all have. Proposals are settled whether
    a step checks them or not, so the shares in `own` are known without drafting.
    """

    __slots__ = ("_begin", "_came", "_count", "_proposal", "_text", "checked", "own", "shared")

    def __init__(self, shared: Acceptance):
        """`shared`: of all replies. It learns from this one; this one begins with it."""
        # the latest tokens as text, because `str.rfind` is fast; the count of all
        self._text = ""
        self._count = 0
        self._proposal = array("i")
        self._begin = 0  # position of the proposal's first token
        self._came = 0  # tokens of the proposal that have come true
        self.shared = shared
        self.own = Acceptance(shared.first, shared.later, shared.found)
        self.checked = 0  # the last step that checks drafts

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
            chance, count = self._first, _depth(later, later, left - 1, least)
            return chance * count, chance * _expected(later, later, count)
        first, chance = _within(self.own.first), _within(self.own.found)
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
        if len(tokens) == self._count + self._came:
            return
        proposal = self._proposal
        sampled = tokens[self._begin : self._begin + len(proposal)]
        came = common_prefix(sampled, proposal)
        if came == len(sampled) and came < len(proposal):
            self._came = came
            return
        if proposal:
            self.own.settled(came, len(proposal), LEARNED)
            self.shared.settled(came, len(proposal), LEARNED / 8)
        new = tokens[max(self._count, len(tokens) - SEARCHED) :]
        self._text = (self._text + new.tobytes().decode(*_CODE))[-SEARCHED:]
        self._begin = self._count = len(tokens)
        self._came = 0
        self._proposal = array("i", propose(self._text).encode(*_CODE))
        self.own.searched(bool(self._proposal), LEARNED)
        self.shared.searched(bool(self._proposal), LEARNED / 8)


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
    if text.rfind(text[-SHORTEST:], 0, end) < 0 or len(text) <= SHORTEST:
        return ""
    for length in range(LONGEST, SHORTEST - 1, -1):
        at = text.rfind(text[-length:], 0, end)
        if at >= 0:
            return (text[at + length :][:MOST_DRAFTS] * MOST_DRAFTS)[:MOST_DRAFTS]
    return ""


def may_draft(request: Request) -> bool:
    """False if a draw depends on the tokens before it other than through the logits (grammar,
    bad words, penalties), or has more results than its token (log probabilities)."""
    sampling = request.sampling
    return not sampling.constrained and sampling.logprobs is None and not sampling.penalised
